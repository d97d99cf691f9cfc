"""How a plan is found whose devices share long sequences, by HexiSeq's planner."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetjax.configuration import Configuration, PlannerSettings
from hetjax.errors import DoesNotFitError, InputError
from hetjax.mesh import Cluster
from hetjax.mesh.quantities import format_seconds
from hetjax.planner import Found, Plan, PlanningProblem
from hetjax.planner.harp.microbatches import coupling_among, notes_of_chosen
from hetjax.planner.hexiseq.context_choice import ContextChoice
from hetjax.planner.hexiseq.context_pipelines import MOST_STAGES, context_pipelines
from hetjax.planner.hexiseq.hexiseq_planner import HexiSeqPlanner
from hetjax.planner.hexiseq.planned_pipelines import planned
from hetjax.planner.hexiseq.predicted_choice import PREDICTED, Chosen, best_that_fits
from hetjax.planner.predictions.schedule_choice import choose_schedule
from hetjax.planner.problem.problems import Problems


@dataclass(frozen=True)
class ContextFound:
    """A context split that was found, and what it is compared with.

    Args:
        problem: the problem that it is for.
        found: the plan.
        choice: the split; None where the plan is of pipelines, of whose stages each has its own.
        beside: ring attention, Ulysses and USP, each with its best number of microbatches; those
            that are legal and fit.
        compared: the numbers of microbatches that it was chosen from, which are the same loss.
    """

    problem: PlanningProblem
    found: Found
    choice: ContextChoice | None
    beside: Mapping[str, ContextChoice]
    compared: tuple[int, ...]


def check_context_settings(settings: Configuration) -> None:
    """Check that nothing is asked for that a plan of HexiSeq's does not have.

    Args:
        settings: the configuration.

    Raises:
        InputError: naming the setting, its value and what is allowed.
    """
    train, planner = settings.train, settings.planner
    what = "planner.name is 'hexiseq', whose stages are of devices that share sequences"
    if planner.objective == "cost":
        raise InputError(
            f"planner.objective is 'cost', and {what}, whatever they cost; set planner.name = "
            f"'harp'"
        )
    if settings.cluster.play and settings.runtime.name == "local":
        raise InputError(
            f"cluster.play is True, and {what}, which no played cluster holds back; set "
            f"cluster.play = False"
        )
    if train.tune or train.beside:
        name = "train.tune" if train.tune else "train.beside"
        raise InputError(f"{name} is given, and {what}: there is no other schedule; leave it out")
    if planner.min_stages > 1:
        raise InputError(
            f"planner.min_stages is {planner.min_stages}, and {what}; allowed is 1: leave it out"
        )
    if settings.model.dropout:
        raise InputError(
            f"model.dropout is {settings.model.dropout}, and {what}: attention with dropout cannot "
            f"be shared; set model.dropout = 0"
        )


def find_context(
    problems: Problems, batch_size: int, counts: Sequence[int], settings: PlannerSettings
) -> ContextFound:
    """The best context split for some numbers of microbatches, or pipelines of such.

    Where another number is another loss, that of the fewest that fit.

    Args:
        problems: the problem for each of them, with sequences that may be divided.
        batch_size: examples in a step.
        counts: the numbers, rising.
        settings: the planner's: which system, and how many stages pipelines may have.

    Returns:
        The plan, and what it is compared with.

    Raises:
        InputError: the model has no attention, something in it goes along the sequence, or nothing
            fits.
    """
    coupling = coupling_among(problems.traced, batch_size, counts)
    refused: DoesNotFitError | None = None
    for each in [counts] if coupling is None else [[count] for count in counts]:
        try:
            made = _fastest(problems, each, settings)
        except DoesNotFitError as error:
            refused = error
            continue
        plan = made.found.plan
        notes = notes_of_chosen(made.problem, counts, coupling, problems.program)
        plan = replace(plan, notes=(*plan.notes, *notes))
        return replace(made, found=replace(made.found, plan=plan))
    assert refused is not None, "some number of microbatches is tried"
    raise refused


def _fastest(problems: Problems, counts: Sequence[int], settings: PlannerSettings) -> ContextFound:
    """The fastest context split, or pipelines of such, for numbers that are one loss."""
    began, planner = time.perf_counter(), HexiSeqPlanner(settings.context)
    is_uneven = settings.context == "hexiseq"
    beside: dict[str, Chosen] = {}
    found: list[Chosen] = []
    errors: list[DoesNotFitError] = []
    for count in counts:
        problem = problems.traced(count)
        try:
            found += [Chosen(count, choice) for choice in planner.choices(problem)]
        except DoesNotFitError as error:
            errors.append(error)
            continue
        for name, choice in planner.beside(problem).items():
            even = Chosen(count, choice)
            pair = beside.get(name, even), even
            beside[name] = min(pair, key=lambda each: each.choice.schedule.seconds)
    one: tuple[Chosen, Plan] | None = None
    try:
        if found:
            evens = [*beside.values()] if is_uneven else []
            one = best_that_fits(found, evens, problems.traced, is_even=not is_uneven)
    except DoesNotFitError as error:
        errors.append(error)
    # Even systems are of one stage, as they are published.
    most = settings.max_stages or MOST_STAGES
    several = _best_pipelines(problems, counts, most, one and one[1]) if is_uneven else None
    searched = time.perf_counter() - began
    if several is not None:
        problem, plan = several
        notes = (_beside_one(one and one[1]), *_without_sharing(plan))
        seconds, choice = plan.predicted.step_time, None
    elif one is not None:
        (count, choice), plan = one
        problem, seconds = problems.traced(count), choice.schedule.seconds
        notes = ()
    else:
        raise errors[-1]
    plan = replace(plan, notes=notes)
    made = Found(plan, seconds, seconds, 0, problem.profile_seconds, searched)
    others = {name: each.choice for name, each in beside.items()}
    return ContextFound(problem, made, choice, others, tuple(counts))


def _best_pipelines(
    problems: Problems, counts: Sequence[int], most_stages: int, one: Plan | None
) -> tuple[PlanningProblem, Plan] | None:
    """Pipelines whose stages share the context, where these are faster than one stage.

    Of all numbers of microbatches the fastest, as they are predicted.
    """
    least = one.predicted.step_time if one is not None else math.inf
    found = [
        (count, each)
        for count in counts
        for each in context_pipelines(problems.traced(count), most_stages, PREDICTED)
    ]
    best: tuple[PlanningProblem, Plan] | None = None
    for count, pipelines in sorted(found, key=lambda pair: pair[1].seconds)[:PREDICTED]:
        problem = problems.traced(count)
        plan = planned(problem, pipelines)
        scheduled = choose_schedule(plan, problem.options.schedule)
        # Another schedule may have more microbatches at once than there is memory for.
        plan = scheduled if scheduled.predicted.fits else plan
        if plan.predicted.fits and plan.predicted.step_time < least:
            least, best = plan.predicted.step_time, (problem, plan)
    return best


def _beside_one(one: Plan | None) -> str:
    """What the best single stage would take, where pipelines are better."""
    alone = "fits in no way" if one is None else f"takes {format_seconds(one.predicted.step_time)}"
    return f"several stages: the best single one whose devices share the context {alone}, predicted"


def _without_sharing(plan: Plan) -> tuple[str, ...]:
    """What to try where devices of no stage share sequences; nothing where some do."""
    if any(stage.members_share_context for stage in plan.stages):
        return ()
    return (
        "no stage shares sequences: planner.name = 'harp' searches more widely among such plans, "
        "and may find a faster one",
    )


def least_seconds_on(
    problems: Problems, counts: Sequence[int], part: Cluster, lost: frozenset[int]
) -> float | None:
    """What a part of a cluster takes by itself, by the scheduler's model.

    Args:
        problems: as for `find_context`.
        counts: the numbers of microbatches.
        part: some of the cluster's subclusters.
        lost: devices of the part that cannot be used.

    Returns:
        Seconds of a step of the best split for the part; None where nothing fits.
    """
    if len(lost) == part.num_devices:
        return None
    found: list[float] = []
    for count in counts:
        problem = replace(problems.traced(count), cluster=part, lost=lost)
        with contextlib.suppress(DoesNotFitError):
            found.append(HexiSeqPlanner().choose(problem).schedule.seconds)
    return min(found, default=None)
