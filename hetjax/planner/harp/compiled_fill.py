"""The dynamic program of one pace by compiled loops: what they take and what they give."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.harp.fast_stages import Band, BeginningsByDevices, Suffixes
from hetjax.planner.harp.stage_table import Bounds, Slice, StageTable
from hetjax.planner.work.arrays import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class StackedBands:
    """The bands of all slices of a subcluster, one after the other.

    Args:
        slices: what stages cost.
        seconds: ``[counts, runs]``: those of all bands; see `Band.seconds`.
        starts: where each band begins in them, and the end.
        widths: `Band.widths` of all.
    """

    slices: Sequence[Slice]
    seconds: FloatArray
    starts: IntArray
    widths: IntArray

    @functools.cached_property
    def runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`Slice.runs` of all, each once; and by slice where its band begins, and which it has."""
        every = {id(cut.runs): cut.runs for cut in self.slices}
        which = [list(every).index(id(cut.runs)) for cut in self.slices]
        every_run = np.stack(list(every.values()), dtype=np.int64)
        return every_run, np.stack([self.starts[:-1], which], axis=1)

    @classmethod
    def of(
        cls, slices: Sequence[Slice], bounds: Bounds, least_count: int, num_counts: int, pace: float
    ) -> StackedBands:
        """The bands of some slices; see `Band.of`.

        Args:
            slices: what stages cost.
            bounds: the least of that.
            least_count: the first warm-up count; the others follow it.
            num_counts: how many there are.
            pace: seconds that no stage may exceed.
        """
        from hetjax.planner.harp import reach_kernels, suffix_kernels

        starts = np.cumsum([0, *(cut.num_runs for cut in slices)])
        seconds = np.full((num_counts, starts[-1]), np.inf)
        for cut, start in zip(slices, starts[:-1], strict=True):
            closing = np.zeros((cut.num_options, len(cut.runs)))
            suffix_kernels.stage_seconds(
                seconds,
                start,
                np.ascontiguousarray(cut.seconds, float),
                np.ascontiguousarray(cut.live_limits, np.int64),
                np.ascontiguousarray(closing if cut.closing is None else cut.closing, float),
                np.ascontiguousarray(cut.runs[0], np.int64),
                least_count,
                pace,
            )
        widths = reach_kernels.most_layers(*bounds, pace, least_count, num_counts)
        return cls(slices, seconds, starts, widths)

    def band(self, chosen: int) -> Band:
        """The band of one slice."""
        start, end = self.starts[chosen : chosen + 2]
        return Band(self.slices[chosen], self.seconds[:, start:end].T, self.widths[chosen])


class SuffixesFound(NamedTuple):
    """The suffixes that begin in a subcluster, and what stages on it are put before.

    Args:
        best: by how many of its devices they use.
        rests: the best of all that may lie behind a stage, by how many devices do; without those
            that no stage is put before.
        anywhere: the least of `best`; None where there are none.
    """

    best: dict[int, Suffixes]
    rests: dict[int, Suffixes]
    anywhere: Suffixes | None


def suffixes_before(
    table: StageTable,
    subcluster: int,
    bands: StackedBands,
    windows: BeginningsByDevices,
    outside: Suffixes | None,
    moves: Sequence[tuple[FloatArray, IntArray]],
    num_stage_rows: int,
) -> SuffixesFound:
    """The suffixes that begin in a subcluster.

    Args:
        table: what stages and transfers cost.
        subcluster: the place of the subcluster.
        bands: its stages.
        windows: what the suffixes may begin with.
        outside: the best in other subclusters, with the move to it; None for nothing.
        moves: the seconds of moves inside a node and between nodes, and by how much they raise the
            warm-up count, by layer.
        num_stage_rows: how many numbers of stages are told from each other.
    """
    from hetjax.planner.harp import suffix_kernels

    outside = outside or Suffixes(0, 0, np.empty((num_stage_rows, 0, 0)))
    layout = _Layout.of(table, subcluster)
    runs, of_slices = bands.runs
    heads, best, behind, rests, (first, row, least) = suffix_kernels.suffixes_before(
        num_stage_rows,
        table.max_stages is None,
        layout.leaving,
        layout.idle,
        layout.links,
        np.ascontiguousarray(windows.lows, np.int64),
        np.ascontiguousarray(windows.highs, np.int64),
        layout.starts,
        layout.extensions,
        of_slices,
        bands.seconds,
        runs,
        bands.widths,
        np.array([seconds for seconds, _ in moves]),
        np.array([extra for _, extra in moves], np.int64),
        np.ascontiguousarray(outside.values),
        outside.first,
        outside.row,
    )
    return SuffixesFound(
        _put_together(heads, best, num_stage_rows),
        _put_together(behind, rests, num_stage_rows),
        Suffixes(first, row, least) if least.size else None,
    )


def _put_together(heads: IntArray, values: FloatArray, num_stage_rows: int) -> dict[int, Suffixes]:
    """Suffixes by the number of devices, of what `suffix_kernels.suffixes_before` returns."""
    found = {}
    for devices, (first, row, layers, rows, start) in enumerate(heads.tolist()):
        if layers:
            past = start + num_stage_rows * rows * layers
            totals = values[start:past].reshape(num_stage_rows, rows, layers)
            found[devices] = Suffixes(first, row, totals)
    return found


class _Layout(NamedTuple):
    """Where stages on a subcluster may be, by how many devices lie behind them or are used.

    The arguments are those of the same names of `suffix_kernels.suffixes_before`.
    """

    leaving: NDArray[np.int64]
    idle: NDArray[np.int64]
    links: NDArray[np.int64]
    starts: NDArray[np.int64]
    extensions: NDArray[np.int64]

    @classmethod
    def of(cls, table: StageTable, subcluster: int) -> _Layout:
        """The layout of one subcluster."""
        nodes, per_node = table.nodes[subcluster]
        devices = np.arange(nodes * per_node + 1)
        ends_node, is_damaged = devices % per_node == 0, table.is_damaged(subcluster)
        extensions = table.extensions[subcluster]
        return cls(
            leaving=((devices == 0) | (ends_node & is_damaged)).astype(np.int64),
            idle=np.where(ends_node & (devices > 0), devices if is_damaged else per_node, 1)
            * (devices > 0),
            links=ends_node.astype(np.int64),
            starts=np.cumsum([0, *map(len, extensions)]),
            extensions=np.array(list(itertools.chain(*extensions)), np.int64).reshape(-1, 2),
        )
