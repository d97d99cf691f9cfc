"""The work of the equations of tokens' cross-entropies, and the memory that they take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hetjax import _compat
from hetjax.sharding.attention.tile_views import accumulator
from hetjax.sharding.cross_entropy.chunks import chunk_size
from hetjax.sharding.cross_entropy.primitive import CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD

BACKWARD_PASSES = 3
"""How often the backward equation does the product of the forward one: the logits again, and both
gradients."""


class _LossPasses(NamedTuple):
    """How often an equation goes over its logits.

    Args:
        products: matrix products.
        arithmetic: elementwise operations.
        traffic: times that something of the logits' size is written or read.
    """

    products: int
    arithmetic: int
    traffic: int


_PASSES: Mapping[Any, _LossPasses] = {
    # Compared, shifted, exponentiated, added up, and picked; written, and read three times.
    CROSS_ENTROPY: _LossPasses(1, 5, 4),
    # Shifted, exponentiated, less the label, scaled; logits and their cotangents are written, and
    # read by what comes after.
    CROSS_ENTROPY_BACKWARD: _LossPasses(BACKWARD_PASSES, 4, 5),
}


@dataclass(frozen=True)
class CrossEntropyWork:
    """What an equation of tokens' cross-entropies computes.

    Args:
        products: FLOPs of its matrix products.
        arithmetic: other FLOPs.
        traffic: bytes of logits, and of what is made of them, that it writes and reads.
        side: the smallest side of its products.
        memory: bytes that it holds beside its operands and results.
    """

    products: float
    arithmetic: float
    traffic: float
    side: int
    memory: int


def cross_entropy_work(equation: _compat.JaxprEqn) -> CrossEntropyWork | None:
    """The work of an equation of tokens' cross-entropies; None for any other.

    Args:
        equation: the jaxpr equation.
    """
    passes = _PASSES.get(equation.primitive)
    if passes is None:
        return None
    avals: list[Any] = [variable.aval for variable in equation.invars[:3]]
    hidden, weights, labels = avals
    vocabulary, width = weights.shape[-2:]
    rows = math.prod(labels.shape[:-1]) * chunk_size(labels.shape[-1], equation.params["chunk"])
    logits, wide = float(labels.size * vocabulary), accumulator(hidden.dtype).itemsize
    # The logits, and what is made of them before it is added up, or as the next products take it.
    is_backward = equation.primitive is CROSS_ENTROPY_BACKWARD
    memory = rows * vocabulary * (wide + (hidden.dtype.itemsize if is_backward else wide))
    if weights.dtype != hidden.dtype:
        memory += weights.size * hidden.dtype.itemsize
    if is_backward:
        # The summands of one chunk, and their sum where it is not the result.
        copies = 1 + (weights.dtype != accumulator(hidden.dtype))
        memory += copies * weights.size * wide
    return CrossEntropyWork(
        products=2 * logits * width * passes.products,
        arithmetic=logits * passes.arithmetic,
        traffic=logits * passes.traffic * wide,
        side=min(width, vocabulary, rows),
        memory=memory,
    )
