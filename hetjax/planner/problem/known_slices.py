"""Slices of a stage table that were made before: parts of a cluster are made of the whole's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, TypeVar, cast

from hetjax.mesh.cluster import Subcluster

if TYPE_CHECKING:
    from hetjax.planner.problem.problem import PlanningProblem

Answer = TypeVar("Answer")

_WITHOUT_EFFECT = frozenset(
    """
    program cluster schedule min_stages max_stages max_pipelines objective sections known traces
    profile_seconds lost slices
    """.split()
)
"""What of a problem says nothing of what a stage costs, or no more than its works do; subclusters
are compared by themselves."""


@dataclass(eq=False)
class KnownSlices:
    """What was found of slices for one problem, and for others about the same model.

    A slice is of one subcluster, and knows nothing of how many nodes there are, nor of other
    subclusters. So the tables of parts of a cluster are put together of those of the whole.
    """

    _found: list[tuple[Question, object]] = field(default_factory=list)

    def answer(self, question: Question, find: Callable[[], Answer]) -> Answer:
        """What is known of a slice.

        Args:
            question: what is asked, always in the same words for what `find` tells.
            find: tells it where it is not known yet.
        """
        for before, found in self._found:
            if before.is_same(question):
                return cast(Answer, found)
        found = find()
        self._found.append((question, found))
        return found


@dataclass(frozen=True, eq=False)
class Question:
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

    def is_same(self, other: Question) -> bool:
        """Whether another question has the same answer."""
        return (
            self.what == other.what
            and self.shape == other.shape
            and self.memory_factor == other.memory_factor
            and replace(self.subcluster, nodes=other.subcluster.nodes) == other.subcluster
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
