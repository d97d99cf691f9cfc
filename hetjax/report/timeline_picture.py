"""A timeline as a picture: a row for every stage, a thin one for every direction of a link."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetjax.files import replacing
from hetjax.mesh.quantities import format_seconds
from hetjax.pipeline.timeline.timeline import Event, Timeline, is_link
from hetjax.report.timeline_style import Style, event_style, styles_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_INCHES = 13.0
_DOTS_PER_INCH = 150
_STAGE_INCHES = 0.42
_LINK_INCHES = 0.13
_GAP_INCHES = 0.07
_MARGINS_INCHES = {
    "left": 1.15,
    "right": 1.1,
    "title": 0.35,
    "top": 0.4,
    "bottom": 0.95,
    "between": 0.65,
}
_POINT = 1 / 72
_NAME_SIZE = 10.0
_NUMBER_SIZES = (8.0, 7.0, 6.0)

_QUIET, _INK, _LANE = "#6b7280", "#1f2933", "#f3f4f6"


@dataclass(frozen=True)
class _PictureRow:
    """Where one track is drawn: `bottom` and `height` in inches from the panel's lower edge."""

    track: str
    bottom: float
    height: float


def draw_timeline(
    timeline: Timeline,
    path: str | os.PathLike[str] | None = None,
    title: str | None = None,
    predicted: Timeline | None = None,
) -> Figure:
    """Draws a timeline; with `predicted`, the prediction above it on the same axis of time.

    A stage is a row of numbered boxes, one a task, and blank where it waits; its share of idle
    time stands at the right. A direction of a link is a thin row below its first stage.

    Args:
        timeline: the timeline to draw; the measured one, if there are two.
        path: a PNG file to write, whole or not at all; None writes nothing.
        title: what stands above the picture.
        predicted: what was predicted of the same step.

    Returns:
        The figure, which a notebook shows by itself.

    Example:
        >>> from hetjax.pipeline import StepTimes, one_f_one_b, simulate_schedule
        >>> times = StepTimes([1.0, 1.0], [2.0, 2.0], [0.1], [0.1])
        >>> step = simulate_schedule(one_f_one_b(2, 4), times)
        >>> draw_timeline(step, title="1F1B").get_size_inches().tolist()[0] > 5
        True
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from hetjax.report.figure import ShownFigure

    panels = [("", timeline)]
    if predicted is not None:
        panels = [("predicted", predicted), ("measured", timeline)]
    layouts = [_layout(panel.tracks) for _, panel in panels]
    heights = [rows[0].bottom + rows[0].height if rows else _STAGE_INCHES for rows in layouts]

    names = [track for _, panel in panels for track in panel.stage_tracks]
    margins = {**_MARGINS_INCHES, "left": _left_margin(names)}
    above = margins["top"] + (margins["title"] if title else 0.0)
    between = margins["between"] * (len(panels) - 1)
    total = above + sum(heights) + between + margins["bottom"]
    figure = ShownFigure(figsize=(_WIDTH_INCHES, total), dpi=_DOTS_PER_INCH, facecolor="white")
    FigureCanvasAgg(figure)
    width = _WIDTH_INCHES - margins["left"] - margins["right"]
    milliseconds = max(panel.makespan for _, panel in panels) * 1e3 or 1.0

    top = total - above
    for (name, panel), rows, height in zip(panels, layouts, heights, strict=True):
        top -= height
        box = (margins["left"], top, width, height)
        axes = figure.add_axes(
            (box[0] / _WIDTH_INCHES, box[1] / total, box[2] / _WIDTH_INCHES, box[3] / total)
        )
        axes.set(xlim=(0, milliseconds), ylim=(-_GAP_INCHES, height + _GAP_INCHES))
        _draw_panel(axes, panel.from_zero(), rows, width / milliseconds)
        _caption(axes, name, panel)
        is_last = panel is panels[-1][1]
        axes.tick_params(axis="x", labelbottom=is_last, bottom=is_last, colors=_QUIET, length=3)
        if is_last:
            axes.set_xlabel("time (ms)", color=_INK)
        top -= margins["between"]

    if title:
        x, y = margins["left"] / _WIDTH_INCHES, 1 - 0.17 / total
        # Names may have dollars, which Matplotlib takes for mathematics.
        text = figure.text(x, y, title, fontsize=13, weight="bold", color=_INK, va="top")
        text.set_parse_math(False)
    events = [event for _, panel in panels for event in panel.events]
    _draw_legend(figure, events, margins["left"], total)
    if path is not None:
        with replacing(path) as temporary:
            figure.savefig(temporary, format="png")
    return figure


def _left_margin(names: Sequence[str]) -> float:
    """Inches in which the longest name of a row stands."""
    longest = max(map(len, names), default=0)
    return max(_MARGINS_INCHES["left"], (0.6 * longest + 2) * _NAME_SIZE * _POINT)


def _layout(tracks: Sequence[str]) -> list[_PictureRow]:
    """Rows from the first track, at the top, to the last, which stands on 0."""
    rows: list[_PictureRow] = []
    bottom = 0.0
    for track in reversed(tracks):
        height = _LINK_INCHES if is_link(track) else _STAGE_INCHES
        rows.append(_PictureRow(track, bottom, height))
        bottom += height + _GAP_INCHES
    return rows[::-1]


def _draw_panel(
    axes: Axes, timeline: Timeline, rows: Sequence[_PictureRow], inches_per_ms: float
) -> None:
    """Draws every row's lane, boxes and labels."""
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_yticks([])
    axes.grid(axis="x", color="#dfe3e8", linewidth=0.6)
    axes.set_axisbelow(True)
    for row in rows:
        link = is_link(row.track)
        middle = row.bottom + row.height / 2
        axes.axhspan(row.bottom, row.bottom + row.height, color=_LANE, linewidth=0, zorder=0.4)
        axes.annotate(
            row.track,
            (0, middle),
            xycoords=("axes fraction", "data"),
            xytext=(-8, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=6.5 if link else _NAME_SIZE,
            color=_QUIET if link else _INK,
        )
        if not link:
            axes.annotate(
                f"bubble {timeline.bubble(row.track):.0%}",
                (1, middle),
                xycoords=("axes fraction", "data"),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=_QUIET,
            )
        _draw_boxes(axes, timeline.on(row.track), row, inches_per_ms)


def _draw_boxes(
    axes: Axes, events: Sequence[Event], row: _PictureRow, inches_per_ms: float
) -> None:
    """One box an event; each sort of event numbered by microbatch, where the numbers fit."""
    groups: dict[Style, list[Event]] = {}
    for event in events:
        groups.setdefault(event_style(event), []).append(event)
    for style, group in groups.items():
        usual = statistics.median(event.duration for event in group) * 1e3 * inches_per_ms
        axes.broken_barh(
            [(event.start * 1e3, event.duration * 1e3) for event in group],
            (row.bottom, row.height),
            facecolor=style.color,
            edgecolor="white",
            # An edge would swallow a box as thin as itself.
            linewidth=0.5 if usual > 2 * _POINT else 0.0,
        )
        if not is_link(row.track):
            _number_boxes(axes, group, row, usual, style.ink)


def _number_boxes(
    axes: Axes, events: Sequence[Event], row: _PictureRow, usual: float, color: str
) -> None:
    """Numbers all boxes of a group in the largest size that fits `usual` inches, or none."""
    longest = max(len(_number(event)) for event in events)
    size = next((s for s in _NUMBER_SIZES if (0.64 * longest + 0.1) * s * _POINT <= usual), None)
    if size is None:
        return
    for event in events:
        axes.text(
            (event.start + event.end) / 2 * 1e3,
            row.bottom + row.height / 2,
            _number(event),
            ha="center",
            va="center_baseline",
            fontsize=size,
            color=color,
            clip_on=True,
        )


def _number(event: Event) -> str:
    return "" if event.microbatch is None else str(event.microbatch)


def _caption(axes: Axes, name: str, timeline: Timeline) -> None:
    """One line above a panel: what it is, how long it takes, its share of idle time."""
    figures = f"{format_seconds(timeline.makespan)}, bubble {timeline.bubble_fraction:.0%}"
    axes.annotate(
        f"{name}: {figures}" if name else figures,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 6),
        textcoords="offset points",
        fontsize=10,
        color=_INK,
    )


def _draw_legend(figure: Figure, events: Sequence[Event], left: float, total: float) -> None:
    """One entry for each sort of event there is, below the axis of time."""
    from matplotlib.patches import Patch

    styles = styles_of(events)
    if not styles:
        return
    figure.legend(
        handles=[Patch(color=style.color, label=style.label) for style in styles],
        loc="lower left",
        bbox_to_anchor=(left / _WIDTH_INCHES, 0.12 / total),
        borderaxespad=0,
        borderpad=0,
        ncols=len(styles),
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        columnspacing=1.6,
        labelcolor=_INK,
    )
