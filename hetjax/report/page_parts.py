"""Parts of pages in HTML: large figures, and tables."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence


def figures_list(figures: Mapping[str, str]) -> str:
    """Figures as large as headings, in HTML.

    Args:
        figures: names of figures, and the figures as people read them.

    Returns:
        HTML.
    """
    items = (
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in figures.items()
    )
    return f'<dl class="figures">{"".join(items)}</dl>'


def page_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, text: int, words: bool = False
) -> str:
    """A table in HTML.

    Args:
        headings: HTML of each.
        rows: HTML of each cell.
        text: how many columns, from the left, are left-aligned.
        words: whether the first column may take several lines.

    Returns:
        HTML.
    """

    def cell(tag: str, place: int, content: str) -> str:
        sort = ' class="text"' if place < text else ""
        if words and place == 0 and tag == "td":
            sort = ' class="text words"'
        return f"<{tag}{sort}>{content}</{tag}>"

    lines = ["".join(cell("th", i, each) for i, each in enumerate(headings))]
    lines += ["".join(cell("td", i, each) for i, each in enumerate(row)) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table>\n{body}\n</table></div>'
