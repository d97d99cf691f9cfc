"""The primitive of attention: one equation with a backward equation of its own.

Its operands are queries [..., T, N, H], keys [..., S, G, H] and values [..., S, G, V]; then the
positions of both, int32 [T] and [S], where there is a mask by them; then the segments of both,
[..., T] and [..., S], int32 or of 64 bits, where there are some. It makes the result [..., T, N, V]
and the log-sum-exp of the scores [..., T, N]. The backward equation takes these two as well, and
the result's cotangent, and makes the gradients of the first three operands.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax

from hetjax import _compat
from hetjax.sharding.attention.block import attend_block
from hetjax.sharding.attention.block_backward import attend_block_backward, delta_of
from hetjax.sharding.attention.cudnn import (
    attention_backward_by_cudnn,
    attention_by_cudnn,
    is_for_cudnn,
)
from hetjax.sharding.attention.late_operands import taken_after
from hetjax.sharding.attention.mask import Mask, Tokens
from hetjax.sharding.attention.tile_views import accumulator
from hetjax.sharding.attention.tiles import LARGEST, LARGEST_ELSEWHERE


def bind_attention(
    q: Any, k: Any, v: Any, queries: Tokens, keys: Tokens, *, mask: Mask, scale: float
) -> tuple[Any, Any]:
    """One equation: attention of queries to keys, both wholly there.

    Args:
        q: queries [..., T, N, H].
        k: keys [..., S, G, H], where G divides N.
        v: values [..., S, G, V].
        queries: the queries' positions, where there is a mask, and segments.
        keys: the same of the keys.
        mask: which keys a query sees.
        scale: what scores are multiplied by.

    Returns:
        The result [..., T, N, V] in the dtype of ``q``, and the log-sum-exp [..., T, N] in float32,
        or float64 for float64.
    """
    operands = [q, k, v]
    if not mask.is_full:
        operands += [queries.known_positions(), keys.known_positions()]
    if queries.segments is not None:
        operands += [queries.segments, keys.segments]
    return ATTENTION.bind(
        *operands,
        mask=mask,
        scale=scale,
        query_spans=None if mask.is_full else queries.spans,
        key_spans=None if mask.is_full else keys.spans,
        has_segments=queries.segments is not None,
    )


def _read(operands: Sequence[Any], params: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """What the kernel takes first and last, from an equation's operands; and the others."""
    q, k, v, *rest = operands
    both = [{}, {}]
    if not params["mask"].is_full:
        for side in both:
            side["positions"] = rest.pop(0)
        both[0]["spans"], both[1]["spans"] = params["query_spans"], params["key_spans"]
    if params["has_segments"]:
        for side in both:
            side["segments"] = rest.pop(0)
    return (q, k, v, *(Tokens(**side) for side in both)), rest


_WITHOUT_CUDNN = (RuntimeError, ValueError, NotImplementedError)
"""What JAX raises where a card, or what is installed for it, has no fused kernel for a shape."""

_STATIC = ("mask", "scale", "query_spans", "key_spans", "has_segments", "largest_tile")


@functools.partial(jax.jit, static_argnames=_STATIC)
def _attention(*operands: Any, largest_tile: int, **params: Any) -> tuple[Any, Any]:
    (q, k, v, queries, keys), _ = _read(operands, params)
    mask, scale = params["mask"], params["scale"]
    out, lse = attend_block(
        q, k, v, queries, keys, mask=mask, scale=scale, largest_tile=largest_tile
    )
    return out.astype(q.dtype), lse


@functools.partial(jax.jit, static_argnames=_STATIC)
def _attention_backward(*operands: Any, largest_tile: int, **params: Any) -> tuple[Any, ...]:
    (q, k, v, queries, keys), (out, lse, d_out) = _read(operands, params)
    mask, scale = params["mask"], params["scale"]
    summands = attend_block_backward(
        q,
        k,
        v,
        lse,
        d_out,
        delta_of(out, d_out),
        queries,
        keys,
        mask=mask,
        scale=scale,
        largest_tile=largest_tile,
    )
    return tuple(each.astype(of.dtype) for each, of in zip(summands, (q, k, v), strict=True))


def _attention_of_card(*operands: Any, **params: Any) -> tuple[Any, Any]:
    q, k, v = operands[:3]
    if is_for_cudnn(q, k, v, params):
        with contextlib.suppress(*_WITHOUT_CUDNN):
            return attention_by_cudnn(q, k, v, params["mask"], params["scale"])
    return _attention(*operands, largest_tile=LARGEST_ELSEWHERE, **params)


def _attention_backward_of_card(*operands: Any, **params: Any) -> tuple[Any, ...]:
    *kept, d_out = operands
    q, k, v = kept[:3]
    if is_for_cudnn(q, k, v, params):
        with contextlib.suppress(*_WITHOUT_CUDNN):
            # It reads them as they lie: what waits is copied, and to wait with one is enough.
            (late,) = taken_after(d_out, q)
            return attention_backward_by_cudnn(late, k, v, d_out, params["mask"], params["scale"])
    late = taken_after(d_out, q, k, v)
    return _attention_backward(*late, *kept[3:], d_out, largest_tile=LARGEST_ELSEWHERE, **params)


@functools.partial(jax.jit, static_argnames=_STATIC)
def _attention_tangent(*operands: Any, largest_tile: int, **params: Any) -> tuple[Any, ...]:
    """How the results move with queries, keys and values; for derivatives in forward mode."""
    (*primals, _, _), tangents = operands[:-3], operands[-3:]

    def moving(*first: Any) -> tuple[Any, Any]:
        return _attention(*first, *primals[3:], largest_tile=largest_tile, **params)

    return jax.jvp(moving, tuple(primals[:3]), tuple(tangents))[1]


def by_platform(function: Any) -> dict[str | None, Any]:
    """What a primitive is compiled as, with the largest tiles of each platform.

    Args:
        function: from operands, parameters and ``largest_tile`` to results.

    Returns:
        By platform, as `hetjax._compat.compiled_primitive` takes it.
    """
    return {
        None: functools.partial(function, largest_tile=LARGEST_ELSEWHERE),
        "cpu": functools.partial(function, largest_tile=LARGEST),
    }


def _shared(params: Any) -> Sequence[int]:
    """The places of positions, which are of all examples."""
    return () if params["mask"].is_full else (3, 4)


_MAPPED = _compat.leading_axis(_shared)


def _shapes(*avals: Any, **params: Any) -> list[Any]:
    q, _, v, *_ = avals
    rows, wide = q.shape[:-1], accumulator(q.dtype)
    results = ((*rows, v.shape[-1]), q.dtype), (rows, wide)
    return [_compat.abstract_like(avals, shape, dtype) for shape, dtype in results]


def _backward_shapes(*avals: Any, **params: Any) -> list[Any]:
    return [_compat.abstract_like(avals, each.shape, each.dtype) for each in avals[:3]]


ATTENTION = _compat.compiled_primitive(
    "attention", _shapes, by_platform(_attention), _MAPPED, {"cuda": _attention_of_card}
)
"""The primitive; see `bind_attention`."""

ATTENTION_BACKWARD = _compat.compiled_primitive(
    "attention_backward",
    _backward_shapes,
    by_platform(_attention_backward),
    _MAPPED,
    {"cuda": _attention_backward_of_card},
)
"""Its backward equation."""

_TANGENT = _compat.compiled_primitive(
    "attention_tangent", _shapes, by_platform(_attention_tangent), _MAPPED
)


def _bind_backward(known: Sequence[Any], cotangents: Sequence[Any], **params: Any) -> Sequence[Any]:
    d_out, d_lse = cotangents
    if d_lse is not None:
        raise NotImplementedError("attention: its log-sum-exp has no derivative")
    return ATTENTION_BACKWARD.bind(*known, d_out, **params)


_compat.differentiate(ATTENTION, _TANGENT, _bind_backward, moving=3)


def attention_line(jaxprs: Sequence[_compat.Jaxpr]) -> str | None:
    """The line of an attention in some bodies, or in what they call; None where there is none."""
    for equation in (each for jaxpr in jaxprs for each in jaxpr.eqns):
        if equation.primitive is ATTENTION:
            return _compat.source_line(equation)
        line = attention_line(_compat.inner_jaxprs(equation))
        if line is not None:
            return line
    return None
