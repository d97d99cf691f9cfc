"""`hetjax.linear_cross_entropy`: losses of tokens, in memory for a chunk of their logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hetjax.errors import InputError, shown
from hetjax.sharding.cross_entropy.primitive import bind_cross_entropy

CHUNK = 512
"""Tokens of a chunk unless given: its products are large enough, and its logits few enough."""


def linear_cross_entropy(
    hidden: Any, weights: Any, labels: Any, *, chunk: int = CHUNK
) -> jax.Array:
    """The cross-entropy of each token's label, from hidden states and the output matrix.

    It is ``optax.softmax_cross_entropy_with_integer_labels(hidden @ weights.T, labels)``, but only
    the logits of a chunk of tokens are in memory at a time. It is one equation of a traced
    program, with a backward equation that makes the logits again: one product more than where they
    are kept. Logits are summed in float32, or float64 for float64, and so is the gradient of the
    weights over all tokens.

    Args:
        hidden: [batch..., tokens, width], floating.
        weights: the output matrix [vocabulary, width], floating; products take it in the dtype of
            ``hidden``, and its gradient has its own.
        labels: integers [batch..., tokens], each in [0, vocabulary). Where a token has none, any
            other number, as -1, and no weight in the mean: the loss there is the log-sum-exp.
        chunk: the most tokens of each example whose logits are in memory at a time; examples are
            computed together, so that they can be divided among devices.

    Returns:
        The losses in nats, [batch..., tokens], in float32, or float64 for float64.

    Raises:
        InputError: shapes, dtypes or the chunk do not fit.

    Source: Wijmans et al., 2024, arXiv:2411.09009, section 4; chunks of tokens: Hsu et al., 2024,
    arXiv:2410.10989, section 3.2.

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, weights = jnp.ones((2, 5, 8)), jnp.zeros((3, 8))
        >>> losses = linear_cross_entropy(hidden, weights, jnp.zeros((2, 5), int), chunk=4)
        >>> losses.shape, round(float(losses[0, 0]), 4)
        ((2, 5), 1.0986)
    """
    hidden, weights, labels = (jnp.asarray(each) for each in (hidden, weights, labels))
    for name, array, form in (
        ("hidden", hidden, "[batch..., tokens, width]"),
        ("weights", weights, "[vocabulary, width]"),
    ):
        fits = array.ndim == 2 or (array.ndim > 2 and name == "hidden")
        if not fits or not jnp.issubdtype(array.dtype, jnp.floating):
            raise InputError(f"{name}: {array.dtype} {array.shape} is not allowed: floating {form}")
    if not weights.shape[0] or weights.shape[1] != hidden.shape[-1]:
        raise InputError(
            f"weights: shape {weights.shape} is not allowed: [vocabulary, {hidden.shape[-1]}], the "
            f"width of hidden"
        )
    if labels.shape != hidden.shape[:-1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise InputError(
            f"labels: {labels.dtype} {labels.shape} is not allowed: integers {hidden.shape[:-1]}"
        )
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise InputError(f"chunk: {shown(chunk)} is not allowed: a number of tokens from 1")
    return bind_cross_entropy(hidden, weights, labels.astype(jnp.int32), chunk=chunk)[0]
