"""Who sees whom: the mask of an attention, and the positions of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees, by how far apart they stand in the sequence.

    Args:
        before: how many tokens before its own a query sees; None for all.
        after: how many tokens after its own it sees; None for all, 0 for causal attention.

    Example:
        >>> Mask(before=1, after=0).sees(np.arange(3)[:, None], np.arange(3)).astype(int)
        array([[1, 0, 0],
               [1, 1, 0],
               [0, 1, 1]])
    """

    before: int | None = None
    after: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        return self.before is None and self.after is None

    def sees(self, queries: Any, keys: Any) -> Any:
        """Whether queries see keys.

        Args:
            queries: positions.
            keys: positions, of a shape that goes with theirs.

        Returns:
            Booleans; True alone where every query sees every key.
        """
        seen: Any = True
        if self.before is not None:
            seen = (queries - keys <= self.before) & seen
        if self.after is not None:
            seen = (keys - queries <= self.after) & seen
        return seen


FULL = Mask()
"""Every query sees every key."""


@dataclass(frozen=True)
class TokenSpan:
    """Positions that follow each other: tokens ``start`` to ``stop`` of the whole sequence.

    Args:
        start: the first position.
        stop: the position after the last.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop, self


Spans = tuple[TokenSpan, ...]
"""The positions of a block's tokens, in their order: a mirrored shard has two spans."""


def num_tokens(spans: Spans) -> int:
    """How many tokens there are in spans."""
    return sum(span.stop - span.start for span in spans)


def positions_of(spans: Spans) -> jax.Array:
    """The positions in spans, int32 [tokens].

    Example:
        >>> positions_of((TokenSpan(2, 4), TokenSpan(7, 8))).tolist()
        [2, 3, 7]
    """
    runs = [(span.start, jax.lax.iota(jnp.int32, span.stop - span.start)) for span in spans]
    parts = [start + each if start else each for start, each in runs]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


@dataclass(frozen=True, eq=False)
class Tokens:
    """What is known of the tokens of a block's queries, or of its keys.

    Args:
        spans: their positions, where these are known before the program runs: then nothing is
            computed where no query sees a key, and nothing is compared where each sees all.
        positions: the same as data, int32 [tokens]; None where there are spans, or no mask.
        segments: which segment of a packed sequence they are of, [..., tokens], as
            `segment_numbers` gives them, with the leading axes of the queries; tokens of unlike
            segments do not see each other.
    """

    spans: Spans | None = None
    positions: Any = None
    segments: Any = None

    def known_positions(self) -> Any:
        """Their positions, as data; None where they are not said."""
        if self.positions is not None or self.spans is None:
            return self.positions
        return positions_of(self.spans)


def segment_numbers(given: Any) -> Any:
    """The numbers of segments as int32, or as they are where they have 64 bits.

    Args:
        given: whole numbers of any shape.
    """
    return given if given.dtype.itemsize > 4 else given.astype(jnp.int32)


ANYWHERE = Tokens()
"""Tokens of which nothing need be known: every query sees every key."""


def intervals(spans: Sequence[TokenSpan], tile: int, tiles: int) -> np.ndarray:
    """The first and the last positions of tiles, int64 [tiles, spans, 2].

    Args:
        spans: the positions.
        tile: how many tokens a tile has; the last one may have fewer.
        tiles: how many there are.

    Returns:
        For each tile what it has of each span; where that is nothing, the last is before the first.

    Example:
        >>> intervals((TokenSpan(0, 3), TokenSpan(9, 12)), 4, 2).tolist()
        [[[0, 2], [9, 9]], [[4, 2], [10, 11]]]
    """
    begins = np.arange(tiles)[:, None] * tile
    lengths = np.array([span.stop - span.start for span in spans], np.int64)
    offsets = np.cumsum(lengths) - lengths
    starts = np.array([span.start for span in spans], np.int64)
    first = np.maximum(begins - offsets, 0)
    last = np.minimum(begins + tile - offsets, lengths) - 1
    return np.stack([starts + first, starts + last], axis=-1)
