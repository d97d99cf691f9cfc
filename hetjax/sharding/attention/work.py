"""The work of attention's equations, counted by the tiles that are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetjax import _compat
from hetjax.sharding.attention.primitive import ATTENTION, ATTENTION_BACKWARD
from hetjax.sharding.attention.tile_views import accumulator
from hetjax.sharding.attention.tiles import LARGEST, Tiling, tiling

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
    params: Any = equation.params
    avals: list[Any] = [variable.aval for variable in equation.invars[:3]]
    q, k, v = avals
    tiles = tiling(
        q.shape[-3],
        k.shape[-3],
        params["mask"],
        params["query_spans"],
        params["key_spans"],
        params["has_segments"],
        LARGEST,
    )
    is_backward = is_backward or equation.primitive is ATTENTION_BACKWARD
    return tiles_work(tiles, q, k.shape[-3], v.shape[-1], is_backward=is_backward)


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
