"""Stage tables that allow less: fewer nodes, or no recomputation. What they cost stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetjax.planner.harp.stage_table import Slice, StageTable


def with_nodes(table: StageTable, nodes: Sequence[int]) -> StageTable:
    """The table of a cluster that has fewer nodes.

    Args:
        table: the whole cluster's.
        nodes: how many nodes each subcluster has; 0 for a subcluster that is left out.

    Returns:
        A table whose plans are those of the whole table that need no more nodes, in the same
        numbers: shapes of fewer nodes come first.
    """
    return replace(
        table,
        nodes=tuple((n, m) for n, (_, m) in zip(nodes, table.nodes, strict=True)),
        slices=tuple(
            tuple(cut for cut in slices if cut.shape[0] <= n)
            for n, slices in zip(nodes, table.slices, strict=True)
        ),
    )


def without_recomputation(table: StageTable) -> StageTable:
    """The table of stages that keep what they made for their backward pass.

    Args:
        table: with all options.

    Returns:
        The table without the options that recompute; shapes that have no other are left out.
    """
    every = ((_keeping(cut) for cut in slices) for slices in table.slices)
    return replace(table, slices=tuple(tuple(cut for cut in cuts if cut) for cuts in every))


def _keeping(cut: Slice) -> Slice | None:
    kept = [place for place, option in enumerate(cut.options) if option.repeats == "nothing"]
    if not kept:
        return None
    options = tuple(cut.options[place] for place in kept)
    closing = None if cut.closing is None else cut.closing[kept]
    return Slice(cut.shape, cut.runs, cut.seconds[kept], cut.live_limits[kept], options, closing)
