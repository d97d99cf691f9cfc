"""What is asked of slices of a stage table, and when two questions have the same answer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields

from hetjax.mesh.subcluster import Subcluster
from hetjax.planner.problem.problem import PlanningProblem

_WITHOUT_EFFECT = frozenset(
    """
    program cluster options sections known traces profile_seconds lost slices
    """.split()
)
"""What of a problem says nothing of what a stage costs, or no more than its works do; subclusters
are compared by themselves."""

_OF_PROBLEMS = tuple(
    each.name for each in fields(PlanningProblem) if each.name not in _WITHOUT_EFFECT
)
_OF_SUBCLUSTERS = tuple(each.name for each in fields(Subcluster) if each.name != "nodes")


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
    def key(self) -> Hashable:
        """What is equal for questions that have the same answer, and for no others."""
        return (
            self.what,
            self.shape,
            self.memory_factor,
            *(getattr(self.subcluster, name) for name in _OF_SUBCLUSTERS),
            self.problem.options.allow_recompute,  # The one option that changes what a stage costs.
            *(_as_compared(getattr(self.problem, name)) for name in _OF_PROBLEMS),
        )


class _Identical:
    """Something that is equal to nothing but itself, whatever it says of that."""

    __slots__ = ("_it",)

    def __init__(self, it: object) -> None:
        self._it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identical) and self._it is other._it

    def __hash__(self) -> int:
        return id(self._it)


def _as_compared(value: object) -> Hashable:
    """A part of a problem: numbers and names are compared, and all else has to be identical."""
    return value if isinstance(value, int | float | str) else _Identical(value)
