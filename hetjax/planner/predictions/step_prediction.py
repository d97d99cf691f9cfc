"""What follows for a plan from what its stages take and its schedules: the step, and its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetjax.pipeline.timeline.lower_bound import lower_bound
from hetjax.pipeline.timeline.simulate import StageClock, stage_clocks
from hetjax.planner.costs.told_updates import told_latency, told_moments
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.prediction import Prediction, StagePrediction, times_of
from hetjax.planner.plan.stage_plan import PipelinePlan
from hetjax.planner.predictions.scheduled_memory import with_memories


def with_schedules(plan: Plan) -> Plan:
    """A plan whose prediction has the times of its stages, with what follows from schedules.

    Args:
        plan: the plan; of its prediction only what stages take and hold counts.
    """
    clocks = _clocks(plan)
    step_time = max(clock.end for clock in clocks)
    stages, bounds = [], []
    busy = {
        stage: sum(sum(clocks[each].durations) for each in group)
        for group in plan.sharing
        for stage in group
    }
    for first, pipeline, held in plan.predicted_pipelines():
        for s, told in enumerate(with_memories(held, pipeline.schedule)):
            bubble = max(0.0, 1 - busy[first + s] / step_time) if step_time else 0.0
            stages.append(replace(told, bubble=bubble))
        bounds.append(_lower_bound(held, pipeline))
    # At the bound itself, sums in another order may differ in their last bit.
    bound = min(max(bounds), step_time)
    return replace(plan, prediction=Prediction(step_time, bound, tuple(stages)))


def _clocks(plan: Plan) -> tuple[StageClock, ...]:
    """What `simulate` tells of each stage, to the bit: its tasks and its update, and their end."""
    clocks = task_clocks(plan)
    spans = update_spans(plan, clocks)
    return tuple(
        StageClock((*clock.durations, end - start), end)
        for clock, (start, end) in zip(clocks, spans, strict=True)
    )


def task_clocks(plan: Plan) -> list[StageClock]:
    """What the schedules of a plan say of each of its stages, but for its update.

    Args:
        plan: a plan with a prediction.
    """
    return [
        clock
        for _, pipeline, held in plan.predicted_pipelines()
        for clock in stage_clocks(pipeline.schedule, times_of(held))
    ]


def sharing_start(plan: Plan, clocks: Sequence[StageClock]) -> float:
    """When stages begin to exchange what several hold: once all of these have computed.

    Args:
        plan: a plan with a prediction.
        clocks: what its schedules say of its stages.
    """
    both = zip(clocks, plan.predicted.stages, strict=True)
    return max((clock.end for clock, stage in both if stage.sharing_seconds > 0), default=0.0)


def update_spans(plan: Plan, clocks: Sequence[StageClock]) -> list[tuple[float, float]]:
    """When each stage updates its parameters.

    It has exchanged what other stages hold too, its devices are done with the update of another
    stage, and it is told in time what all stages tell.

    Args:
        plan: a plan with a prediction.
        clocks: what its schedules say of its stages.

    Returns:
        The start and the end of each update, in seconds.
    """
    stages, begin = plan.predicted.stages, sharing_start(plan, clocks)
    starts = [0.0] * len(stages)
    awaited = [begin + each.sharing_seconds if each.sharing_seconds > 0 else 0.0 for each in stages]
    for group in plan.sharing:
        start = clocks[group[0]].end
        for stage in group:
            starts[stage] = start
            start += stages[stage].update_seconds
    summed = [
        max(start, moment) + each.exchange_seconds
        for start, moment, each in zip(starts, awaited, stages, strict=True)
    ]
    told = told_moments(
        summed, told_latency(plan.cluster, [each.submeshes for each in plan.stages])
    )
    spans = [(start, start) for start in starts]
    for group in plan.sharing:
        free = 0.0
        for stage in group:
            each, start = stages[stage], starts[stage]
            moment = max(free, awaited[stage])
            if each.update_seconds > 0:
                moment = max(moment, told[stage] - each.exchange_seconds)
            spans[stage] = not_before((start, start + each.update_seconds), moment)
            free = spans[stage][1]
    return spans


def not_before(span: tuple[float, float], moment: float) -> tuple[float, float]:
    """A span of an update, moved to a moment at which what it waits for is there.

    Args:
        span: when it begins and ends.
        moment: when what it waits for is there.
    """
    start, end = span
    return span if start >= moment else (moment, moment + (end - start))


def _lower_bound(held: Sequence[StagePrediction], pipeline: PipelinePlan) -> float:
    """A time that no schedule of a pipeline beats: what a stage exchanges follows its last task."""
    times = times_of(held)
    closing = [stage.sharing_seconds + stage.update_seconds for stage in held]
    alone = lower_bound(pipeline.num_microbatches, replace(times, update=closing))
    groups = pipeline.schedule.groups
    if not groups:
        return alone
    # Of stages that share devices one may exchange something while another one computes.
    return max(alone, lower_bound(pipeline.num_microbatches, times, sharing=groups))
