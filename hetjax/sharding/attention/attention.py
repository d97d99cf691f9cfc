"""`hetjax.attention`: attention that hetjax can divide along the sequence."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.errors import InputError, shown
from hetjax.sharding.attention.mask import Mask, Tokens, TokenSpan, positions_of, segment_numbers
from hetjax.sharding.attention.primitive import bind_attention


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    segment_ids: Any = None,
    scale: float | None = None,
    **flax: Any,
) -> jax.Array:
    """Softmax attention, with grouped queries and the usual masks, in memory linear in the tokens.

    It is one equation of a traced program, with a backward equation that makes the probabilities
    again from the log-sum-exp of the scores; it has no second derivative. It can be an
    ``attention_fn`` of `flax.nnx.MultiHeadAttention`. Scores are summed in float32, or float64 for
    float64. Masks that do not let a query see any key give it zeros.

    Args:
        q: queries [batch..., tokens, query heads, head size].
        k: keys [batch..., key tokens, key-value heads, head size], in the dtype of ``q``. The
            number of query heads is a multiple of that of key-value heads, each of which serves
            as many query heads in a row.
        v: values [batch..., key tokens, key-value heads, size], in the dtype of ``q``.
        causal: whether a query sees itself and those before it alone. Both tokens and key tokens
            are counted from the beginning of the sequence.
        window: how many tokens a query sees before and after its own: one number for both, or a
            pair; None for all.
        segment_ids: numbers of the sequences that are packed into one, int [batch..., tokens]; a
            query sees keys of its own number. A pair where keys have other numbers than queries,
            of one dtype where either has 64 bits.
        scale: what scores are multiplied by; 1 / sqrt(head size) unless given.
        **flax: what `flax.nnx.MultiHeadAttention` passes beside these: ``is_causal`` is
            ``causal``; a mask, a bias, dropout and sown weights are refused.

    Returns:
        [batch..., tokens, query heads, size of ``v``], in the dtype of ``q``.

    Raises:
        InputError: shapes, dtypes or numbers do not fit, or what Flax passes cannot be taken.
        TypeError: an argument has another name than these.

    Source: Vaswani et al., 2017, arXiv:1706.03762, eq. 1; grouped queries: Ainslie et al., 2023,
    arXiv:2305.13245, section 2.2; the computation: Dao et al., 2022, arXiv:2205.14135.

    Example:
        >>> import jax.numpy as jnp
        >>> ones = jnp.ones((2, 5, 4, 8))
        >>> attention(ones, ones[:, :, :2], ones[:, :, :2], causal=True).shape
        (2, 5, 4, 8)
    """
    if unknown := flax.keys() - _OF_FLAX:
        raise TypeError(f"attention: {min(unknown)} is no argument of it")
    is_causal, dtype = _of_flax(**flax)
    q, k, v = (_array(name, each, dtype) for name, each in (("q", q), ("k", k), ("v", v)))
    _check_shapes(q, k, v)
    before, after = _window(window)
    sees_none_after = _flag("causal", causal) or _flag("is_causal", is_causal)
    mask = Mask(before, 0 if sees_none_after else after)
    spans = {length: (TokenSpan(0, length),) for length in (q.shape[-3], k.shape[-3])}
    positions = {} if mask.is_full else {n: positions_of(each) for n, each in spans.items()}
    segments = _segments(segment_ids, [each.shape[:-2] for each in (q, k)])
    queries, keys = (
        Tokens(spans[n], positions.get(n), of)
        for n, of in zip((q.shape[-3], k.shape[-3]), segments, strict=True)
    )
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else _number("scale", scale)
    return bind_attention(q, k, v, queries, keys, mask=mask, scale=scale)[0]


def _of_flax(
    *,
    is_causal: bool = False,
    dtype: Any = None,
    mask: Any = None,
    bias: Any = None,
    dropout_rate: float = 0.0,
    dropout_rng: Any = None,
    deterministic: bool = True,
    broadcast_dropout: bool = True,
    precision: Any = None,
    module: Any = None,
) -> tuple[bool, Any]:
    """What of that which Flax passes counts here: whether it is causal, and the dtype."""
    del dropout_rng, broadcast_dropout
    for name, given in (("mask", mask), ("bias", bias)):
        if given is not None:
            raise InputError(
                f"{name}: an array is not allowed: causal, window and segment_ids say who sees whom"
            )
    if dropout_rate > 0.0 and not deterministic:
        raise InputError(
            f"dropout_rate: {shown(dropout_rate)} is not allowed: attention weights, which are "
            "never in memory, are not dropped; 0, or deterministic"
        )
    if module is not None:
        raise InputError("sow_weights: True is not allowed: attention weights are never in memory")
    if precision is not None:
        raise InputError(f"precision: {shown(precision)} is not allowed: None")
    return is_causal, dtype


_OF_FLAX = inspect.signature(_of_flax).parameters.keys()


def _array(name: str, given: Any, dtype: Any) -> jax.Array:
    try:
        return jnp.asarray(given, dtype)
    except (TypeError, ValueError):
        raise InputError(f"{name}: {shown(given)} is not allowed: an array") from None


def _flag(name: str, given: Any) -> bool:
    if not isinstance(given, bool | np.bool_):
        raise InputError(f"{name}: {shown(given)} is not allowed: True or False")
    return bool(given)


def _number(name: str, given: Any) -> float:
    """A number that is known when a program is traced."""
    try:
        number = float(given)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{name}: {shown(given)} is not allowed: a finite number, not traced")
    return number


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim < 3:
            raise InputError(
                f"{name}: shape {array.shape} is not allowed: [batch..., tokens, heads, head size]"
            )
        if array.dtype != q.dtype or not jnp.issubdtype(array.dtype, jnp.floating):
            raise InputError(
                f"{name}: dtype {array.dtype} is not allowed: one floating dtype of q, k and v"
            )
    if k.shape[:-3] != q.shape[:-3] or k.shape[-1] != q.shape[-1] or not q.shape[-1]:
        raise InputError(f"k: shape {k.shape} does not go with that of q, {q.shape}")
    if v.shape[:-1] != k.shape[:-1]:
        raise InputError(f"v: shape {v.shape} does not go with that of k, {k.shape}")
    if not k.shape[-2] or q.shape[-2] % k.shape[-2]:
        raise InputError(
            f"k: {k.shape[-2]} heads are not allowed: a divisor of the {q.shape[-2]} of q"
        )


def _window(window: Any) -> tuple[int | None, int | None]:
    """How many tokens a query sees before and after its own."""
    if window is None:
        return None, None
    sides = window if isinstance(window, Sequence) else (window, window)
    whole = [isinstance(n, int | np.integer) and not isinstance(n, bool) for n in sides]
    if len(sides) != 2 or not all(whole) or min(sides) < 0:
        raise InputError(
            f"window: {shown(window)} is not allowed: a number from 0, or two: before and after"
        )
    return int(sides[0]), int(sides[1])


def _segments(given: Any, shapes: Sequence[tuple[int, ...]]) -> tuple[Any, Any]:
    """The segments of queries and keys, whose shapes are [batch..., tokens]."""
    if given is None:
        return None, None
    pair = given if isinstance(given, tuple) else (given, given)
    if len(pair) != 2:
        raise InputError(
            f"segment_ids: {len(pair)} arrays are not allowed: one, or a pair of those of queries "
            "and keys"
        )
    pair = [_array("segment_ids", each, None) for each in pair]
    for side, array, shape in zip(("queries", "keys"), pair, shapes, strict=True):
        if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.integer):
            raise InputError(
                f"segment_ids: {array.dtype} {array.shape} is not allowed for the {side}: "
                f"integers {shape}, or a pair of those of queries and keys"
            )
    queries, keys = map(segment_numbers, pair)
    if queries.dtype != keys.dtype:
        raise InputError(
            f"segment_ids: {pair[0].dtype} and {pair[1].dtype} are not allowed: one dtype where "
            "either has 64 bits"
        )
    return queries, keys
