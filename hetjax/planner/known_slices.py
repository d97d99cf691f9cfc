"""Slices of a stage table that were made before: parts of a cluster are made of the whole's."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from hetjax.mesh.cluster import Subcluster

if TYPE_CHECKING:
    from hetjax.planner.problem import PlanningProblem
    from hetjax.planner.stage_table import Slice

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
    """The slices that were made for one problem, and for others about the same model.

    A slice is of one subcluster, and knows nothing of how many nodes there are, nor of other
    subclusters. So the tables of parts of a cluster are put together of those of the whole.
    """

    _made: list[tuple[PlanningProblem, Subcluster, float, Slice]] = field(default_factory=list)

    def get(
        self,
        problem: PlanningProblem,
        subcluster: Subcluster,
        shape: tuple[int, int],
        memory_factor: float,
    ) -> Slice | None:
        """A slice that was made before.

        Args:
            problem: the planning problem.
            subcluster: what the slice is cut from.
            shape: its nodes, and devices in each.
            memory_factor: by how much the devices' memory is multiplied.

        Returns:
            The slice; None where none was made of all the same figures.
        """
        for before, of, factor, made in self._made:
            if (
                made.shape == shape
                and factor == memory_factor
                and replace(of, nodes=subcluster.nodes) == subcluster
                and _cost_the_same(before, problem)
            ):
                return made
        return None

    def add(
        self,
        problem: PlanningProblem,
        subcluster: Subcluster,
        memory_factor: float,
        made: Slice,
    ) -> None:
        """Keep a slice.

        Args:
            problem: what it was made for.
            subcluster: what it is cut from.
            memory_factor: by how much the devices' memory is multiplied.
            made: the slice.
        """
        self._made.append((problem, subcluster, memory_factor, made))


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
