"""Writes what docs/hspmd.md shows of the code: its pictures and the table of rules.

python scripts/hspmd_page.py
"""

from __future__ import annotations

from pathlib import Path

from jax.sharding import PartitionSpec as P

from hetjax import HSharding, Subgroup, visualize
from hetjax.sharding import rules_table

DOCS = Path(__file__).parent.parent / "docs"
FIRST, LAST = "<!-- rules: hetjax.sharding.rules_table() -->\n", "<!-- end of rules -->\n"


def with_rules(page: str) -> str:
    """The page with the table of rules as the code has it."""
    before, rest = page.split(FIRST)
    _, after = rest.split(LAST)
    return f"{before}{FIRST}\n{rules_table()}\n{LAST}{after}"


def main() -> None:
    strong = Subgroup((0, 1), (("tensor", 2),), P(None, "tensor"))
    weak = Subgroup((2,), (), P())
    rows = HSharding((strong, weak), hdim=0, sizes=(4, 2))
    visualize(rows, (6, 4), DOCS / "images" / "hspmd_rows.png")
    gradients = HSharding((strong, weak), hdim="partial")
    visualize(gradients, (6, 4), DOCS / "images" / "hspmd_gradients.png")
    page = DOCS / "hspmd.md"
    page.write_text(with_rules(page.read_text()))


if __name__ == "__main__":
    main()
