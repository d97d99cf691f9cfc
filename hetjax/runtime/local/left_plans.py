"""Plans that a trainer has left: the last of them stay compiled, so that it can come back."""

from __future__ import annotations

from typing import NamedTuple

from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.local.local_executor import LocalExecutor
from hetjax.runtime.workers.job import Job

KEPT_PLANS = 2
"""How many plans stay compiled beside the one that is trained by."""


class CompiledPlan(NamedTuple):
    """A plan that can be trained by at once.

    Args:
        job: the job with this plan.
        placement: its programs and shardings.
        executor: what runs it.
    """

    job: Job
    placement: Placement
    executor: LocalExecutor


class LeftPlans:
    """The plans that were left last; older ones are given up, with programs and threads.

    Args:
        limit: how many to keep.
    """

    def __init__(self, limit: int = KEPT_PLANS):
        self._limit = limit
        self._kept: dict[str, CompiledPlan] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, key: str) -> CompiledPlan | None:
        """Take a plan out, if it is there.

        Args:
            key: what tells plans apart.
        """
        return self._kept.pop(key, None)

    def keep(self, key: str, left: CompiledPlan) -> None:
        """Keep a plan, and give up the one that was left longest ago where there are too many.

        Args:
            key: what tells plans apart.
            left: the plan, whose executor holds no state.
        """
        self._kept[key] = left
        while len(self._kept) > self._limit:
            self._kept.pop(next(iter(self._kept))).executor.close()

    def close(self) -> None:
        """Give up all of them."""
        for left in self._kept.values():
            left.executor.close()
        self._kept.clear()
