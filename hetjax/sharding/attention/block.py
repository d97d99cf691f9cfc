"""Attention block by block: a block's result with its log-sum-exp, and how two are merged.

The results of any division of the keys into blocks, merged in any order, are the attention to all.
A block is computed tile by tile, and takes memory for its tokens alone, never for their pairs.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from hetjax.sharding.attention.mask import ANYWHERE, FULL, Mask, Tokens
from hetjax.sharding.attention.tile_views import (
    accumulator,
    by_groups,
    by_heads,
    in_whole_tiles,
    over_tiles,
    rows_of,
    seeing,
    tile,
    with_tile,
)
from hetjax.sharding.attention.tiles import LARGEST


def attend_block(
    q: Any,
    k: Any,
    v: Any,
    queries: Tokens = ANYWHERE,
    keys: Tokens = ANYWHERE,
    *,
    mask: Mask = FULL,
    scale: float,
    largest_tile: int = LARGEST,
) -> tuple[Any, Any]:
    """Attention of a block of queries to a block of keys.

    Args:
        q: queries [..., T, N, H].
        k: keys [..., S, G, H], where G divides N; of the dtype of ``q``.
        v: values [..., S, G, V]; of the dtype of ``q``.
        queries: the queries' positions and segments, as far as there is a mask by them.
        keys: the keys' positions and segments.
        mask: which keys a query sees; a block of which each sees all is given none, however the
            whole sequence is masked.
        scale: what scores are multiplied by.
        largest_tile: the most tokens of a tile.

    Returns:
        The mean of the values that a query sees, weighted by the exponentials of its scores,
        [..., T, N, V]; and the logarithm of the sum of these, [..., T, N]. Both in float32, or
        float64 for float64; zeros and minus infinity for a query that sees nothing.

    Source: Milakov and Gimelshein, 2018, arXiv:1805.02867, algorithm 3; Dao et al., 2022,
    arXiv:2205.14135, algorithm 1.

    Example:
        >>> ones = jnp.ones((5, 2, 4))
        >>> out, lse = attend_block(ones, ones, ones, scale=0.25)
        >>> out.shape, lse.shape, round(float(lse[0, 0] - jnp.log(5.0)), 3)
        ((5, 2, 4), (5, 2), 1.0)
    """
    groups, wide = k.shape[-2], accumulator(q.dtype)
    see = seeing(q.shape[-3], k.shape[-3], mask, queries, keys, largest_tile)
    size, key_size = see.tiling.query_tile, see.tiling.key_tile
    rows = in_whole_tiles(by_groups(q, groups), size, -2)
    columns = [in_whole_tiles(jnp.moveaxis(each, -3, -2), key_size, -2) for each in (k, v)]
    if not see.tiling.num_pairs:
        shape = (*q.shape[:-1], v.shape[-1])
        return jnp.zeros(shape, wide), jnp.full(q.shape[:-1], -jnp.inf, wide)

    def step(state: Any, query_tile: Any, key_tile: Any, visible: Any) -> Any:
        mixed, total, largest = state
        key, value = (tile(each, key_tile, key_size, -2) for each in columns)
        scores = scores_of(tile(rows, query_tile, size, -2), key, scale, visible)
        known = tile(largest, query_tile, size, -1)
        most = jnp.maximum(known, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - finite(most)[..., None])
        kept = jnp.exp(known - finite(most))
        added = jnp.einsum(
            "...grts,...gsv->...grtv", weights.astype(v.dtype), value, preferred_element_type=wide
        )
        mixed_tile = tile(mixed, query_tile, size, -2) * kept[..., None] + added
        total_tile = tile(total, query_tile, size, -1) * kept + jnp.sum(weights, axis=-1)
        return (
            with_tile(mixed, mixed_tile, query_tile, -2),
            with_tile(total, total_tile, query_tile, -1),
            with_tile(largest, most, query_tile, -1),
        )

    # Of the queries, so that they are on their mesh.
    nothing = jnp.zeros_like(rows[..., 0], dtype=wide)
    empty = (
        jnp.broadcast_to(nothing[..., None], (*rows.shape[:-1], v.shape[-1])),
        nothing,
        jnp.full_like(nothing, -jnp.inf),
    )
    mixed, total, largest = over_tiles(see, empty, step)
    tokens = slice(q.shape[-3])
    out = by_heads(mixed / jnp.where(total > 0, total, 1)[..., None])[..., tokens, :, :]
    return out, rows_of(largest + jnp.log(total))[..., tokens, :]


def scores_of(q: Any, k: Any, scale: float, visible: Any) -> Any:
    """Scores [..., G, R, T, S] of queries [..., G, R, T, H] and keys [..., G, S, H]."""
    scores = scale * jnp.einsum(
        "...grth,...gsh->...grts", q, k, preferred_element_type=accumulator(q.dtype)
    )
    return scores if visible is True else jnp.where(visible, scores, -jnp.inf)


def finite(x: Any) -> Any:
    """Zero where there is minus infinity: of a query that sees nothing, so that it is never NaN."""
    return jnp.where(x == -jnp.inf, jnp.zeros_like(x), x)


def merge(out: Any, lse: Any, other_out: Any, other_lse: Any) -> tuple[Any, Any]:
    """The attention to two blocks of keys, from that to each.

    Args:
        out: [..., T, N, V], of `attend_block`.
        lse: [..., T, N].
        other_out: of the same queries and other keys.
        other_lse: of the same.

    Returns:
        The same to both blocks together. A query that sees nothing in one of them, or in both, is
        as it should be.

    Example:
        >>> ones, none = jnp.ones((1, 1, 2)), jnp.zeros((1, 1, 2))
        >>> merge(ones, jnp.zeros((1, 1)), none, jnp.full((1, 1), -jnp.inf))[0].tolist()
        [[[1.0, 1.0]]]
    """
    most = finite(jnp.maximum(lse, other_lse))
    first, second = jnp.exp(lse - most), jnp.exp(other_lse - most)
    total = first + second
    sum_ = first[..., None] * out + second[..., None] * other_out
    return sum_ / jnp.where(total > 0, total, 1)[..., None], most + jnp.log(total)
