"""Timelines: what ran where and when, predicted by a discrete-event model or measured.

`hetjax.pipeline.simulate_schedule` puts durations to a schedule; the runtime fills the same types
from its own clock, so that prediction and measurement are drawn, written and compared by the same
code.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

_LINK = re.compile(r"link (\d+)->(\d+)(?:, member \d+)?")
_HOST = re.compile(r"link (?:host->(\d+)|(\d+)->host)(?:, member (\d+))?")
_STAGE = re.compile(r"stage (\d+)(?:, member (\d+))?")


def stage_track(stage: int, member: int = 0) -> str:
    """The name of the track of a stage, or of another member of it than the first.

    Example:
        >>> stage_track(1), stage_track(1, 2)
        ('stage 1', 'stage 1, member 2')
    """
    return f"stage {stage}, member {member}" if member else f"stage {stage}"


def link_track(source: int, target: int, member: int = 0) -> str:
    """The name of one direction of the link between two stages, e.g. ``"link 0->1"``.

    What the members of a stage give each other is on a track of its own: ``"link 0->0"``; or on one
    for each member that gives something.

    Example:
        >>> link_track(0, 1), link_track(0, 0, 2)
        ('link 0->1', 'link 0->0, member 2')
    """
    return f"link {source}->{target}, member {member}" if member else f"link {source}->{target}"


def host_track(stage: int, member: int = 0, *, inward: bool) -> str:
    """The name of one direction of the link between a stage's devices and their hosts' memory.

    Args:
        stage: the stage.
        member: which of its members; those after the first have links of their own.
        inward: whether to its devices.

    Example:
        >>> host_track(1, inward=True), host_track(1, 2, inward=False)
        ('link host->1', 'link 1->host, member 2')
    """
    track = f"link host->{stage}" if inward else f"link {stage}->host"
    return f"{track}, member {member}" if member else track


def is_link(track: str) -> bool:
    """Whether a track is a link's; every other track is a stage's or a worker's."""
    return _LINK.fullmatch(track) is not None or _HOST.fullmatch(track) is not None


def _host_stage(track: str) -> tuple[int, int] | None:
    """The stage and member whose link to its hosts' memory a track is; None where it is none."""
    match = _HOST.fullmatch(track)
    return (int(match[1] or match[2]), int(match[3] or 0)) if match else None


def link_stages(track: str) -> tuple[int, ...]:
    """The stages of a link's track, the one that sends first; none where it is not a link's.

    Args:
        track: the name of a track.

    Returns:
        Two indices of stages, or nothing.

    Example:
        >>> link_stages(link_track(0, 1)), link_stages(stage_track(0))
        ((0, 1), ())
    """
    match = _LINK.fullmatch(track)
    return (int(match[1]), int(match[2])) if match else ()


@dataclass(frozen=True)
class Event:
    """One thing that occupied one track for a while.

    Args:
        track: who was busy: ``"stage 0"``, ``"link 0->1"``, or a worker's own name.
        name: what is written on it, e.g. ``"F3"``.
        kind: what it was: ``"F"``, ``"R"``, ``"B"``, ``"W"``,
            ``"send"``, ``"update"``, or a runtime's own word.
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
        """All tracks from the first stage to the last, its members followed by its links."""
        return tuple(sorted({event.track for event in self.events}, key=_track_key))

    @property
    def stage_tracks(self) -> tuple[str, ...]:
        """The tracks that compute: all but the links."""
        return tuple(track for track in self.tracks if not is_link(track))

    def member_tracks(self, stage: int) -> tuple[str, ...]:
        """The tracks of a stage's members, the first one's first.

        Args:
            stage: the stage.
        """
        tracks = self.stage_tracks
        return tuple(track for track in tracks if _stage_and_member(track)[:1] == (stage,))

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

    def from_stage(self, first: int) -> Timeline:
        """The same with stages counted from another number than 0.

        Args:
            first: the number of the first stage.

        Returns:
            The timeline.
        """
        if first == 0:
            return self

        def moved(track: str) -> str:
            host = _host_stage(track)
            if host is not None:
                inward = track == host_track(*host, inward=True)
                return host_track(first + host[0], host[1], inward=inward)
            if is_link(track):
                source, target = link_stages(track)
                return link_track(first + source, first + target)
            stage, member = _stage_and_member(track)
            return stage_track(first + stage, member)

        return Timeline(tuple(replace(event, track=moved(event.track)) for event in self.events))

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


def live_over_time(timeline: Timeline, track: str) -> tuple[tuple[float, int], ...]:
    """How many microbatches' activations a stage holds at every moment.

    A microbatch is held from the start of its forward event to the end of its weight-gradient
    event, or of its backward event where it has none.

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
    events = timeline.on(track)
    split = {event.microbatch for event in events if event.kind == "W"}
    for event in events:
        if event.kind == "F":
            changes[event.start] = changes.get(event.start, 0) + 1
        if event.kind == "W" or (event.kind == "B" and event.microbatch not in split):
            changes[event.end] = changes.get(event.end, 0) - 1
    held, steps = 0, []
    for moment, change in sorted(changes.items()):
        held += change
        if change:
            steps.append((moment, held))
    return tuple(steps)


def _stage_and_member(track: str) -> tuple[int, ...]:
    """The stage and the member of a track; none where it is a link's or a worker's own."""
    match = _STAGE.fullmatch(track)
    return (int(match[1]), int(match[2] or 0)) if match else ()


def _track_key(track: str) -> tuple[Any, ...]:
    """Sorts stage 2 before stage 10, members in turn, a link after the lower of its two stages."""
    numbers = [int(number) for number in re.findall(r"\d+", track)]
    if is_link(track):
        ends = link_stages(track) or (_host_stage(track) or (0,))[:1]
        return ([min(ends)], 1, numbers, track)
    if _stage_and_member(track):
        return (numbers[:1], 0, numbers, track)
    return (numbers, 0, [], track)


def _owner(track: str, stage_tracks: Container[str]) -> str:
    """The process of a track: a link belongs to the stage that sends on it, if it is there."""
    stages, host = link_stages(track), _host_stage(track)
    if host is not None:
        stages = (host[0], host[0])
    sender = stage_track(stages[0]) if stages else track
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
