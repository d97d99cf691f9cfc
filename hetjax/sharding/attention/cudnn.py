"""Attention by cuDNN's fused kernel, on cards that have one: several times as fast as tiles there.

It is for 16-bit numbers and whole sequences, in programs of one card. Its log-sum-exp comes in 16
bits, too coarse to merge blocks by, so blocks of a divided sequence are computed by tiles; and the
backward pass, which would read it, makes the forward one again, a sixth of its time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import _compat
from hetjax.sharding.attention.mask import Mask, TokenSpan

MOST_HEAD_SIZE = 128
"""The most numbers of a head that all cards with a fused kernel take."""

_HEAD_SIZES = 8


def is_for_cudnn(q: Any, k: Any, v: Any, params: dict[str, Any]) -> bool:
    """Whether cuDNN's kernel computes an equation of attention.

    Args:
        q: queries [..., T, N, H].
        k: keys [..., S, G, H].
        v: values [..., S, G, V].
        params: the equation's parameters; see `hetjax.sharding.attention.primitive`.

    Returns:
        Whether it does: numbers of 16 bits, all tokens of one sequence in their order, a full or a
        causal mask, and heads of a size that it takes.

    Example:
        >>> q = jnp.ones((1, 64, 4, 64), jnp.bfloat16)
        >>> params = {"mask": Mask(), "has_segments": False}
        >>> is_for_cudnn(q, q, q, params), is_for_cudnn(*[q.astype("float32")] * 3, params)
        (True, False)
    """
    size = q.shape[-1]
    if q.dtype not in (jnp.bfloat16, jnp.float16) or params["has_segments"]:
        return False
    if v.shape[-1] != size or size > MOST_HEAD_SIZE or size % _HEAD_SIZES:
        return False
    if 0 in q.shape or 0 in k.shape:
        return False
    if params["mask"].is_full:
        return True
    whole = (TokenSpan(0, q.shape[-3]),)
    return params["mask"] == Mask(None, 0) and (
        params["query_spans"] == params["key_spans"] == whole
    )


def attention_by_cudnn(q: Any, k: Any, v: Any, mask: Mask, scale: float) -> tuple[Any, Any]:
    """Attention and its log-sum-exp.

    Args:
        q: queries [..., T, N, H].
        k: keys [..., S, G, H].
        v: values [..., S, G, H].
        mask: full, or causal.
        scale: what scores are multiplied by.

    Returns:
        The result [..., T, N, H] in the dtype of ``q``, and the log-sum-exp [..., T, N] in float32,
        as exact as 16 bits.
    """
    kernel = _compat.on_one_device(_kernel(mask, scale, return_residual=True))
    out, lse = kernel(*map(_in_one_batch, (q, k, v)))
    return out.reshape(q.shape), lse.reshape(q.shape[:-1]).astype(jnp.float32)


def attention_backward_by_cudnn(
    q: Any, k: Any, v: Any, d_out: Any, mask: Mask, scale: float
) -> tuple[Any, Any, Any]:
    """The gradients of queries, keys and values.

    Args:
        q: queries [..., T, N, H].
        k: keys [..., S, G, H].
        v: values [..., S, G, H].
        d_out: the result's cotangent [..., T, N, H].
        mask: full, or causal.
        scale: what scores are multiplied by.

    Returns:
        Gradients of their shapes and dtypes.
    """

    def gradients(*operands: Any) -> tuple[Any, Any, Any]:
        _, backward = jax.vjp(_kernel(mask, scale), *operands[:3])
        return backward(operands[3])

    operands = map(_in_one_batch, (q, k, v, d_out))
    d_q, d_k, d_v = _compat.on_one_device(gradients)(*operands)
    return d_q.reshape(q.shape), d_k.reshape(k.shape), d_v.reshape(v.shape)


def _kernel(mask: Mask, scale: float, **more: Any) -> Callable[..., Any]:
    return functools.partial(
        jax.nn.dot_product_attention,
        scale=scale,
        is_causal=not mask.is_full,
        implementation="cudnn",
        **more,
    )


def _in_one_batch(array: Any) -> Any:
    """With one axis before those of tokens, heads and numbers."""
    return array.reshape(-1, *array.shape[-3:])
