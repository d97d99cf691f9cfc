"""The planning problems of a loss, one for every number of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.stages.resized import UnlikeError, is_alike
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.problem.resized_problem import ResizedProblems, with_program


class Problems:
    """The problems for numbers of microbatches, each stated once.

    The loss function is traced for few sizes of microbatches: for one example, where arrays often
    have another form; for the next and the largest size, from which follow those between; and
    for those whose plans are completed. Where stages may be synthesised, programs are computed, and
    all are traced. Were these found to be others than what followed, all are
    traced.

    Args:
        state: states the problem for a number of microbatches.
        trace: traces the program for a number of microbatches, and counts nothing.
        batch_size: examples in a step.
        counts: the numbers that will be asked for.
    """

    def __init__(
        self,
        state: Callable[[int], PlanningProblem],
        trace: Callable[[int], Program],
        batch_size: int,
        counts: Sequence[int] = (),
    ):
        self._state, self._trace = state, trace
        self._batch_size = batch_size
        self._traced: dict[int, PlanningProblem] = {}
        self._resized: dict[int, PlanningProblem] = {}
        self._between: ResizedProblems | None = None
        several = sorted(count for count in counts if count < batch_size)
        self._inner = set(several[1:-1])
        self._ends = several[-1:] + several[:1]
        self.is_misled = False

    def of(self, count: int) -> PlanningProblem:
        """The problem for a number of microbatches, to search for a plan."""
        if count in self._inner and count not in self._traced and not self._synthesises():
            try:
                return self._resized_to(count)
            except UnlikeError:
                self._inner.clear()
        return self.traced(count)

    def traced(self, count: int) -> PlanningProblem:
        """The same, with a program that can be computed.

        Where that shows that another program was searched with, `is_misled` is set.
        """
        if count not in self._traced:
            before = self._resized.get(count)
            made = before and self._confirmed(before)
            self._traced[count] = made or self._state(count)
        return self._traced[count]

    def program(self, count: int) -> Program:
        """The traced program of a number of microbatches, for which no problem is stated."""
        made = self._traced.get(count)
        return self._trace(count) if made is None else made.program

    def _synthesises(self) -> bool:
        return self.traced(self._ends[0]).options.synthesised_stages

    def _confirmed(self, before: PlanningProblem) -> PlanningProblem | None:
        """A problem with its traced program; None where that is another one."""
        program = self._trace(before.num_microbatches)
        if is_alike(before.program, program):
            return with_program(before, program)
        self.is_misled = True
        self._inner.clear()
        self._resized.clear()
        return None

    def _resized_to(self, count: int) -> PlanningProblem:
        if count not in self._resized:
            if self._between is None:
                first, second = map(self.traced, self._ends)
                self._between = ResizedProblems(first, second)
            size = self._batch_size // count
            self._resized[count] = self._between.at(count, size)
        return self._resized[count]
