"""Writes the table of device kinds of docs/clusters.md.

python scripts/kinds_page.py
"""

from __future__ import annotations

from pathlib import Path

from hetjax.mesh import KINDS
from hetjax.mesh.kinds import DeviceKind
from hetjax.mesh.quantities import format_bytes, format_rate
from hetjax.report.tables import format_efficiency

PAGE = Path(__file__).parent.parent / "docs" / "clusters.md"
_HEAD = (
    "| kind | memory | bandwidth | 16-bit peak | products reach | float32 peak | products reach |"
)


def with_kinds(page: str) -> str:
    """The page with the table of the kinds that there are now.

    Args:
        page: the page.

    Returns:
        The page with its table replaced.
    """
    before, _, rest = page.partition(_HEAD)
    _, _, after = rest.partition("\n\n")
    lines = [_HEAD, "|---|---|---|---|---|---|---|", *(_row(kind) for kind in KINDS.values())]
    return before + "\n".join(lines) + "\n\n" + after


def _row(kind: DeviceKind) -> str:
    cells = [kind.name, format_bytes(kind.memory_bytes), format_rate(kind.memory_bandwidth, "B/s")]
    half = "bfloat16" if "bfloat16" in kind.peak_flops else "float16"
    for dtype in (half, "float32"):
        note = " (float16 alone)" if dtype == "float16" else ""
        cells += [format_rate(kind.flops(dtype), "FLOP/s") + note, format_efficiency(kind, dtype)]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(with_kinds(PAGE.read_text()))
