"""An annotation as a picture: the array, and in each part of it the devices that hold it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetjax.errors import InputError
from hetjax.files import replacing
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.bounds import contains, finest_slices
from hetjax.sharding.annotation.subgroup import Shard

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hetjax.runtime.moves.union_array import HArray

_WIDTH_INCHES, _LONGEST_INCHES, _SHORTEST_INCHES = 5.0, 2.5, 0.8
_DOTS_PER_INCH = 150
_INK, _EDGE = "#1f2933", "#ffffff"
_COLORS = ("#9ecae1", "#fdbe85", "#a1d99b", "#bcbddc", "#fdd0a2", "#c7e9c0", "#c6dbef", "#dadaeb")


_LABEL = {"boxstyle": "round,pad=0.2", "facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.8}


@dataclass(frozen=True)
class Cell:
    """A part of an array as it is drawn, and who holds it.

    Args:
        rows: its first row and the one after its last.
        columns: its first column and the one after its last.
        holders: the devices; those that hold a summand each are joined by a plus.
        subgroups: the subgroups that these devices are in.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    holders: str
    subgroups: tuple[int, ...]


def visualize(
    x: HSharding | HArray,
    shape: Sequence[int] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Draws how an array lies: each part of it with the devices that hold it.

    Submeshes have a colour each. Devices that hold the same part stand beside each other, ``0 1``;
    devices that hold summands of it are joined, ``0 + 1``. Of an array of more than two dimensions
    the two that are cut most are drawn.

    Args:
        x: an annotation, or an array that lies as one says.
        shape: the array's shape; not needed for an array.
        path: where to write a picture as well, e.g. ``"weights.png"``.

    Returns:
        The figure, which a notebook shows.

    Raises:
        InputError: the annotation is given without a shape, or does not fit it.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from hetjax.sharding import HSharding, Subgroup
        >>> two, one = Subgroup((0, 1), (("x", 2),), P(None, "x")), Subgroup((2,), (), P())
        >>> figure = visualize(HSharding((two, one), hdim=0, sizes=(4, 2)), (6, 4))
        >>> figure.axes[0].get_title("left")
        'HSharding of (6, 4): split on dimension 0 among 3 devices of 2 submeshes'
    """
    annotation = x if isinstance(x, HSharding) else x.annotation
    shape = shape if isinstance(x, HSharding) else x.shape
    if shape is None:
        raise InputError("shape: none is given; an annotation is drawn for an array of some shape")
    figure = _draw(annotation, tuple(shape), cells_of(annotation, shape))
    if path is not None:
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=_DOTS_PER_INCH, format="png")
    return figure


def cells_of(annotation: HSharding, shape: Sequence[int]) -> tuple[Cell, ...]:
    """The parts of an array that are drawn, with who holds them.

    Args:
        annotation: how the array lies.
        shape: its shape.

    Returns:
        The parts, row-major in the two dimensions that are drawn.
    """
    shards = annotation.shards(shape)
    subgroup = {
        device: place
        for place, group in enumerate(annotation.subgroups)
        for device in group.devices
    }
    rows, columns = _drawn_dimensions(shards, shape)
    found = []
    for part in finest_slices({shard.bounds for shard in shards}, shape):
        if any(part[d][0] for d in range(len(shape)) if d not in (rows, columns)):
            continue
        holding = [shard for shard in shards if contains(shard.bounds, part)]
        found.append(
            Cell(
                part[rows] if rows is not None else (0, 1),
                part[columns] if columns is not None else (0, 1),
                _holders(holding),
                tuple(sorted({subgroup[shard.device] for shard in holding})),
            )
        )
    return tuple(found)


def _drawn_dimensions(
    shards: Sequence[Shard], shape: Sequence[int]
) -> tuple[int | None, int | None]:
    """The dimensions drawn as rows and as columns: those that are cut most, in their order."""

    def cuts(dimension: int) -> int:
        return len({shard.bounds[dimension] for shard in shards})

    chosen = sorted(sorted(range(len(shape)), key=lambda d: (-cuts(d), d))[:2])
    if len(chosen) == 2:
        return chosen[0], chosen[1]
    return None, chosen[0] if chosen else None


def _holders(shards: Sequence[Shard]) -> str:
    """Devices with the same summand side by side, summands joined by a plus."""
    groups: dict[tuple[int, int] | None, list[int]] = {}
    for shard in shards:
        groups.setdefault(shard.summand, []).append(shard.device)
    sums: dict[int | None, list[str]] = {}
    for summand, devices in sorted(groups.items(), key=lambda item: item[0] or (-1, -1)):
        group = None if summand is None else summand[0]
        sums.setdefault(group, []).append(" ".join(map(str, sorted(devices))))
    return "   ".join(" + ".join(parts) for parts in sums.values())


def _draw(annotation: HSharding, shape: tuple[int, ...], cells: Sequence[Cell]) -> Figure:
    from hetjax.report.figure import ShownFigure

    height, width = (cells[-1].rows[1], cells[-1].columns[1]) if cells else (1, 1)
    inches = min(_LONGEST_INCHES, max(_SHORTEST_INCHES, _WIDTH_INCHES * height / width))
    figure = ShownFigure(figsize=(_WIDTH_INCHES + 0.5, inches + 0.6), layout="constrained")
    axes = figure.add_subplot()
    for cell in cells:
        _draw_cell(axes, cell)
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_xticks(sorted({end for cell in cells for end in cell.columns}))
    axes.set_yticks(sorted({end for cell in cells for end in cell.rows}))
    axes.tick_params(length=0, labelsize=8)
    axes.set_title(_title(annotation, shape), fontsize=9, color=_INK, loc="left")
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def _draw_cell(axes: Axes, cell: Cell) -> None:
    """A box with a band in the colour of each submesh that holds it."""
    from matplotlib.patches import Rectangle

    (top, bottom), (left, right) = cell.rows, cell.columns
    band = (bottom - top) / len(cell.subgroups)
    for place, subgroup in enumerate(cell.subgroups):
        corner, color = (left, top + place * band), _COLORS[subgroup % len(_COLORS)]
        axes.add_patch(Rectangle(corner, right - left, band, facecolor=color, edgecolor="none"))
    axes.add_patch(
        Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=_EDGE, linewidth=3)
    )
    middle = ((left + right) / 2, (top + bottom) / 2)
    axes.text(*middle, cell.holders, ha="center", va="center", color=_INK, bbox=_LABEL)


def _title(annotation: HSharding, shape: tuple[int, ...]) -> str:
    devices, count = len(annotation.devices), len(annotation.subgroups)
    if count == 1:
        return f"HSharding of {shape}: {devices} devices of one submesh"
    hdim = annotation.hdim
    among = f"split on dimension {hdim}" if isinstance(hdim, int) else hdim
    return f"HSharding of {shape}: {among} among {devices} devices of {count} submeshes"
