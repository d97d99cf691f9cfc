"""The stages of one shape of submesh that are no slower than a pace, by length and first layer."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from hetjax.planner.harp.stage_table import Slice, by_length
from hetjax.planner.work.arrays import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Band:
    """Stages on one shape of submesh that are no slower than a pace, each with its fastest option.

    A stage of many layers is slow, so that few last layers are left for each first one.

    Args:
        seconds: ``[counts, width, L + 1]``: the entry ``[n, k, i]`` is for layers i to i + k, with
            the n-th warm-up count, and with what closes a step where i is 0; infinite where nothing
            fits.
    """

    seconds: FloatArray

    @classmethod
    def of(cls, cut: Slice, least_count: int, num_counts: int, pace: float) -> Band:
        """The band of a slice.

        Args:
            cut: what stages cost.
            least_count: the first warm-up count; the others follow it.
            num_counts: how many there are.
            pace: seconds that no stage may exceed.
        """
        width = max(int(np.searchsorted(cut.fastest_by_length, pace, side="right")), 1)
        fastest = _fastest(cut, least_count, num_counts, width)
        by_count = np.where(fastest <= pace, fastest, np.inf)
        by_count[..., 0] = _first_stages(cut, least_count, num_counts, pace, width)
        return cls(by_count)

    def put_before(self, rest: FloatArray) -> FloatArray:
        """The least of a stage and the rest behind it, by the stage's first layer.

        Args:
            rest: ``[stages, counts, L + 1]``: the entry ``[s, n, j]`` is for layers j to the end.

        Returns:
            Values of the same shape, by the first layer of the stage in front.
        """
        _, width, num_firsts = self.seconds.shape
        padded = np.full((*rest.shape[:-1], num_firsts - 1 + width), np.inf)
        padded[..., : num_firsts - 1] = rest[..., 1:]
        # What sliding_window_view gives, in a tenth of the time.
        stages, counts, step = padded.strides
        shape = (*rest.shape[:-1], width, num_firsts)
        windows = np.ndarray(shape, padded.dtype, padded, strides=(stages, counts, step, step))
        return (self.seconds + windows).min(axis=-2)

    def from_layer(self, first: int, row: int, rest: FloatArray) -> FloatArray:
        """The stage from one layer and the rest behind it, by the rest's first layer.

        Args:
            first: the stage's first layer.
            row: of the warm-up counts.
            rest: ``[L + 1]``.

        Returns:
            Values ``[L + 1]``.
        """
        values = np.full(len(rest), np.inf)
        band = self.seconds[row, :, first][: len(rest) - first - 1]
        values[first + 1 : first + 1 + len(band)] = band + rest[first + 1 : first + 1 + len(band)]
        return values


_KNOWN: WeakKeyDictionary[Slice, tuple[tuple[int, int], FloatArray]] = WeakKeyDictionary()
"""What was found last of each slice: a search asks for many paces, and seldom for other counts."""


def _fastest(cut: Slice, least_count: int, num_counts: int, width: int) -> FloatArray:
    """The fastest stages by warm-up count, at any pace, and without what closes a step."""
    counts = least_count, num_counts
    known = _KNOWN.get(cut)
    if known is None or known[0] != counts or known[1].shape[1] < width:
        by_count = np.full((num_counts, width, cut.seconds.shape[1]), np.inf)
        for option, option_limits in zip(cut.seconds, cut.live_limits, strict=True):
            seconds, limits = by_length(option, width), by_length(option_limits, width)
            fits = np.nonzero(limits >= least_count)
            _note(by_count, limits[fits] - least_count, fits, seconds[fits])
        known = _KNOWN[cut] = counts, _for_all_below(by_count)
    return known[1][:, :width]


def _first_stages(
    cut: Slice, least_count: int, num_counts: int, pace: float, width: int
) -> FloatArray:
    """The fastest stages from the first layer on, by warm-up count and length."""
    by_count = np.full((num_counts, width), np.inf)
    for place, (option, limits) in enumerate(zip(cut.seconds, cut.live_limits, strict=True)):
        seconds, held = option[0, 1 : width + 1], limits[0, 1 : width + 1]
        fits = np.nonzero((seconds <= pace) & (held >= least_count))
        total = seconds[fits]
        if cut.closing is not None:
            total = total + cut.closing[place, 1 : width + 1][fits]
        _note(by_count, held[fits] - least_count, fits, total)
    return _for_all_below(by_count)


def _note(
    by_count: FloatArray, counts: IntArray, fits: tuple[IntArray, ...], seconds: FloatArray
) -> None:
    """Note what takes so long at the largest warm-up count that fits it."""
    where = (np.minimum(counts, len(by_count) - 1), *fits)
    by_count[where] = np.minimum(by_count[where], seconds)


def _for_all_below(by_count: FloatArray) -> FloatArray:
    """What fits a warm-up count fits all below it."""
    return np.minimum.accumulate(by_count[::-1], axis=0)[::-1]
