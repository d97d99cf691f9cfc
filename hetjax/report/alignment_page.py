"""An alignment as a page: one HTML file that opens from the file system and needs no network."""

from __future__ import annotations

import html
import os
from typing import TYPE_CHECKING

from hetjax.files import replacing
from hetjax.report.alignment_pictures import Points, error_picture
from hetjax.report.alignment_table import (
    error_text,
    loss_error_text,
    operator_text,
    overflow_text,
    primal_text,
    shown_line,
    verdict_text,
)
from hetjax.report.page_parts import figures_list, page_table
from hetjax.report.timeline_page import fill, part_of_page

if TYPE_CHECKING:
    from hetjax.alignment.result import Alignment

_ROWS = 200
"""The most operators that are listed."""

_POINTS = 5000
"""The most operators of a kind that are drawn, those with the largest errors."""


def write_alignment_page(path: str | os.PathLike[str], aligned: Alignment) -> None:
    """Writes an alignment as a page.

    Args:
        path: the HTML file to write, whole or not at all; it needs no other.
        aligned: what it shows.
    """
    reference, comparison = aligned.reference, aligned.comparison
    summary = (
        f"{len(aligned.program.operators):,} operators of the forward and the backward pass; the "
        f"reference is {reference.name} ({reference.device}, products in {reference.products}); "
        f"errors over {comparison.tolerance:g} are more than rounding"
    )
    page = fill(
        part_of_page("alignment_page.html"),
        title=html.escape(f"{aligned.title}: precision"),
        summary=html.escape(summary),
        style=part_of_page("timeline_page.css") + part_of_page("plan_page.css"),
        figures=figures_list({each.kind.name: verdict_text(each) for each in aligned.verdicts}),
        kinds=_kinds(aligned),
        errors=error_picture(_errors(aligned), comparison.tolerance, "operators, in order"),
        operators=_operators(aligned),
        losses=_losses(aligned),
        opaque=_opaque(aligned),
    )
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _kinds(aligned: Alignment) -> str:
    rows = [
        [
            html.escape(each.kind.name),
            html.escape(each.kind.device),
            each.kind.products,
            str(each.named),
            "" if each.largest_error is None else error_text(each.largest_error),
            loss_error_text(each),
        ]
        for each in aligned.verdicts
    ]
    headings = ["kind", "device", "products in", "operators off", "largest error", "loss MRE"]
    notes = [
        overflow_text(each.kind, each.overflow)
        for each in aligned.trainings
        if each.overflow is not None
    ]
    said = "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes)
    return page_table(headings, rows, text=3) + said


def _errors(aligned: Alignment) -> list[Points]:
    return [
        Points(
            kind.name,
            [
                (
                    each.operator.number,
                    each.error,
                    f"{operator_text(each)}: {error_text(each.error)}, {shown_line(each.operator)}",
                )
                for each in aligned.comparison.ranked(kind.name)[:_POINTS]
            ],
        )
        for kind in aligned.kinds
    ]


def _operators(aligned: Alignment) -> str:
    ranked, named = aligned.comparison.ranked(), len(aligned.comparison.named())
    rows = [
        [
            html.escape(each.kind),
            error_text(each.error),
            html.escape(operator_text(each)),
            html.escape(shown_line(each.operator)),
            html.escape(primal_text(each.operator)),
            html.escape(each.operator.near),
            html.escape(each.operator.signature),
        ]
        for each in ranked[:_ROWS]
    ]
    headings = ["kind", "error", "operator", "from", "derived", "near parameter", "equation"]
    note = f"{named:,} of {len(ranked):,} are off by more than the tolerance."
    if len(ranked) > _ROWS:
        note += f" The first {_ROWS} are listed."
    return page_table(headings, rows, text=7) + f'<p class="note">{note}</p>'


def _losses(aligned: Alignment) -> str:
    if len(aligned.trainings) < 2:
        return ""
    from hetjax.alignment.comparison import relative_differences
    from hetjax.alignment.training import CRITERION

    reference, *others = aligned.trainings
    series = [
        Points(
            each.kind,
            [
                (step, error, "")
                for step, error in enumerate(
                    relative_differences(each.losses, reference.losses), start=1
                )
            ],
        )
        for each in others
    ]
    picture = error_picture(series, CRITERION, "training steps", joined=True)
    return f"<article>\n<h2>Losses, relative to the reference's</h2>\n{picture}\n</article>"


def _opaque(aligned: Alignment) -> str:
    if not aligned.program.opaque:
        return ""
    items = "".join(
        f"<li>{html.escape(f'#{each.number} {each.signature}, {shown_line(each)}')}</li>"
        for each in aligned.program.opaque
    )
    return f"<article>\n<h2>Not looked into</h2>\n<ul>{items}</ul>\n</article>"
