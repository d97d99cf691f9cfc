"""The work of attention's equations, counted by the tiles that are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetjax import _compat
from hetjax.sharding.attention.cudnn import is_for_cudnn
from hetjax.sharding.attention.primitive import ATTENTION, ATTENTION_BACKWARD
from hetjax.sharding.attention.tile_views import accumulator
from hetjax.sharding.attention.tiles import LARGEST, LARGEST_ELSEWHERE, Tiling, tiling

BACKWARD_PASSES = 2.5
"""How often the backward equation does the products of the forward one: five to its two."""


@dataclass(frozen=True)
class AttentionWork:
    """What an equation of attention computes.

    Args:
        products: FLOPs of its matrix products: two in the forward equation, five in the backward
            one, which makes the scores again.
        arithmetic: other FLOPs.
        traffic: bytes of scores, and of what is made of them, that it writes and reads.
        side: the smallest side of its products.
    """

    products: float
    arithmetic: float
    traffic: float
    side: int


@dataclass(frozen=True)
class _Passes:
    """How often an equation goes over its scores.

    Args:
        by_head: products with the size of queries and keys.
        by_value: products with the size of values.
        arithmetic: elementwise operations.
        traffic: times that something of the scores' size is written or read.
    """

    by_head: int
    by_value: int
    arithmetic: int
    traffic: int


_PASSES: Mapping[Any, _Passes] = {
    # Scaled, masked, compared, exponentiated, added up; scores written and read twice, weights
    # written and read twice.
    ATTENTION: _Passes(1, 1, 5, 6),
    # Scaled, masked, exponentiated, and the softmax's derivative; scores, weights, their cotangents
    # and those of scores are written, and read by what comes after.
    ATTENTION_BACKWARD: _Passes(3, 2, 7, 10),
}


def attention_work(
    equation: _compat.JaxprEqn, *, is_backward: bool = False
) -> AttentionWork | None:
    """The work of an equation of attention; None for any other.

    Pairs of tiles in which no query sees a key are no work: of a long causal sequence half.
    Segments, which are data, are taken to leave out nothing.

    Args:
        equation: the jaxpr equation.
        is_backward: of a forward equation, whether the work of its backward one is asked for.
    """
    if equation.primitive not in _PASSES:
        return None
    q, k, v = attended_avals(equation)
    tiles = _tiling(equation)
    is_backward = is_backward or equation.primitive is ATTENTION_BACKWARD
    return tiles_work(tiles, q, k.shape[-3], v.shape[-1], is_backward=is_backward)


def attention_bytes(equation: _compat.JaxprEqn, *, on_cpu: bool) -> int | None:
    """What an equation of attention holds beside its operands and results; None for any other.

    Args:
        equation: the jaxpr equation.
        on_cpu: whether it is compiled for CPUs; cards fuse more, and may have a kernel for it.
    """
    if equation.primitive not in _PASSES:
        return None
    q, k, v = attended_avals(equation)
    if not on_cpu and is_for_cudnn(q, k, v, equation.params):
        return 0
    is_backward = equation.primitive is ATTENTION_BACKWARD
    sides = k.shape[-3], k.shape[-2], v.shape[-1]
    tiles = _tiling(equation, LARGEST if on_cpu else LARGEST_ELSEWHERE)
    return tiles_bytes(tiles, q, sides, is_backward=is_backward, is_fused=not on_cpu)


def attended_avals(equation: _compat.JaxprEqn) -> tuple[Any, Any, Any]:
    """Queries, keys and values of an attention, or of a block of one: shapes and dtypes.

    Args:
        equation: the jaxpr equation.
    """
    query, key, value, *_ = (variable.aval for variable in equation.invars)
    return query, key, value


def _tiling(equation: _compat.JaxprEqn, largest: int = LARGEST) -> Tiling:
    params: Any = equation.params
    q, k, _ = attended_avals(equation)
    return tiling(
        q.shape[-3],
        k.shape[-3],
        params["mask"],
        params["query_spans"],
        params["key_spans"],
        params["has_segments"],
        largest,
    )


def tiles_bytes(
    tiles: Tiling,
    query: Any,
    sides: tuple[int, int, int],
    *,
    is_backward: bool,
    has_slots: bool = True,
    is_fused: bool = False,
) -> int:
    """What is held while the pairs of tiles are computed, beside what goes in and comes out.

    It is the scores of a pair of tiles and what is made of them; queries, keys and values as tiles
    want them; and where there are several pairs the sums over them, which are brought into the
    results' form afterwards.

    Args:
        tiles: the pairs.
        query: shape and dtype of the queries, [..., T, N, H].
        sides: how many keys there are, in how many slots of heads, and numbers of a value.
        is_backward: whether gradients are made.
        has_slots: whether tiles take keys and values by slots; else once for each query head.
        is_fused: whether what is made of scores goes into the next product as it is made.
    """
    if not tiles.num_pairs:
        return 0
    *batch, queries, heads, head = query.shape
    keys, slots, value = sides
    wide = accumulator(query.dtype).itemsize
    # Scores and weights; backward their cotangents too, and the sum of both products.
    copies = 1 + is_backward if is_fused else 5 if is_backward else 2
    scored = copies * heads * tiles.query_tile * tiles.key_tile * wide
    tiled_queries = _in_whole(queries, tiles.query_tile)
    tiled_keys = _in_whole(keys, tiles.key_tile)
    rows = heads * tiled_queries
    columns = (slots if has_slots else heads) * tiled_keys * (head + value)
    taken = rows * (head + is_backward * value) + columns
    summed = 0
    if tiles.num_pairs > tiles.query_tile * tiles.key_tile:
        summed = rows * head + columns if is_backward else rows * value
    if summed and is_backward:
        # What has a result's size lies in its place meanwhile.
        summed -= rows * head * (tiled_queries == queries)
        summed -= columns * (tiled_keys == keys and has_slots)
    return math.prod(batch) * (scored + taken * query.dtype.itemsize + summed * wide)


def _in_whole(tokens: int, tile: int) -> int:
    """Tokens up to whole tiles."""
    return -(-tokens // tile) * tile


def tiles_work(
    tiles: Tiling, query: Any, num_keys: int, value_size: int, *, is_backward: bool
) -> AttentionWork:
    """The work of the pairs of tiles of an attention, or of a block of one.

    Args:
        tiles: the pairs.
        query: shape and dtype of the queries, [..., T, N, H].
        num_keys: how many keys there are.
        value_size: numbers of a value.
        is_backward: whether gradients are made.
    """
    passes = _PASSES[ATTENTION_BACKWARD if is_backward else ATTENTION]
    shape = query.shape
    scores = float(tiles.num_pairs * math.prod(shape[:-3]) * shape[-2])
    sizes = passes.by_head * shape[-1] + passes.by_value * value_size
    return AttentionWork(
        products=2 * scores * sizes,
        arithmetic=scores * passes.arithmetic,
        traffic=scores * passes.traffic * accumulator(query.dtype).itemsize,
        side=min(shape[-1], value_size, shape[-3], num_keys),
    )
