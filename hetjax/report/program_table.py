"""A synthesised program as tables: how tensors lie, and what is moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hetjax.mesh.quantities import format_bytes, format_seconds
from hetjax.report.tables import empty_table

if TYPE_CHECKING:
    from rich.table import Table

    from hetjax.planner.hap.explain import ProgramReport


def layouts_table(report: ProgramReport) -> Table:
    """How the tensors of a program lie among members, by module.

    Args:
        report: the program.

    Returns:
        A table for rich to print.
    """
    left = ("module", "tensor", "shape", "lies", "parts")
    table = empty_table("Program: how tensors lie", left=left)
    last = ""
    for row in report.layouts:
        parts = " + ".join(f"{part:.0%}" for part in row.ratios)
        module, last = ("" if row.module == last else row.module), row.module
        table.add_row(module, row.what, row.shape, row.layout, parts)
    return table


def moves_table(report: ProgramReport) -> Table:
    """What members of a program give each other, by module.

    Args:
        report: the program.

    Returns:
        A table for rich to print.
    """
    table = empty_table("Program: moves", left=("module", "what", "shape", "from, to", "form"))
    for heading in ("bytes", "each", "times"):
        table.add_column(heading, justify="right")
    last = ""
    for row in report.moves:
        module, last = ("" if row.module == last else row.module), row.module
        table.add_row(
            module,
            row.what,
            row.shape,
            row.layout,
            f"{row.form} by even parts" if row.by_even_parts else row.form,
            format_bytes(int(row.num_bytes)),
            format_seconds(row.seconds),
            str(row.times),
        )
    return table


def program_lines(report: ProgramReport, step_time: float) -> Iterator[str]:
    """What a program takes beside data parallelism, in sentences; all of it is predicted.

    Args:
        report: the program.
        step_time: seconds of a step of it.

    Yields:
        A sentence for each.
    """
    for shares, seconds in report.data_parallel.items():
        yield (
            f"data parallelism with {shares} is predicted to take {format_seconds(seconds)} a "
            f"step, {seconds / step_time:.2f} times as long"
        )
    if report.without_rule:
        names = ", ".join(report.without_rule)
        yield f"computed whole on every member, for want of a rule: {names}"
