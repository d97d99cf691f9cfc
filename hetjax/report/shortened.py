"""Long timelines in few boxes: both ends as they are, the middle as one box a row."""

from __future__ import annotations

from hetjax.pipeline.timeline.timeline import Event, Timeline

MIDDLE = "the middle of the step, not drawn"
"""The kind of the events that stand for what is left out."""


def shortened(timeline: Timeline, most: int) -> Timeline:
    """A timeline of about so many events.

    Args:
        timeline: the timeline.
        most: how many events may be kept.

    Returns:
        The timeline itself where it has no more; else its first and its last events, and between
        them one event a track that spans what was left out.

    Example:
        >>> events = tuple(Event("stage 0", f"F{m}", "F", m, m, m + 1.0) for m in range(100))
        >>> [event.name for event in shortened(Timeline(events), 4).events]
        ['F0', 'F1', 'F98', 'F99', '96 events']
    """
    if len(timeline.events) <= most:
        return timeline
    events = sorted(timeline.events, key=lambda event: (event.start, event.end))
    half = most // 2
    middle: dict[str, list[Event]] = {}
    for event in events[half:-half]:
        middle.setdefault(event.track, []).append(event)
    merged = (_merged(track, each) for track, each in middle.items())
    return Timeline((*events[:half], *events[-half:], *merged))


def _merged(track: str, events: list[Event]) -> Event:
    end = max(event.end for event in events)
    return Event(track, f"{len(events)} events", MIDDLE, None, events[0].start, end)
