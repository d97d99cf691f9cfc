"""Ways to put devices, or what devices are of, into groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def set_partitions(items: Sequence[Item]) -> Iterator[tuple[tuple[Item, ...], ...]]:
    """All ways to put things into groups; there are many even of few.

    Args:
        items: the things, in groups in the same order.

    Yields:
        The groups, each of one thing or more.

    Example:
        >>> list(set_partitions("ab"))
        [(('a',), ('b',)), (('a', 'b'),)]
    """
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for others in set_partitions(rest):
        yield ((first,), *others)
        for place, group in enumerate(others):
            yield (*others[:place], (first, *group), *others[place + 1 :])
