"""The work of a member's block of an attention, counted by the tiles that it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from hetjax import _compat
from hetjax.sharding.attention.mask import Mask
from hetjax.sharding.attention.tile_views import accumulator
from hetjax.sharding.attention.tiles import LARGEST, tiling
from hetjax.sharding.attention.work import AttentionWork, tiles_work
from hetjax.sharding.context.attention_blocks import ATTEND, ATTEND_BACKWARD, Block
from hetjax.sharding.deduction.signature_rules import BlockLabel


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
    (q, _, v), sizes = _avals(equation), {label: b - a for label, (a, b) in ranges.items()}
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

    It is the scores of a pair of tiles and what is made of them; queries, keys and values as tiles
    want them, for each query head where slots have unlike numbers of them; and where there are
    several pairs the sums over them, which are brought into the results' form afterwards.

    Args:
        equation: the block, of all members together.
        ranges: by `BlockLabel`, what the member has.
    """
    block: Block = equation.params["block"].located(ranges)
    (q, _, v), sizes = _avals(equation), {label: b - a for label, (a, b) in ranges.items()}
    queries, keys = sizes[BlockLabel.QUERIES], sizes[BlockLabel.KEYS]
    heads, slots = sizes[BlockLabel.QUERY_HEADS], sizes[BlockLabel.KEY_SLOTS]
    if not queries * keys * heads:
        return 0
    spans = block.query_spans, block.key_spans
    tiles = tiling(queries, keys, block.mask, *spans, block.has_segments, LARGEST)
    if not tiles.num_pairs:
        return 0
    is_backward, wide = equation.primitive is ATTEND_BACKWARD, accumulator(q.dtype).itemsize
    scores = heads * tiles.query_tile * tiles.key_tile
    # Scores and weights; backward their cotangents too, and the sum of both products.
    scored = (5 if is_backward else 2) * scores * wide
    of_slots = slots if len({*block.heads_of_slots}) == 1 else heads
    head, value = q.shape[3], v.shape[3]
    tiled_queries = _in_whole(queries, tiles.query_tile)
    tiled_keys = _in_whole(keys, tiles.key_tile)
    rows, head, value = heads * tiled_queries, q.shape[3], v.shape[3]
    columns = of_slots * tiled_keys * (head + value)
    taken = rows * (head + is_backward * value) + columns
    summed = 0
    if tiles.num_pairs > tiles.query_tile * tiles.key_tile:
        summed = rows * head + columns if is_backward else rows * value
    if summed and is_backward:
        # What has a result's size lies in its place meanwhile.
        summed -= rows * head * (tiled_queries == queries)
        summed -= columns * (tiled_keys == keys and of_slots == slots)
    return q.shape[0] * (scored + taken * q.dtype.itemsize + summed * wide)


def _in_whole(tokens: int, tile: int) -> int:
    """Tokens up to whole tiles."""
    return -(-tokens // tile) * tile


def _avals(equation: _compat.JaxprEqn) -> tuple[Any, Any, Any]:
    query, key, value, *_ = (variable.aval for variable in equation.invars)
    return query, key, value
