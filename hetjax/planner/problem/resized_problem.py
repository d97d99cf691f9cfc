"""Planning problems of many sizes of microbatches, made of the traces of two."""

from __future__ import annotations

from dataclasses import replace

from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.stages.resized import Between, SizedProgram
from hetjax.planner.problem.known_slices import KnownSlices
from hetjax.planner.problem.problem import PlanningProblem, groups_of, model_figures
from hetjax.planner.work.stage_traces import StageTraces, TwoTraces


class ResizedProblems:
    """Problems of sizes of microbatches between two, without a trace of their own.

    They are good for all that a search asks. To complete a plan, or to run it, their program has to
    be traced.

    Args:
        first: a problem.
        second: one of larger microbatches that differs in nothing else.

    Raises:
        UnlikeError: their programs differ in more than sizes.
    """

    def __init__(self, first: PlanningProblem, second: PlanningProblem):
        assert first.traces is not None, "a problem that was made keeps its traces"
        assert second.traces is not None, "a problem that was made keeps its traces"
        self._first, self._second = first, second
        self._program = SizedProgram(first.program, second.program)
        self._traces = TwoTraces(first.traces, second.traces)

    def at(self, num_microbatches: int, microbatch_size: int) -> PlanningProblem:
        """The problem of another number of microbatches.

        Args:
            num_microbatches: microbatches in a step.
            microbatch_size: examples in each, between those of the two problems.

        Returns:
            The problem, whose program can be counted but not computed.

        Raises:
            UnlikeError: some layer differs in more than sizes between the two problems.
        """
        first, second = self._first, self._second
        between = Between(first.microbatch_size, second.microbatch_size, microbatch_size)
        figures = model_figures(
            self._program.at(between),
            self._traces.at(between),
            microbatch_size,
            first.options.num_layers,
            first.together,
        )
        return replace(first, **figures, num_microbatches=num_microbatches, slices=KnownSlices())


def with_program(problem: PlanningProblem, program: Program) -> PlanningProblem:
    """A problem with a program that can be computed.

    Args:
        problem: a problem of `ResizedProblems`.
        program: the same program, traced at the size of its microbatches.
    """
    assert problem.tensor_axis is not None, "a problem that was made has one"
    program = replace(program, frozen=problem.program.frozen)
    groups = groups_of(program, problem.tensor_axis.sections)
    known = replace(problem.known, groups=groups)
    return replace(problem, program=program, known=known, traces=StageTraces(program))
