"""The work of a member's block of an attention, counted by the tiles that it computes."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from hetjax import _compat
from hetjax.sharding.attention.mask import Mask
from hetjax.sharding.attention.tiles import LARGEST, tiling
from hetjax.sharding.attention.work import AttentionWork, attended_avals, tiles_bytes, tiles_work
from hetjax.sharding.context.attention_blocks import ATTEND, ATTEND_BACKWARD, Block
from hetjax.sharding.deduction.own_primitive_rules import BlockLabel


def is_block(equation: _compat.JaxprEqn) -> bool:
    """Whether an equation is a block of an attention, forward or backward."""
    return equation.primitive in (ATTEND, ATTEND_BACKWARD)


def block_work(equation: _compat.JaxprEqn, ranges: Mapping[int, tuple[int, int]]) -> AttentionWork:
    """What one member computes of a block.

    Args:
        equation: the block, of all members together.
        ranges: by `BlockLabel`, what the member has.

    Returns:
        The work: two products of the pairs that are seen, tile by tile; backward five.
    """
    whole: Block = equation.params["block"]
    block = whole.located(ranges)
    (q, _, v), sizes = attended_avals(equation), {label: b - a for label, (a, b) in ranges.items()}
    queries, keys = sizes[BlockLabel.QUERIES], sizes[BlockLabel.KEYS]
    mine = q.shape[0], queries, sizes[BlockLabel.QUERY_HEADS], q.shape[3]
    if 0 in mine or not keys:
        return AttentionWork(0.0, 0.0, 0.0, 1)
    mask: Mask = block.mask
    spans = block.query_spans, block.key_spans
    tiles = tiling(queries, keys, mask, *spans, block.has_segments, LARGEST)
    query = jax.ShapeDtypeStruct(mine, q.dtype)
    is_backward = equation.primitive is ATTEND_BACKWARD
    return tiles_work(tiles, query, keys, v.shape[3], is_backward=is_backward)


def block_bytes(equation: _compat.JaxprEqn, ranges: Mapping[int, tuple[int, int]]) -> int:
    """What one member holds while it computes a block, beside what goes in and comes out.

    Keys and values are made anew for each query head where slots have unlike numbers of them.

    Args:
        equation: the block, of all members together.
        ranges: by `BlockLabel`, what the member has.
    """
    block: Block = equation.params["block"].located(ranges)
    (q, _, v), sizes = attended_avals(equation), {label: b - a for label, (a, b) in ranges.items()}
    queries, keys = sizes[BlockLabel.QUERIES], sizes[BlockLabel.KEYS]
    heads, slots = sizes[BlockLabel.QUERY_HEADS], sizes[BlockLabel.KEY_SLOTS]
    if not queries * keys * heads:
        return 0
    spans = block.query_spans, block.key_spans
    tiles = tiling(queries, keys, block.mask, *spans, block.has_segments, LARGEST)
    query = jax.ShapeDtypeStruct((q.shape[0], queries, heads, q.shape[3]), q.dtype)
    return tiles_bytes(
        tiles,
        query,
        (keys, slots, v.shape[3]),
        is_backward=equation.primitive is ATTEND_BACKWARD,
        has_slots=len({*block.heads_of_slots}) == 1,
    )
