"""Tiles: the pairs of runs of queries and keys that an attention is computed by.

Pairs in which no query sees a key are left out, and those in which each sees all are told from
those that need a mask. So a causal sequence takes half the work, and its mask the diagonal's alone.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from hetjax.sharding.attention.mask import Mask, Spans, intervals

LARGEST = 224
"""The most tokens of a tile on CPUs, whose caches hold the scores of one: up to here, or 128 where
there is a mask, an attention is computed in one piece, without a loop. Rows of 256 scores are
whole pages apart by fours, so that columns fall into the same lines of a cache: the products of
the backward pass by transposed scores would take half as long again."""

LARGEST_ELSEWHERE = 1024
"""The same on accelerators, which take longer to begin with a tile."""

_ROUNDED, _TRIED = 16, 3
"""Of what the tokens of a tile are a multiple, and how many numbers of tiles are tried."""


def tile_of(tokens: int, largest: int) -> int:
    """How many tokens the tiles of so many have: few tiles, that reach little beyond the tokens.

    Args:
        tokens: how many there are in all.
        largest: the most that a tile may have.

    Example:
        >>> tile_of(150, 256), tile_of(257, 256), tile_of(1360, 224), tile_of(8192, 256)
        (150, 144, 176, 256)
    """
    if tokens <= largest:
        return tokens
    unit, least = min(_ROUNDED, largest), math.ceil(tokens / largest)
    sizes = [math.ceil(tokens / count / unit) * unit for count in range(least, least + _TRIED)]
    return min(sizes, key=lambda size: (math.ceil(tokens / size) * size, -size))


@dataclass(frozen=True, eq=False)
class Tiling:
    """The pairs of tiles that are computed.

    Args:
        query_tile: tokens of a tile of queries.
        key_tile: tokens of a tile of keys.
        whole: pairs in which every query sees every key, int32 [pairs, 2].
        partly: pairs in which some do, or may.
    """

    query_tile: int
    key_tile: int
    whole: np.ndarray
    partly: np.ndarray

    @property
    def num_pairs(self) -> int:
        """How many pairs of a query and a key are computed."""
        return (len(self.whole) + len(self.partly)) * self.query_tile * self.key_tile


@functools.lru_cache(maxsize=256)
def tiling(
    queries: int,
    keys: int,
    mask: Mask,
    query_spans: Spans | None,
    key_spans: Spans | None,
    has_segments: bool,
    largest: int,
) -> Tiling:
    """The pairs of tiles of a block.

    Args:
        queries: how many queries it has.
        keys: how many keys.
        mask: which keys a query sees.
        query_spans: the queries' positions, where they are known.
        key_spans: the keys' positions, where they are known.
        has_segments: whether there are segments too.
        largest: the most tokens of a tile.

    Returns:
        The pairs; the last tile of either side may reach beyond its tokens.

    Example:
        >>> from hetjax.sharding.attention.mask import TokenSpan
        >>> spans = (TokenSpan(0, 768),)
        >>> found = tiling(768, 768, Mask(after=0), spans, spans, False, 256)
        >>> found.whole.tolist(), found.partly.tolist()
        ([[1, 0], [2, 0], [2, 1]], [[0, 0], [1, 1], [2, 2]])
    """
    half = 2 ** math.ceil(math.log2(largest / 2))
    query_tile, key_tile = (
        # Where a mask hides some, four tiles of which three are computed are faster than one.
        tile_of(count, largest if mask.is_full else min(largest, max(half, count // 2)))
        for count in (queries, keys)
    )
    if not queries or not keys:
        nothing = np.zeros((0, 2), np.int32)
        return Tiling(query_tile, key_tile, nothing, nothing)
    shape = math.ceil(queries / query_tile), math.ceil(keys / key_tile)
    some, every = np.ones(shape, bool), np.full(shape, mask.is_full)
    if not mask.is_full and query_spans is not None and key_spans is not None:
        some, every = _seen(
            mask,
            intervals(query_spans, query_tile, shape[0]),
            intervals(key_spans, key_tile, shape[1]),
        )
    if has_segments:
        every[:] = False
    if keys % key_tile:
        every[:, -1] = False
    return Tiling(query_tile, key_tile, _pairs(some & every), _pairs(some & ~every))


def _pairs(chosen: np.ndarray) -> np.ndarray:
    return np.argwhere(chosen).astype(np.int32)


def _seen(mask: Mask, queries: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each pair of tiles whether some query sees a key, and whether each sees all."""
    least = -np.inf if mask.after is None else -mask.after
    most = np.inf if mask.before is None else mask.before
    shape = len(queries), len(keys)
    some, every = np.zeros(shape, bool), np.ones(shape, bool)
    for (first, last), (start, end) in (
        (q.T, k.T) for q in queries.transpose(1, 0, 2) for k in keys.transpose(1, 0, 2)
    ):
        nearest, farthest = first[:, None] - end, last[:, None] - start
        is_there = (first <= last)[:, None] & (start <= end)
        some |= is_there & (farthest >= least) & (nearest <= most)
        every &= ~is_there | ((nearest >= least) & (farthest <= most))
    return some, every
