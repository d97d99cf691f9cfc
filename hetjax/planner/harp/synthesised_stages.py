"""Pipelines whose last stage is a synthesised program over unlike devices: one space with HAP's.

Where the members of a stage share tensors, and not examples alone, they need not add up the
gradients of all its parameters. So stages that a search by examples would keep apart, or give to
one device, may be worth joining. From the best pipelines that were found, the last stages are
joined, the joint is cut anew among the layers, and its program is synthesised; with all stages
joined, that is HAP's own plan. All subclusters but one may be joined, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hetjax.errors import InputError
from hetjax.mesh.cluster import SubMesh
from hetjax.pipeline.schedules.warm_up import from_warm_up_counts
from hetjax.planner.hap.hap_planner import HapPlanner, cluster_members, members_of
from hetjax.planner.harp.candidate_plans import pipeline_plan
from hetjax.planner.harp.refit import counts_at_pace, slowest_of
from hetjax.planner.harp.replicas import Timed
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import Member, StagePlan
from hetjax.planner.predictions.complete import complete
from hetjax.planner.predictions.predict import predict_stages
from hetjax.planner.predictions.scheduled_memory import leaves_room
from hetjax.planner.problem.problem import PlanningProblem

_CUTS = 4
"""Where the joint is cut at first: so many places, evenly among the layers."""

_MOST_SUBCLUSTERS = 4
"""With more of them, joints of all but one are not looked at: each takes a second or two."""

_FAR = 1.25
"""How much slower than the best plan a joint may be at first, to be looked at more finely."""

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
    last_stage = HapPlanner().last_stages(problem)
    for first, members in _joints(problem, bases):
        limit = below if best is None else best[0]
        found = _best_cut(problem, first, members, last_stage, limit)
        if found is not None and found[0] < _WORTH * limit:
            best = found
    return best


LastStage = Callable[[tuple[Member, ...], int], StagePlan]
"""From members and their first layer to a synthesised stage."""

Joint = tuple[tuple[StagePlan, ...], tuple[Member, ...]]
"""The stages that stay as they are, and the members of those that are joined."""


def _joints(problem: PlanningProblem, bases: Sequence[Plan]) -> Iterator[Joint]:
    """What may be joined, none twice."""
    seen: set[object] = set()
    options = problem.options
    for first, members in itertools.chain(_last_joined(problem, bases), _all_but_one(problem)):
        total = len(first) + 1
        allowed = options.min_stages <= total <= (options.max_stages or total)
        where = tuple(stage.members for stage in first), members
        if len(members) > 1 and allowed and where not in seen:
            seen.add(where)
            yield first, members


def _last_joined(problem: PlanningProblem, bases: Sequence[Plan]) -> Iterator[Joint]:
    """The last stages of the pipelines that were found."""
    for base in bases:
        if len(base.pipelines) > 1:
            continue
        stages = base.pipeline.stages
        for count in range(1, len(stages) + 1):
            first, joined = stages[: len(stages) - count], stages[len(stages) - count :]
            submeshes = [member.submesh for stage in joined for member in stage.members]
            submeshes.sort(key=problem.cluster.device_ids)
            yield first, members_of(problem.cluster, submeshes, problem.microbatch_size)


def _all_but_one(problem: PlanningProblem) -> Iterator[Joint]:
    """All subclusters but one, which is the first stage.

    No good pipeline by examples need have them so: where one layer is most of the work, it leaves
    all of that to the fastest devices.
    """
    cluster, size = problem.cluster, problem.microbatch_size
    for each in cluster.subclusters if 2 < len(cluster.subclusters) <= _MOST_SUBCLUSTERS else ():
        submesh = SubMesh(each.name, 0, (each.nodes, each.devices_per_node))
        if size % each.num_devices == 0:
            member = Member(submesh, (each.num_devices, 1))
            others = cluster_members(cluster, size, problem.lost)
            joined = tuple(one for one in others if one.submesh.subcluster != each.name)
            yield (StagePlan((0, 1), (member,)),), joined


def _best_cut(
    problem: PlanningProblem,
    first: Sequence[StagePlan],
    members: tuple[Member, ...],
    last_stage: LastStage,
    limit: float,
) -> Timed | None:
    """The best of all layers that the joint may begin with, looked for from coarse to fine.

    Where more values cross, a step is longer: the best place may stand beside a bad one.
    """
    if not first:
        return _planned(problem, first, members, 0, last_stage)
    low, high = first[-1].layers[0] + 1, problem.num_layers - 1
    known: dict[int, Timed | None] = {}
    step = max(1, (high - low) // _CUTS)
    cuts = range(low, high + 1, step)
    while True:
        for cut in cuts:
            if cut not in known:
                known[cut] = _planned(problem, first, members, cut, last_stage)
        fitting = {cut: timed for cut, timed in known.items() if timed is not None}
        if not fitting:
            return None
        best = min(fitting, key=lambda cut: fitting[cut][0])
        if step == 1 or fitting[best][0] > _FAR * limit:
            return fitting[best]
        far, step = step + 1, max(1, step // 2)
        cuts = range(max(low, best - far), min(high, best + far) + 1, step)


def _planned(
    problem: PlanningProblem,
    first: Sequence[StagePlan],
    members: tuple[Member, ...],
    cut: int,
    last_stage: LastStage,
) -> Timed | None:
    """The plan whose joint begins with a layer, predicted; None where it is found in no way."""
    try:
        last = last_stage(members, cut)
    except InputError:
        return None
    stages = [*first, last]
    for place, after in enumerate(stages[1:]):
        stages[place] = replace(stages[place], layers=(stages[place].layers[0], after.layers[0]))
    plans = [_completed(problem, plan) for plan in _scheduled(problem, stages)]
    return min(filter(None, plans), key=lambda timed: timed[0], default=None)


def _completed(problem: PlanningProblem, plan: Plan) -> Timed | None:
    """What a step of a plan takes, and the plan; None where it does not fit."""
    prediction = complete(plan, problem, annotate=False).predicted
    return (prediction.step_time, plan) if leaves_room(prediction) else None


def _scheduled(problem: PlanningProblem, stages: Sequence[StagePlan]) -> list[Plan]:
    """The pipeline with the warm-up that its links ask for, and with the least."""
    count = problem.num_microbatches

    def plan_of(counts: Sequence[int]) -> Plan:
        schedule = from_warm_up_counts(counts, count, problem.warm_up_schedule)
        return pipeline_plan(problem, stages, schedule, "Harp with HAP's programs")

    fewest = tuple(min(len(stages) - place, count) for place in range(len(stages)))
    plan = plan_of(fewest)
    told = predict_stages(plan, problem)
    counts = counts_at_pace(plan, told, slowest_of(told))
    return [plan] if counts == fewest else [plan_of(counts), plan]
