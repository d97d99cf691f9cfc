"""What both cost models answer: seconds and memory of many candidates at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.hexiseq.context_devices import ContextDevices
from hetjax.planner.hexiseq.context_work import ContextWork
from hetjax.planner.hexiseq.group_layout import Floats, GroupLayout, Numbers

UNFIT = 1e12
"""What a candidate that does not fit counts as, times how full memory would be: more than seconds
of any that does, so that a search looks for room first."""


class Candidates(NamedTuple):
    """Tokens and heads of a layout's devices; several candidates often have the same heads.

    Args:
        tokens: of each device, [candidates, devices].
        heads: query heads of each device, [divisions of heads, devices].
        division: which of these divisions each candidate has.
    """

    tokens: NDArray[np.int64]
    heads: NDArray[np.int64]
    division: Numbers

    @classmethod
    def one(cls, tokens: NDArray[np.int64], heads: NDArray[np.int64]) -> Candidates:
        """A single candidate, of tokens and heads of each device."""
        return cls(tokens[None], heads[None], np.zeros(1, np.intp))

    @property
    def all_heads(self) -> NDArray[np.int64]:
        """Query heads of each device, [candidates, devices]."""
        return self.heads[self.division]


class RowCosts(NamedTuple):
    """What candidates take.

    Args:
        seconds: of a step, [candidates].
        filled: the share of its memory that the fullest device needs, [candidates]; over 1 where
            one does not fit.
    """

    seconds: Floats
    filled: Floats

    @property
    def scores(self) -> Floats:
        """Seconds where a candidate fits, and more than that where not; less is better."""
        return np.where(self.filled <= 1, self.seconds, UNFIT * self.filled)


class ContextCosts(Protocol):
    """A cost model of context splits."""

    devices: ContextDevices
    work: ContextWork

    def costs(self, layout: GroupLayout, candidates: Candidates) -> RowCosts:
        """Seconds of a step and how full memory is, of every candidate."""
        ...

    def best(
        self, layout: GroupLayout, candidates: Candidates, below: float = ...
    ) -> tuple[int, float]:
        """The number and the score of the best candidate, if that is below something."""
        ...

    def least_seconds(self, flops: float) -> float:
        """What a step takes devices of so many FLOP/s in all, if none ever waits."""
        ...

    def memory(self, layout: GroupLayout, candidates: Candidates) -> NDArray:
        """Bytes of each device, [candidates, devices]."""
        ...

    def memory_told(self, layout: GroupLayout, candidates: Candidates, column: int) -> str:
        """What the device of a column holds of the first candidate, in words."""
        ...


def by_rows(rows: Numbers, at_once: int) -> Iterator[Numbers]:
    """Some rows, a few at a time.

    Args:
        rows: their numbers.
        at_once: how many at most, but at least one.

    Yields:
        Parts of them.
    """
    size = max(1, at_once)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
