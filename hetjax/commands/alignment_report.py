"""An alignment as people read it, and as plain values for ``--json``."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hetjax.alignment.comparison import OperatorDifference
from hetjax.alignment.operators import Operator
from hetjax.alignment.result import Alignment, KindVerdict
from hetjax.alignment.training import Overflow
from hetjax.mesh.quantities import format_bytes
from hetjax.report.alignment_table import kinds_table, operators_table, overflow_text

if TYPE_CHECKING:
    from rich.console import Console


def show_alignment(console: Console, aligned: Alignment, rows: int) -> None:
    """Print an alignment.

    Args:
        console: where to.
        aligned: the alignment.
        rows: how many operators at most.
    """
    console.print(
        f"{aligned.title}: {len(aligned.program.operators):,} operators of the forward and the "
        f"backward pass",
        highlight=False,
    )
    if aligned.capture is not None:
        size = aligned.capture
        console.print(
            f"capture: {size.operators:,} operators in {size.runs:,} runs, {size.values:,} values "
            f"of {format_bytes(size.num_bytes)}",
            highlight=False,
        )
    console.print()
    if aligned.kinds:
        console.print(kinds_table(aligned))
    for each in aligned.trainings:
        if each.overflow is not None:
            console.print(overflow_text(each.kind, each.overflow), highlight=False, markup=False)
    for operator in aligned.program.opaque:
        console.print(
            f"not looked into: #{operator.number} {operator.signature}",
            highlight=False,
            markup=False,
        )
    if aligned.comparison.differences:
        console.print()
        console.print(operators_table(aligned, rows))


def alignment_figures(aligned: Alignment, rows: int) -> dict[str, Any]:
    """The figures of an alignment as plain values.

    Args:
        aligned: the alignment.
        rows: how many operators at most.

    Returns:
        What JSON can hold; an error that is not finite is the text ``"not finite"``.
    """
    return {
        "model": aligned.title,
        "operators": len(aligned.program.operators),
        "not_looked_into": [_operator(each) for each in aligned.program.opaque],
        "tolerance": aligned.comparison.tolerance,
        "reference": asdict(aligned.reference),
        "kinds": [_verdict(each) for each in aligned.verdicts],
        "capture": None if aligned.capture is None else asdict(aligned.capture),
        "rows": [_difference(each, aligned) for each in aligned.comparison.ranked()[:rows]],
        "losses": {each.kind: list(each.losses) for each in aligned.trainings},
        "overflows": {
            each.kind: _overflow(each.overflow)
            for each in aligned.trainings
            if each.overflow is not None
        },
        "made_by_the_reference": [_operator(each) for each in aligned.comparison.reference],
    }


def _verdict(verdict: KindVerdict) -> dict[str, Any]:
    return {
        **asdict(verdict.kind),
        "named": verdict.named,
        "largest_error": _number(verdict.largest_error),
        "operators_not_finite": verdict.overflows,
        "loss_mre": _number(verdict.loss_error),
        "steps": verdict.steps,
        "steps_asked": verdict.asked_steps,
        "operators_aligned": verdict.are_operators_aligned,
        "losses_aligned": verdict.are_losses_aligned,
    }


def _difference(each: OperatorDifference, aligned: Alignment) -> dict[str, Any]:
    return {
        "kind": each.kind,
        "error": _number(each.error),
        "is_named": each.error > aligned.comparison.tolerance,
        "is_overflow": each.is_overflow,
        "iterations": list(each.place),
        **_operator(each.operator),
    }


def _overflow(overflow: Overflow) -> dict[str, Any]:
    operator = None if overflow.operator is None else _operator(overflow.operator)
    return {
        "step": overflow.step,
        "what": overflow.what,
        "iterations": list(overflow.place),
        "operator": operator,
    }


def _operator(operator: Operator) -> dict[str, Any]:
    return {
        "operator": operator.number,
        "primitive": operator.name,
        "direction": operator.direction,
        "equation": operator.signature,
        "line": operator.line,
        "primal": list(operator.primal),
        "near": operator.near,
        "loops": list(operator.loops),
    }


def _number(value: float | None) -> float | str | None:
    return "not finite" if value is not None and not math.isfinite(value) else value
