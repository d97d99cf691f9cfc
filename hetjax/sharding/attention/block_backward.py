"""The gradients of attention block by block: probabilities are made again from the log-sum-exp.

Each pair of a block of queries and one of keys adds to the gradients of both. With the log-sum-exp
of the whole attention these sums over all pairs are its gradients.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from hetjax.sharding.attention.block import finite, scores_of
from hetjax.sharding.attention.mask import ANYWHERE, FULL, Mask, Tokens
from hetjax.sharding.attention.tile_views import (
    accumulator,
    by_groups,
    by_heads,
    in_whole_tiles,
    of_rows,
    over_tiles,
    seeing,
    tile,
    with_tile,
)
from hetjax.sharding.attention.tiles import LARGEST


def delta_of(out: Any, d_out: Any) -> Any:
    """For each query how the whole attention's result goes with its cotangent.

    Args:
        out: the result [..., T, N, V].
        d_out: its cotangent.

    Returns:
        [..., T, N], in the dtype of sums.

    Source: Dao et al., 2022, arXiv:2205.14135, appendix B.2, eq. 4.
    """
    wide = accumulator(out.dtype)
    return jnp.sum(out.astype(wide) * d_out.astype(wide), axis=-1)


def attend_block_backward(
    q: Any,
    k: Any,
    v: Any,
    lse: Any,
    d_out: Any,
    delta: Any,
    queries: Tokens = ANYWHERE,
    keys: Tokens = ANYWHERE,
    *,
    mask: Mask = FULL,
    scale: float,
    largest_tile: int = LARGEST,
) -> tuple[Any, Any, Any]:
    """What a block of queries and one of keys add to the gradients of both.

    Args:
        q: queries [..., T, N, H].
        k: keys [..., S, G, H].
        v: values [..., S, G, V].
        lse: the log-sum-exp of the queries' scores with all keys, also those of other blocks,
            [..., T, N].
        d_out: the cotangent of the whole attention's result, [..., T, N, V].
        delta: `delta_of` that result.
        queries: the queries' positions and segments, as far as there is a mask by them.
        keys: the keys' positions and segments.
        mask: which keys a query sees; none for a block of which each sees all.
        scale: what scores are multiplied by.
        largest_tile: the most tokens of a tile.

    Returns:
        Summands of the gradients of ``q``, ``k`` and ``v``, of their shapes, in float32, or float64
        for float64.

    Source: Dao et al., 2022, arXiv:2205.14135, algorithm 4.
    """
    groups, wide = k.shape[-2], accumulator(q.dtype)
    see = seeing(q.shape[-3], k.shape[-3], mask, queries, keys, largest_tile)
    size, key_size = see.tiling.query_tile, see.tiling.key_tile
    if not see.tiling.num_pairs:
        return jnp.zeros(q.shape, wide), jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)
    rows = [in_whole_tiles(by_groups(each, groups), size, -2) for each in (q, d_out)]
    of_row = [in_whole_tiles(of_rows(each, groups), size, -1) for each in (finite(lse), delta)]
    columns = [in_whole_tiles(jnp.moveaxis(each, -3, -2), key_size, -2) for each in (k, v)]

    def product(form: str, left: Any, right: Any) -> Any:
        narrow = left.astype(right.dtype)
        return jnp.einsum(form, narrow, right, preferred_element_type=wide)

    def step(state: Any, query_tile: Any, key_tile: Any, visible: Any) -> Any:
        query, cotangent = (tile(each, query_tile, size, -2) for each in rows)
        normal, shift = (tile(each, query_tile, size, -1)[..., None] for each in of_row)
        key, value = (tile(each, key_tile, key_size, -2) for each in columns)
        weights = jnp.exp(scores_of(query, key, scale, visible) - normal)
        d_weights = product("...grtv,...gsv->...grts", cotangent, value)
        d_scores = weights * (d_weights - shift) * scale
        summands = (
            (product("...grts,...gsh->...grth", d_scores, key), query_tile),
            (product("...grts,...grth->...gsh", d_scores, query), key_tile),
            (product("...grts,...grtv->...gsv", weights, cotangent), key_tile),
        )
        return tuple(
            with_tile(total, tile(total, place, added.shape[-2], -2) + added, place, -2)
            for total, (added, place) in zip(state, summands, strict=True)
        )

    empty = tuple(jnp.zeros_like(each, dtype=wide) for each in (rows[0], *columns))
    d_q, d_k, d_v = over_tiles(see, empty, step)
    return (
        by_heads(d_q)[..., : q.shape[-3], :, :],
        jnp.moveaxis(d_k[..., : k.shape[-3], :], -2, -3),
        jnp.moveaxis(d_v[..., : v.shape[-3], :], -2, -3),
    )
