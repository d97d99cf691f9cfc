"""Pictures of a plan in HTML: its stages against the layers, and the memory of each."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetjax.mesh.cluster import Cluster
from hetjax.mesh.quantities import format_bytes, format_seconds
from hetjax.report.timeline_style import Style

if TYPE_CHECKING:
    from hetjax.planner.plan.plan import Plan
    from hetjax.planner.plan.prediction import StagePrediction
    from hetjax.report.layer_table import ModuleRun

_COLORS = ("#3b78b8", "#e2a13a", "#3f9c6d", "#a8557a", "#6a5a9c", "#5f97a0")
_STATE = Style("parameters, gradients and optimizer state", "#3b78b8")
_LIVE = Style("activations of live microbatches", "#3f9c6d")
_WORKING = Style("working memory of a task", "#e2a13a")
_NARROW = 2.5
"""Percent of the width below which a box has no room for a letter."""


def subcluster_styles(cluster: Cluster) -> dict[str, Style]:
    """The colour of each subcluster.

    Args:
        cluster: the cluster.

    Returns:
        Styles by the subclusters' names; colours repeat where there are many.
    """
    return {
        subcluster.name: Style(f"{subcluster.name} ({subcluster.kind.name})", color)
        for subcluster, color in zip(cluster.subclusters, itertools.cycle(_COLORS), strict=False)
    }


def stage_picture(plan: Plan, costs: Sequence[float], modules: Sequence[ModuleRun]) -> str:
    """Which stage holds which layers: a lane a member, layers from left to right by their cost.

    Args:
        plan: a plan with a prediction.
        costs: of each layer, in any unit.
        modules: the structure that the layers follow.

    Returns:
        HTML.
    """
    edges = _edges(costs)
    styles = subcluster_styles(plan.cluster)
    lines = [keys([styles[s.name] for s in plan.cluster.subclusters])]
    if modules:
        lines.append(_module_lane(modules, edges))
    for p, (first, pipeline) in enumerate(plan.numbered_pipelines()):
        if len(plan.pipelines) > 1:
            lines.append(
                f'<p class="pipeline">pipeline {p}: {pipeline.num_microbatches} microbatches of '
                f"{pipeline.microbatch_size}</p>"
            )
        for s, stage in enumerate(pipeline.stages):
            predicted = plan.predicted.stages[first + s]
            begin, end = (edges[layer] for layer in stage.layers)
            layers = f"{stage.layers[0]}&ndash;{stage.layers[1] - 1}"
            seconds = format_seconds(predicted.compute_seconds)
            for submesh in stage.submeshes:
                drawn = box(begin, end - begin, styles[submesh.subcluster], layers)
                lines.append(lane(f"{first + s} {submesh}", drawn, f"{seconds} each"))
    return "\n".join(lines)


def memory_picture(plan: Plan) -> str:
    """What fills the memory of one device of each stage: a bar a stage, as long as it is large.

    Args:
        plan: a plan with a prediction.

    Returns:
        HTML.
    """
    largest = max(stage.memory_limit_bytes for stage in plan.predicted.stages)
    largest = max(largest, *(stage.memory_bytes for stage in plan.predicted.stages))
    lines = [keys([_STATE, _LIVE, _WORKING, Style("left", "var(--lane)")])]
    for s, (stage, held) in enumerate(zip(plan.stages, plan.predicted.stages, strict=True)):
        used, limit = format_bytes(held.memory_bytes), format_bytes(held.memory_limit_bytes)
        label = f"{s} {stage.devices_text}"
        lines.append(lane(label, _memory_bar(held, largest), f"{used} of {limit}", "memory"))
    return "\n".join(lines)


def share_lane(label: str, share: float, color: str = _COLORS[0]) -> str:
    """A share as a bar.

    Args:
        label: what stands before it.
        share: from 0 to 1.
        color: of the bar.

    Returns:
        HTML.
    """
    bar = f'<i style="left: 0; width: {min(share, 1):.2%}; background: {color}"></i>'
    return lane(label, bar, f"{share:.0%}", "limits")


def _memory_bar(held: StagePrediction, largest: float) -> str:
    live = held.memory_bytes - held.state_bytes - held.working_bytes
    room = f'<i class="room" style="left: 0; width: {held.memory_limit_bytes / largest:.2%}"></i>'
    parts, left = [room], 0.0
    for style, size in ((_STATE, held.state_bytes), (_LIVE, live), (_WORKING, held.working_bytes)):
        width = 100 * size / largest
        if width > 0:
            parts.append(box(left, width, style, format_bytes(size), room=8.0))
        left += width
    return "".join(parts)


def _module_lane(modules: Sequence[ModuleRun], edges: Sequence[float]) -> str:
    boxes = []
    for run in modules:
        begin, end = edges[run.layers[0]], edges[run.layers[1]]
        name = html.escape(run.module)
        shown = name if end - begin >= _NARROW / 2 else ""
        boxes.append(
            f'<i style="left: {begin:.3f}%; width: {end - begin:.3f}%" '
            f'title="module {name or "(between)"}, layers {run.layers[0]} to '
            f'{run.layers[1] - 1}">{shown}</i>'
        )
    return lane("modules", "".join(boxes), "", "modules")


def _edges(costs: Sequence[float]) -> list[float]:
    """Where layers begin, and the end, in percent of all; none without any width."""
    least = sum(costs) / max(1, len(costs)) / 20 or 1.0
    sums = [0.0, *itertools.accumulate(max(cost, least) for cost in costs)]
    return [100 * each / sums[-1] for each in sums]


def box(left: float, width: float, style: Style, text: str, room: float = _NARROW * 2) -> str:
    """A box in a lane.

    Args:
        left: where it begins, in percent of the lane.
        width: how wide it is, in percent.
        style: its colour, and what it is of.
        text: HTML of what stands in it.
        room: the least width, in percent, at which that is shown.

    Returns:
        HTML.
    """
    ink = f"; color: {style.ink}" if style.color.startswith("#") else ""
    return (
        f'<i style="left: {left:.3f}%; width: {width:.3f}%; background: {style.color}{ink}" '
        f'title="{html.escape(style.label)}: {text}">{text if width >= room else ""}</i>'
    )


def lane(label: str, inside: str, after: str, sort: str = "") -> str:
    """A lane with boxes.

    Args:
        label: what stands before it; its end is hidden where it is long, and told by a pointer.
        inside: HTML of its boxes.
        after: what stands behind it.
        sort: its class in the style sheet.

    Returns:
        HTML.
    """
    told = html.escape(label)
    return (
        f'<div class="lane {sort}"><b title="{told}">{told}</b><div>{inside}</div>'
        f"<span>{html.escape(after)}</span></div>"
    )


def keys(styles: Sequence[Style]) -> str:
    """What colours stand for.

    Args:
        styles: the colours.

    Returns:
        HTML.
    """
    items = (
        f'<li><i class="key" style="background: {style.color}"></i>{html.escape(style.label)}</li>'
        for style in styles
    )
    return f'<ul class="keys">{"".join(items)}</ul>'
