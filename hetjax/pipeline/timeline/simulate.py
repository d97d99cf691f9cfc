"""The discrete-event model: a schedule and the times of its tasks give a timeline."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetjax.errors import InputError
from hetjax.pipeline.schedules.schedule import (
    Schedule,
    Task,
    TaskKind,
    dependency_order,
    split_microbatches,
)
from hetjax.pipeline.timeline.host_copies import HOST, HostCopies
from hetjax.pipeline.timeline.timeline import (
    Event,
    Timeline,
    host_track,
    link_track,
    stage_track,
)
from hetjax.pipeline.timeline.times import StepTimes


def simulate_schedule(schedule: Schedule, times: StepTimes) -> Timeline:
    """Runs a schedule in a discrete-event model of the stages and the links between them.

    A task starts when its stage has finished the task before it and its input has arrived. A
    result enters the link as soon as it is computed and the link's same direction is free; links
    are full-duplex, first in, first out, and a send does not occupy the stage. Copies of
    activations to the hosts' memory and back are as `HostCopies` has them. Each stage updates its
    parameters after its last task. Stages that share devices share their links too; they do
    one task at a time, and their updates after the last of all.

    Args:
        schedule: what every stage runs, in order.
        times: what it takes.

    Returns:
        The timeline from 0. A transfer or an update that takes no time has no event.

    Raises:
        InputError: the times are of another number of stages, the schedule splits backward passes
            and the times do not say how, or it deadlocks.

    Source: Harp section 4.2.1, the graph of its equation 3.

    Example:
        >>> from hetjax.pipeline.schedules.warm_up import gpipe
        >>> simulate_schedule(gpipe(2, 2), StepTimes([1.0, 1.0], [2.0, 2.0], [0.5], [0.5])).makespan
        10.0
    """
    events = []
    for source, target, task, start, end in _spans(schedule, times):
        if HOST in (source, target):
            kind = "fetch" if source == HOST else "store"
            track = host_track(max(source, target), inward=source == HOST)
            events.append(Event(track, f"{kind} {task}", kind, task.microbatch, start, end))
            continue
        here = source == target
        track = stage_track(source) if here else link_track(source, target)
        kind = task.kind if here else "send"
        events.append(Event(track, str(task), kind, task.microbatch, start, end))
    ends = {event.track: event.end for event in events}
    for group in schedule.sharing:
        start = max(ends.get(stage_track(stage), 0.0) for stage in group)
        for stage in group:
            update = times.update[stage] if times.update else 0.0
            if update > 0:
                track = stage_track(stage)
                events.append(Event(track, "update", "update", None, start, start + update))
            start += update
    return Timeline(tuple(events))


@dataclass(frozen=True)
class StageClock:
    """What the timeline of a schedule says of one stage, but for its update.

    Args:
        durations: seconds of each of its tasks, as between its start and its end.
        end: when the last task ends on its devices, which may be another stage's there.
    """

    durations: tuple[float, ...]
    end: float


def stage_clocks(schedule: Schedule, times: StepTimes) -> tuple[StageClock, ...]:
    """What `simulate_schedule` finds of every stage, to the bit, without an event for each task.

    Args:
        schedule: what every stage runs, in order.
        times: what it takes.

    Returns:
        One clock a stage; a transfer ends before the task that waits for it.

    Raises:
        InputError: as for `simulate_schedule`.

    Example:
        >>> from hetjax.pipeline.schedules.warm_up import gpipe
        >>> clocks = stage_clocks(gpipe(2, 1), StepTimes([1.0, 1.0], [2.0, 2.0], [0.5], [0.5]))
        >>> [clock.end for clock in clocks]
        [7.0, 4.5]
    """
    durations: list[list[float]] = [[] for _ in schedule.order]
    ends = [0.0] * schedule.num_stages
    for source, target, _, start, end in _spans(schedule, times):
        if source == target:
            durations[source].append(end - start)
            ends[source] = end
    for group in schedule.sharing:
        last = max(ends[stage] for stage in group)
        for stage in group:
            ends[stage] = last
    return tuple(StageClock(tuple(each), end) for each, end in zip(durations, ends, strict=True))


_TaskSpan = tuple[int, int, Task, float, float]
"""What occupies a stage, given twice, or a link between two, for a task: its start and its end.

`HOST` is one of the two where it is the link to the hosts' memory.
"""

TimedTask = tuple[int, Task, float]
"""A stage, its task, and what the task takes."""

Lane = tuple[int, int]
"""One direction of the link between two sets of devices, each told by its first stage."""

_NOT_SENT = -1.0


def link_lanes(schedule: Schedule) -> dict[tuple[int, int], Lane]:
    """The lane of what each stage sends its neighbours.

    Args:
        schedule: the schedule, which says what stages share devices.

    Returns:
        For each pair of a stage and a neighbour, the lane from the one to the other.

    Example:
        >>> tasks = (Task("F", 0), Task("B", 0))
        >>> turns = (0, 2, 2, 0), (1, 3, 3, 1)
        >>> lanes = link_lanes(Schedule("explicit", (tasks,) * 4, turns))
        >>> lanes[0, 1], lanes[2, 3], lanes[2, 1]
        ((0, 1), (0, 1), (0, 1))
    """
    first = {stage: group[0] for group in schedule.sharing for stage in group}
    pairs = itertools.pairwise(range(schedule.num_stages))
    both = [pair for a, b in pairs for pair in ((a, b), (b, a))]
    return {(a, b): (first[a], first[b]) for a, b in both}


def timed_rows(schedule: Schedule, times: StepTimes) -> list[tuple[TimedTask, ...]]:
    """What each set of devices runs, in order, with what every task takes.

    Args:
        schedule: what every stage runs.
        times: what its tasks take.

    Returns:
        Rows in the order of `Schedule.rows`.

    Raises:
        InputError: the schedule splits backward passes and the times do not say how.
    """
    seconds = [iter(task_seconds(each, times, s)) for s, each in enumerate(schedule.order)]
    return [
        tuple((stage, task, next(seconds[stage])) for stage, task in row) for row in schedule.rows
    ]


class _LinkSpans:
    """What a stage sends another one, on a lane where what is sent first arrives first."""

    def __init__(
        self,
        source: int,
        target: int,
        seconds: float,
        num_microbatches: int,
        free: dict[Lane, float],
        lane: Lane,
    ):
        self.source, self.target, self.seconds = source, target, seconds
        self.free, self.lane = free, lane
        self.arrivals = [_NOT_SENT] * num_microbatches

    def send(self, task: Task, ready: float) -> _TaskSpan:
        start = max(ready, self.free[self.lane])
        end = self.free[self.lane] = self.arrivals[task.microbatch] = start + self.seconds
        return self.source, self.target, task, start, end


def _spans(schedule: Schedule, times: StepTimes) -> Iterator[_TaskSpan]:
    """All tasks, and the transfers that take time, in the order of `dependency_order`."""
    if times.num_stages != schedule.num_stages:
        raise InputError(
            f"times are of {times.num_stages} stages; the schedule has {schedule.num_stages}"
        )
    count = schedule.num_microbatches
    lanes = link_lanes(schedule)
    free = dict.fromkeys(lanes.values(), 0.0)

    def link(source: int, target: int, seconds: float) -> _LinkSpans:
        return _LinkSpans(source, target, seconds, count, free, lanes[source, target])

    there = [link(s, s + 1, each) for s, each in enumerate(times.sends)]
    back = [link(s + 1, s, each) for s, each in enumerate(times.returns)]
    # What the first stage and the last one begin with is there.
    begun = [0.0] * count
    stages = [
        _StageLinks(
            {
                "F": there[stage - 1].arrivals if stage else begun,
                "B": back[stage].arrivals if stage < len(back) else begun,
            },
            {"F": there[stage : stage + 1], "B": back[stage - 1 : stage]},
        )
        for stage in range(schedule.num_stages)
    ]
    hosts = [HostCopies.of(stage, row, times) for stage, row in enumerate(schedule.order)]
    rows = [_row_spans(row, stages, hosts) for row in timed_rows(schedule, times)]
    moved = True
    while moved:
        moved = False
        for spans in rows:
            for span in spans:
                if span is None:
                    break
                yield span
                moved = True
    if any(next(spans, ()) is None for spans in rows):
        # This says what they wait for.
        for _ in dependency_order(schedule):
            pass


class _StageLinks(NamedTuple):
    """What has reached a stage, for tasks of a kind, and where these tasks send what they make."""

    received: Mapping[str, Sequence[float]]
    sending: Mapping[str, Sequence[_LinkSpans]]


def _row_spans(
    row: Sequence[TimedTask], stages: Sequence[_StageLinks], hosts: Sequence[HostCopies | None]
) -> Iterator[_TaskSpan | None]:
    """What devices do and send, and None whenever what they wait for is not there yet."""
    now = 0.0
    for stage, task, seconds in row:
        host = hosts[stage]
        if host is not None:
            now, copies = host.before(task, now)
            yield from copies
        arrivals = stages[stage].received.get(task.kind)
        while arrivals is not None and arrivals[task.microbatch] == _NOT_SENT:
            yield None
        start = now if arrivals is None else max(arrivals[task.microbatch], now)
        now = start + seconds
        yield stage, stage, task, start, now
        for link in stages[stage].sending.get(task.kind, ()):
            span = link.send(task, now)
            if link.seconds > 0:
                yield span
        if host is not None:
            now, copies = host.after(now)
            yield from copies


def warm_up_makespan(counts: Sequence[int], num_microbatches: int, times: StepTimes) -> float:
    """The makespan of a schedule of warm-up counts, without its timeline.

    Args:
        counts: N_i of every stage, from 1 to M, never above the count of the stage before.
        num_microbatches: M.
        times: what tasks, transfers and updates take; backward passes with recomputation in them.

    Returns:
        Seconds, to the bit what `simulate_schedule` finds for `from_warm_up_counts`, in a
        twentieth of the time: for searches that judge many plans.

    Example:
        >>> warm_up_makespan([2, 2], 2, StepTimes([1.0, 1.0], [2.0, 2.0], [0.5], [0.5]))
        10.0
    """
    ends = warm_up_ends(counts, num_microbatches, times)
    updates = times.update or [0.0] * len(ends)
    return max(end + update for end, update in zip(ends, updates, strict=True))


def warm_up_ends(
    counts: Sequence[int], num_microbatches: int, times: StepTimes
) -> tuple[float, ...]:
    """When every stage ends its last backward pass, in a schedule of warm-up counts.

    Args:
        counts: as for `warm_up_makespan`.
        num_microbatches: M.
        times: what tasks and transfers take.

    Returns:
        Seconds from the start of the step, one a stage.
    """
    # Millions of tasks go through here: a comparison takes a third of the time of `max`.
    last = len(counts) - 1
    forward, backward = list(times.forward), list(times.backward)
    sends, returns = list(times.sends), list(times.returns)
    free = [0.0] * (last + 1)
    sent, returned = [0.0] * last, [0.0] * last
    arrived = [[0.0] * num_microbatches for _ in counts]
    started = [0] * (last + 1)
    for microbatch in range(num_microbatches):
        # All forward tasks that come before this microbatch's backward task, stage by stage.
        for stage, count in enumerate(counts):
            here, seconds, end = arrived[stage], forward[stage], free[stage]
            begin, stop = started[stage], min(microbatch + count, num_microbatches)
            if stage == last:
                for each in range(begin, stop):
                    ready = here[each]
                    end = (ready if ready > end else end) + seconds
            else:
                there, link, crossing = arrived[stage + 1], sent[stage], sends[stage]
                for each in range(begin, stop):
                    ready = here[each]
                    end = (ready if ready > end else end) + seconds
                    link = there[each] = (end if end > link else link) + crossing
                sent[stage] = link
            free[stage], started[stage] = end, stop
        ready = 0.0
        for stage in range(last, -1, -1):
            end = free[stage]
            end = free[stage] = (ready if ready > end else end) + backward[stage]
            if stage:
                link = returned[stage - 1]
                ready = (end if end > link else link) + returns[stage - 1]
                returned[stage - 1] = ready
    return tuple(free)


def task_seconds(tasks: Sequence[Task], times: StepTimes, stage: int) -> tuple[float, ...]:
    """What every task of a stage's order takes.

    Args:
        tasks: the order of one stage.
        times: the times of its tasks.
        stage: which stage.

    Returns:
        Seconds, one a task.

    Raises:
        InputError: the order splits backward passes and the times do not say how.
    """
    split = split_microbatches(tasks)
    recomputed = {task.microbatch for task in tasks if task.kind == "R"}

    @functools.cache
    def seconds(kind: TaskKind, is_split: bool, is_recomputed: bool) -> float:
        match kind:
            case "F":
                return times.forward[stage]
            case "R":
                return times.recompute_seconds(stage)
            case "B":
                return times.backward_seconds(stage, split=is_split, recomputed=is_recomputed)
            case "W":
                return times.weight_gradient[stage]

    return tuple(
        seconds(task.kind, task.microbatch in split, task.microbatch in recomputed)
        for task in tasks
    )
