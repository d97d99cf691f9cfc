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
    options, last = seconds.shape[0], found.shape[1] - 1
    is_first = np.full(seconds.shape[1], -1)
    is_first[first_runs] = np.arange(len(first_runs))
    for r in range(seconds.shape[1]):
        of_run, most = found[r], -1
        of_run[:] = np.inf
        for o in range(options):
            if limits[o, r] >= least_count and seconds[o, r] <= pace:
                c = min(limits[o, r] - least_count, last)
                total = seconds[o, r]
                if is_first[r] >= 0:
                    total += closing[o, is_first[r]]
                of_run[c], most = min(of_run[c], total), max(most, c)
        for c in range(most - 1, -1, -1):
            of_run[c] = min(of_run[c], of_run[c + 1])


@compiled
def _kept(
    totals: FloatArray,
    low: int,
    high: int,
    row: int,
    end: int,
    place: IntArray,
    arena: FloatArray,
    used: int,
) -> tuple[int, FloatArray]:
    """Appends what is of use of some totals; see `hetjax.planner.harp.fast_stages.Suffixes.shrunk`.

    Args:
        totals: ``[stages, layers, counts]``; what is of no use becomes infinite.
        low: the first layer to be looked at.
        high: the one after the last.
        row: the first row to be looked at; what is below it is infinite.
        end: the one after the last.
        place: filled with the first layer that is kept, the first row, how many there are of both,
            and where in the arena they are; as it was where there are none.
        arena: values kept one after the other.
        used: how many there are.

    Returns:
        How many there are now; and the arena, or a larger one.
    """
    assert low < high, "there are layers"
    stages = len(totals)
    first, after, first_row, after_row = high, low, end, row
    for s in range(stages):
        for i in range(low, high):
            of_layer = totals[s, i]
            least = np.inf
            for c in range(row, end):
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
    start: int,
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
        seconds: of stages, ``[runs, counts]``.
        start: where this one's are.
        runs: ``[L + 1, L + 1]``.
        widths: how many layers it has at most, by count; not rising.
        open_rows: by layer the first row that is of interest, and the one after the last.
        low: the first layer that is of interest.
        high: the last one.
    """
    (stages, layers, rows), most = rest.shape, widths[row]
    _, all_layers, counts = found.shape
    every, behind, of_stage = found.ravel(), rest.ravel(), seconds.ravel()
    for s in range(stages):
        for i in range(max(low, first - most), min(high, first + layers - 2) + 1):
            begin, end = max(row, open_rows[i, 0]), min(row + rows, open_rows[i, 1])
            # An index that has no sign is not looked at for being counted from the end.
            here = np.uint64((s * all_layers + i) * counts + begin)
            for j in range(max(first, i + 1), min(first + layers - 1, i + most) + 1):
                while end > begin and widths[end - 1] < j - i:
                    end -= 1
                if end <= begin:
                    break
                stage = np.uint64((start + runs[i, j]) * counts + begin)
                after = np.uint64((s * layers + j - first) * rows + begin - row)
                for c in range(np.uint64(end - begin)):
                    total = of_stage[stage + c] + behind[after + c]
                    known = every[here + c]
                    every[here + c] = total if total < known else known


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
            low, high, row, end = layers + 1, 0, counts, 0
            if leaving[before] and outside.shape[1]:
                low, high = outside_first, outside_first + outside.shape[1]
                row, end = outside_row, outside_row + outside.shape[2]
            of_link = extra[links[before]]
            for head in range(before, before - idle[before], -1):
                if heads[head, 2]:
                    low, high = min(low, heads[head, 0]), max(high, heads[head, 0] + heads[head, 2])
                    least, most = heads[head, 1] + of_link.min(), heads[head, 1] + of_link.max()
                    row = min(row, least, counts - 1)
                    end = max(end, min(most + heads[head, 3], counts))
            totals[:, low:high, row:end] = np.inf
            if leaving[before]:
                rows = slice(outside_row, outside_row + outside.shape[2])
                totals[:, outside_first : outside_first + outside.shape[1], rows] = outside
            for head in range(before, before - idle[before], -1):
                first_layer, first_row, width, height, start = heads[head]
                if width:
                    past = start + stages * width * height
                    _put_move(
                        totals,
                        best[start:past].reshape(stages, width, height),
                        first_layer,
                        first_row,
                        moves[links[before]],
                        of_link,
                        takes_more,
                    )
            if low < high:
                num_behind, behind = _kept(
                    totals, low, high, row, end, rests[before], behind, num_behind
                )
        row, end = open_rows[first:after, 0].min(), open_rows[first:after, 1].max()
        totals[:, first:after, row:end] = np.inf
        for each in range(starts[used], starts[used + 1]):
            chosen, before = extensions[each]
            first_layer, first_row, width, height, start = rests[before]
            if width:
                past = start + stages * width * height
                _put_stage(
                    totals,
                    behind[start:past].reshape(stages, width, height),
                    first_layer,
                    first_row,
                    seconds,
                    of_slices[chosen, 0],
                    runs[of_slices[chosen, 1]],
                    widths[chosen],
                    open_rows,
                    first,
                    after - 1,
                )
        for c in range(highs.shape[1]):
            rows = slice(c, c + 1) if highs.shape[1] > 1 else slice(0, counts)
            totals[:, max(first, highs[used, c] + 1) : after, rows] = np.inf
        num_best, best = _kept(totals, first, after, row, end, heads[used], best, num_best)
    return heads, best[:num_best].copy()
