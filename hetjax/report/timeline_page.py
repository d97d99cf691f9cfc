"""A timeline as a page: one HTML file that opens from the file system and needs no network.

The page is put together from the files of the same name beside this one (`.html`, `.css`, `.js`),
`timeline_chart.html` and the events as JSON.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from hetjax.files import replacing
from hetjax.pipeline.timeline.timeline import Event, Timeline, is_link
from hetjax.report.shortened import shortened
from hetjax.report.timeline_style import Style, event_style, styles_of

_TITLE = "Timeline of a training step"
_DIGITS = 9
"""Decimals of a second that are kept: nanoseconds."""


def write_timeline_page(
    path: str | os.PathLike[str],
    measured: Timeline,
    predicted: Timeline | None = None,
    title: str | None = None,
) -> None:
    """Writes a timeline as a page; with `predicted`, the prediction above it on the same axis.

    A stage is a row of boxes, one a task, with its share of idle time at the right; a direction of
    a link is a thin row below its first stage. The wheel zooms, dragging moves, a double click
    shows all again; a box under the pointer says what it is and what was predicted of it. The
    keyboard does all of it too.

    Args:
        path: the HTML file to write, whole or not at all; it needs no other.
        measured: the timeline to draw; a predicted one, where it is the only one.
        predicted: what was predicted of the same step.
        title: what stands above.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> step = Timeline((Event("stage 0", "F0", "F", 0, start=0.0, end=1.0),))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_timeline_page(Path(folder) / "timeline.html", step, title="a < b")
        ...     "<title>a &lt; b</title>" in (Path(folder) / "timeline.html").read_text()
        True
    """
    panels = [("", measured)]
    if predicted is not None:
        panels = [("predicted", predicted), ("measured", measured)]
    page = fill(
        part_of_page("timeline_page.html"),
        title=html.escape(title or _TITLE),
        style=part_of_page("timeline_page.css"),
        chart=timeline_chart(panels),
        script=part_of_page("timeline_page.js"),
    )
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def timeline_chart(panels: Sequence[tuple[str, Timeline]], most_boxes: int | None = None) -> str:
    """What a page needs of HTML to draw timelines; the style and the script go with it.

    Args:
        panels: timelines and their names, on one axis.
        most_boxes: about how many boxes a timeline has at most; None for all of its events.

    Returns:
        HTML.
    """
    data = _json_in_html(_content(panels, most_boxes))
    return fill(part_of_page("timeline_chart.html"), data=data)


def part_of_page(name: str) -> str:
    """The text of one of the files beside this one."""
    return (resources.files("hetjax.report") / name).read_text(encoding="utf-8")


def fill(template: str, **parts: str) -> str:
    """Puts parts into ``{{name}}``, all at once: what is put in is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _json_in_html(value: object) -> str:
    """JSON in which nothing ends a script element or begins a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _content(
    panels: Sequence[tuple[str, Timeline]], most_boxes: int | None = None
) -> dict[str, Any]:
    """What the page's script draws."""
    drawn = [
        timeline if most_boxes is None else shortened(timeline, most_boxes)
        for _, timeline in panels
    ]
    styles = styles_of(event for timeline in drawn for event in timeline.events)
    return {
        "seconds": max(timeline.makespan for _, timeline in panels),
        "styles": [{**asdict(style), "ink": style.ink} for style in styles],
        "panels": [
            {
                "name": name,
                "seconds": timeline.makespan,
                "bubble": timeline.bubble_fraction,
                "rows": [_row(timeline, boxes, track, styles) for track in timeline.tracks],
            }
            for (name, timeline), boxes in zip(panels, drawn, strict=True)
        ],
    }


def _row(
    timeline: Timeline, boxes: Timeline, track: str, styles: Sequence[Style]
) -> dict[str, Any]:
    return {
        "track": track,
        "link": is_link(track),
        "bubble": timeline.bubble(track),
        "boxes": [_box(event, timeline.start, styles) for event in boxes.on(track)],
    }


def _box(event: Event, zero: float, styles: Sequence[Style]) -> list[Any]:
    """Name, style, microbatch, start and duration in seconds, and bytes."""
    start, duration = round(event.start - zero, _DIGITS), round(event.duration, _DIGITS)
    style = styles.index(event_style(event))
    return [event.name, style, event.microbatch, start, duration, event.num_bytes]
