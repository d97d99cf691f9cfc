"""Where the tokens of a context split are in the sequence.

Under a causal mask a token sees all before it, so runs of tokens would be unlike in work: the last
sees all, the first itself. A group therefore has two halves, as far from the beginning as from the
end: the groups' early halves follow one another, and then their late halves, backwards. Of two
groups the one outside sees all keys of the inner one with its late half and none with its early
half; and all of the inner one sees the early half of the outer, and nothing of the late one. Every
block of one group's queries and another's keys is half of its full area, as one rectangle without a
mask; only a group's own keys need one.
"""

from __future__ import annotations

from hetjax.errors import InputError, is_whole, shown
from hetjax.sharding.context.context_split import ContextSplit

PositionRun = tuple[int, int]
"""Positions in the sequence from the first to the one after the last."""


def halves(length: int) -> tuple[int, int]:
    """How many of a group's tokens are in its early and its late half.

    Args:
        length: the group's tokens.

    Returns:
        The two sizes; of an odd length the early half has one more.

    Example:
        >>> halves(40), halves(9), halves(1)
        ((20, 20), (5, 4), (1, 0))
    """
    return length - length // 2, length // 2


def group_positions(split: ContextSplit, group: int) -> tuple[PositionRun, ...]:
    """The positions that a group has, in ascending order.

    Args:
        split: the context split.
        group: the group's number.

    Returns:
        One or two runs, none empty.

    Raises:
        InputError: there is no such group.

    Example:
        >>> from hetjax.sharding.context.context_split import ContextGroup
        >>> sizes = (40, 28, 18, 10)
        >>> groups = tuple(ContextGroup((d,), (n,), ((0, 1),)) for d, n in enumerate(sizes))
        >>> split = ContextSplit(96, 1, 1, groups)
        >>> [group_positions(split, number) for number in range(4)]
        [((0, 20), (76, 96)), ((20, 34), (62, 76)), ((34, 43), (53, 62)), ((43, 53),)]
    """
    _check_number("group", group, len(split.groups))
    lengths = split.group_lengths
    if not split.is_mirrored:
        start = sum(lengths[:group])
        return ((start, start + lengths[group]),)
    early = sum(halves(each)[0] for each in lengths[:group])
    end = split.length - sum(halves(each)[1] for each in lengths[:group])
    first, last = halves(lengths[group])
    return _joined(((early, early + first), (end - last, end)))


def positions_in_order(split: ContextSplit) -> tuple[PositionRun, ...]:
    """The positions of all tokens, group by group: the order in which devices have them.

    Args:
        split: the context split.

    Example:
        >>> from hetjax.sharding.context.context_split import ContextGroup
        >>> groups = tuple(ContextGroup((d,), (n,), ((0, 1),)) for d, n in enumerate((6, 4)))
        >>> positions_in_order(ContextSplit(10, 1, 1, groups))
        ((0, 3), (7, 10), (3, 7))
    """
    groups = range(len(split.groups))
    return tuple(run for group in groups for run in group_positions(split, group))


def device_positions(split: ContextSplit, group: int, place: int) -> tuple[PositionRun, ...]:
    """The positions that a device has before the exchange: a part of its group's, in their order.

    What the devices of a group have, one after another, is what the group has, so that tokens that
    are exchanged for heads need not be put in order.

    Args:
        split: the context split.
        group: the group's number.
        place: the device's place in it.

    Returns:
        Up to two runs in ascending order, none empty.

    Raises:
        InputError: there is no such group, or no such place in it.

    Example:
        >>> from hetjax.sharding.context.context_split import ContextGroup
        >>> outer = ContextGroup((0, 1), (4, 2), ((0, 1), (1, 2)))
        >>> split = ContextSplit(10, 2, 2, (outer, ContextGroup((2,), (4,), ((0, 2),))))
        >>> device_positions(split, 0, 0), device_positions(split, 0, 1)
        (((0, 3), (7, 8)), ((8, 10),))
    """
    _check_number("group", group, len(split.groups))
    tokens = split.groups[group].tokens
    _check_number("place", place, len(tokens))
    start = sum(tokens[:place])
    return places_of(group_positions(split, group), start, start + tokens[place])


def places_of(runs: tuple[PositionRun, ...], start: int, stop: int) -> tuple[PositionRun, ...]:
    """The positions of some tokens, by their places in an order of all of them.

    Args:
        runs: the positions of all, in order.
        start: the first place.
        stop: the place after the last.

    Returns:
        Their runs, none empty.
    """
    found, before = [], 0
    for first, last in runs:
        run = (max(first, first + start - before), min(last, first + stop - before))
        if run[0] < run[1]:
            found.append(run)
        before += last - first
    return tuple(found)


def seen_rectangle(split: ContextSplit, group: int, source: int) -> tuple[int, int, int, int]:
    """What a group's queries see of another group's keys under a causal mask: all of a rectangle.

    Args:
        split: a context split that is mirrored.
        group: the number of the group of the queries.
        source: the number of the group of the keys, another one.

    Returns:
        The first and the end place of the queries among the group's, and of the keys among the
        source's. Each of these queries sees each of these keys, and no other pair is seen.

    Raises:
        InputError: there is no such group, or the split is not mirrored.

    Example:
        >>> from hetjax.sharding.context.context_split import ContextGroup
        >>> groups = tuple(ContextGroup((d,), (n,), ((0, 1),)) for d, n in enumerate((6, 4)))
        >>> split = ContextSplit(10, 1, 1, groups)
        >>> seen_rectangle(split, 0, 1), seen_rectangle(split, 1, 0)
        ((3, 6, 0, 4), (0, 4, 0, 3))
    """
    if not split.is_mirrored:
        raise InputError("split: is_mirrored=False is not allowed: it must be mirrored")
    _check_number("group", group, len(split.groups))
    _check_number("source", source, len(split.groups))
    if group == source:
        raise InputError(f"source: {source} is not allowed: another group than that of the queries")
    queries, keys = split.group_lengths[group], split.group_lengths[source]
    if group < source:
        return halves(queries)[0], queries, 0, keys
    return 0, queries, 0, halves(keys)[0]


def seen_pairs(split: ContextSplit, group: int, source: int) -> int:
    """How many pairs of a query and a key a causal mask leaves of a block.

    Args:
        split: a context split that is mirrored.
        group: the number of the group of the queries.
        source: the number of the group of the keys.

    Returns:
        The number of pairs, of one head.

    Raises:
        InputError: there is no such group, or the split is not mirrored.

    Example:
        >>> from hetjax.sharding.context.context_split import ContextGroup
        >>> groups = tuple(ContextGroup((d,), (n,), ((0, 1),)) for d, n in enumerate((6, 4)))
        >>> split = ContextSplit(10, 1, 1, groups)
        >>> [seen_pairs(split, group, source) for group in (0, 1) for source in (0, 1)]
        [21, 12, 12, 10]
    """
    if group == source:
        _check_number("group", group, len(split.groups))
        length = split.group_lengths[group]
        return length * (length + 1) // 2
    first, last, start, stop = seen_rectangle(split, group, source)
    return (last - first) * (stop - start)


def _check_number(field: str, number: object, count: int) -> None:
    if not (is_whole(number) and 0 <= number < count):
        raise InputError(f"{field}: {shown(number)} is not allowed: a number from 0 to {count - 1}")


def _joined(runs: tuple[PositionRun, PositionRun]) -> tuple[PositionRun, ...]:
    (a, b), (c, d) = runs
    if b == c:
        return ((a, d),)
    return tuple(each for each in runs if each[0] < each[1])
