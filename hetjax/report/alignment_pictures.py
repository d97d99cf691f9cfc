"""Pictures of an alignment in HTML: the error of every operator, and losses beside losses."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

_COLORS = ("#3b78b8", "#e2a13a", "#3f9c6d", "#a8557a", "#6a5a9c", "#5f97a0")
_WIDTH, _HEIGHT, _LEFT, _BELOW = 900, 240, 64, 24
_LOWEST = 1e-9
"""Smaller errors are drawn as if they were that."""


@dataclass(frozen=True)
class Points:
    """Errors of one kind.

    Args:
        name: of the kind.
        points: for each the place from left to right, the error, and what it is; infinite errors
            are drawn at the top.
    """

    name: str
    points: Sequence[tuple[int, float, str]]


def error_picture(series: Sequence[Points], line: float, axis: str, *, joined: bool = False) -> str:
    """Errors from left to right, on a scale of powers of ten.

    Args:
        series: the errors of each kind.
        line: an error to draw a line at.
        axis: what goes from left to right.
        joined: whether the points of a kind are joined by a line.

    Returns:
        HTML.
    """
    finite = [error for each in series for _, error, _ in each.points if _LOWEST < error < math.inf]
    top = math.ceil(math.log10(max([line, *finite]) * 1.5))
    bottom = math.floor(math.log10(min([line / 10, *finite])))
    last = max((place for each in series for place, _, _ in each.points), default=1)

    def x(place: int) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - 8) * place / max(last, 1), 1)

    def y(error: float) -> float:
        power = math.log10(max(error, _LOWEST)) if error < math.inf else top
        share = (min(max(power, bottom), top) - bottom) / (top - bottom)
        return round(8 + (_HEIGHT - _BELOW - 8) * (1 - share), 1)

    parts = [_grid(y(10.0**power), f"1e{power}") for power in range(bottom, top + 1)]
    parts.append(_grid(y(line), f"{line:g}", dashed=True))
    for each, color in zip(series, itertools.cycle(_COLORS), strict=False):
        if joined:
            ends = " ".join(f"{x(place)},{y(error)}" for place, error, _ in each.points)
            parts.append(f'<polyline points="{ends}" fill="none" stroke="{color}"/>')
        else:
            parts += [
                f'<circle cx="{x(place)}" cy="{y(error)}" r="2.5" fill="{color}">'
                f"<title>{html.escape(words)}</title></circle>"
                for place, error, words in each.points
            ]
    parts.append(
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 6}" text-anchor="end">{html.escape(axis)}</text>'
    )
    return (
        f"{_keys([each.name for each in series])}\n"
        f'<div class="scroll"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img" class="errors">{"".join(parts)}</svg></div>'
    )


def _grid(height: float, words: str, *, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="5 4" class="limit"' if dashed else ' class="grid"'
    left = _LEFT - 8
    label = f'<text x="{left}" y="{height + 4}" text-anchor="end">{words}</text>'
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{height}" y2="{height}"{dashes}/>'
        f"{'' if dashed else label}"
    )


def _keys(names: Sequence[str]) -> str:
    items = "".join(
        f'<li><i class="key" style="background: {color}"></i>{html.escape(name)}</li>'
        for name, color in zip(names, itertools.cycle(_COLORS), strict=False)
    )
    return f'<ul class="keys">{items}</ul>'
