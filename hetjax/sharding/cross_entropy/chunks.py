"""Losses of tokens and their gradients, chunk by chunk: no more logits than a chunk's in memory.

Shapes: T tokens, D the width, V the vocabulary; "..." are the axes of the batch, which are never
cut apart, so that compilers can divide the examples. The label's logit is picked by comparison and
sum, so that they can divide the vocabulary too, with nothing but sums to communicate.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hetjax.sharding.attention.tile_views import accumulator, in_whole_tiles, tile, with_tile
from hetjax.sharding.attention.tiles import tile_of


def chunk_size(tokens: int, chunk: int) -> int:
    """How many tokens of an example the chunks have, as nearly the same as can be.

    Args:
        tokens: how many there are in all.
        chunk: the most that a chunk may have.

    Example:
        >>> chunk_size(300, 512), chunk_size(600, 512), chunk_size(5, 2)
        (300, 304, 2)
    """
    return min(chunk, tile_of(tokens, chunk))


def token_losses(hidden: Any, weights: Any, labels: Any, *, chunk: int) -> tuple[Any, Any]:
    """The loss of each token.

    Args:
        hidden: [..., T, D].
        weights: [V, D]; taken in the dtype of ``hidden``.
        labels: [..., T], int32.
        chunk: the most tokens of each example whose logits are in memory.

    Returns:
        The losses and the log-sum-exp of the logits, [..., T], both in float32, or float64 for
        float64.
    """
    wide, tokens = accumulator(hidden.dtype), labels.shape[-1]
    if not labels.size:
        return jnp.zeros(labels.shape, wide), jnp.zeros(labels.shape, wide)
    size = chunk_size(tokens, chunk)
    narrow = weights.astype(hidden.dtype)
    padded, padded_labels = _whole(hidden, -2, size), _whole(labels, -1, size)

    def step(place: Any, state: Any) -> Any:
        logits = _logits(tile(padded, place, size, -2), narrow)
        most = jnp.max(logits, axis=-1, keepdims=True)
        total = jnp.log(jnp.sum(jnp.exp(logits - most), axis=-1))
        chosen = _is_label(logits, tile(padded_labels, place, size, -1))
        picked = jnp.sum(jnp.where(chosen, logits - most, jnp.zeros_like(logits)), axis=-1)
        found = total - picked, total + most[..., 0]
        return tuple(with_tile(x, each, place, -1) for x, each in zip(state, found, strict=True))

    empty = jnp.zeros(padded_labels.shape, wide)
    losses, log_sums = _over_chunks(padded_labels.shape[-1] // size, step, (empty, empty))
    return losses[..., :tokens], log_sums[..., :tokens]


def token_gradients(
    hidden: Any, weights: Any, labels: Any, log_sums: Any, d_losses: Any, *, chunk: int
) -> tuple[Any, Any]:
    """The gradients of `token_losses`, whose logits are made again.

    Args:
        hidden: [..., T, D].
        weights: [V, D]; taken in the dtype of ``hidden``.
        labels: [..., T], int32.
        log_sums: the log-sum-exp of the logits, [..., T].
        d_losses: the cotangents of the losses, [..., T].
        chunk: the most tokens of each example whose logits are in memory.

    Returns:
        The gradient of ``hidden`` in its dtype, and that of ``weights`` in the dtype of sums.
    """
    wide, tokens = accumulator(hidden.dtype), labels.shape[-1]
    if not labels.size:
        return jnp.zeros_like(hidden), jnp.zeros(weights.shape, wide)
    size = chunk_size(tokens, chunk)
    narrow = weights.astype(hidden.dtype)
    padded, padded_labels = _whole(hidden, -2, size), _whole(labels, -1, size)
    rows = [_whole(each, -1, size) for each in (log_sums, d_losses)]

    def step(place: Any, state: Any) -> Any:
        d_hidden, d_weights = state
        rows_of_chunk = tile(padded, place, size, -2)
        log_sum, scale = (tile(each, place, size, -1)[..., None] for each in rows)
        logits = _logits(rows_of_chunk, narrow)
        chosen = _is_label(logits, tile(padded_labels, place, size, -1))
        d_logits = (jnp.exp(logits - log_sum) - chosen.astype(wide)) * scale
        d_logits = d_logits.astype(hidden.dtype)
        d_rows = jnp.einsum("...tv,vd->...td", d_logits, narrow, preferred_element_type=wide)
        d_hidden = with_tile(d_hidden, d_rows.astype(hidden.dtype), place, -2)
        # Turned, so that compilers for CPUs copy no logits to turn them.
        added = jnp.einsum("...td,...tv->dv", rows_of_chunk, d_logits, preferred_element_type=wide)
        return d_hidden, d_weights + added

    empty = jnp.zeros_like(padded), jnp.zeros(weights.shape[::-1], wide)
    d_hidden, d_weights = _over_chunks(padded_labels.shape[-1] // size, step, empty)
    # Without a loop between, XLA for CPUs would join both: of bfloat16 it has no such product.
    return d_hidden[..., :tokens, :], jax.lax.optimization_barrier(d_weights).T


def _over_chunks(count: int, step: Any, state: Any) -> Any:
    return step(0, state) if count == 1 else jax.lax.fori_loop(0, count, step, state)


def _whole(x: Any, axis: int, size: int) -> Any:
    return in_whole_tiles(x, size, axis)


def _logits(hidden: Any, weights: Any) -> Any:
    return jnp.einsum(
        "...td,vd->...tv", hidden, weights, preferred_element_type=accumulator(hidden.dtype)
    )


def _is_label(logits: Any, labels: Any) -> Any:
    """Where [..., T, V] is the label of a token."""
    numbers = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return numbers == labels[..., None]
