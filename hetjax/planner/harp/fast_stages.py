"""The stages of one shape of submesh that are no slower than a pace, by length and first layer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.harp.stage_table import Slice
from hetjax.planner.work.arrays import FloatArray, IntArray


class Suffixes(NamedTuple):
    """The least totals of pipelines' last stages, by what the stages before them have to know.

    Args:
        first: the first of the layers that they begin with, which follow each other.
        row: the row of the least of their warm-up counts.
        values: ``[stages, counts, layers]``: by the number of stages, by the warm-up count of the
            first of them, and by its first layer; infinite where there are none.
    """

    first: int
    row: int
    values: FloatArray

    @property
    def end(self) -> int:
        """The one after the last of the layers."""
        return self.first + self.values.shape[2]

    @property
    def end_row(self) -> int:
        """The one after the last of the rows."""
        return self.row + self.values.shape[1]

    def at(self, stage_row: int, row: int, layer: int) -> float:
        """The total of some number of stages and count from a layer on."""
        if self.first <= layer < self.end and self.row <= row < self.end_row:
            return float(self.values[stage_row, row - self.row, layer - self.first])
        return float("inf")

    def totals(self, stage_row: int, row: int) -> FloatArray | None:
        """The totals of some number of stages and count, by layer; None where there are none."""
        if self.row <= row < self.end_row:
            return self.values[stage_row, row - self.row]
        return None

    def shrunk(self) -> Suffixes | None:
        """The same without what is of no use; None where nothing is left.

        A larger warm-up count needs a smaller total.
        """
        values = self.values
        if values.shape[1] > 1:
            least = np.minimum.accumulate(values, axis=1)
            values = values.copy()
            values[:, 1:][values[:, 1:] >= least[:, :-1]] = np.inf
        there = values.min(axis=0) < np.inf
        layers = np.flatnonzero(there.any(axis=0))
        if not len(layers):
            return None
        low, high = int(layers[0]), int(layers[-1]) + 1
        rows = np.flatnonzero(there.any(axis=1))
        row, end = int(rows[0]), int(rows[-1]) + 1
        kept = values[:, row:end, low:high]
        if 2 * kept.size < values.size:
            # What is left out is not to stay in memory.
            kept = kept.copy()
        return Suffixes(self.first + low, self.row + row, kept)


@dataclass(frozen=True, eq=False)
class Beginnings:
    """The layers that suffixes may begin with, by the warm-up count of their first stage.

    Args:
        lows: the first of the layers, by the row of the count, or for all of them.
        highs: the last one; where it is before the first, there are none.
    """

    lows: IntArray
    highs: IntArray

    @functools.cached_property
    def low(self) -> int:
        """The first layer for any count."""
        return int(self.lows[self.lows <= self.highs].min())

    @functools.cached_property
    def high(self) -> int:
        """The last layer for any count."""
        return int(self.highs[self.lows <= self.highs].max())

    @functools.cached_property
    def rows(self) -> tuple[int, int] | None:
        """The first row that has layers and the one after the last; None where all are alike."""
        if len(self.lows) == 1:
            return None
        there = np.flatnonzero(self.lows <= self.highs)
        return int(there[0]), int(there[-1]) + 1

    def inside(self, suffixes: Suffixes) -> Suffixes:
        """Suffixes without those that begin behind the last of the layers of their count."""
        if self.rows is None:
            return suffixes
        highs = self.highs[suffixes.row : suffixes.end_row]
        if highs.min() >= suffixes.end - 1:
            return suffixes
        past = np.arange(suffixes.first, suffixes.end) > highs[:, None]
        return suffixes._replace(values=np.where(past, np.inf, suffixes.values))


@dataclass(frozen=True, eq=False)
class BeginningsByDevices:
    """Beginnings by the number of devices that suffixes use.

    Args:
        lows: ``[devices + 1, rows]``, or one row for all counts.
        highs: likewise.
    """

    lows: IntArray
    highs: IntArray

    @property
    def is_open(self) -> NDArray[np.bool_]:
        """Which of them have layers."""
        return np.asarray((self.lows <= self.highs).any(axis=1))

    def at(self, devices: int) -> Beginnings:
        """Those of so many devices."""
        return Beginnings(self.lows[devices], self.highs[devices])


def least_of(every: Sequence[Suffixes]) -> Suffixes:
    """The least totals of several, which are one or more.

    Args:
        every: suffixes of the same numbers of stages.
    """
    if len(every) == 1:
        return every[0]
    first, end = min(each.first for each in every), max(each.end for each in every)
    row, end_row = min(each.row for each in every), max(each.end_row for each in every)
    least = np.full((every[0].values.shape[0], end_row - row, end - first), np.inf)
    for each in every:
        layers = slice(each.first - first, each.end - first)
        there = least[:, each.row - row : each.end_row - row, layers]
        np.minimum(there, each.values, out=there)
    return Suffixes(first, row, least)


@dataclass(frozen=True, eq=False)
class Band:
    """Stages on one shape of submesh that are no slower than a pace, each with its fastest option.

    Args:
        cut: what they cost.
        seconds: ``[runs, counts]``: by run of layers as the slice lists them, with what closes a
            step where that is from the first layer on, and by warm-up count; infinite where nothing
            fits. The counts of a run are read together.
        widths: how many layers they have at most, by warm-up count; as far as is known.
    """

    cut: Slice
    seconds: FloatArray
    widths: IntArray

    @classmethod
    def of(cls, cut: Slice, least_count: int, num_counts: int, pace: float) -> Band:
        """The band of a slice.

        Args:
            cut: what stages cost.
            least_count: the first warm-up count; the others follow it.
            num_counts: how many there are.
            pace: seconds that no stage may exceed.
        """
        widths = cut.most_layers(pace, np.arange(num_counts) + least_count)
        fastest = _fastest(cut, least_count, num_counts)
        seconds = np.where(fastest <= pace, fastest, np.inf)
        ends = np.flatnonzero(cut.runs[0, 1:] < cut.num_runs) + 1
        of_first = _first_stages(cut, ends, least_count, num_counts, pace)
        seconds[:, cut.runs[0, ends]] = of_first
        return cls(cut, np.ascontiguousarray(seconds.T), widths)

    def put_before(self, rest: Suffixes, window: Beginnings) -> Suffixes | None:
        """The least of a stage and the rest behind it, by the stage's first layer.

        Args:
            rest: what is behind it.
            window: the layers that are of interest.

        Returns:
            The totals with the stage in front; None where there are none.
        """
        if window.rows is not None:
            row, end_row = max(rest.row, window.rows[0]), min(rest.end_row, window.rows[1])
            if row >= end_row:
                return None
            if (row, end_row) != (rest.row, rest.end_row):
                kept = rest.values[:, row - rest.row : end_row - rest.row]
                rest = Suffixes(rest.first, row, kept)
        # What fits a count fits all below it.
        width = int(self.widths[rest.row])
        low = max(window.low, rest.first - width)
        high = min(window.high, rest.end - 2)
        if low > high or not width:
            return None
        # Lengths less one, from the shortest that reaches the rest to the longest that is left.
        shortest, longest = max(rest.first - high - 1, 0), min(rest.end - low - 1, width)
        runs = self.cut.by_length[shortest:longest, low : high + 1]
        behind = _windows(rest, low + shortest + 1, *runs.shape)
        of_counts = self.seconds[:, rest.row : rest.end_row]
        seconds = of_counts.take(runs, axis=0, mode="clip")
        if len(behind) == 1:
            seconds += behind[0]
            least = seconds.min(axis=0)[None]
        else:
            least = (seconds + behind).min(axis=1)
        return Suffixes(low, rest.row, least.transpose(0, 2, 1))

    def from_layer(self, first: int, row: int, rest: FloatArray, low: int) -> FloatArray:
        """The stage from one layer and the rest behind it, by the rest's first layer.

        Args:
            first: the stage's first layer.
            row: of the warm-up counts.
            rest: totals behind it, from a layer on.
            low: that layer.

        Returns:
            Values in the form of the rest.
        """
        runs = self.cut.runs[first, low : low + len(rest)]
        return self.seconds[:, row].take(runs, mode="clip") + rest


def _windows(rest: Suffixes, first: int, lengths: int, firsts: int) -> NDArray[np.float64]:
    """Totals of the rest by how far it is from a layer, by that layer, and by count."""
    num_layers = lengths + firsts - 1
    stages, counts, _ = rest.values.shape
    padded = np.full((stages, num_layers, counts), np.inf)
    low, high = max(rest.first, first), min(rest.end, first + num_layers)
    known = rest.values[..., low - rest.first : high - rest.first]
    padded[:, low - first : high - first] = known.transpose(0, 2, 1)
    # What sliding_window_view gives, in a tenth of the time.
    of_stages, step, of_counts = padded.strides
    shape = (stages, lengths, firsts, counts)
    return np.ndarray(shape, padded.dtype, padded, strides=(of_stages, step, step, of_counts))


_KNOWN: WeakKeyDictionary[Slice, tuple[tuple[int, int], FloatArray]] = WeakKeyDictionary()
"""What was found last of each slice: a search asks for many paces, and seldom for other counts."""

_MOST_KNOWN = 64
"""More counts than these take more memory than it is worth to know them for the next pace."""


def _fastest(cut: Slice, least_count: int, num_counts: int) -> FloatArray:
    """The fastest stages by warm-up count, at any pace, and without what closes a step."""
    counts = least_count, num_counts
    known = _KNOWN.get(cut)
    if known is not None and known[0] == counts:
        return known[1]
    by_count = np.full((num_counts, cut.num_runs), np.inf)
    for seconds, limits in zip(cut.seconds, cut.live_limits, strict=True):
        fits = np.flatnonzero(limits >= least_count)
        _note(by_count, limits[fits] - least_count, fits, seconds[fits])
    fastest = _for_all_below(by_count)
    if num_counts <= _MOST_KNOWN:
        _KNOWN[cut] = counts, fastest
    return fastest


def _first_stages(
    cut: Slice, ends: IntArray, least_count: int, num_counts: int, pace: float
) -> FloatArray:
    """The fastest stages from the first layer to some others, by warm-up count."""
    by_count = np.full((num_counts, len(ends)), np.inf)
    runs = cut.runs[0, ends]
    every, limits = cut.seconds[:, runs], cut.live_limits[:, runs]
    fitting = (every <= pace) & (limits >= least_count)
    for place in np.flatnonzero(fitting.any(axis=1)):
        fits = np.flatnonzero(fitting[place])
        total = every[place, fits]
        if cut.closing is not None:
            total = total + cut.closing[place, ends[fits]]
        _note(by_count, limits[place, fits] - least_count, fits, total)
    return _for_all_below(by_count)


def _note(by_count: FloatArray, counts: IntArray, fits: IntArray, seconds: FloatArray) -> None:
    """Note what takes so long at the largest warm-up count that fits it."""
    where = (np.minimum(counts, len(by_count) - 1), fits)
    by_count[where] = np.minimum(by_count[where], seconds)


def _for_all_below(by_count: FloatArray) -> FloatArray:
    """What fits a warm-up count fits all below it."""
    return np.minimum.accumulate(by_count[::-1], axis=0)[::-1]
