"""Pipelines whose last stage is a synthesised program over unlike devices: one space with HAP's.

Where the members of a stage share tensors, and not examples alone, they need not add up the
gradients of all its parameters. So stages that a search by examples would keep apart, or give to
one device, may be worth joining. From the best pipelines that were found, the last stages are
joined, the joint is cut anew among the layers, and its program is synthesised; with all stages
joined, that is HAP's own plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetjax.errors import DoesNotFitError
from hetjax.pipeline.schedules.warm_up import from_warm_up_counts
from hetjax.pipeline.stages.traced_modules import begins_as_modules_do
from hetjax.planner.costs.complete import complete
from hetjax.planner.hap.hap_planner import HapPlanner, members_of
from hetjax.planner.harp.candidate_plans import pipeline_plan
from hetjax.planner.harp.replicas import Timed
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import Member, StagePlan
from hetjax.planner.problem.problem import PlanningProblem

_CUTS = 8
"""Where the joint is cut at first: so many places, evenly among the layers."""

_WORTH = 0.99
"""What saves less than 1% of a step is not wanted."""


def synthesised_pipelines(
    problem: PlanningProblem, bases: Sequence[Plan], below: float
) -> Timed | None:
    """The fastest pipeline whose last stage is synthesised.

    Args:
        problem: what to plan.
        bases: the pipelines that were found, whose last stages are joined.
        below: no plan is wanted that takes this or more, nor one that takes nearly so.

    Returns:
        Predicted seconds of a step, and the plan; None where none is faster.
    """
    options = problem.options
    if not options.synthesised_stages or options.objective != "step_time" or problem.lost:
        return None
    best: Timed | None = None
    for first, members in _joints(problem, bases):
        limit = below if best is None else best[0]
        found = _best_cut(problem, first, members)
        if found is not None and found[0] < _WORTH * limit:
            best = found
    return best


def _joints(
    problem: PlanningProblem, bases: Sequence[Plan]
) -> Iterator[tuple[tuple[StagePlan, ...], tuple[Member, ...]]]:
    """The stages that stay as they are, and the members of those that are joined; none twice."""
    seen: set[object] = set()
    options = problem.options
    for base in bases:
        if len(base.pipelines) > 1:
            continue
        stages = base.pipeline.stages
        for count in range(1, len(stages) + 1):
            first, joined = stages[: len(stages) - count], stages[len(stages) - count :]
            submeshes = [member.submesh for stage in joined for member in stage.members]
            members = members_of(submeshes, problem.microbatch_size)
            total = len(first) + 1
            allowed = options.min_stages <= total <= (options.max_stages or total)
            where = tuple(stage.members for stage in first), members
            if len(members) > 1 and allowed and where not in seen:
                seen.add(where)
                yield first, members


def _best_cut(
    problem: PlanningProblem, first: Sequence[StagePlan], members: tuple[Member, ...]
) -> Timed | None:
    """The best of all layers that the joint may begin with, looked for from coarse to fine."""
    if not first:
        return _planned(problem, first, members, 0)
    low, high = first[-1].layers[0] + 1, problem.num_layers - 1
    known: dict[int, Timed | None] = {}
    step = max(1, (high - low) // _CUTS)
    cuts = range(low, high + 1, step)
    while cuts:
        for cut in cuts:
            if cut not in known:
                known[cut] = _planned(problem, first, members, cut)
        fitting = {cut: timed for cut, timed in known.items() if timed is not None}
        if not fitting:
            return None
        best = min(fitting, key=lambda cut: fitting[cut][0])
        if step == 1:
            return fitting[best]
        step = max(1, step // 2)
        cuts = range(max(low, best - step), min(high, best + step) + 1, step)
    return None


def _planned(
    problem: PlanningProblem, first: Sequence[StagePlan], members: tuple[Member, ...], cut: int
) -> Timed | None:
    """The plan whose joint begins with a layer, predicted; None where it does not fit."""
    begins = [problem.layers[stage.layers[0]] for stage in first] + [problem.layers[cut]]
    if not begins_as_modules_do(problem.program, [*begins, problem.program.num_positions]):
        return None
    try:
        last = HapPlanner().last_stage(problem, members, cut)
    except DoesNotFitError:
        return None
    stages = [*first, last]
    for place, after in enumerate(stages[1:]):
        stages[place] = replace(stages[place], layers=(stages[place].layers[0], after.layers[0]))
    plan = complete(_plan_of(problem, stages), problem, annotate=False)
    prediction = plan.prediction
    assert prediction is not None, "it is predicted"
    if not all(stage.fits for stage in prediction.stages):
        return None
    return prediction.step_time, replace(plan, prediction=None)


def _plan_of(problem: PlanningProblem, stages: Sequence[StagePlan]) -> Plan:
    count = problem.num_microbatches
    depths = [min(len(stages) - place, count) for place in range(len(stages))]
    schedule = from_warm_up_counts(depths, count, problem.warm_up_schedule)
    return pipeline_plan(problem, stages, schedule, "Harp with HAP's programs")
