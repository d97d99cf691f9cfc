"""How much of the communication between stages is hidden behind computation."""

from __future__ import annotations

from collections.abc import Iterable

from hetjax.pipeline.timeline import Event, Timeline, link_stages, stage_track

Span = tuple[float, float]
"""A start and an end in seconds."""

_COMPUTATIONS = ("F", "R", "B", "W")


def overlap(timeline: Timeline) -> dict[str, float]:
    """For every link direction, how much of its steady transfers the receiver computes through.

    Of the time in a link's steady phase during which something is on that direction of it, this is
    the share during which the receiving stage computes. At 1 nobody waits for the link. Before and
    after the steady phase, while the pipeline fills and drains, some waits cannot be hidden by any
    schedule.

    Args:
        timeline: a timeline, predicted or measured, with the tracks of stages and links.

    Returns:
        A share from 0 to 1 for every link track that is used in its steady phase. GPipe has none:
        its stages are done with forward passes when backward passes begin.

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
        phase = steady_phase(timeline, track)
        if phase is None:
            continue
        receiver = stage_track(link_stages(track)[1])
        computations = [e for e in timeline.on(receiver) if e.kind in _COMPUTATIONS]
        sends, computing = _busy(timeline.on(track), phase), _busy(computations, phase)
        if sends:
            # What both do is what each does alone less what one or the other does.
            either = _length(_joined([*sends, *computing]))
            hidden = _length(sends) + _length(computing) - either
            shares[track] = min(max(hidden / _length(sends), 0.0), 1.0)
    return shares


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


def _busy(events: Iterable[Event], phase: Span) -> list[Span]:
    """When something went on within a phase, without what overlaps."""
    start, end = phase
    clipped = [(max(event.start, start), min(event.end, end)) for event in events]
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
