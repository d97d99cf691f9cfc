"""The work of attention's equations, counted by the tiles that are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetjax import _compat
from hetjax.sharding.attention.primitive import ATTENTION, ATTENTION_BACKWARD
from hetjax.sharding.attention.tile_views import accumulator
from hetjax.sharding.attention.tiles import LARGEST, tiling

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


def attention_work(equation: _compat.JaxprEqn) -> AttentionWork | None:
    """The work of an equation of attention; None for any other.

    Pairs of tiles in which no query sees a key are no work: of a long causal sequence half.
    Segments, which are data, are taken to leave out nothing.

    Args:
        equation: the jaxpr equation.
    """
    passes = _PASSES.get(equation.primitive)
    if passes is None:
        return None
    params: Any = equation.params
    avals: list[Any] = [variable.aval for variable in equation.invars[:3]]
    q, k, v = avals
    pairs = tiling(
        q.shape[-3],
        k.shape[-3],
        params["mask"],
        params["query_spans"],
        params["key_spans"],
        params["has_segments"],
        LARGEST,
    ).num_pairs
    scores = float(pairs * math.prod(q.shape[:-3]) * q.shape[-2])
    sizes = passes.by_head * q.shape[-1] + passes.by_value * v.shape[-1]
    return AttentionWork(
        products=2 * scores * sizes,
        arithmetic=scores * passes.arithmetic,
        traffic=scores * passes.traffic * accumulator(q.dtype).itemsize,
        side=min(q.shape[-1], v.shape[-1], q.shape[-3], k.shape[-3]),
    )
