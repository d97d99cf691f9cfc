"""Held-out examples in whole batches, each read when it is asked for."""

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
        places: of the examples, at least one; where they fill no batch they are repeated.
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
