"""The carriers of a run's links: what each was measured to take, and which messages it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetjax.mesh.quantities import format_bytes, format_seconds
from hetjax.report.tables import empty_table

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class CarrierRow:
    """A carrier on a link.

    Args:
        link: which, e.g. ``"fast and slow"``.
        carrier: the carrier, e.g. ``"wire"``.
        seconds: by bytes of a message, what it was measured to take.
        sizes: from how many bytes on it takes messages, and up to how many, None for any; nothing
            where others are faster for all.
    """

    link: str
    carrier: str
    seconds: Mapping[int, float]
    sizes: Sequence[tuple[float, float | None]]


def carrier_table(rows: Sequence[CarrierRow], title: str = "Carriers, as measured") -> Table:
    """What carriers take on links, and which messages go by each.

    Args:
        rows: one for each carrier of each link.
        title: what stands above the table.

    Returns:
        A table for rich to print.

    Example:
        >>> wire = CarrierRow("fast and slow", "wire", {4000: 1e-4, 4000000: 4e-3}, [(0, 2e6)])
        >>> [column._cells for column in carrier_table([wire]).columns[2:]]
        [['100 us'], ['4 ms'], ['up to 2 MB']]
    """
    from rich.text import Text

    table = empty_table(title, left=("", "carrier"))
    measured = sorted({size for row in rows for size in row.seconds})
    for heading in (*map(format_bytes, measured), "takes messages"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = (row.seconds.get(size) for size in measured)
        table.add_row(
            Text(row.link),
            row.carrier,
            *("" if each is None else format_seconds(each) for each in times),
            "; ".join(map(_format_sizes, row.sizes)) or "none",
        )
    return table


def _format_sizes(sizes: tuple[float, float | None]) -> str:
    start, end = sizes
    words = [f"from {format_bytes(round(start))}"] if start else []
    words += [f"up to {format_bytes(round(end))}"] if end is not None else []
    return ", ".join(words) or "all"
