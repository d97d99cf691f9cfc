"""Schedules that are chosen for what is predicted of a plan's stages."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from hetjax.errors import InputError
from hetjax.pipeline.schedule_search.interleaved_search import search_interleaved
from hetjax.pipeline.schedule_search.named_schedules import make_schedule
from hetjax.pipeline.schedule_search.schedule_search import TIE, fixed_schedules
from hetjax.pipeline.schedules.schedule import INTERLEAVED, Schedule
from hetjax.pipeline.timeline.quick_clock import makespan
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.prediction import StagePrediction, times_of
from hetjax.planner.plan.stage_plan import PipelinePlan
from hetjax.planner.predictions.scheduled_memory import (
    fits_by,
    live_limits_of,
    with_memories,
)
from hetjax.planner.predictions.step_prediction import with_schedules

INTERLEAVING = ("search", INTERLEAVED)
"""What a schedule may be asked to be where stages share devices."""


def reschedule(plan: Plan, schedule: Schedule, times: StepTimes | None = None) -> Plan:
    """The plan with another schedule, and what is predicted of it then.

    Args:
        plan: a plan with a prediction, which says what each stage takes.
        schedule: of as many stages and microbatches.
        times: what tasks and transfers take, where it is known better than the prediction has it.

    Returns:
        The plan with the schedule and its prediction.

    Raises:
        InputError: the plan has no prediction.
    """
    prediction = plan.predicted
    if times is not None:
        prediction = replace(prediction, stages=_with_times(prediction.stages, times))
    return with_schedules(replace(plan.with_schedule(schedule), prediction=prediction))


def _with_times(held: Sequence[StagePrediction], times: StepTimes) -> tuple[StagePrediction, ...]:
    """A pipeline's stages with other times of their tasks and transfers, where these are told."""
    return tuple(
        replace(
            stage,
            forward_seconds=times.forward[s],
            backward_seconds=times.backward[s],
            recompute_seconds=times.recompute_seconds(s),
            **{
                f"{name}_seconds": seconds[s]
                for name in ("input_gradient", "weight_gradient", "update")
                if (seconds := getattr(times, name))
            },
            communication_seconds=[*times.sends, 0.0][s],
            return_seconds=[0.0, *times.returns][s],
        )
        for s, stage in enumerate(held)
    )


def choose_schedule(plan: Plan, name: str, times: StepTimes | None = None) -> Plan:
    """The plan with the schedule of a name, made for what its tasks and transfers take.

    Args:
        plan: a plan with a prediction.
        name: one of `hetjax.pipeline.SCHEDULES`. A search may use the memory that is left. Where
            stages share devices, ``"search"`` or ``"interleaved"``, which are the same there.
        times: what tasks and transfers take, where it is known better than the prediction has it;
            of a plan of one pipeline.

    Returns:
        The plan with the schedule, on each of its pipelines, and its prediction.

    Raises:
        InputError: the plan has no prediction, or the name is unknown, or another one is allowed
            where stages share devices.
    """
    prediction = plan.predicted
    if times is not None:
        known = times.with_copies_of(prediction.times)
        return reschedule(
            plan, _named_schedule(plan.pipeline, prediction.stages, name, known), times
        )
    pipelines = []
    for _, pipeline, held in plan.predicted_pipelines():
        schedule = _named_schedule(pipeline, held, name, times_of(held))
        pipelines.append(replace(pipeline, schedule=schedule))
    return with_schedules(replace(plan, pipelines=tuple(pipelines)))


def _named_schedule(
    pipeline: PipelinePlan, held: Sequence[StagePrediction], name: str, times: StepTimes
) -> Schedule:
    """The schedule of a name for a pipeline of which something is predicted."""
    if pipeline.schedule.groups:
        return _interleaved_schedule(pipeline, held, name, times)
    count = pipeline.num_microbatches
    limits = live_limits_of(held, count)
    alone = times.with_copies_in_tasks
    made = make_schedule(name, len(pipeline.stages), count, alone, live_limits=limits)
    if name != "search":
        return made
    # The search keeps within caps that hold for any order of the tasks, and knows no copies that
    # run beside them: where memory is short, what fits by its own order may be faster.
    fitting = [each for each in (made, *fixed_schedules(times, count)) if fits_by(held, each)]
    # What the pipeline has may fill more than was counted when its stages were chosen.
    if all(stage.fits for stage in with_memories(held, pipeline.schedule)):
        fitting.append(pipeline.schedule)

    def seconds(schedule: Schedule) -> float:
        return makespan(schedule, times) * (1 if schedule is made else TIE)

    return min(fitting, key=seconds, default=pipeline.schedule)


def _interleaved_schedule(
    pipeline: PipelinePlan, held: Sequence[StagePrediction], name: str, times: StepTimes
) -> Schedule:
    """The best interleaved schedule that is found for a pipeline whose stages share devices.

    Where none fits it is the one that the pipeline has.
    """
    if name not in INTERLEAVING:
        raise InputError(
            f"schedule is {name!r}, and stages of the pipeline share devices; allowed there: "
            f"{' or '.join(map(repr, INTERLEAVING))}"
        )
    sharing = pipeline.schedule.sharing
    submeshes, count = len(sharing), len(pipeline.stages)
    if sharing != tuple(tuple(range(row, count, submeshes)) for row in range(submeshes)):
        raise InputError(
            f"schedule is {name!r}, and the pipeline's stages share devices as "
            f"{[list(group) for group in sharing]}; allowed there: stage s on submesh s modulo "
            f"their number, {submeshes}, or an order that is written down"
        )

    fits = functools.partial(fits_by, held)
    found = search_interleaved(times, submeshes, pipeline.num_microbatches, fits)
    return pipeline.schedule if found is None else found


def live_limits(plan: Plan) -> tuple[int, ...]:
    """How many live microbatches fit on each stage, by the plan's own prediction.

    Args:
        plan: a plan with a prediction.

    Returns:
        For each stage a number from 1 to the number of microbatches.

    Raises:
        InputError: the plan has no prediction.
    """
    return live_limits_of(plan.predicted.stages, plan.pipeline.num_microbatches)
