"""Into how many microbatches a batch is best divided: a choice that the planner makes, too.

Where that changes what the loss is, there are as few as fit; see
`hetjax.planner.work.coupled_examples`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hetjax.errors import InputError
from hetjax.pipeline.program.traced_program import Program
from hetjax.planner.harp.dynamic_program import Alternative, DynamicProgram, Found
from hetjax.planner.harp.no_fit import does_not_fit
from hetjax.planner.harp.table_making import submesh_shapes
from hetjax.planner.predictions.complete import complete
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.problem.problems import Problems
from hetjax.planner.work.coupled_examples import Coupling, coupling_of

_CLOSE = 0.02
"""By what share a search's own times may differ from those of a whole prediction."""

PROMISING = 0.15
"""Plans that look worse than the best by more than this share are not improved."""

_FAR = 0.3
"""Plans whose closed form is worse than the best by more than this share are not looked at. By the
clock it is longer or shorter by less than half as much."""


@dataclass(frozen=True)
class Choice:
    """A number of microbatches, and the plan for it.

    Args:
        problem: the problem with this number.
        found: its plan; where the number was chosen since examples are coupled, its notes say so.
        step_times: seconds of a step for each number that was tried; infinite where nothing fits,
            or where a glance tells that nothing is near the best.
        others: the plans for the other numbers.
        beside: the problems with the numbers of the other sizes of microbatches that the plan has.
    """

    problem: PlanningProblem
    found: Found
    step_times: dict[int, float]
    others: tuple[Alternative, ...] = ()
    beside: tuple[PlanningProblem, ...] = ()


def choose_among(
    problems: Problems,
    batch_size: int,
    planner: DynamicProgram,
    counts: Sequence[int],
    told: Callable[[int, int, str], None] | None = None,
) -> Choice:
    """Find the number of microbatches with the best plan, by problems of which few are traced.

    Args:
        problems: the problems.
        batch_size: examples in a step.
        planner: finds the plan for one problem.
        counts: the numbers to try.
        told: as for `choose_microbatches`.

    Returns:
        The best, as `choose_microbatches` finds it.

    Raises:
        InputError: the model fits with no number.
    """
    was_misled = problems.is_misled
    choice = choose_microbatches(problems.of, batch_size, planner, counts, told, problems.traced)
    # Once, since all are traced after it.
    if problems.is_misled > was_misled:
        return choose_among(problems, batch_size, planner, counts, told)
    return choice


def choose_microbatches(
    problem_for: Callable[[int], PlanningProblem],
    batch_size: int,
    planner: DynamicProgram,
    counts: Sequence[int] = (),
    told: Callable[[int, int, str], None] | None = None,
    traced: Callable[[int], PlanningProblem] | None = None,
) -> Choice:
    """Find the number of microbatches with the best plan by the objective.

    Where the loss is another one for another number, that is the least with which the model fits:
    so far as memory allows, what is computed does not depend on the plan.

    Else few large microbatches make bubbles, many small ones cost their start and starve data
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
    tried = counts or divisors(batch_size)
    coupling = coupling_among(traced or problem_for, batch_size, tried)
    if coupling is not None:
        return _fewest(coupling, problem_for, planner, tried, told, traced or problem_for)
    fitting = look_at(problem_for, batch_size, planner, tried, told)
    if not fitting:
        raise InputError(does_not_fit(problem_for(max(tried))))
    fitting = improve_promising(fitting, planner)
    step_times = dict.fromkeys(tried, float("inf"))
    step_times |= {problem.num_microbatches: found.step_time for problem, found in fitting}
    plans = {
        problem.num_microbatches: Alternative(found.plan, found.step_time, found.score)
        for problem, found in fitting
    }
    problem, found = _best(fitting, traced or problem_for)
    del plans[problem.num_microbatches]
    others = [each for each, _ in fitting if each.microbatch_size != problem.microbatch_size]
    found, beside = or_several_pipelines(problem, found, planner, others, traced or problem_for)
    return Choice(problem, found, step_times, tuple(plans.values()), beside)


def coupling_among(
    problem_for: Callable[[int], PlanningProblem], batch_size: int, counts: Sequence[int]
) -> Coupling | None:
    """Why another number of microbatches may be another loss.

    Args:
        problem_for: the problem for a number of microbatches, with a program that can be computed.
        batch_size: examples in a step.
        counts: the numbers that are chosen from.

    Returns:
        None where that is not so, or where there is no choice.
    """
    several = sorted(count for count in counts if count < batch_size)
    if len(counts) < 2 or not several:
        return None
    program = problem_for(several[0]).program
    coupling = coupling_of(program)
    if coupling is not None or len(several) == 1:
        return coupling
    return coupling_of(program, problem_for(several[-1]).program)


def _fewest(
    coupling: Coupling,
    problem_for: Callable[[int], PlanningProblem],
    planner: DynamicProgram,
    counts: Sequence[int],
    told: Callable[[int, int, str], None] | None,
    traced: Callable[[int], PlanningProblem],
) -> Choice:
    """The plan with the fewest microbatches that fit."""
    step_times = dict.fromkeys(counts, float("inf"))
    for place, count in enumerate(sorted(counts)):
        problem = problem_for(count)
        found = planner.find(problem)
        if told is not None:
            told(place + 1, len(counts), f"microbatches of {problem.microbatch_size}")
        if found is not None:
            step_times[count] = found.step_time
            plan = replace(found.plan, notes=(_fewest_note(coupling, count),))
            return Choice(traced(count), replace(found, plan=plan), step_times)
    raise InputError(does_not_fit(problem_for(max(counts))))


def _fewest_note(coupling: Coupling, count: int) -> str:
    """What is to be known of a plan with the fewest microbatches that fit."""
    return (
        f"{count} microbatch{'es' if count > 1 else ''}, the fewest that fit: {coupling}, so "
        f"another number may be another loss; train.microbatches (num_microbatches in Python) sets "
        f"one"
    )


def notes_of(problem: PlanningProblem, trace: Callable[[int], Program]) -> tuple[str, ...]:
    """What is to be known of a plan with the number of microbatches that was asked for.

    Args:
        problem: what is planned.
        trace: the traced program for a number of microbatches.

    Returns:
        A sentence where another number may be another loss.
    """
    count = problem.num_microbatches
    if count == 1:
        return ()
    program = problem.program if problem.microbatch_size > 1 else _of_several(count, trace)
    coupling = program and coupling_of(program)
    if coupling is None:
        return ()
    return (f"{coupling}, so another number of microbatches than {count} may be another loss",)


def _of_several(batch_size: int, trace: Callable[[int], Program]) -> Program | None:
    """The program for microbatches of the fewest examples above one.

    Of one example it cannot always be told which dimension is that of the examples.

    Returns:
        None where the loss cannot be traced so: then it is one of single examples.
    """
    try:
        return trace(divisors(batch_size)[-2])
    except Exception:  # Whatever it is: the loss could be traced for one example.
        return None


def notes_of_chosen(
    problem: PlanningProblem,
    counts: Sequence[int],
    coupling: Coupling | None,
    trace: Callable[[int], Program],
) -> tuple[str, ...]:
    """What is to be known of a plan whose number of microbatches was chosen among some.

    Args:
        problem: what is planned, with the number that was chosen.
        counts: what it was chosen from; one where it was asked for.
        coupling: what `coupling_among` says of them.
        trace: as for `notes_of`.

    Returns:
        A sentence where another number may be another loss.
    """
    if coupling is not None:
        return (_fewest_note(coupling, problem.num_microbatches),)
    return notes_of(problem, trace) if len(counts) == 1 else ()


def look_at(
    problem_for: Callable[[int], PlanningProblem],
    batch_size: int,
    planner: DynamicProgram,
    counts: Sequence[int],
    told: Callable[[int, int, str], None] | None = None,
) -> list[tuple[PlanningProblem, Found]]:
    """Have a first look at numbers of microbatches, the smallest microbatches first.

    Args:
        problem_for: the problem for a number of microbatches.
        batch_size: examples in a step.
        planner: what looks.
        counts: the numbers.
        told: as for `choose_microbatches`.

    Returns:
        Problems, and what was found; without numbers where nothing fits, or where a glance tells
        that nothing is near the best. Empty where nothing fits at all.
    """
    looked: list[tuple[PlanningProblem, Found]] = []
    too_large: list[PlanningProblem] = []
    for place, count in enumerate(sorted(counts, reverse=True)):
        size = batch_size // count
        if not any(_holds_no_less(size, problem) for problem in too_large):
            problem = problem_for(count)
            found = planner.first_look(problem, _not_far(looked))
            if found is not None:
                looked.append((problem, found))
            elif not planner.may_fit(problem):
                too_large.append(problem)
        if told is not None:
            told(place + 1, len(counts), f"microbatches of {size}")
    return looked


def _holds_no_less(size: int, small: PlanningProblem) -> bool:
    """Whether a device holds no less of a microbatch of some size than of a small one.

    The small ones can be divided among as many devices as the large ones, whatever the submesh.
    """
    return size % small.microbatch_size == 0 and all(
        small.microbatch_size % math.gcd(size, nodes * per_node) == 0
        for subcluster in small.cluster.subclusters
        for nodes, per_node in submesh_shapes(subcluster.nodes, subcluster.devices_per_node)
    )


def _not_far(looked: Sequence[tuple[PlanningProblem, Found]]) -> float:
    """The score by the closed form from which on a plan is far behind the best."""
    least = min((found.closed_form_score for _, found in looked), default=float("inf"))
    return least * (1 + _FAR)


def improve_promising(
    looked: Sequence[tuple[PlanningProblem, Found]],
    planner: DynamicProgram,
    promising: float = PROMISING,
) -> list[tuple[PlanningProblem, Found]]:
    """Improve those of some plans that are not far behind the best, each of one pipeline.

    Args:
        looked: problems, and what a first look at each found; one or more.
        planner: what looked.
        promising: by what share a plan may be worse than the best one to be improved.

    Returns:
        The same, by rising score of the first look.
    """
    better = sorted(looked, key=lambda each: each[1].score)
    least = better[0][1].score
    for place, (problem, found) in enumerate(better):
        if found.score <= least * (1 + promising):
            below = min(each.score for _, each in better)
            alone = replace(problem, options=replace(problem.options, max_pipelines=1))
            better[place] = problem, planner.improved(alone, found, below)
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


def or_several_pipelines(
    problem: PlanningProblem,
    found: Found,
    planner: DynamicProgram,
    others: Sequence[PlanningProblem],
    traced: Callable[[int], PlanningProblem],
) -> tuple[Found, tuple[PlanningProblem, ...]]:
    """What was found, or several pipelines, with microbatches of unlike sizes, if that is better.

    Args:
        problem: the problem with the best number of microbatches.
        found: its plan, of one pipeline.
        planner: what found it.
        others: the problems with other numbers, of which some fit.
        traced: the problem for a number of microbatches, with a program that can be computed.

    Returns:
        What is better as it is predicted; and the problems of the other sizes of microbatches that
        the plan has.
    """
    several = planner.or_several([problem, *others], found)
    if several.plan is found.plan:
        return found, ()
    sizes = {each.microbatch_size for each in several.plan.pipelines} - {problem.microbatch_size}
    beside = tuple(
        traced(each.num_microbatches) for each in others if each.microbatch_size in sizes
    )
    whole = traced(problem.num_microbatches)
    if _predicted_score(whole, several, beside) >= _predicted_score(whole, found):
        return found, ()
    return several, beside


def _predicted_score(
    problem: PlanningProblem, found: Found, beside: Sequence[PlanningProblem] = ()
) -> float:
    """The score by a prediction, without annotations: an integer program takes long for these."""
    prediction = complete(found.plan, problem, *beside, annotate=False).predicted
    return found.score * prediction.step_time / found.step_time


def divisors(batch_size: int) -> tuple[int, ...]:
    """The numbers that divide a batch.

    Example:
        >>> divisors(12)
        (1, 2, 3, 4, 6, 12)
    """
    return tuple(n for n in range(1, batch_size + 1) if batch_size % n == 0)
