"""Draws the rooms of the code, and writes the table of them in docs/design/rooms.md, from imports.

python scripts/rooms_page.py
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE, PAGE = ROOT / "hetjax", ROOT / "docs" / "design" / "rooms.md"
PICTURE = ROOT / "docs" / "images" / "rooms.svg"

PACKAGES: dict[str, tuple[str, ...]] = {
    "commands": (),
    "configuration": (),
    "report": (),
    "alignment": (),
    "runtime": (
        "ray",
        "local",
        "checkpoints",
        "workers",
        "moves",
        "compilation",
        "instructions",
    ),
    "planner": (
        "profiler",
        "foreign",
        "h2",
        "hexiseq",
        "harp",
        "hap",
        "annotated",
        "predictions",
        "costs",
        "problem",
        "module_programs",
        "intra_op",
        "work",
        "plan",
    ),
    "pipeline": (
        "schedule_search",
        "timeline",
        "schedules",
        "update",
        "layers",
        "stages",
        "program",
    ),
    "models": (),
    "sharding": ("context", "deduction", "resolution", "annotation", "cross_entropy", "attention"),
    "mesh": (),
    "data": (),
}
"""The packages from the top down, and the rooms of each from the top down: a room may import those
after it in its package, and all packages below."""

_COLOURS = ("#dbe7f4", "#e6efdc", "#f6ead3", "#f1dfe3", "#e4def0")
_HEAD = "| room | what lives there | files | uses |"
_WIDTH, _ROW, _LABEL = 1000, 58, 120


def rooms() -> Iterator[tuple[str, str]]:
    """Each room: its package, and its name; empty for a package that is one room."""
    for package, names in PACKAGES.items():
        yield from ((package, name) for name in names or ("",))


def folder(package: str, name: str) -> Path:
    """Where a room's files are."""
    return CODE / package / name if name else CODE / package


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """The modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if _is_module(name) else node.module for name in names}
    return frozenset(found)


def _is_module(name: str) -> bool:
    """Whether a name is a file's or a package's of hetjax, not one that is defined in a file."""
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def uses(package: str, name: str) -> list[str]:
    """The rooms that a room imports, in their order; those of its package by their name alone."""
    imported = {each for path in folder(package, name).glob("*.py") for each in imports(path)}
    found = []
    for other, room in rooms():
        prefix = ".".join(part for part in ("hetjax", other, room) if part)
        is_used = any(each == prefix or each.startswith(prefix + ".") for each in imported)
        if is_used and (other, room) != (package, name):
            found.append(room if other == package else f"{other}.{room}" if room else other)
    return found


def said(package: str, name: str) -> str:
    """What a room's package says of it, in its first paragraph."""
    text = (folder(package, name) / "__init__.py").read_text()
    document = ast.get_docstring(ast.parse(text)) or ""
    return document.split("\n\n")[0].replace("\n", " ")


def _subject(package: str) -> str:
    """The first words of that."""
    return re.split("[:;,.] ", said(package, "").rstrip("."))[0]


def table() -> str:
    """All rooms, with what their packages say of them."""
    lines = [_HEAD, "|---|---|---|---|"]
    for package, name in rooms():
        files = len(list(folder(package, name).glob("*.py"))) - 1
        title = f"`{package}.{name}`" if name else f"`{package}`"
        used = ", ".join(uses(package, name))
        lines.append(f"| {title} | {said(package, name)} | {files} | {used} |")
    return "\n".join(lines)


def with_rooms(page: str) -> str:
    """The page with the table of the rooms that there are now.

    Args:
        page: the page.

    Returns:
        The page with its table replaced.
    """
    before, _, rest = page.partition(_HEAD)
    _, _, after = rest.partition("\n\n")
    return before + table() + "\n\n" + after


def picture() -> str:
    """The rooms as an SVG: a row for each package, imports go to the right and down."""
    height = _ROW * len(PACKAGES) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="sans-serif" font-size="14">'
    ]
    for row, (package, names) in enumerate(PACKAGES.items()):
        top = 10 + row * _ROW
        lines.append(f'<text x="8" y="{top + 29}" font-weight="bold">{package}</text>')
        lines += _boxes(names or (_subject(package),), top, _COLOURS[row % len(_COLOURS)])
    return "\n".join([*lines, "</svg>", ""])


def _boxes(names: Sequence[str], top: int, colour: str) -> Iterator[str]:
    width = (_WIDTH - _LABEL) / len(names)
    for place, name in enumerate(names):
        left = _LABEL + place * width
        yield (
            f'<rect x="{left:.0f}" y="{top}" width="{width - 8:.0f}" height="{_ROW - 12}" rx="5" '
            f'fill="{colour}" stroke="#8a8a8a"/>'
        )
        middle = left + (width - 8) / 2
        yield f'<text x="{middle:.0f}" y="{top + 28}" text-anchor="middle">{name}</text>'


def main() -> None:
    """Rewrite the page and the picture."""
    PAGE.write_text(with_rooms(PAGE.read_text()))
    PICTURE.write_text(picture())


if __name__ == "__main__":
    main()
