"""Dense attention and its gradients in NumPy, as their definitions have them."""

from typing import Any

import numpy as np

from hetjax.sharding.attention.mask import Mask, Spans


def numbers_of(spans: Spans) -> np.ndarray:
    """The positions in spans."""
    return np.array([p for span in spans for p in range(span.start, span.stop)], np.int32)


def seen_by(mask: Mask, queries: np.ndarray, keys: np.ndarray, segments: Any = None) -> np.ndarray:
    """Who sees whom [B, T, S], from positions [T], [S] and segments [B, T], [B, S]."""
    seen = np.broadcast_to(mask.sees(queries[:, None], keys), (1, len(queries), len(keys)))
    if segments is not None:
        seen = seen & (segments[0][:, :, None] == segments[1][:, None, :])
    return seen


def dense_attention(
    q: Any, k: Any, v: Any, seen: np.ndarray, scale: float, d_out: Any = None
) -> tuple[np.ndarray, ...]:
    """Attention of [B, T, N, H] to [B, S, G, H], in float64; and with a cotangent, gradients."""
    q, k, v = (np.asarray(each, np.float64) for each in (q, k, v))
    groups, each = k.shape[2], q.shape[2] // k.shape[2]
    wide_k, wide_v = (np.repeat(x, each, axis=2) for x in (k, v))
    scores = scale * np.einsum("btnh,bsnh->bnts", q, wide_k)
    scores = np.where(seen[:, None], scores, -np.inf)
    most = np.max(scores, axis=-1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - most)
    total = np.sum(weights, axis=-1, keepdims=True)
    weights = weights / np.where(total > 0, total, 1)
    out = np.einsum("bnts,bsnh->btnh", weights, wide_v)
    if d_out is None:
        return (out,)
    d_out = np.asarray(d_out, np.float64)
    d_weights = np.einsum("btnh,bsnh->bnts", d_out, wide_v)
    d_scores = weights * (d_weights - np.sum(weights * d_weights, axis=-1, keepdims=True)) * scale

    def summed(x: np.ndarray) -> np.ndarray:
        batch, tokens, _, size = x.shape
        return x.reshape(batch, tokens, groups, each, size).sum(axis=3)

    d_q = np.einsum("bnts,bsnh->btnh", d_scores, wide_k)
    d_k = summed(np.einsum("bnts,btnh->bsnh", d_scores, q))
    return out, d_q, d_k, summed(np.einsum("bnts,btnh->bsnh", weights, d_out))
