"""The carriers of a run's links: what each was measured to take, and which messages it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetjax.mesh.quantities import format_bytes, format_rate, format_seconds
from hetjax.report.tables import empty_table

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class CarrierRow:
    """A carrier on a link.

    Args:
        link: which, e.g. ``"fast and slow"``.
        carrier: the carrier, e.g. ``"wire"``.
        latency: seconds of a message of next to nothing.
        bandwidth: bytes/s.
        sizes: from how many bytes on it takes messages, and up to how many, None for any; None
            where another one is faster for all.
    """

    link: str
    carrier: str
    latency: float
    bandwidth: float
    sizes: tuple[float, float | None] | None


def carrier_table(rows: Sequence[CarrierRow], title: str = "Carriers, as measured") -> Table:
    """What carriers take on links, and which messages go by each.

    Args:
        rows: one for each carrier of each link.
        title: what stands above the table.

    Returns:
        A table for rich to print.

    Example:
        >>> wire = CarrierRow("fast and slow", "wire", 1e-4, 1e9, (0, 2e6))
        >>> carrier_table([wire]).columns[4]._cells
        ['up to 2 MB']
    """
    from rich.text import Text

    table = empty_table(title, left=("", "carrier"))
    for heading in ("latency", "bandwidth", "takes messages"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            Text(row.link),
            row.carrier,
            format_seconds(row.latency),
            format_rate(row.bandwidth, "B/s"),
            _format_sizes(row.sizes),
        )
    return table


def _format_sizes(sizes: tuple[float, float | None] | None) -> str:
    if sizes is None:
        return "none"
    start, end = sizes
    words = [f"from {format_bytes(round(start))}"] if start else []
    words += [f"up to {format_bytes(round(end))}"] if end is not None else []
    return ", ".join(words) or "all"
