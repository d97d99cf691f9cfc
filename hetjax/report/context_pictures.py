"""Pictures of a context split in HTML: who has which tokens and heads; the rings; other systems."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from hetjax.mesh.cluster import Cluster
from hetjax.report.context_table import (
    heads_text,
    owners_text,
    system_cells,
)
from hetjax.report.page_parts import page_table
from hetjax.report.plan_pictures import box, keys, lane, subcluster_styles

if TYPE_CHECKING:
    from hetjax.planner.hexiseq.context_report import ContextReport, DeviceRow


def context_article(report: ContextReport, cluster: Cluster) -> str:
    """How devices share sequences, as a part of a page.

    Args:
        report: the split.
        cluster: the cluster.

    Returns:
        HTML.
    """
    styles = subcluster_styles(cluster)

    def boxes(row: DeviceRow, runs: tuple[tuple[int, int], ...], whole: int) -> str:
        style = styles[row.subcluster]
        return "".join(
            box(100 * start / whole, 100 * (stop - start) / whole, style, html.escape(row.device))
            for start, stop in runs
            if stop > start
        )

    lines = [
        keys([styles[each.name] for each in cluster.subclusters]),
        f'<p class="pipeline">{report.length:,} tokens, by their positions</p>',
    ]
    for number, group in enumerate(report.groups):
        inside = "".join(boxes(row, row.positions, report.length) for row in group.devices)
        lines.append(lane(f"group {number}", inside, f"{group.length:,} tokens", "context"))
    lines.append(f'<p class="pipeline">{report.query_heads} query heads, in each group</p>')
    for number, group in enumerate(report.groups):
        inside = "".join(boxes(row, (row.heads,), report.query_heads) for row in group.devices)
        count = sum(row.size for row in group.devices)
        lines.append(lane(f"group {number}", inside, f"{count} devices", "context"))
    return "\n".join(
        (
            "<article>",
            "<h2>Who shares the sequence</h2>",
            *lines,
            _rings(report),
            _systems(report),
            "</article>",
        )
    )


def _rings(report: ContextReport) -> str:
    if not report.rings:
        return ""
    rows = [
        [
            heads_text(ring.heads),
            heads_text(ring.key_value_heads),
            html.escape(owners_text(ring.owners)),
        ]
        for ring in report.rings
    ]
    headings = ["query heads", "heads of keys and values", "go round among"]
    return page_table(headings, rows, text=3)


def _systems(report: ContextReport) -> str:
    rows = [system_cells(row, report.seconds) for row in report.systems]
    headings = ["system", "groups", "layers are", "sequences at once", "step", "times as long"]
    note = '<p class="note">Steps of systems are predicted by the scheduler\'s model.</p>'
    return page_table(headings, rows, text=3) + note
