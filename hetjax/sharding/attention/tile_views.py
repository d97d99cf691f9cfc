"""Arrays of an attention as its tiles want them: heads before tokens, tokens in whole tiles.

Shapes: T queries, S keys, G key-value heads, R query heads for each of them, N = G R, H head size;
"..." are the axes of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.sharding.attention.mask import Mask, Tokens, num_tokens
from hetjax.sharding.attention.tiles import Tiling, tiling


def accumulator(dtype: Any) -> Any:
    """The dtype of sums and softmax: float64 for float64, float32 for all else."""
    return jnp.dtype("float64") if dtype == jnp.float64 else jnp.dtype("float32")


def by_groups(x: Any, groups: int) -> Any:
    """[..., T, N, H] to [..., G, R, T, H]."""
    *batch, tokens, heads, size = x.shape
    split = x.reshape(*batch, tokens, groups, heads // groups, size)
    return jnp.moveaxis(split, -4, -2)


def by_heads(x: Any) -> Any:
    """[..., G, R, T, H] to [..., T, N, H]."""
    *batch, groups, each, tokens, size = x.shape
    return jnp.moveaxis(x, -2, -4).reshape(*batch, tokens, groups * each, size)


def of_rows(x: Any, groups: int) -> Any:
    """[..., T, N] to [..., G, R, T]."""
    return by_groups(x[..., None], groups)[..., 0]


def rows_of(x: Any) -> Any:
    """[..., G, R, T] to [..., T, N]."""
    return by_heads(x[..., None])[..., 0]


def tile(x: Any, index: Any, size: int, axis: int) -> Any:
    """A tile of an array along an axis, counted from the end."""
    if x.shape[axis] == size:
        return x
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)


def with_tile(x: Any, part: Any, index: Any, axis: int) -> Any:
    """An array with another tile along an axis, counted from the end."""
    if x.shape[axis] == part.shape[axis]:
        return part
    return jax.lax.dynamic_update_slice_in_dim(x, part, index * part.shape[axis], axis)


def in_whole_tiles(x: Any, size: int, axis: int) -> Any:
    """An array with zeros behind its tokens, up to whole tiles."""
    missing = -x.shape[axis] % size if size else 0
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


@dataclass(frozen=True, eq=False)
class Seeing:
    """Which keys the queries of a block see, tile by tile.

    Args:
        mask: by their distance.
        queries: the queries' tokens.
        keys: the keys' tokens.
        num_keys: how many keys there are.
        tiling: the pairs of tiles.
    """

    mask: Mask
    queries: Tokens
    keys: Tokens
    num_keys: int
    tiling: Tiling

    def visible(self, query_tile: Any, key_tile: Any) -> Any:
        """Booleans for a pair of tiles, which go with its scores [..., G, R, T, S]; or True."""
        sizes = self.tiling.query_tile, self.tiling.key_tile
        seen: Any = True
        if not self.mask.is_full:
            q = _tile_of(self.queries.known_positions(), query_tile, sizes[0])
            k = _tile_of(self.keys.known_positions(), key_tile, sizes[1])
            seen = self.mask.sees(q[:, None], k)
        if self.queries.segments is not None:
            q = _tile_of(self.queries.segments, query_tile, sizes[0])
            k = _tile_of(self.keys.segments, key_tile, sizes[1])
            same = q[..., :, None] == k[..., None, :]
            seen = same[..., None, None, :, :] & seen
        if self.num_keys % sizes[1]:
            seen = (
                key_tile * sizes[1] + np.arange(sizes[1], dtype=np.int32) < self.num_keys
            ) & seen
        return seen

    def worth_computing(self) -> tuple[Any, Any]:
        """The pairs of tiles with a mask, int32 [pairs, 2], and how many of them count.

        Where positions or segments are data, pairs in which no query sees a key are found when the
        program runs, and come last.
        """
        partly = jnp.asarray(self.tiling.partly)
        may: Any = None
        if not self.mask.is_full and (self.queries.spans is None or self.keys.spans is None):
            (first, last), (start, end) = self._bounds(lambda tokens: tokens.known_positions())
            before, after = self.mask.before, self.mask.after
            near = True if before is None else first[:, None] - end <= before
            may = near & (True if after is None else start - last[:, None] <= after)
        if self.queries.segments is not None:
            (first, last), (start, end) = self._bounds(lambda tokens: tokens.segments)
            meet = (first[..., :, None] <= end[..., None, :]) & (
                start[..., None, :] <= last[..., :, None]
            )
            meet = jnp.any(meet, axis=tuple(range(meet.ndim - 2)))
            may = meet if may is None else may & meet
        if may is None:
            return partly, len(partly)
        counts = may[partly[:, 0], partly[:, 1]]
        return partly[jnp.argsort(~counts)], jnp.sum(counts, dtype=jnp.int32)

    def _bounds(self, what: Callable[[Tokens], Any]) -> list[tuple[Any, Any]]:
        """The least and the largest number of every tile, of queries and of keys."""
        found = []
        sizes = self.tiling.query_tile, self.tiling.key_tile
        for tokens, size in zip((self.queries, self.keys), sizes, strict=True):
            numbers = jnp.asarray(what(tokens))
            missing = [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % size)]
            padded = jnp.pad(numbers, missing, mode="edge")
            tiles = padded.reshape(*padded.shape[:-1], -1, size)
            found.append((jnp.min(tiles, axis=-1), jnp.max(tiles, axis=-1)))
        return found


def _tile_of(tokens: Any, index: Any, size: int) -> Any:
    return tile(in_whole_tiles(jnp.asarray(tokens), size, -1), index, size, -1)


def seeing(
    queries: int, keys: int, mask: Mask, of_queries: Tokens, of_keys: Tokens, largest: int
) -> Seeing:
    """Which keys the queries of a block see.

    Args:
        queries: how many queries it has.
        keys: how many keys.
        mask: by their distance.
        of_queries: the queries' tokens.
        of_keys: the keys' tokens.
        largest: the most tokens of a tile.
    """
    for count, tokens in ((queries, of_queries), (keys, of_keys)):
        assert tokens.spans is None or num_tokens(tokens.spans) == count, (tokens.spans, count)
        assert mask.is_full or tokens.known_positions() is not None, "a mask goes by positions"
    has_segments = of_queries.segments is not None
    assert has_segments == (of_keys.segments is not None), "segments are of both sides"
    pairs = tiling(queries, keys, mask, of_queries.spans, of_keys.spans, has_segments, largest)
    return Seeing(mask, of_queries, of_keys, keys, pairs)


def over_tiles(see: Seeing, state: Any, step: Callable[[Any, Any, Any, Any], Any]) -> Any:
    """Take a state through all pairs of tiles: first those without a mask, then the others.

    Args:
        see: the pairs.
        state: what comes in.
        step: from the state, the numbers of both tiles, and booleans of who is seen, to the state.

    Returns:
        The state after the last pair.
    """
    pairs = see.tiling
    if len(pairs.whole) + len(pairs.partly) == 1:
        (pair,) = (*pairs.whole, *pairs.partly)
        return step(state, pair[0], pair[1], True if len(pairs.whole) else see.visible(*pair))

    def whole(place: Any, state: Any) -> Any:
        i, j = every[place]
        return step(state, i, j, True)

    def partly(place: Any, state: Any) -> Any:
        i, j = some[place]
        return step(state, i, j, see.visible(i, j))

    if len(pairs.whole):
        every = jnp.asarray(pairs.whole)
        state = jax.lax.fori_loop(0, len(pairs.whole), whole, state)
    if len(pairs.partly):
        some, count = see.worth_computing()
        state = jax.lax.fori_loop(0, count, partly, state)
    return state
