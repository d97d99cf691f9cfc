"""A context split as tables: who has which tokens and heads, the rings, and other systems."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hetjax.mesh.quantities import format_bytes, format_seconds
from hetjax.report.tables import empty_table

if TYPE_CHECKING:
    from rich.table import Table

    from hetjax.planner.hexiseq.context_report import (
        ContextReport,
        DeviceRow,
        GroupRow,
        SystemRow,
    )
    from hetjax.sharding.context.context_split import HeadRange

MOST_RINGS, MOST_OWNERS = 16, 4
"""How many sub-rings a table shows, and how many owners of each."""

SYSTEM_NAMES = {"hexiseq": "HexiSeq", "ring": "ring attention", "ulysses": "Ulysses", "usp": "USP"}
"""What systems are called."""


def context_table(report: ContextReport) -> Table:
    """Who has which tokens and heads: a row for each run of devices that have as many.

    Args:
        report: the split.

    Returns:
        A table for rich to print.
    """
    from rich.text import Text

    heads, keys = report.query_heads, report.key_value_heads
    title = (
        f"Who shares {report.length:,} tokens, {heads} query heads and {keys} heads of keys and "
        f"values"
    )
    table = empty_table(title, left=("group", "positions", "devices"))
    for heading in ("tokens\neach", "query\nheads", "key\nheads", "attends", "computes\nelse"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    for number, group in enumerate(report.groups):
        first = [str(number), positions_text(group)]
        for run in device_runs(group):
            row = run[0]
            filled = max(run, key=lambda each: each.memory_bytes / each.memory_limit_bytes)
            table.add_row(
                *first,
                Text(run_name(run)),
                f"{row.tokens:,}",
                heads_of_run(run),
                key_heads_of_run(run),
                f"{row.attention_seconds / report.seconds:.0%}",
                f"{row.other_seconds / report.seconds:.0%}",
                memory_text(filled).replace(" of ", "\nof "),
            )
            first = ["", ""]
    table.caption = "predicted by the scheduler's model: shares of a step, and a device's memory"
    return table


def rings_table(report: ContextReport) -> Table:
    """The sub-rings: which keys and values go round among whom.

    Args:
        report: the split.

    Returns:
        A table for rich to print.
    """
    from rich.text import Text

    left = ("query heads", "key heads", "owners, of each group one")
    table = empty_table("Sub-rings of keys and values", left=left)
    for ring in report.rings[:MOST_RINGS]:
        table.add_row(
            heads_text(ring.heads),
            heads_text(ring.key_value_heads),
            Text(owners_text(ring.owners)),
        )
    more = len(report.rings) - MOST_RINGS
    if more > 0:
        table.caption = f"and {more} more"
    return table


def systems_table(report: ContextReport) -> Table:
    """What the split and other systems take, each at its best settings.

    Args:
        report: the split.

    Returns:
        A table for rich to print.
    """
    left = ("system", "groups", "layers are")
    table = empty_table("Beside other systems, each at its best settings", left=left)
    for heading in ("sequences\nat once", "step", "times as\nlong"):
        table.add_column(heading, justify="right")
    for row in report.systems:
        table.add_row(*system_cells(row, report.seconds))
    table.caption = "predicted by the scheduler's model"
    return table


def system_cells(row: SystemRow, seconds: float) -> list[str]:
    """A system as the cells of a row.

    Args:
        row: the system.
        seconds: of a step of what it is compared with.
    """
    name = SYSTEM_NAMES[row.system]
    if row.seconds is None:
        return [name, "not legal, or fits in no way", "", "", "", ""]
    return [
        name,
        groups_text(row.groups) + (f", tensor {row.tensor}" if row.tensor > 1 else ""),
        "made again" if row.is_recomputed else "kept",
        str(row.microbatch_size),
        format_seconds(row.seconds),
        f"{row.seconds / seconds:.2f}",
    ]


def groups_text(sizes: Sequence[int]) -> str:
    """How many groups there are, of how many devices.

    Args:
        sizes: devices of each group.

    Example:
        >>> groups_text((4, 4, 2)), groups_text((1,))
        ('2 of 4 devices, 1 of 2 devices', '1 device alone')
    """
    if sum(sizes) == 1:
        return "1 device alone"
    found = Counter(sizes).items()
    return ", ".join(f"{count} of {size} device{'s' * (size > 1)}" for size, count in found)


def device_runs(group: GroupRow) -> Iterator[tuple[DeviceRow, ...]]:
    """A group's devices, those together that follow each other and have as much.

    Args:
        group: the group.
    """

    def key(numbered: tuple[int, DeviceRow]) -> tuple[str, int, int, int, int]:
        number, row = numbered
        first, heads = row.place - number * row.size, row.heads[1] - row.heads[0]
        return row.subcluster, first, row.size, row.tokens, heads

    for _, run in itertools.groupby(enumerate(group.devices), key):
        yield tuple(row for _, row in run)


def run_name(run: Sequence[DeviceRow]) -> str:
    """What some devices are called together.

    Args:
        run: of one group, as `device_runs` gives them.
    """
    if len(run) == 1:
        return run[0].device
    first, last = run[0], run[-1]
    name = f"{first.subcluster}[{first.place}:{last.place + last.size}]"
    return name if first.size == 1 else f"{name} by {first.size}"


def heads_of_run(run: Sequence[DeviceRow]) -> str:
    """The query heads of some devices, and how many each of them has."""
    return _each([row.heads for row in run])


def key_heads_of_run(run: Sequence[DeviceRow]) -> str:
    """The heads of keys and values of some devices, and how many each of them has."""
    return _each([row.key_value_heads for row in run])


def _each(ranges: Sequence[HeadRange]) -> str:
    whole = ranges[0][0], ranges[-1][1]
    sizes = {stop - start for start, stop in ranges}
    if len(ranges) == 1 or sizes == {0}:
        return heads_text(whole)
    few = f"{min(sizes)}" if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"
    return f"{heads_text(whole)},\n{few} each"


def heads_text(heads: HeadRange) -> str:
    """Heads as the first and the last of them.

    Args:
        heads: a range.

    Example:
        >>> heads_text((0, 4)), heads_text((3, 4)), heads_text((2, 2))
        ('0-3', '3', 'none')
    """
    start, stop = heads
    if start == stop:
        return "none"
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def positions_text(group: GroupRow) -> str:
    """The positions of a group's tokens, from and to."""
    return "\n".join(f"{start:,} to {stop - 1:,}" for start, stop in group.positions)


def owners_text(owners: Sequence[str]) -> str:
    """The owners of a sub-ring in its order, the first ones of many."""
    more = len(owners) - MOST_OWNERS
    shown = [*owners[:MOST_OWNERS], *([f"{more} more"] if more > 0 else [])]
    return ", ".join(shown)


def memory_text(row: DeviceRow) -> str:
    """What a device holds, of what it may hold."""
    return f"{format_bytes(row.memory_bytes)} of {format_bytes(row.memory_limit_bytes)}"
