"""The timeline of one step, as the plan's own prediction has it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hetjax.pipeline.timeline.simulate import simulate_schedule
from hetjax.pipeline.timeline.streamed_update import stream_update
from hetjax.pipeline.timeline.timeline import Event, Timeline, host_track, stage_track
from hetjax.planner.plan.plan import Plan, as_plan
from hetjax.planner.plan.prediction import StagePrediction, times_of
from hetjax.planner.predictions.member_timeline import by_members
from hetjax.planner.predictions.step_prediction import sharing_start, task_clocks, update_spans


def simulate(plan: Plan | str | os.PathLike[str]) -> Timeline:
    """The timeline of one step as the plan's own prediction has it; no model is needed.

    Args:
        plan: a plan with a prediction, or the path of its file.

    Returns:
        The timeline, from 0; a member of a stage has a track of its own. It ends with the predicted
        step, but for predictions of before that began updates sooner.

    Raises:
        InputError: the plan has no prediction.

    Example:
        >>> plan = Plan.load("plan.json")  # doctest: +SKIP
        >>> simulate(plan).makespan == plan.prediction.step_time  # doctest: +SKIP
        True
    """
    plan = as_plan(plan)
    return by_members(stage_timeline(plan), plan.predicted.stages)


def stage_timeline(plan: Plan) -> Timeline:
    """The timeline of one step, in which a stage of several members has one track for all.

    Args:
        plan: a plan with a prediction.

    Returns:
        The timeline, from 0.
    """
    prediction = plan.predicted
    events = [
        event
        for first, pipeline, held in plan.predicted_pipelines()
        for event in simulate_schedule(pipeline.schedule, times_of(held)).from_stage(first).events
    ]
    sharing = {
        stage_track(s): stage.sharing_seconds
        for s, stage in enumerate(prediction.stages)
        if stage.sharing_seconds > 0
    }
    clocks = task_clocks(plan)
    begin = sharing_start(plan, clocks)
    events += [
        Event(track, "share", "share", None, begin, begin + seconds)
        for track, seconds in sharing.items()
    ]
    spans = update_spans(plan, clocks)
    updates = {stage_track(s): span for s, span in enumerate(spans)}
    events = [
        replace(event, start=updates[event.track][0], end=updates[event.track][1])
        if event.kind == "update"
        else event
        for event in events
    ]
    groups = {stage_track(s): (s, stage) for s, stage in enumerate(prediction.stages)}
    return Timeline(tuple(_with_groups(events, groups)))


def _with_groups(
    events: Sequence[Event], stages: Mapping[str, tuple[int, StagePrediction]]
) -> Iterator[Event]:
    """Events in which an update whose state is offloaded is one of groups, with their copies."""
    for event in events:
        number, stage = stages.get(event.track, (0, None))
        if event.kind != "update" or stage is None or not stage.update_groups:
            yield event
            continue
        spans = stream_update(stage.update_groups, stage.copies_overlap)
        last = max(span.end for span in spans)
        start = event.end - last
        if start > event.start:
            yield replace(event, end=start)
        for span in spans:
            is_copy = span.what != "update"
            yield Event(
                host_track(number, inward=span.what == "fetch") if is_copy else event.track,
                f"{span.what} {span.group}",
                span.what,
                None,
                start + span.start,
                # To the bit where the update ends.
                event.end if span.end == last else min(event.end, start + span.end),
            )
