"""How good a plan is, in the terms of the papers: load balance and use of the peak FLOP/s."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from hetjax.pipeline.timeline.timeline import Event, stage_track
from hetjax.planner.plan.plan import Plan
from hetjax.planner.predictions.predicted_timeline import stage_timeline
from hetjax.planner.problem.problem import PlanningProblem


def load_balance(plan: Plan, dtype: str) -> float:
    """How evenly a plan's computation is spread over all devices of its cluster.

    Args:
        plan: a plan with a prediction.
        dtype: the dtype whose peak FLOP/s weighs the devices.

    Returns:
        From 0 to 1, where 1 means that all devices compute for the same time. A device that the
        plan leaves out counts as idle.

    Source: Harp equation 20.
    """
    prediction = plan.predicted
    computing: list[tuple[float, float]] = []
    for first, pipeline in plan.numbered_pipelines():
        for group in pipeline.schedule.sharing:
            peak = sum(
                submesh.num_devices * plan.cluster.subcluster(submesh.subcluster).kind.flops(dtype)
                for submesh in pipeline.stages[group[0]].submeshes
            )
            seconds = sum(prediction.stages[first + s].compute_seconds for s in group)
            computing.append((pipeline.num_microbatches * seconds, peak))
    longest = max(seconds for seconds, _ in computing)
    return sum(seconds * peak for seconds, peak in computing) / (longest * peak_flops(plan, dtype))


def flops_utilization(plan: Plan, problem: PlanningProblem) -> float:
    """The model FLOPs of a predicted step over what the cluster's peak allows in its time (MFU).

    Args:
        plan: a plan with a prediction.
        problem: the problem that it solves.

    Returns:
        A share from 0 to 1. Matrix products and convolutions count, what is computed again does
        not.
    """
    of_microbatch = sum(
        work.forward.matmul_flops + work.backward.matmul_flops for work in problem.works
    )
    of_step = of_microbatch / problem.microbatch_size * plan.batch_size
    return of_step / (plan.predicted.step_time * peak_flops(plan, problem.dtype))


def peak_flops(plan: Plan, dtype: str) -> float:
    """The peak FLOP/s of all devices of a plan's cluster together.

    Args:
        plan: the plan.
        dtype: the dtype whose rate counts.

    Returns:
        FLOP/s.
    """
    return sum(s.num_devices * s.kind.flops(dtype) for s in plan.cluster.subclusters)


@dataclass(frozen=True)
class Limits:
    """What a plan's step is spent on, and how near it is to what there is; shares from 0 to 1.

    Args:
        stage: the stage that computes longest; of stages that share devices, which compute as
            long as all of them, the first.
        stage_busy: the share of the step in which it does.
        link: the stages at the ends of the link that is busiest in one direction, told alike; None
            without transfers.
        link_busy: the share of the step in which it is.
        sharing: the share of the step in which stages exchange what several of them hold: gradients
            of parameters, and their new values.
        fullest: the stage whose devices have the least memory left.
        memory: the share of their memory that is used.
    """

    stage: int
    stage_busy: float
    link: tuple[int, int] | None
    link_busy: float
    sharing: float
    fullest: int
    memory: float


def limits(plan: Plan) -> Limits:
    """What limits a plan.

    Args:
        plan: a plan with a prediction.

    Returns:
        Its longest stage, its busiest link and its fullest device.
    """
    prediction = plan.predicted
    leads = plan.leads
    stages: defaultdict[int, float] = defaultdict(float)
    links: defaultdict[tuple[int, int], float] = defaultdict(float, {(0, 0): 0.0})
    for first, pipeline in plan.numbered_pipelines():
        last = first + len(pipeline.stages) - 1
        for s in range(first, last + 1):
            held, count = prediction.stages[s], pipeline.num_microbatches
            stages[leads[s]] += count * held.compute_seconds + held.update_seconds
            if s < last:
                links[leads[s], leads[s + 1]] += count * held.communication_seconds
            if s > first:
                links[leads[s], leads[s - 1]] += count * held.return_seconds
    longest, stage = max((seconds, stage) for stage, seconds in stages.items())
    crossing, link = max((seconds, link) for link, seconds in links.items())
    shares = [each.memory_bytes / each.memory_limit_bytes for each in prediction.stages]
    return Limits(
        stage=stage,
        stage_busy=longest / prediction.step_time,
        link=link if crossing > 0 else None,
        link_busy=crossing / prediction.step_time,
        sharing=prediction.sharing_seconds / prediction.step_time,
        fullest=shares.index(max(shares)),
        memory=max(shares),
    )


@dataclass(frozen=True)
class StepParts:
    """What a stage does in a step, in seconds; together they are the step.

    Args:
        computing: forward and backward passes, recomputation included.
        updating: the optimizer's update, with the sum of gradients inside the stage.
        exchanging: gradients and new values of what other stages hold too.
        waiting: everything else: for transfers, for other stages, for the schedule.
    """

    computing: float
    updating: float
    exchanging: float
    waiting: float


def step_parts(plan: Plan) -> tuple[StepParts, ...]:
    """What every stage of a plan does in a step, by the plan's timeline.

    Args:
        plan: a plan with a prediction.

    Returns:
        Of each stage its parts, those of one pipeline after those of the other; of stages that
        share devices what these do, for all of them.
    """
    step_time, timeline = plan.predicted.step_time, stage_timeline(plan)
    found: dict[int, StepParts] = {}
    for group in plan.sharing:
        events = [event for stage in group for event in timeline.on(stage_track(stage))]
        found |= dict.fromkeys(group, _parts_of(events, step_time))
    return tuple(found[stage] for stage in range(len(plan.stages)))


def _parts_of(events: Iterable[Event], step_time: float) -> StepParts:
    seconds = {"computing": 0.0, "updating": 0.0, "exchanging": 0.0}
    for event in events:
        part = {"update": "updating", "share": "exchanging"}.get(event.kind, "computing")
        seconds[part] += event.duration
    # Sums in another order differ in their last bit.
    return StepParts(**seconds, waiting=max(0.0, step_time - sum(seconds.values())))
