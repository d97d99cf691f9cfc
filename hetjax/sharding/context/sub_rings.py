"""Sub-rings: ranges of query heads that have one owner in every group.

Groups may divide their heads at unlike places. All places together divide the heads into ranges
that no group divides: the keys and values of each go round among its owners, one of each group.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hetjax.sharding.context.context_split import ContextSplit, HeadRange


@dataclass(frozen=True)
class SubRing:
    """A range of query heads, and who has it.

    Args:
        heads: the query heads.
        key_value_heads: the heads of keys and values that these see, as a range.
        owners: of each group the device that has them.
    """

    heads: HeadRange
    key_value_heads: HeadRange
    owners: tuple[int, ...]


def key_value_range(heads: HeadRange, heads_per_key_value: int) -> HeadRange:
    """The heads of keys and values that query heads see.

    Args:
        heads: query heads.
        heads_per_key_value: how many query heads one head of keys and values serves. One that
            serves heads inside and outside of the range is needed on both sides.

    Returns:
        A range; empty where there are no query heads.

    Example:
        >>> key_value_range((2, 5), 3), key_value_range((3, 6), 3), key_value_range((4, 4), 3)
        ((0, 2), (1, 2), (1, 1))
    """
    start, stop = heads
    if start == stop:
        return start // heads_per_key_value, start // heads_per_key_value
    return start // heads_per_key_value, -(-stop // heads_per_key_value)


def sub_rings(split: ContextSplit) -> tuple[SubRing, ...]:
    """The ranges of query heads that no group divides, and their owners.

    Args:
        split: the context split.

    Returns:
        The sub-rings, in the order of their heads.

    Source: HexiSeq, section 3.2, where ranges have one peer each; here boundaries may be unlike.

    Example:
        >>> from hetjax.sharding.context.context_split import ContextGroup
        >>> first = ContextGroup((0, 1), (1, 1), ((0, 4), (4, 6)))
        >>> second = ContextGroup((2, 3), (1, 1), ((2, 6), (0, 2)))
        >>> for ring in sub_rings(ContextSplit(4, 6, 2, (first, second))):
        ...     print(ring.heads, ring.key_value_heads, ring.owners)
        (0, 2) (0, 1) (0, 3)
        (2, 4) (0, 2) (0, 2)
        (4, 6) (1, 2) (1, 2)
    """
    places = {place for group in split.groups for heads in group.heads for place in heads}
    bounds = sorted(place for place in places | {0, split.query_heads})
    owners = [_owners(split, number) for number in range(len(split.groups))]
    return tuple(
        SubRing(
            heads,
            key_value_range(heads, split.heads_per_key_value),
            tuple(of[heads[0]] for of in owners),
        )
        for heads in itertools.pairwise(bounds)
    )


def _owners(split: ContextSplit, number: int) -> list[int]:
    """The device of a group that has each query head."""
    group = split.groups[number]
    found = [-1] * split.query_heads
    for device, (start, stop) in zip(group.devices, group.heads, strict=True):
        found[start:stop] = [device] * (stop - start)
    return found
