"""How much of the communication between stages is hidden behind computation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from hetjax.pipeline.timeline.timeline import Timeline, link_stages, stage_track

Span = tuple[float, float]
"""A start and an end in seconds."""

_COMPUTATIONS = ("F", "R", "B", "W")


def overlap(timeline: Timeline) -> dict[str, float]:
    """For every link direction, how much of its steady transfers nobody waits for.

    Of the time in a link's steady phase during which something is on that direction of it, this is
    the share during which the receiving stage does not stand still for what is to arrive over it.
    What a worker does between two tasks, and waits for anything else, are not the link's. Before
    and after the steady phase, while the pipeline fills and drains, some waits cannot be hidden by
    any schedule.

    Args:
        timeline: a timeline, predicted or measured, with the tracks of stages and links.

    Returns:
        A share from 0 to 1 for every link track between two stages that is used in its steady
        phase. GPipe has none: its stages are done with forward passes when backward passes begin.

    Example:
        >>> from hetjax.pipeline import StepTimes, h_1f1b, one_f_one_b, simulate_schedule
        >>> times = StepTimes([1.0] * 2, [1.0] * 2, [1.8], [1.8])
        >>> shares = overlap(simulate_schedule(h_1f1b(2, 12, times.compute, [1.8]), times))
        >>> {track: round(share, 3) for track, share in shares.items()}
        {'link 0->1': 1.0, 'link 1->0': 1.0}
        >>> overlap(simulate_schedule(one_f_one_b(2, 12), times))["link 0->1"] < 0.6
        True
    """
    shares = {}
    for track in timeline.tracks:
        phase = steady_phase(timeline, track) if len({*link_stages(track)}) > 1 else None
        if phase is None:
            continue
        sends = _within(((event.start, event.end) for event in timeline.on(track)), phase)
        waits = _within(_waits(timeline, track), phase)
        if sends:
            # What is both is what each is alone less what is one or the other.
            exposed = _length(sends) + _length(waits) - _length(_joined([*sends, *waits]))
            shares[track] = min(max(1 - exposed / _length(sends), 0.0), 1.0)
    return shares


def _waits(timeline: Timeline, track: str) -> Iterator[Span]:
    """When the receiver of a link stood still for what was to arrive over it."""
    arrivals = {event.name: event.end for event in timeline.on(track)}
    tasks = [e for e in timeline.on(stage_track(link_stages(track)[1])) if e.kind in _COMPUTATIONS]
    for before, task in itertools.pairwise(tasks):
        arrival = min(arrivals.get(task.name, before.end), task.start)
        if arrival > before.end:
            yield before.end, arrival


def steady_phase(timeline: Timeline, track: str) -> Span | None:
    """While both stages of a link alternate forward and backward passes.

    Args:
        timeline: a timeline, predicted or measured.
        track: the track of one of the link's directions.

    Returns:
        From when both stages have started a first backward pass to when one of them starts its
        last forward pass, in seconds; None where that is no time, or the track is not a link's.
    """
    first_backwards, last_forwards = [], []
    for stage in link_stages(track):
        events = timeline.on(stage_track(stage))
        first_backwards += [event.start for event in events if event.kind == "B"][:1]
        last_forwards += [event.start for event in events if event.kind == "F"][-1:]
    if len(first_backwards) < 2 or len(last_forwards) < 2:
        return None
    start, end = max(first_backwards), min(last_forwards)
    return (start, end) if start < end else None


def _within(spans: Iterable[Span], phase: Span) -> list[Span]:
    """Spans as far as they lie in a phase, without what overlaps."""
    start, end = phase
    clipped = [(max(a, start), min(b, end)) for a, b in spans]
    return _joined([(a, b) for a, b in clipped if a < b])


def _joined(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that do not overlap."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
