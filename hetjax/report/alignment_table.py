"""An alignment as tables: a verdict for each kind, and the operators that are off the most."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hetjax.report.tables import empty_table

if TYPE_CHECKING:
    from rich.table import Table

    from hetjax.alignment.comparison import OperatorDifference
    from hetjax.alignment.operators import Operator
    from hetjax.alignment.result import Alignment, KindVerdict
    from hetjax.alignment.training import Overflow


def kinds_table(aligned: Alignment) -> Table:
    """A row for each kind: its operators, its losses, its first overflow.

    Args:
        aligned: the alignment.

    Returns:
        A table for rich to print.
    """
    from rich.text import Text

    reference = aligned.reference
    title = (
        f"Beside {reference.name} ({reference.device}, products in {reference.products}), "
        f"tolerance {aligned.comparison.tolerance:g}"
    )
    table = empty_table(title, left=("kind", "device", "products in"))
    for heading in ("operators off\nby more", "largest\nerror", "loss MRE", "not finite\nat step"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for verdict in aligned.verdicts:
        overflow = verdict.overflow
        table.add_row(
            Text(verdict.kind.name),
            Text(verdict.kind.device),
            verdict.kind.products,
            str(verdict.named),
            "" if verdict.largest_error is None else error_text(verdict.largest_error),
            loss_error_text(verdict),
            "" if overflow is None else str(overflow.step),
            verdict_text(verdict),
        )
    return table


def operators_table(aligned: Alignment, rows: int) -> Table:
    """The operators of all kinds that are off the most, the largest error first.

    Args:
        aligned: the alignment.
        rows: how many at most.

    Returns:
        A table for rich to print; those within the tolerance are dim.
    """
    from rich.text import Text

    named = len(aligned.comparison.named())
    title = f"Operators by error: {named:,} of {len(aligned.comparison.differences):,} are off"
    table = empty_table(title, left=("", "kind"))
    table.add_column("error", justify="right")
    for heading in ("operator", "from", "near parameter"):
        table.add_column(heading, overflow="fold")
    for place, each in enumerate(aligned.comparison.ranked()[:rows]):
        operator = each.operator
        table.add_row(
            str(place + 1),
            Text(each.kind),
            error_text(each.error),
            Text(f"{operator_text(each)}\n{operator.signature}"),
            Text(f"{shown_line(operator)}\n{primal_text(operator)}"),
            Text(operator.near),
            style="" if place < named else "dim",
        )
    return table


def error_text(error: float) -> str:
    """An error as people read it."""
    return "not finite" if error == float("inf") else f"{error:.2g}"


def loss_error_text(verdict: KindVerdict) -> str:
    """The mean relative error of a kind's losses, and over how many steps of those asked for."""
    asked = verdict.asked_steps
    if verdict.loss_error is None:
        return f"none of {asked} steps" if asked else ""
    fewer = f" of {asked}" if verdict.steps < asked else ""
    return f"{100 * verdict.loss_error:.2g}% over {verdict.steps}{fewer}"


def verdict_text(verdict: KindVerdict) -> str:
    """Whether a kind is aligned with the reference."""
    found = verdict.are_operators_aligned, verdict.are_losses_aligned
    if found == (None, None):
        return "nothing compared"
    if False not in found:
        return "aligned"
    return "losses aligned" if verdict.are_losses_aligned else "not aligned"


def operator_text(each: OperatorDifference) -> str:
    """Which operator it is, and in which iteration of its loops."""
    operator = each.operator
    where = [f"{loop} {i}" for loop, i in zip(operator.loops, each.place, strict=False)]
    inside = f", {' '.join(where)}" if where else ""
    return f"#{operator.number} {operator.name}, {operator.direction}{inside}"


def primal_text(operator: Operator) -> str:
    """Which operators of the forward pass a backward one derives from; empty for others."""
    if not operator.primal:
        return ""
    first, last = operator.primal[0], operator.primal[-1]
    return f"of #{first}" if first == last else f"of #{first} to #{last}"


def shown_line(operator: Operator) -> str:
    """An operator's line as seen from the working folder, or from where packages are."""
    path = operator.line
    for part in ("/site-packages/", "/dist-packages/"):
        if part in path:
            return path.rpartition(part)[2]
    here = os.path.relpath(path) if os.path.isabs(path) else path
    return path if here.startswith("..") else here


def overflow_text(kind: str, overflow: Overflow) -> str:
    """A sentence about a kind's first overflow."""
    said = f"{kind}: step {overflow.step} is the first in which {overflow.what} is not finite"
    if overflow.operator is None:
        return f"{said}; no operator by itself makes it of finite operands"
    operator = overflow.operator
    where = [f"{loop} {i}" for loop, i in zip(operator.loops, overflow.place, strict=False)]
    inside = f" in {' '.join(where)}" if where else ""
    return (
        f"{said}; the first to make such of finite operands is #{operator.number} "
        f"{operator.signature}{inside}, {operator.direction}, {shown_line(operator)}"
    )
