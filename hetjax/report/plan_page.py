"""A plan as a page: one HTML file that opens from the file system and needs no network.

The page is put together from `plan_page.html` and `.css`, and from what a timeline page is made of.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hetjax.files import replacing
from hetjax.mesh.cluster import Cluster
from hetjax.mesh.links import Link
from hetjax.mesh.quantities import format_bytes, format_rate, format_seconds
from hetjax.pipeline.timeline.timeline import Timeline
from hetjax.report.context_pictures import context_article
from hetjax.report.page_parts import figures_list, page_table
from hetjax.report.parts_table import name_of_whole, side_by_side_row
from hetjax.report.plan_pictures import (
    memory_picture,
    share_lane,
    stage_picture,
    subcluster_styles,
)
from hetjax.report.tables import format_efficiency
from hetjax.report.timeline_page import fill, part_of_page, timeline_chart

if TYPE_CHECKING:
    from hetjax.planner.harp.mixing import PartAlone
    from hetjax.planner.hexiseq.context_report import ContextReport
    from hetjax.planner.plan.plan import Plan
    from hetjax.report.alternatives_table import OtherPlan
    from hetjax.report.layer_table import ModuleRun

MOST_BOXES = 12_000
"""More of them take seconds to draw; a timeline of more shows both its ends."""


@dataclass(frozen=True)
class PlanReport:
    """What a plan's page shows.

    Args:
        title: what stands above.
        summary: one line below it, before the plan's notes.
        plan: the plan, with a prediction.
        timeline: the step as it is predicted.
        dtype: the dtype whose peak rate is shown.
        figures: names of figures, and the figures as people read them.
        limits: what limits the plan, and what share of it is used, from 0 to 1.
        costs: of each layer, in any unit.
        modules: the structure that the layers follow; empty where there is none.
        alternatives: the next best plans.
        alone: what parts of the cluster would do.
        context: how devices share sequences; None where they share none.
        moves: by stage, one microbatch as its members share the context.
    """

    title: str
    summary: str
    plan: Plan
    timeline: Timeline
    dtype: str
    figures: Mapping[str, str]
    limits: Sequence[tuple[str, float]]
    costs: Sequence[float]
    modules: Sequence[ModuleRun] = ()
    alternatives: Sequence[OtherPlan] = ()
    alone: Sequence[PartAlone] = ()
    context: ContextReport | None = None
    moves: Mapping[int, Timeline] = field(default_factory=dict)


def write_plan_page(path: str | os.PathLike[str], report: PlanReport) -> None:
    """Writes a plan as a page.

    Args:
        path: the HTML file to write, whole or not at all; it needs no other.
        report: what it shows.
    """
    plan = report.plan
    page = fill(
        part_of_page("plan_page.html"),
        title=html.escape(report.title),
        summary="<br>".join(map(html.escape, (report.summary, *plan.notes))),
        style=part_of_page("timeline_page.css") + part_of_page("plan_page.css"),
        figures=figures_list(report.figures),
        limits="\n".join(share_lane(words, share) for words, share in report.limits),
        cluster=_cluster(plan.cluster, report.dtype),
        context=context_article(report.context, plan.cluster) if report.context else "",
        stages=stage_picture(plan, report.costs, report.modules) + _stages(plan),
        chart=timeline_chart([*_panels(report)], MOST_BOXES) + _left_out(report.timeline),
        memory=memory_picture(plan),
        alternatives=_alternatives(report),
        parts=_parts(report),
        script=part_of_page("timeline_page.js"),
    )
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _panels(report: PlanReport) -> Iterator[tuple[str, Timeline]]:
    """The step's timeline, and what goes on inside stages whose members share the context."""
    yield "the step" if report.moves else "", report.timeline
    for stage, timeline in report.moves.items():
        yield f"inside stage {stage}, one microbatch", timeline


def _cluster(cluster: Cluster, dtype: str) -> str:
    styles = subcluster_styles(cluster)
    rows = [
        [
            f'<i class="key" style="background: {styles[each.name].color}"></i>'
            + html.escape(each.name),
            html.escape(each.kind.name),
            f"{each.nodes} &times; {each.devices_per_node}",
            format_rate(each.kind.flops(dtype), "FLOP/s"),
            format_efficiency(each.kind, dtype),
            format_bytes(each.kind.memory_bytes),
            format_rate(each.kind.memory_bandwidth, "B/s"),
            _link(each.intra_node) if each.devices_per_node > 1 else "",
            _link(each.inter_node) if each.nodes > 1 else "",
        ]
        for each in cluster.subclusters
    ]
    headings = [
        "subcluster",
        "kind",
        "nodes &times; devices",
        html.escape(dtype),
        "products reach",
        "memory",
        "memory bandwidth",
        "link in a node",
        "between nodes",
    ]
    links = "; ".join(
        f"{html.escape(a)} to {html.escape(b)}: {_link(link)}" for a, b, link in cluster.links
    )
    note = f'<p class="note">{links}</p>' if links else ""
    return page_table(headings, rows, text=2) + note


def _stages(plan: Plan) -> str:
    rows = []
    for first, pipeline in plan.numbered_pipelines():
        for s, stage in enumerate(pipeline.stages):
            held = plan.predicted.stages[first + s]
            rows.append(
                [
                    str(first + s),
                    f"{stage.layers[0]}&ndash;{stage.layers[1] - 1}",
                    html.escape(stage.devices_text),
                    html.escape(stage.sharding_text),
                    str(pipeline.schedule.warm_up_counts[s]),
                    format_seconds(held.compute_seconds),
                    format_seconds(held.communication_seconds)
                    if held.communication_seconds
                    else "",
                    f"{held.bubble:.0%}",
                ]
            )
    headings = ["stage", "layers", "submesh", "sharding", "warm-up N<sub>i</sub>"]
    headings += ["compute t<sub>i</sub>", "to next c<sub>i</sub>", "bubble"]
    return page_table(headings, rows, text=4)


def _left_out(timeline: Timeline) -> str:
    if len(timeline.events) <= MOST_BOXES:
        return ""
    return (
        f'<p class="note">The step has {len(timeline.events):,} events; the first and the last '
        f"{MOST_BOXES // 2:,} of them are drawn.</p>"
    )


def _alternatives(report: PlanReport) -> str:
    if not report.alternatives:
        return ""
    step_time = report.plan.predicted.step_time
    rows = [["this plan", format_seconds(step_time), ""]]
    for each in report.alternatives:
        words, seconds = html.escape(each.difference), format_seconds(each.step_time)
        rows.append([words, seconds, f"{each.ratio - 1:+.1%}"])
    table = page_table(["the next best", "step time", "costs"], rows, text=1, words=True)
    return f"<article>\n<h2>What else could be done</h2>\n{table}\n</article>"


def _parts(report: PlanReport) -> str:
    if not report.alone:
        return ""
    step_time = report.plan.predicted.step_time
    used = report.plan.num_devices
    rows = [[name_of_whole(report.plan.cluster, used), format_seconds(step_time), ""]]
    for part in report.alone:
        name = html.escape(f"{' + '.join(part.subclusters)} ({part.num_devices})")
        if part.step_time is None:
            rows.append([name, "does not fit", ""])
        else:
            ratio = part.step_time / step_time
            rows.append([name, format_seconds(part.step_time), f"{ratio:.2f} times"])
    together = side_by_side_row(report.alone, step_time)
    if together is not None:
        rows.append([*together])
    table = page_table(["devices", "step time", "the whole is faster by"], rows, text=1)
    return f"<article>\n<h2>Does it pay to mix?</h2>\n{table}\n</article>"


def _link(link: Link) -> str:
    return f"{format_rate(link.bandwidth, 'B/s')}, {format_seconds(link.latency)}"
