"""Code blocks of the documentation, so that tests run what a page says."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FENCE = re.compile(
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]*)")?\n(?P<text>.*?)^```$', re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Args:
        language: what follows the fence; empty where nothing does.
        title: its title; empty where it has none.
        text: its lines.
        line: the page's line that the text begins at, counted from 1.
    """

    language: str
    title: str
    text: str
    line: int


def code_blocks(page: str) -> list[Block]:
    r"""The fenced blocks of a page that begin at its margin.

    Args:
        page: its Markdown.

    Returns:
        The blocks, in their order.

    Example:
        >>> [block] = code_blocks('See\n```bash title="here"\nls\n```\n')
        >>> block.language, block.title, block.text, block.line
        ('bash', 'here', 'ls\n', 3)
    """
    return [
        Block(
            found["language"],
            found["title"] or "",
            found["text"],
            page.count("\n", 0, found.start("text")) + 1,
        )
        for found in _FENCE.finditer(page)
    ]
