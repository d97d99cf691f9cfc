"""The layers of a model by its structure, as a table."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetjax.mesh.quantities import format_bytes, format_rate
from hetjax.report.tables import empty_table

if TYPE_CHECKING:
    from rich.table import Table

    from hetjax.pipeline.layers.structural_layers import LayeredSection


@dataclass(frozen=True)
class LayerRow:
    """A repeated module, or what stands between two, as the table shows it.

    Args:
        module: its letter; empty for what is not repeated.
        repeats: how often it stands in the program.
        layers: how many layers each occurrence has; 0 where it goes with its neighbour.
        flops: of one occurrence's forward pass, of one microbatch.
        bytes_in: bytes that cross its first edge.
    """

    module: str
    repeats: int
    layers: int
    flops: float
    bytes_in: float


@dataclass(frozen=True)
class ModuleRun:
    """An occurrence of a module, or what stands between two, and the layers that it is cut into.

    Args:
        module: its letter; empty for what is not repeated.
        layers: first layer, and the one after the last.
    """

    module: str
    layers: tuple[int, int]


def module_runs(sections: Sequence[LayeredSection]) -> list[ModuleRun]:
    """The modules along the layers of a program.

    Args:
        sections: in the program's order.

    Returns:
        A run for each section that has layers of its own.
    """
    runs: list[ModuleRun] = []
    first = 0
    for each in sections:
        end, module = first + len(each.starts), each.section.module
        if end > first:
            runs.append(ModuleRun("" if module is None else _letter(module), (first, end)))
        first = end
    return runs


def layer_rows(sections: Sequence[LayeredSection]) -> list[LayerRow]:
    """What the table shows of a program's sections.

    Args:
        sections: in the program's order.

    Returns:
        A row for each module, where it first stands, and for each section that is not repeated.
    """
    modules = [each.section.module for each in sections]
    rows: list[LayerRow] = []
    for place, (layered, module) in enumerate(zip(sections, modules, strict=True)):
        if module is not None and module in modules[:place]:
            continue
        name = "" if module is None else _letter(module)
        repeats = 1 if module is None else modules.count(module)
        # The very first section begins with the batch; what crosses the later edges says more.
        edges = [each.bytes_in for each, m in zip(sections, modules, strict=True) if m == module]
        bytes_in = layered.bytes_in if module is None else max(edges)
        rows.append(LayerRow(name, repeats, len(layered.starts), layered.flops, bytes_in))
    return rows


def layer_table(rows: Sequence[LayerRow], num_layers: int) -> Table:
    """A model's modules and how they are cut into layers.

    Args:
        rows: in the program's order.
        num_layers: how many layers there are in all.

    Returns:
        A table for rich to print.

    Example:
        >>> rows = [LayerRow("A", 12, 3, 2e9, 1_000_000), LayerRow("", 1, 0, 1e3, 4_000)]
        >>> layer_table(rows, 36).row_count
        2
    """
    from rich.text import Text

    table = empty_table(f"Layers by structure: {num_layers}", left=("module",))
    for heading in ("repeats", "layers\neach", "forward,\neach", "bytes in,\neach"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            Text(row.module or "(between)"),
            str(row.repeats),
            str(row.layers) if row.layers else "with its\nneighbour",
            format_rate(row.flops, "FLOP"),
            format_bytes(int(row.bytes_in)),
        )
    return table


def _letter(module: int) -> str:
    letters = string.ascii_uppercase
    return letters[module] if module < len(letters) else f"M{module}"
