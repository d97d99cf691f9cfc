"""The stages of one shape of submesh that are no slower than a pace, by length and first layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetjax.planner.stage_table import FloatArray, Slice, by_length


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
        num_firsts = cut.seconds.shape[1]
        width = max(int(np.searchsorted(cut.fastest_by_length, pace, side="right")), 1)
        by_count = np.full((num_counts, width, num_firsts), np.inf)
        closing = np.zeros((len(cut.seconds), num_firsts)) if cut.closing is None else cut.closing
        every = zip(cut.seconds, cut.live_limits, closing, strict=True)
        for option, option_limits, option_closing in every:
            seconds, limits = by_length(option, width), by_length(option_limits, width)
            fits = np.nonzero((seconds <= pace) & (limits >= least_count))
            # Each option counts for the largest warm-up count that fits it, and so for all below.
            where = (np.minimum(limits[fits] - least_count, num_counts - 1), *fits)
            total = seconds[fits]
            total += np.where(fits[1] == 0, option_closing[fits[0] + 1], 0.0)
            by_count[where] = np.minimum(by_count[where], total)
        for row in range(num_counts - 1, 0, -1):
            np.minimum(by_count[row - 1], by_count[row], out=by_count[row - 1])
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
