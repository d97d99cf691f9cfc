"""What tasks and transfers take, read off measured timelines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median

from hetjax.errors import InputError
from hetjax.pipeline.schedules.interleaved import from_rows
from hetjax.pipeline.schedules.schedule import EXPLICIT, Schedule, Task, input_source
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.timeline.timeline import (
    Event,
    Timeline,
    host_track,
    link_track,
    stage_track,
)
from hetjax.pipeline.timeline.times import StepTimes


def measured_times(
    steps: Sequence[tuple[Timeline, Schedule]], known: StepTimes | None = None
) -> StepTimes:
    """What tasks and transfers took: the median, over the steps, of the mean in each.

    A step takes the sum of its tasks, so within one the mean counts, stragglers and all. A transfer
    that had to wait for the one before it on its link counts from that one's arrival.

    Args:
        steps: measured steps of one pipeline, each with its schedule.
        known: what was measured before, for tasks that none of the steps has.

    Returns:
        The times; without those of split backward passes where no step had any.

    Raises:
        InputError: some stage's forward or whole backward pass was not measured, though it has one.
    """
    num_stages = steps[0][1].num_stages
    stages = range(num_stages)

    def tasks(field: str, kind: str, split: bool | None = None) -> list[float]:
        before = getattr(known, field, ()) or [0.0] * num_stages
        found = [_seconds(steps, s, kind, split) for s in stages]
        return [median(found[s]) if found[s] else before[s] for s in stages]

    whole = {"forward": tasks("forward", "F"), "backward": tasks("backward", "B", split=False)}
    _check_measured(steps, whole)
    halves = {
        "input_gradient": tasks("input_gradient", "B", split=True),
        "weight_gradient": tasks("weight_gradient", "W"),
    }
    return StepTimes(
        **whole,
        sends=[_transfer(steps, s, s + 1) for s in range(num_stages - 1)],
        returns=[_transfer(steps, s + 1, s) for s in range(num_stages - 1)],
        update=[_update(steps, s) for s in stages],
        recompute=tasks("recompute", "R"),
        **(halves if any(halves["input_gradient"]) else {}),
    )


def _check_measured(
    steps: Sequence[tuple[Timeline, Schedule]], whole: Mapping[str, Sequence[float]]
) -> None:
    for name, seconds in whole.items():
        for stage, each in enumerate(seconds):
            # Below the last stage that is trained there are no backward passes at all.
            if not each and (name == "forward" or _seconds(steps, stage, "B")):
                raise InputError(
                    f"no {name} pass of stage {stage} was measured in a step that ran it whole"
                )


def measuring_schedules(schedule: Schedule) -> tuple[Schedule, Schedule]:
    """Schedules in which to measure what another one needs to know: whole and split passes.

    Args:
        schedule: the other one.

    Returns:
        1F1B, which holds the least memory, for as many stages and microbatches, as it is and with
        split backward passes; where stages share devices, the other schedule itself with all
        backward passes whole, and with all of them split.
    """
    whole = one_f_one_b(schedule.num_stages, schedule.num_microbatches)
    if schedule.groups:
        rows = [[each for each in row if each[1].kind != "W"] for row in schedule.rows]
        whole = from_rows(EXPLICIT, rows)
    return whole, with_split_backward(whole)


def with_split_backward(schedule: Schedule) -> Schedule:
    """A schedule with every backward pass split, its halves one after the other.

    Args:
        schedule: a schedule without W.

    Returns:
        The explicit schedule.

    Example:
        >>> from hetjax.pipeline.schedules.warm_up import gpipe
        >>> [str(task) for task in with_split_backward(gpipe(1, 1)).order[0]]
        ['F0', 'B0', 'W0']
    """

    def halves(task: Task) -> tuple[Task, ...]:
        return (task, Task("W", task.microbatch)) if task.kind == "B" else (task,)

    rows = [
        [(stage, half) for stage, task in row for half in halves(task)] for row in schedule.rows
    ]
    return from_rows(EXPLICIT, rows)


def _seconds(
    steps: Sequence[tuple[Timeline, Schedule]], stage: int, kind: str, split: bool | None = None
) -> list[float]:
    """The mean duration of a kind of task in each step that has any.

    Args:
        steps: measured steps.
        stage: which stage.
        kind: the kind of task.
        split: whether only split, or only whole, backward passes count.
    """
    found = (
        [
            seconds
            for event, seconds in _task_seconds(timeline, schedule, stage)
            if event.kind == kind
            and (split is None or kind != "B" or _is_split(schedule, stage, event) == split)
        ]
        for timeline, schedule in steps
    )
    return [mean(each) for each in found if each]


def _task_seconds(
    timeline: Timeline, schedule: Schedule, stage: int
) -> Iterator[tuple[Event, float]]:
    """Each task of a stage with its duration from when it could have begun.

    It could when the task before it on the stage's devices had ended and its input had arrived;
    what a worker does between two tasks is the second one's, too.
    """
    arrivals = {
        event.name: event.end
        for neighbour in (stage - 1, stage + 1)
        for event in timeline.on(link_track(neighbour, stage))
    }
    there = next(group for group in schedule.sharing if stage in group)
    events = [event for each in there for event in timeline.on(stage_track(each))]
    before = None
    for event in sorted(events, key=lambda event: event.start):
        if event.track != stage_track(stage):
            before = event
            continue
        # A first task, and one whose input took no time on its link, began when it could.
        could = event.start
        if before is not None and (event.name in arrivals or not _receives(schedule, stage, event)):
            could = max(before.end, arrivals.get(event.name, before.end))
        yield event, event.end - min(event.start, could)
        before = event


def _receives(schedule: Schedule, stage: int, event: Event) -> bool:
    """Whether a task has an input from another stage."""
    if event.kind not in ("F", "B") or event.microbatch is None:
        return False
    return input_source(schedule, stage, Task(event.kind, event.microbatch)) is not None


def _is_split(schedule: Schedule, stage: int, event: Event) -> bool:
    assert event.microbatch is not None
    return Task("W", event.microbatch) in schedule.order[stage]


def _update(steps: Sequence[tuple[Timeline, Schedule]], stage: int) -> float:
    return median(update_seconds(timeline, stage) for timeline, _ in steps)


def update_seconds(timeline: Timeline, stage: int) -> float:
    """What a stage's update took in a measured step.

    Args:
        timeline: the step.
        stage: the stage.

    Returns:
        Seconds; where its state came and went, from the first copy to the last.
    """
    events = [event for event in timeline.on(stage_track(stage)) if event.kind == "update"]
    seconds = sum(event.duration for event in events)
    copies = [
        event
        for inward in (True, False)
        for event in timeline.on(host_track(stage, inward=inward))
        if event.kind in ("fetch", "store") and event.microbatch is None
    ]
    if not copies:
        return seconds
    first = min(event.start for event in copies)
    early = sum(event.duration for event in events if event.end <= first)
    return early + max(event.end for event in (*events, *copies)) - first


def _transfer(steps: Sequence[tuple[Timeline, Schedule]], source: int, target: int) -> float:
    track = link_track(source, target)
    found = (list(seconds_on_link(timeline.on(track))) for timeline, _ in steps)
    means = [mean(each) for each in found if each]
    return median(means) if means else 0.0


def seconds_on_link(events: Sequence[Event]) -> Iterator[float]:
    """How long each transfer had the link: one that waits for another has it from that one's end.

    Args:
        events: the transfers of one direction of a link, by their start.

    Yields:
        Seconds.

    Example:
        >>> first = Event("link 0->1", "F0", "send", microbatch=0, start=0.0, end=2.0)
        >>> second = Event("link 0->1", "F1", "send", microbatch=1, start=1.0, end=5.0)
        >>> list(seconds_on_link([first, second]))
        [2.0, 3.0]
    """
    if events:
        yield events[0].duration
    for before, event in itertools.pairwise(events):
        yield max(0.0, event.end - max(event.start, before.end))
