"""Timelines: what ran where and when, predicted by a discrete-event model or measured.

`simulate_schedule` puts durations to a schedule; the runtime fills the same types from its own
clock, so that prediction and measurement are drawn, written and compared by the same code.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetjax.errors import InputError
from hetjax.pipeline.schedule import Schedule, Task, dependency_order, input_source

_LINK = re.compile(r"link (\d+)->(\d+)")


def stage_track(stage: int) -> str:
    """The name of a stage's track, e.g. ``"stage 0"``."""
    return f"stage {stage}"


def link_track(source: int, target: int) -> str:
    """The name of one direction of the link between two stages, e.g. ``"link 0->1"``."""
    return f"link {source}->{target}"


def is_link(track: str) -> bool:
    """Whether a track is a link's; every other track is a stage's or a worker's."""
    return _LINK.fullmatch(track) is not None


@dataclass(frozen=True)
class Event:
    """One thing that occupied one track for a while.

    Args:
        track: who was busy: ``"stage 0"``, ``"link 0->1"``, or a worker's own name.
        name: what is written on it, e.g. ``"F3"``.
        kind: what it was: ``"F"``, ``"B"``, ``"FB"`` (both in one program), ``"send"``,
            ``"update"``, or a runtime's own word.
        microbatch: index of the microbatch, None where there is none.
        start: in seconds, from any common zero.
        end: in seconds, not before `start`.
        num_bytes: bytes moved; 0 for computation and where not known.
    """

    track: str
    name: str
    kind: str
    microbatch: int | None
    start: float
    end: float
    num_bytes: int = 0

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The events of one training step, predicted or measured.

    Args:
        events: in any order.
    """

    events: tuple[Event, ...]

    @property
    def start(self) -> float:
        """The start of the first event in seconds; 0 where there are no events."""
        return min((event.start for event in self.events), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the start of the first event to the end of the last one."""
        return max((event.end for event in self.events), default=0.0) - self.start

    @property
    def tracks(self) -> tuple[str, ...]:
        """All tracks from the first stage to the last, each followed by its links."""
        return tuple(sorted({event.track for event in self.events}, key=_track_key))

    @property
    def stage_tracks(self) -> tuple[str, ...]:
        """The tracks that compute: all but the links."""
        return tuple(track for track in self.tracks if not is_link(track))

    def on(self, track: str) -> tuple[Event, ...]:
        """The events of one track, by their start."""
        events = (event for event in self.events if event.track == track)
        return tuple(sorted(events, key=lambda event: (event.start, event.end)))

    def busy(self, track: str) -> float:
        """Seconds in which a track did something; events that overlap count once."""
        total, until = 0.0, float("-inf")
        for event in self.on(track):
            total += max(0.0, event.end - max(event.start, until))
            until = max(until, event.end)
        return total

    def bubble(self, track: str) -> float:
        """The fraction of the makespan, from 0 to 1, in which a track did nothing."""
        return max(0.0, 1 - self.busy(track) / self.makespan) if self.makespan > 0 else 0.0

    @property
    def bubble_fraction(self) -> float:
        """The mean of `bubble` over the stages."""
        tracks = self.stage_tracks
        return sum(self.bubble(track) for track in tracks) / len(tracks) if tracks else 0.0

    def from_zero(self) -> Timeline:
        """The same events with the first one starting at 0."""
        zero = self.start
        return Timeline(
            tuple(
                replace(event, start=event.start - zero, end=event.end - zero)
                for event in self.events
            )
        )

    def to_chrome_trace(self) -> dict[str, Any]:
        """This timeline as a Chrome trace, which Perfetto and chrome://tracing open.

        A stage or worker is a process; the links on which it sends are further threads of it.
        Times are in microseconds from the first event.

        Returns:
            JSON values: ``{"traceEvents": [...], "displayTimeUnit": "ms"}``, names first, then
            complete (``"X"``) events by their start.

        Source: the Trace Event Format, Google.
        """
        tracks, stage_tracks = self.tracks, set(self.stage_tracks)
        owners = {track: _owner(track, stage_tracks) for track in tracks}
        processes = {owner: pid for pid, owner in enumerate(dict.fromkeys(owners.values()))}
        threads = {track: (processes[owners[track]], tid) for tid, track in enumerate(tracks)}
        names = [_process_name(owner, pid) for owner, pid in processes.items()]
        names += [_thread_name(track, *threads[track]) for track in tracks]
        boxes = [_box(event, *threads[event.track]) for event in self.from_zero().events]
        boxes.sort(key=lambda box: (box["ts"], box["pid"], box["tid"]))
        return {
            "traceEvents": [entry for group in names for entry in group] + boxes,
            "displayTimeUnit": "ms",
        }


def simulate_schedule(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    communication_forward: Sequence[float],
    communication_backward: Sequence[float],
    update: Sequence[float] = (),
) -> Timeline:
    """Runs a schedule in a discrete-event model of the stages and the links between them.

    A task starts when its stage has finished the task before it and its input has arrived. A
    result enters the link as soon as it is computed and the link's same direction is free; links
    are full-duplex, first in, first out, and a send does not occupy the stage. Each stage updates
    its parameters after its last task.

    Args:
        schedule: what every stage runs, in order.
        forward: seconds of one forward task on every stage; S long.
        backward: seconds of one backward task on every stage; S long.
        communication_forward: seconds to move one activation from stage i to i + 1; S - 1 long.
        communication_backward: seconds to move one gradient from stage i + 1 to i; S - 1 long.
        update: seconds of the optimizer's update on every stage; S long, or empty for none.

    Returns:
        The timeline from 0. A transfer or an update that takes no time has no event.

    Raises:
        InputError: a length does not fit the schedule, a time is negative, or the schedule
            deadlocks.

    Source: Harp section 4.2.1, the graph of its equation 3.

    Example:
        >>> from hetjax.pipeline.schedule import gpipe
        >>> simulate_schedule(gpipe(2, 2), [1.0, 1.0], [2.0, 2.0], [0.5], [0.5]).makespan
        10.0
    """
    _check_times(
        schedule.num_stages,
        forward=forward,
        backward=backward,
        communication_forward=communication_forward,
        communication_backward=communication_backward,
        update=update,
    )
    events: list[Event] = []
    free: dict[str, float] = {}
    arrival: dict[tuple[int, Task], float] = {}

    def occupy(track: str, kind: str, task: Task | None, ready: float, seconds: float) -> float:
        start = max(ready, free.get(track, 0.0))
        end = free[track] = start + seconds
        if seconds > 0 or kind in ("F", "B"):
            name, microbatch = (str(task), task.microbatch) if task else (kind, None)
            events.append(Event(track, name, kind, microbatch, start, end))
        return end

    for stage, task in dependency_order(schedule):
        source = input_source(schedule, stage, task)
        ready = arrival[source] if source else 0.0
        seconds = (forward if task.kind == "F" else backward)[stage]
        end = occupy(stage_track(stage), task.kind, task, ready, seconds)
        if task.kind == "F" and stage + 1 < schedule.num_stages:
            track, seconds = link_track(stage, stage + 1), communication_forward[stage]
            end = occupy(track, "send", task, end, seconds)
        elif task.kind == "B" and stage > 0:
            track, seconds = link_track(stage, stage - 1), communication_backward[stage - 1]
            end = occupy(track, "send", task, end, seconds)
        arrival[stage, task] = end
    for stage, seconds in enumerate(update):
        occupy(stage_track(stage), "update", None, 0.0, seconds)
    return Timeline(tuple(events))


def lower_bound(
    num_microbatches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    communication_forward: Sequence[float],
    communication_backward: Sequence[float],
    update: Sequence[float] = (),
) -> float:
    """A time that no schedule of forward and backward tasks beats, however much memory it takes.

    Proof. Take any resource (a stage, or one direction of a link) and any set of operations that
    it executes one at a time. None of them starts before the least *head*, the length of the
    chain of tasks and transfers that must precede it; after the last of them has ended, at least
    the least *tail* must follow. So the makespan is at least head + work + tail. Along the
    pipeline one microbatch takes the chain F_0, C_0, F_1, ..., F_{S-1}, B_{S-1}, ..., B_0, hence

    - head of F_i: ``sum_{k<i} (f_k + c_k)``;
    - trip_i, from the end of F_i to the start of B_i: the chain's part between the two;
    - tail of B_i: ``max(u_i, c'_{i-1} + b_{i-1} + tail of B_{i-1})``, where u_i is the update;
    - head of B_i is that of F_i + f_i + trip_i; tail of F_i is trip_i + b_i + tail of B_i.

    The bound is the maximum over three sets on every stage (all F, all B, and both: the first of
    them is an F, the last a B) and the transfers of each direction of every link. With M = 1 it
    is the chain itself.

    Args:
        num_microbatches: M, at least 1.
        forward: seconds of one forward task on every stage; S long.
        backward: seconds of one backward task on every stage; S long.
        communication_forward: seconds to move one activation from stage i to i + 1; S - 1 long.
        communication_backward: seconds to move one gradient from stage i + 1 to i; S - 1 long.
        update: seconds of the optimizer's update on every stage; S long, or empty for none.

    Returns:
        Seconds, at most the makespan of every schedule under `simulate_schedule`.

    Raises:
        InputError: a length does not fit, a time is negative, or `num_microbatches` is below 1.

    Example:
        >>> lower_bound(2, [1.0, 1.0], [2.0, 2.0], [0.5], [0.5])
        10.0
    """
    stages = len(forward)
    _check_times(
        stages,
        forward=forward,
        backward=backward,
        communication_forward=communication_forward,
        communication_backward=communication_backward,
        update=update,
    )
    if num_microbatches < 1:
        raise InputError(f"num_microbatches is {num_microbatches}; it must be 1 or more")
    updates = update if len(update) else [0.0] * stages

    heads, tails = [0.0], [updates[0]]
    for i in range(1, stages):
        heads.append(heads[-1] + forward[i - 1] + communication_forward[i - 1])
        chain = communication_backward[i - 1] + backward[i - 1] + tails[-1]
        tails.append(max(updates[i], chain))
    trips = [0.0] * stages
    for i in reversed(range(stages - 1)):
        inner = forward[i + 1] + trips[i + 1] + backward[i + 1]
        trips[i] = communication_forward[i] + inner + communication_backward[i]

    bounds = []
    for i, (f, b) in enumerate(zip(forward, backward, strict=True)):
        ends = heads[i] + tails[i]
        bounds.append(ends + num_microbatches * (f + b))
        bounds.append(ends + num_microbatches * f + trips[i] + b)
        bounds.append(ends + f + trips[i] + num_microbatches * b)
    for i, (c, c_back) in enumerate(
        zip(communication_forward, communication_backward, strict=True)
    ):
        path = heads[i] + forward[i] + trips[i] + backward[i] + tails[i]
        bounds.append(path + (num_microbatches - 1) * max(c, c_back))
    return max(bounds)


def harp_latency(
    compute: Sequence[float], communication: Sequence[float], num_microbatches: int
) -> float:
    """Harp's closed form for the step time under H-1F1B, where every c_i is at most t_max.

    ``sum_i (t_i + 2 c_i) + (M - 1) t_max``: one microbatch's way through the pipeline and back,
    then one more microbatch every t_max. Where stages are equal and so are links, the
    discrete-event model gives the same; where links differ it can give up to S t_max more, lost
    once while the pipeline fills.

    Args:
        compute: t_i, forward plus backward of one microbatch, in seconds; S long.
        communication: c_i, one transfer between stage i and i + 1, in seconds; S - 1 long.
        num_microbatches: M, written B in the paper.

    Returns:
        Seconds.

    Source: Harp equation 12.

    Example:
        >>> harp_latency([3.0, 3.0], [0.5], num_microbatches=2)
        10.0
    """
    return sum(compute) + 2 * sum(communication) + (num_microbatches - 1) * max(compute)


def live_over_time(timeline: Timeline, track: str) -> tuple[tuple[float, int], ...]:
    """How many microbatches' activations a stage holds at every moment.

    A microbatch is held from the start of its forward event to the end of its backward event.

    Args:
        timeline: a timeline, predicted or measured.
        track: the stage's track.

    Returns:
        Pairs (seconds, number held from then on), in order of time, one for every moment at which
        the number changes.

    Example:
        >>> forward = Event("stage 0", "F0", "F", microbatch=0, start=0.0, end=1.0)
        >>> backward = Event("stage 0", "B0", "B", microbatch=0, start=2.0, end=4.0)
        >>> live_over_time(Timeline((forward, backward)), "stage 0")
        ((0.0, 1), (4.0, 0))
    """
    changes: dict[float, int] = {}
    for event in timeline.on(track):
        if event.kind in ("F", "FB"):
            changes[event.start] = changes.get(event.start, 0) + 1
        if event.kind in ("B", "FB"):
            changes[event.end] = changes.get(event.end, 0) - 1
    held, steps = 0, []
    for moment, change in sorted(changes.items()):
        held += change
        if change:
            steps.append((moment, held))
    return tuple(steps)


def _check_times(num_stages: int, **times: Sequence[float]) -> None:
    """Raises unless every list of times is as long as its name wants and not negative."""
    for field, values in times.items():
        expected = num_stages - 1 if field.startswith("communication") else num_stages
        if len(values) != expected and not (field == "update" and len(values) == 0):
            raise InputError(
                f"{field} has {len(values)} times; {num_stages} stages need {expected}"
            )
        if not all(0 <= value < float("inf") for value in values):
            raise InputError(f"{field} is {list(values)}; times must be finite and not negative")


def _track_key(track: str) -> tuple[Any, ...]:
    """Sorts stage 2 before stage 10, and a link after the lower of its two stages."""
    numbers = [int(number) for number in re.findall(r"\d+", track)]
    if is_link(track):
        return ([min(numbers)], 1, numbers, track)
    return (numbers, 0, [], track)


def _owner(track: str, stage_tracks: Container[str]) -> str:
    """The process of a track: a link belongs to the stage that sends on it, if it is there."""
    match = _LINK.fullmatch(track)
    sender = stage_track(int(match[1])) if match else track
    return sender if sender in stage_tracks else track


def _process_name(owner: str, pid: int) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": owner}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
    ]


def _thread_name(track: str, pid: int, tid: int) -> list[dict[str, Any]]:
    thread = {"ph": "M", "pid": pid, "tid": tid}
    name = track if is_link(track) else "compute"
    return [
        thread | {"name": "thread_name", "args": {"name": name}},
        thread | {"name": "thread_sort_index", "args": {"sort_index": tid}},
    ]


def _box(event: Event, pid: int, tid: int) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if event.microbatch is not None:
        args["microbatch"] = event.microbatch
    if event.num_bytes:
        args["num_bytes"] = event.num_bytes
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.kind,
        "pid": pid,
        "tid": tid,
        "ts": event.start * 1e6,
        "dur": event.duration * 1e6,
        "args": args,
    }
