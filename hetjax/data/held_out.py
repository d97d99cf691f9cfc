"""Held-out examples, in an order and in whole batches, each read when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Batch = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class HeldOutBatches(Sequence[Batch]):
    """The batches of some examples. What does not fill the last one is left out.

    Args:
        read: from places of examples to a batch.
        places: of the examples, at least one, along the first dimension; where they fill no batch
            they are repeated.
        batch_size: examples a batch.
    """

    read: Callable[[np.ndarray], Batch]
    places: np.ndarray
    batch_size: int

    def __len__(self) -> int:
        return max(1, len(self.places) // self.batch_size)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        first = index * self.batch_size
        rows = np.arange(first, first + self.batch_size) % len(self.places)
        return self.read(self.places[rows])


def in_proportion(counts: Sequence[int], weights: Sequence[float]) -> np.ndarray:
    """An order in which all examples of several parts come once, by weight as long as they last.

    Args:
        counts: how many examples each part has.
        weights: of each part, up to a common factor.

    Returns:
        [sum of counts, 2] integers: at each place a part, and which of its examples.

    Example:
        >>> in_proportion([4, 1], [2.0, 1.0])[:, 0].tolist()
        [0, 1, 0, 0, 0]
    """
    parts = np.repeat(np.arange(len(counts)), counts)
    examples = np.concatenate([np.arange(count) for count in counts])
    times = (examples + 0.5) / np.asarray(weights)[parts]
    return np.stack([parts, examples], axis=1)[np.argsort(times, kind="stable")]
