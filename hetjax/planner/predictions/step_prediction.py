"""What follows for a plan from what its stages take and its schedules: the step, and its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetjax.pipeline.timeline.lower_bound import lower_bound
from hetjax.pipeline.timeline.simulate import StageClock, stage_clocks
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
    prediction = plan.predicted
    clocks = [
        clock
        for _, pipeline, held in plan.predicted_pipelines()
        for clock in stage_clocks(pipeline.schedule, times_of(held))
    ]
    sharing = [stage.sharing_seconds for stage in prediction.stages]
    # Stages exchange what several hold, once all of these have computed.
    begin = max((c.end for c, each in zip(clocks, sharing, strict=True) if each > 0), default=0.0)
    found: dict[int, StageClock] = {}
    for group in plan.sharing:
        start, free = clocks[group[0]].end, 0.0
        for stage in group:
            seconds = prediction.stages[stage].update_seconds
            span = start, start + seconds
            shared = begin + sharing[stage] if sharing[stage] > 0 else 0.0
            start += seconds
            first, free = not_before(span, max(free, shared))
            found[stage] = StageClock((*clocks[stage].durations, free - first), free)
    return tuple(found[stage] for stage in range(len(clocks)))


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
