"""What is asked of slices of a stage table, and when two questions have the same answer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from hetjax.mesh.subcluster import Subcluster
from hetjax.planner.problem.problem import PlanningProblem

_WITHOUT_EFFECT = frozenset(
    """
    program cluster options sections known traces profile_seconds lost slices
    """.split()
)
"""What of a problem says nothing of what a stage costs, or no more than its works do; subclusters
are compared by themselves."""


@dataclass(frozen=True, eq=False)
class SliceQuestion:
    """What is asked of a slice.

    Args:
        what: the question, in words.
        problem: the planning problem.
        subcluster: what the slice is cut from.
        shape: its nodes, and devices in each.
        memory_factor: by how much every device's memory is multiplied.
    """

    what: str
    problem: PlanningProblem
    subcluster: Subcluster
    shape: tuple[int, int]
    memory_factor: float

    @property
    def _allows_recompute(self) -> bool:
        """The one of the options that changes what a stage costs."""
        return self.problem.options.allow_recompute

    def is_same(self, other: SliceQuestion) -> bool:
        """Whether another question has the same answer."""
        return (
            self.what == other.what
            and self.shape == other.shape
            and self.memory_factor == other.memory_factor
            and replace(self.subcluster, nodes=other.subcluster.nodes) == other.subcluster
            and self._allows_recompute == other._allows_recompute
            and _cost_the_same(self.problem, other.problem)
        )


def _cost_the_same(a: PlanningProblem, b: PlanningProblem) -> bool:
    """Whether stages cost the same in two problems: numbers are equal and all else is identical."""
    for each in fields(a):
        if each.name in _WITHOUT_EFFECT:
            continue
        mine, other = getattr(a, each.name), getattr(b, each.name)
        is_plain = isinstance(mine, int | float | str)
        if mine is not other and not (is_plain and mine == other):
            return False
    return True
