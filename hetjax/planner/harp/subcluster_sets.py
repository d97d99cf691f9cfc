"""The sets of subclusters that a pipeline's last stages may lie on, as bits of a number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Order = Sequence[int] | None
"""Subclusters in the one order in which a pipeline may pass them; None for any."""


def members(used: int) -> list[int]:
    """The subclusters of a set.

    Args:
        used: the set.

    Example:
        >>> members(0b101)
        [0, 2]
    """
    return [place for place in range(used.bit_length()) if used >> place & 1]


def sets_and_firsts(count: int, order: Order) -> Iterator[tuple[int, int]]:
    """The sets that a pipeline's last stages may lie on, and which subcluster comes first there.

    In a given order it is the first one alone that tells what may still come before it. So the set
    is that of all after it, whether stages lie on them or not, and there are as many sets as
    subclusters. In any order there are twice as many for each one.

    Args:
        count: how many subclusters there are.
        order: in which they may be passed.

    Yields:
        Sets and their first subclusters; what may lie behind one is yielded before it.

    Example:
        >>> [(bin(used), first) for used, first in sets_and_firsts(3, (1, 0, 2))]
        [('0b100', 2), ('0b101', 0), ('0b111', 1)]
        >>> len(list(sets_and_firsts(3, None)))
        12
    """
    if order is None:
        for used in range(1, 1 << count):
            for first in members(used):
                yield used, first
        return
    used = 0
    for first in reversed(order):
        used |= 1 << first
        yield used, first


def sets_behind(used: int, first: int, order: Order) -> list[tuple[int, int]]:
    """The sets that may lie behind the stages on the first subcluster of a set.

    Args:
        used: the set.
        first: its first subcluster.
        order: in which subclusters may be passed.

    Returns:
        Sets and their first subclusters.

    Example:
        >>> [(bin(used), first) for used, first in sets_behind(0b111, 1, (1, 0, 2))]
        [('0b101', 0), ('0b100', 2)]
    """
    others = used & ~(1 << first)
    if order is None:
        return [(others, other) for other in members(others)]
    later = order[order.index(first) + 1 :]
    return [(sum(1 << each for each in later[place:]), at) for place, at in enumerate(later)]


def may_be_last(used: int, first: int, order: Order) -> bool:
    """Whether a pipeline may end in the first subcluster of a set.

    Args:
        used: the set.
        first: its first subcluster.
        order: in which subclusters may be passed; in a given one those behind may be left out.
    """
    return order is not None or used == 1 << first


def sets_before(others: int, first: int, order: Order) -> list[tuple[int, int]]:
    """The subclusters that may lie just before the stages on one, and what is left before them.

    Args:
        others: the subclusters that may be before them.
        first: the subcluster of these stages.
        order: in which subclusters may be passed.

    Returns:
        What is left, and the subcluster just before.

    Example:
        >>> [(bin(left), before) for left, before in sets_before(0b011, 2, (1, 0, 2))]
        [('0b0', 1), ('0b10', 0)]
    """
    if order is None:
        return [(others & ~(1 << other), other) for other in members(others)]
    earlier = order[: order.index(first)]
    return [(sum(1 << each for each in earlier[:place]), at) for place, at in enumerate(earlier)]


def num_sets(count: int, order: Order) -> int:
    """How many sets and first subclusters there are; see `sets_and_firsts`.

    Args:
        count: how many subclusters there are.
        order: in which they may be passed.
    """
    return count if order is not None else count << count >> 1
