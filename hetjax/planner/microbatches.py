"""Into how many microbatches a batch is best divided: a choice that the planner makes, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetjax.errors import InputError
from hetjax.planner.complete import complete
from hetjax.planner.dynamic_program import Alternative, DynamicProgram, Found
from hetjax.planner.no_fit import does_not_fit
from hetjax.planner.problem import PlanningProblem

_CLOSE = 0.02
"""By what share a search's own times may differ from those of a whole prediction."""

_PROMISING = 0.15
"""Plans that look worse than the best by more than this share are not improved."""


@dataclass(frozen=True)
class Choice:
    """A number of microbatches, and the plan for it.

    Args:
        problem: the problem with this number.
        found: its plan.
        step_times: seconds of a step for each number that was tried; infinite where nothing fits.
        others: the plans for the other numbers.
    """

    problem: PlanningProblem
    found: Found
    step_times: dict[int, float]
    others: tuple[Alternative, ...] = ()


def choose_microbatches(
    problem_for: Callable[[int], PlanningProblem],
    batch_size: int,
    planner: DynamicProgram,
    counts: Sequence[int] = (),
    told: Callable[[int, int, str], None] | None = None,
    traced: Callable[[int], PlanningProblem] | None = None,
) -> Choice:
    """Find the number of microbatches with the best plan by the objective.

    Few large microbatches make bubbles, many small ones cost their start and starve data
    parallelism, which needs a size that it divides: step times go up and down over the divisors of
    the batch. So there is a first look at all of them, and what promises the most is improved.

    Args:
        problem_for: the problem for a number of microbatches.
        batch_size: examples in a step.
        planner: finds the plan for one problem.
        counts: the numbers to try; empty for every one that divides the batch.
        told: called after each of them: how many were tried, of how many, and which this one is.
        traced: the problem for a number of microbatches, with a program that can be computed;
            None where all have one.

    Returns:
        The best, and the step times of all.

    Raises:
        InputError: the model fits with no number; the message is that of the most microbatches.
    """
    fitting: list[tuple[PlanningProblem, Found]] = []
    step_times: dict[int, float] = {}
    tried = counts or divisors(batch_size)
    for place, count in enumerate(tried):
        problem = problem_for(count)
        found = planner.first_look(problem)
        step_times[count] = found.step_time if found else float("inf")
        if found:
            fitting.append((problem, found))
        if told is not None:
            told(place + 1, len(tried), f"microbatches of {problem.microbatch_size}")
    if not fitting:
        raise InputError(does_not_fit(problem_for(max(step_times))))
    fitting = improve_promising(fitting, planner)
    step_times |= {problem.num_microbatches: found.step_time for problem, found in fitting}
    plans = {
        problem.num_microbatches: Alternative(found.plan, found.step_time, found.score)
        for problem, found in fitting
    }
    problem, found = _best(fitting, traced or problem_for)
    del plans[problem.num_microbatches]
    return Choice(problem, found, step_times, tuple(plans.values()))


def improve_promising(
    looked: Sequence[tuple[PlanningProblem, Found]], planner: DynamicProgram
) -> list[tuple[PlanningProblem, Found]]:
    """Improve those of some plans that are not far behind the best.

    Args:
        looked: problems, and what a first look at each found; one or more.
        planner: what looked.

    Returns:
        The same, by rising score of the first look.
    """
    better = sorted(looked, key=lambda each: each[1].score)
    least = better[0][1].score
    for place, (problem, found) in enumerate(better):
        if found.score <= least * (1 + _PROMISING):
            below = min(each.score for _, each in better)
            better[place] = problem, planner.improved(problem, found, below)
    return better


def _best(
    fitting: Sequence[tuple[PlanningProblem, Found]], traced: Callable[[int], PlanningProblem]
) -> tuple[PlanningProblem, Found]:
    """The best by the objective; of those that are about as good, the best as it is predicted."""
    least = min(found.score for _, found in fitting)
    close = [
        (traced(problem.num_microbatches), found)
        for problem, found in fitting
        if found.score <= least * (1 + _CLOSE)
    ]
    return close[0] if len(close) == 1 else min(close, key=lambda each: _predicted_score(*each))


def _predicted_score(problem: PlanningProblem, found: Found) -> float:
    prediction = complete(found.plan, problem).prediction
    assert prediction is not None
    return found.score * prediction.step_time / found.step_time


def divisors(batch_size: int) -> tuple[int, ...]:
    """The numbers that divide a batch.

    Example:
        >>> divisors(12)
        (1, 2, 3, 4, 6, 12)
    """
    return tuple(n for n in range(1, batch_size + 1) if batch_size % n == 0)
