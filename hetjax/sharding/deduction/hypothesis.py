"""A hypothesis of deduction: one way in which a program's values lie, and what that moves."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, replace

from hetjax.sharding.deduction.assembling import Chain
from hetjax.sharding.deduction.flat_program import FlatEquation
from hetjax.sharding.deduction.origins import Origins

MOST_HYPOTHESES = 24
"""How many hypotheses are kept after an equation."""


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """One way in which the values lie so far.

    Args:
        held: by variable, the numbers of the layouts that it has been brought to; the first is how
            it was made.
        origins: how operands of reshards lay.
        done: what is done.
        num_bytes: how many bytes that moves.
        mark: tells apart what is held: the hashes of its items, joined bit by bit.
    """

    held: Mapping[int, tuple[int, ...]]
    origins: Origins
    done: Chain = None
    num_bytes: int = 0
    mark: int = 0

    def holding(
        self, changed: Mapping[int, tuple[int, ...]], done: Chain, num_bytes: int
    ) -> Hypothesis:
        """The next one, in which some variables are made, or brought to other layouts."""
        mark = self.mark
        for variable, layouts in changed.items():
            if variable in self.held:
                mark ^= hash((variable, self.held[variable]))
            mark ^= hash((variable, layouts))
        return Hypothesis({**self.held, **changed}, self.origins, done, num_bytes, mark)

    def without(self, unneeded: Set[int]) -> Hypothesis:
        """The same without variables that nothing needs any more."""
        held = {v: layouts for v, layouts in self.held.items() if v not in unneeded}
        return replace(self, held=held, mark=self.mark_without(unneeded))

    def mark_without(self, unneeded: Set[int]) -> int:
        """The mark of `without`."""
        mark = self.mark
        for variable in unneeded:
            if variable in self.held:
                mark ^= hash((variable, self.held[variable]))
        return mark

    def as_made(self, flat: FlatEquation) -> tuple[int, ...]:
        """The layouts of an equation's operands, as these were made."""
        return tuple(self.held[variable][0] for variable in flat.operands)


def worth_keeping(found: Collection[Hypothesis]) -> float:
    """How many bytes a hypothesis may move that is among those that are kept.

    Args:
        found: those that were found.
    """
    if len(found) < MOST_HYPOTHESES:
        return math.inf
    return heapq.nsmallest(MOST_HYPOTHESES, (each.num_bytes for each in found))[-1]
