"""Stage tables that allow less: fewer nodes, other numbers of stages, or no recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetjax.planner.harp.stage_table import Slice, StageTable
from hetjax.planner.problem.problem import PlanningProblem

_COUNTED_STAGES = 10
"""Up to this many stages fewer and more are tried: a search that counts them takes as many times as
long, and a stage of many says little."""


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


def other_numbers_of_stages(problem: PlanningProblem, number: int) -> list[tuple[int, int | None]]:
    """How many stages a pipeline might have instead.

    Args:
        problem: what is planned.
        number: how many it has.

    Returns:
        The least and the largest number, None for any: fewer, and more, as far as such are allowed.
        Nothing where there are many stages.
    """
    if number > _COUNTED_STAGES:
        return []
    options, devices = problem.options, problem.cluster.num_devices
    fewer = [(options.min_stages, number - 1)] if number > options.min_stages else []
    most = min(problem.num_layers, devices, options.max_stages or devices)
    return [*fewer, *([(number + 1, options.max_stages)] if number < most else [])]


def _keeping(cut: Slice) -> Slice | None:
    kept = [place for place, option in enumerate(cut.options) if option.repeats == "nothing"]
    if not kept:
        return None
    options = tuple(cut.options[place] for place in kept)
    closing = None if cut.closing is None else cut.closing[kept]
    return Slice(cut.shape, cut.runs, cut.seconds[kept], cut.live_limits[kept], options, closing)
