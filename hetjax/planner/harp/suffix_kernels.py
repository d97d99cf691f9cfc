"""The loops of the dynamic program of one pace, compiled; only what is large enough imports this.

Each does what NumPy does in `hetjax.planner.harp.fixed_pace` and `hetjax.planner.harp.fast_stages`,
to the last digit: the same sums of the same two numbers, and the least of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba
import numpy as np

from hetjax.planner.work.arrays import FloatArray, IntArray

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function) -> _Function:
    """A function that is compiled when it is first called, and kept where Python keeps bytecode.

    Args:
        function: loops over arrays. It calls none of another file, of whose changes what is kept
            would not know.
    """
    try:
        return numba.njit(cache=True)(function)
    except RuntimeError:
        # There is no folder that can be written.
        return numba.njit(function)


@compiled
def stage_seconds(
    found: FloatArray,
    seconds: FloatArray,
    limits: IntArray,
    closing: FloatArray,
    first_runs: IntArray,
    least_count: int,
    pace: float,
) -> None:
    """What stages take, as `hetjax.planner.harp.fast_stages.Band.seconds` has it.

    Args:
        found: what is filled, ``[runs, counts]``.
        seconds: ``[options, runs]``.
        limits: likewise, how many live microbatches fit.
        closing: what the first stage does once, ``[options, L]`` by its length less one.
        first_runs: the runs from the first layer on, by length less one.
        least_count: the first warm-up count.
        pace: seconds that no stage may exceed.
    """
    options, runs = seconds.shape
    last = found.shape[1] - 1
    found[:] = np.inf
    for o in range(options):
        for r in range(runs):
            if limits[o, r] >= least_count and seconds[o, r] <= pace:
                c = min(limits[o, r] - least_count, last)
                found[r, c] = min(found[r, c], seconds[o, r])
    for k in range(len(first_runs)):
        r = first_runs[k]
        found[r] = np.inf
        for o in range(options):
            if limits[o, r] >= least_count and seconds[o, r] <= pace:
                c = min(limits[o, r] - least_count, last)
                found[r, c] = min(found[r, c], seconds[o, r] + closing[o, k])
    for r in range(runs):
        for c in range(last - 1, -1, -1):
            found[r, c] = min(found[r, c], found[r, c + 1])


@compiled
def _kept(
    totals: FloatArray, low: int, high: int, place: IntArray, arena: FloatArray, used: int
) -> tuple[int, FloatArray]:
    """Appends what is of use of some totals; see `hetjax.planner.harp.fast_stages.Suffixes.shrunk`.

    Args:
        totals: ``[stages, layers, counts]``; what is of no use becomes infinite.
        low: the first layer to be looked at.
        high: the one after the last.
        place: filled with the first layer that is kept, the first row, how many there are of both,
            and where in the arena they are; as it was where there are none.
        arena: values kept one after the other.
        used: how many there are.

    Returns:
        How many there are now; and the arena, or a larger one.
    """
    stages, _, counts = totals.shape
    first, after, first_row, after_row = high, low, counts, 0
    for s in range(stages):
        for i in range(low, high):
            of_layer = totals[s, i]
            least = np.inf
            for c in range(counts):
                if of_layer[c] < least:
                    least = of_layer[c]
                    first, after = min(first, i), max(after, i + 1)
                    first_row, after_row = min(first_row, c), max(after_row, c + 1)
                else:
                    of_layer[c] = np.inf
    if first >= after:
        return used, arena
    layers, rows = after - first, after_row - first_row
    past = used + stages * layers * rows
    if past > len(arena):
        larger = np.empty(max(past, 2 * len(arena)))
        larger[:used] = arena[:used]
        arena = larger
    kept = arena[used:past].reshape(stages, layers, rows)
    kept[:] = totals[:, first:after, first_row:after_row]
    place[0], place[1], place[2], place[3], place[4] = first, first_row, layers, rows, used
    return past, arena


@compiled
def _put_move(
    found: FloatArray,
    behind: FloatArray,
    first: int,
    row: int,
    seconds: FloatArray,
    extra: IntArray,
    takes_more: bool,
) -> None:
    """Lessens totals by others with a move before them.

    Args:
        found: what is lessened, ``[stages, layers, counts]``.
        behind: ``[stages, layers, counts]``, from a layer and a row on.
        first: that layer.
        row: that row.
        seconds: of the move, by layer.
        extra: by how much the warm-up count rises, by layer.
        takes_more: whether the last number of stages stands for all above it too.
    """
    stages, layers, rows = behind.shape
    last = found.shape[2] - 1
    for s in range(stages if takes_more else stages - 1):
        for i in range(layers):
            shift, more = row + extra[first + i], seconds[first + i]
            of_layer = found[min(s + 1, stages - 1), first + i]
            for c in range(rows):
                to = min(c + shift, last)
                of_layer[to] = min(of_layer[to], behind[s, i, c] + more)


@compiled
def _put_stage(
    found: FloatArray,
    rest: FloatArray,
    first: int,
    row: int,
    seconds: FloatArray,
    runs: IntArray,
    widths: IntArray,
    open_rows: IntArray,
    low: int,
    high: int,
) -> None:
    """Lessens totals by those of a stage and a rest behind it; see `Band.put_before`.

    Args:
        found: what is lessened, ``[stages, layers, counts]``.
        rest: ``[stages, layers, counts]``, from a layer and a row on.
        first: that layer.
        row: that row.
        seconds: of the stage, ``[runs, counts]``.
        runs: ``[L + 1, L + 1]``.
        widths: how many layers it has at most, by count; not rising.
        open_rows: by layer the first row that is of interest, and the one after the last.
        low: the first layer that is of interest.
        high: the last one.
    """
    stages, layers, rows = rest.shape
    most = widths[row]
    for i in range(max(low, first - most), min(high, first + layers - 2) + 1):
        begin, end = max(row, open_rows[i, 0]), min(row + rows, open_rows[i, 1])
        for j in range(max(first, i + 1), min(first + layers - 1, i + most) + 1):
            while end > begin and widths[end - 1] < j - i:
                end -= 1
            if end <= begin:
                break
            of_stage = seconds[runs[i, j], begin:end]
            for s in range(stages):
                behind = rest[s, j - first, begin - row : end - row]
                of_layer = found[s, i, begin:end]
                for c in range(end - begin):
                    total = of_stage[c] + behind[c]
                    of_layer[c] = total if total < of_layer[c] else of_layer[c]


@compiled
def _open_rows(lows: IntArray, highs: IntArray, counts: int, found: IntArray) -> tuple[int, int]:
    """Between which rows suffixes may begin with each layer.

    Args:
        lows: the first layer, by row, or for all of them.
        highs: the last one.
        counts: how many rows there are.
        found: filled, by layer, with the first row and the one after the last.

    Returns:
        The first layer of any row, and the one after the last.
    """
    first, after = len(found), 0
    for c in range(len(lows)):
        if lows[c] <= highs[c]:
            first, after = min(first, lows[c]), max(after, highs[c] + 1)
    for i in range(first, after):
        found[i, 0], found[i, 1] = counts, 0
    for c in range(len(lows)):
        for i in range(lows[c], highs[c] + 1):
            found[i, 0], found[i, 1] = min(found[i, 0], c), c + 1
    if len(lows) == 1:
        for i in range(first, after):
            found[i, 1] = counts
    return first, after


@compiled
def suffixes_before(
    stages: int,
    takes_more: bool,
    leaving: IntArray,
    idle: IntArray,
    links: IntArray,
    lows: IntArray,
    highs: IntArray,
    starts: IntArray,
    extensions: IntArray,
    of_slices: IntArray,
    seconds: FloatArray,
    runs: IntArray,
    widths: IntArray,
    moves: FloatArray,
    extra: IntArray,
    outside: FloatArray,
    outside_first: int,
    outside_row: int,
) -> tuple[IntArray, FloatArray]:
    """The suffixes over some subclusters that begin with one of them; D devices of this, C counts.

    Args:
        stages: how many numbers of stages are told from each other.
        takes_more: whether the last of them stands for all above it too.
        leaving: ``[D + 1]``, by how many devices lie behind a stage: 1 where what follows it may be
            in another subcluster.
        idle: likewise, among how many numbers of devices what follows it is where it is in the
            same: so many as lie behind the stage, one less, and so on.
        links: likewise, which move leads there.
        lows: by how many devices are used the first layer that suffixes may begin with,
            ``[D + 1, C]``, or ``[D + 1, 1]`` for all counts.
        highs: the last one.
        starts: by how many are used, where `extensions` begin.
        extensions: the slice of a first stage, and how many devices are used behind it.
        of_slices: by slice where its `seconds` begin, and which of `runs` is its.
        seconds: of stages, ``[runs of all slices, C]``.
        runs: ``[., L + 1, L + 1]``.
        widths: how many layers a stage has at most, ``[slices, C]``.
        moves: seconds by link and layer.
        extra: by how much they raise the warm-up count.
        outside: the least of what is in other subclusters, ``[stages, layers, counts]``, with the
            move to it.
        outside_first: its first layer.
        outside_row: its first row.

    Returns:
        By how many devices are used: the first layer, the first row, how many layers and rows, and
        where the values begin; where there are no layers, there are no suffixes. And the values,
        each ``[stages, layers, rows]``.
    """
    layers, counts = runs.shape[1] - 1, seconds.shape[1]
    heads, rests = np.zeros((len(starts) - 1, 5), np.int64), np.zeros((len(starts) - 1, 5), np.int64)
    is_known = np.zeros(len(starts) - 1, np.bool_)
    best, behind = np.empty(1 << 16), np.empty(1 << 16)
    num_best, num_behind = 0, 0
    totals = np.empty((stages, layers + 1, counts))
    open_rows = np.empty((layers + 1, 2), np.int64)
    for used in range(1, len(starts) - 1):
        first, after = _open_rows(lows[used], highs[used], counts, open_rows)
        if first >= after:
            continue
        for each in range(starts[used], starts[used + 1]):
            before = extensions[each, 1]
            if is_known[before]:
                continue
            is_known[before] = True
            totals[:] = np.inf
            if leaving[before]:
                rows = slice(outside_row, outside_row + outside.shape[2])
                totals[:, outside_first : outside_first + outside.shape[1], rows] = outside
            for head in range(before, before - idle[before], -1):
                begin, row, width, height, start = heads[head]
                if width:
                    _put_move(
                        totals,
                        best[start : start + stages * width * height].reshape(
                            stages, width, height
                        ),
                        begin,
                        row,
                        moves[links[before]],
                        extra[links[before]],
                        takes_more,
                    )
            num_behind, behind = _kept(
                totals, 0, layers + 1, rests[before], behind, num_behind
            )
        totals[:, first:after] = np.inf
        for each in range(starts[used], starts[used + 1]):
            chosen, before = extensions[each]
            begin, row, width, height, start = rests[before]
            if width:
                _put_stage(
                    totals,
                    behind[start : start + stages * width * height].reshape(stages, width, height),
                    begin,
                    row,
                    seconds[of_slices[chosen, 0] :],
                    runs[of_slices[chosen, 1]],
                    widths[chosen],
                    open_rows,
                    first,
                    after - 1,
                )
        for c in range(highs.shape[1]):
            rows = slice(c, c + 1) if highs.shape[1] > 1 else slice(0, counts)
            totals[:, max(first, highs[used, c] + 1) : after, rows] = np.inf
        num_best, best = _kept(totals, first, after, heads[used], best, num_best)
    return heads, best[:num_best].copy()
