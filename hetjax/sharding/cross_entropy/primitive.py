"""The primitive of tokens' cross-entropies: one equation with a backward equation of its own.

Its operands are hidden states [..., T, D], weights [V, D] and labels, int32 [..., T]. It makes the
losses and the log-sum-exp of the logits, both [..., T]. The backward equation takes the latter as
well, and the losses' cotangent, and makes the gradients of the first two operands. Axes that
`jax.vmap` maps along which weights differ, or of which each has a gradient of the weights, lead in
all operands, also in the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import _compat
from hetjax.sharding.attention.tile_views import accumulator
from hetjax.sharding.cross_entropy.chunks import token_gradients, token_losses


def bind_cross_entropy(hidden: Any, weights: Any, labels: Any, *, chunk: int) -> tuple[Any, Any]:
    """One equation: the losses of tokens.

    Args:
        hidden: [..., T, D].
        weights: [V, D].
        labels: int32 [..., T].
        chunk: the most tokens of each example whose logits are in memory.

    Returns:
        The losses and the log-sum-exp of the logits, [..., T].
    """
    losses, log_sums = CROSS_ENTROPY.bind(hidden, weights, labels, chunk=chunk)
    return losses, log_sums


def _for_each_weights(function: Callable[..., Any], weights: Any) -> Callable[..., Any]:
    """A function of one matrix of weights, over the axes that lead in all operands."""
    for _ in range(weights.ndim - 2):
        function = jax.vmap(function)
    return function


@functools.partial(jax.jit, static_argnames="chunk")
def _losses(hidden: Any, weights: Any, labels: Any, *, chunk: int) -> tuple[Any, Any]:
    each = functools.partial(token_losses, chunk=chunk)
    return _for_each_weights(each, weights)(hidden, weights, labels)


@functools.partial(jax.jit, static_argnames="chunk")
def _backward(hidden: Any, weights: Any, *others: Any, chunk: int) -> tuple[Any, Any]:
    each = functools.partial(token_gradients, chunk=chunk)
    d_hidden, d_weights = _for_each_weights(each, weights)(hidden, weights, *others)
    return d_hidden, d_weights.astype(weights.dtype)


@functools.partial(jax.jit, static_argnames="chunk")
def _tangent(*operands: Any, chunk: int) -> tuple[Any, Any]:
    """How the results move with hidden states and weights; for derivatives in forward mode."""
    hidden, weights, labels, _, _, *tangents = operands

    def moving(hidden: Any, weights: Any) -> tuple[Any, Any]:
        return _losses(hidden, weights, labels, chunk=chunk)

    return jax.jvp(moving, (hidden, weights), tuple(tangents))[1]


def _shapes(*avals: Any, chunk: int) -> list[Any]:
    hidden, _, labels, *_ = avals
    return [_compat.abstract_like(avals, labels.shape, accumulator(hidden.dtype))] * 2


def _backward_shapes(*avals: Any, chunk: int) -> list[Any]:
    return [_compat.abstract_like(avals, each.shape, each.dtype) for each in avals[:2]]


def _mapped(
    operands: Sequence[Any], axes: Sequence[int | None], params: Mapping[str, Any]
) -> tuple[list[Any], int]:
    """Operands with one more axis: one of examples, unless weights have it, too."""
    size = _compat.mapped_size(operands, axes)
    of_weights = [place for place in (1, 6) if place < len(operands)]
    if all(axes[place] is None for place in of_weights):
        first = operands[1].ndim - 2
        moved = [
            each if i in of_weights else jnp.moveaxis(_compat.led_by(each, axis, size), 0, first)
            for i, (each, axis) in enumerate(zip(operands, axes, strict=True))
        ]
        return moved, first
    return _each_mapped(operands, axes, params)


def _each_mapped(
    operands: Sequence[Any], axes: Sequence[int | None], params: Mapping[str, Any]
) -> tuple[list[Any], int]:
    """Operands with one more axis, which leads in all of them."""
    size = _compat.mapped_size(operands, axes)
    return [_compat.led_by(x, axis, size) for x, axis in zip(operands, axes, strict=True)], 0


CROSS_ENTROPY = _compat.compiled_primitive(
    "linear_cross_entropy", _shapes, {None: _losses}, _mapped
)
"""The primitive; see `bind_cross_entropy`."""

CROSS_ENTROPY_BACKWARD = _compat.compiled_primitive(
    "linear_cross_entropy_backward", _backward_shapes, {None: _backward}, _each_mapped
)
"""Its backward equation: hidden states, weights, labels, log-sum-exp, cotangents of losses."""

_TANGENT = _compat.compiled_primitive(
    "linear_cross_entropy_tangent", _shapes, {None: _tangent}, _mapped
)


def _bind_backward(known: Sequence[Any], cotangents: Sequence[Any], **params: Any) -> Sequence[Any]:
    d_losses, d_log_sums = cotangents
    assert d_log_sums is None, "the log-sum-exp is no result of a user's"
    hidden, weights, labels, _, log_sums = known
    return CROSS_ENTROPY_BACKWARD.bind(hidden, weights, labels, log_sums, d_losses, **params)


_compat.differentiate(CROSS_ENTROPY, _TANGENT, _bind_backward, moving=2)
