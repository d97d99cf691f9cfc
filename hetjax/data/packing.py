"""Tokens packed end to end into examples of one length."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class TokenSource(Protocol):
    """Examples by index: what grain calls a random-access data source."""

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def __getitem__(self, index: int) -> np.ndarray:
        """Example ``index``, int32 [sequence + 1]."""
        ...


class PackedTokens:
    """A stream of tokens as examples that overlap by one token.

    Example i is tokens ``[i * sequence, (i + 1) * sequence]``, both ends included, so that each
    token but the first is predicted once. What is left at the end, shorter than an example, is
    not used.

    Args:
        tokens: [n] integers.
        sequence: number of predicted tokens an example.

    Example:
        >>> packed = PackedTokens(np.arange(8), sequence=3)
        >>> [packed[i].tolist() for i in range(len(packed))]
        [[0, 1, 2, 3], [3, 4, 5, 6]]
    """

    def __init__(self, tokens: np.ndarray, sequence: int):
        self._tokens = tokens
        self._sequence = sequence

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._sequence)

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        start = index * self._sequence
        return self._tokens[start : start + self._sequence + 1].astype(np.int32)

    @property
    def tokens(self) -> np.ndarray:
        """The stream."""
        return self._tokens

    def __repr__(self) -> str:
        return f"PackedTokens({len(self)} examples of {self._sequence} tokens)"
