"""Bounds: parts of an array as plain numbers, and what is common to several of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

Bounds = tuple[tuple[int, int], ...]
"""For each dimension the first index and the one after the last."""


def extent(part: Bounds) -> tuple[int, ...]:
    """The shape of a part.

    Example:
        >>> extent(((2, 6), (0, 2)))
        (4, 2)
    """
    return tuple(stop - start for start, stop in part)


def volume(part: Bounds) -> int:
    """How many elements a part has.

    Example:
        >>> volume(((2, 6), (0, 2)))
        8
    """
    return math.prod(extent(part))


def overlap(a: Bounds, b: Bounds) -> Bounds | None:
    """The part that two parts of an array have in common.

    Args:
        a: one part.
        b: the other.

    Returns:
        What both have; None where that is nothing.

    Example:
        >>> overlap(((0, 4),), ((2, 8),))
        ((2, 4),)
    """
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def contains(outer: Bounds, inner: Bounds) -> bool:
    """Whether a part has all of another one.

    Example:
        >>> contains(((0, 4),), ((2, 4),))
        True
    """
    # A plain loop: a switch asks this a hundred thousand times.
    for (a, b), (c, d) in zip(outer, inner, strict=True):  # noqa: SIM110
        if c < a or b < d:
            return False
    return True


def within(part: Bounds, around: Bounds) -> tuple[slice, ...]:
    """The index of a part in an array that holds another part around it.

    Example:
        >>> within(((4, 6),), ((2, 8),))
        (slice(2, 4, None),)
    """
    return tuple(
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(part, around, strict=True)
    )


def even_ends(size: int, count: int) -> list[int]:
    """Where runs begin that cut a dimension as evenly as it goes, and its end.

    Example:
        >>> even_ends(8, 3)
        [0, 2, 5, 8]
    """
    return [size * place // count for place in range(count + 1)]


def even_sizes(size: int, count: int) -> tuple[int, ...]:
    """How long the runs are that cut a dimension as evenly as it goes.

    Example:
        >>> even_sizes(8, 3)
        (2, 3, 3)
    """
    return tuple(stop - start for start, stop in itertools.pairwise(even_ends(size, count)))


def cut(bounds: Bounds, count: int) -> tuple[Bounds, ...]:
    """Cut a part along its longest dimension.

    Args:
        bounds: the part.
        count: how many pieces; fewer come where the dimension is shorter.

    Returns:
        The pieces; their sizes differ by one at most.

    Example:
        >>> cut(((0, 5), (0, 2)), 2)
        (((0, 2), (0, 2)), ((2, 5), (0, 2)))
    """
    sizes = extent(bounds)
    if not sizes:
        return (bounds,)
    axis = sizes.index(max(sizes))
    start = bounds[axis][0]
    return tuple(
        (*bounds[:axis], (start + first, start + end), *bounds[axis + 1 :])
        for first, end in itertools.pairwise(even_ends(sizes[axis], min(count, sizes[axis])))
    )


def finest_slices(parts: Iterable[Bounds], shape: Sequence[int]) -> Iterator[Bounds]:
    """Cut an array wherever one of some parts begins or ends.

    Every slice lies wholly inside a part or wholly outside of it.

    Args:
        parts: parts of the array.
        shape: the array's shape.

    Yields:
        The slices, row-major; together they are the array.

    Source: Hetu v2, section 4.2 (finest-grained slices).

    Example:
        >>> list(finest_slices([((0, 2),), ((0, 3),)], (6,)))
        [((0, 2),), ((2, 3),), ((3, 6),)]
    """
    cuts = [{0, size} for size in shape]
    for part in parts:
        for found, ends in zip(cuts, part, strict=True):
            found.update(ends)
    yield from itertools.product(*(itertools.pairwise(sorted(found)) for found in cuts))
