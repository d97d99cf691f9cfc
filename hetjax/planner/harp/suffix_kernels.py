"""The loops of the dynamic program of one pace, compiled; only what is large enough imports this.

Each does what NumPy does in `hetjax.planner.harp.fixed_pace` and `hetjax.planner.harp.fast_stages`,
to the last digit: the same sums of the same two numbers, and the least of them.
"""

from __future__ import annotations

import numpy as np

from hetjax.planner.harp.compiled import compiled
from hetjax.planner.work.arrays import FloatArray, IntArray


@compiled
def stage_seconds(
    found: FloatArray,
    start: int,
    seconds: FloatArray,
    limits: IntArray,
    closing: FloatArray,
    first_runs: IntArray,
    least_count: int,
    pace: float,
) -> None:
    """What stages take, as `hetjax.planner.harp.fast_stages.Band.seconds` has it.

    Args:
        found: what is filled, ``[counts, runs]``; it is infinite.
        start: which of the runs is the first of these.
        seconds: ``[options, runs]``.
        limits: likewise, how many live microbatches fit.
        closing: what the first stage does once, ``[options, L + 1]`` by its length.
        first_runs: the runs from the first layer on, by length; those past the end do not fit.
        least_count: the first warm-up count.
        pace: seconds that no stage may exceed.
    """
    options, runs = seconds.shape
    last = len(found) - 1
    lengths = np.full(runs, -1)
    for j in range(len(first_runs)):
        if first_runs[j] < runs:
            lengths[first_runs[j]] = j
    most = 0
    for o in range(options):
        for r in range(runs):
            if limits[o, r] >= least_count and seconds[o, r] <= pace:
                c, total = min(limits[o, r] - least_count, last), seconds[o, r]
                if lengths[r] >= 0:
                    total += closing[o, lengths[r]]
                if total < found[c, start + r]:
                    found[c, start + r], most = total, max(most, c)
    for c in range(most - 1, -1, -1):
        for r in range(runs):
            found[c, start + r] = min(found[c, start + r], found[c + 1, start + r])


@compiled
def _kept(
    totals: FloatArray,
    box: tuple[int, int, int, int],
    place: IntArray,
    spans: IntArray,
    arena: FloatArray,
    used: int,
) -> tuple[int, FloatArray]:
    """Appends what is of use of some totals; see `hetjax.planner.harp.fast_stages.Suffixes.shrunk`.

    Args:
        totals: ``[stages, counts, layers]``; what is of no use becomes infinite.
        box: the first row to be looked at, the one after the last, and the same of layers.
        place: filled with the first layer that is kept, the first row, how many there are of both,
            and where in the arena they are; as it was where there are none.
        spans: filled, by number of stages and row, with the first layer that is finite, and the one
            after the last.
        arena: values kept one after the other.
        used: how many there are.

    Returns:
        How many there are now; and the arena, or a larger one.
    """
    row, end, low, high = box
    stages = len(totals)
    first_row, after_row, first, after = end, row, high, low
    least = np.empty(max(high - low, 0))
    for s in range(stages):
        least[:] = np.inf
        for c in range(row, end):
            begin, past = high, low
            for i in range(low, high):
                if totals[s, c, i] < least[i - low]:
                    least[i - low] = totals[s, c, i]
                    begin, past = min(begin, i), i + 1
                else:
                    totals[s, c, i] = np.inf
            spans[s, c, 0], spans[s, c, 1] = begin, past
            if begin < past:
                first, after = min(first, begin), max(after, past)
                first_row, after_row = min(first_row, c), c + 1 if s == 0 else max(after_row, c + 1)
    if first >= after:
        return used, arena
    rows, layers = after_row - first_row, after - first
    past = used + stages * rows * layers
    if past > len(arena):
        larger = np.empty(max(past, 2 * len(arena)))
        for k in range(used):
            larger[k] = arena[k]
        arena = larger
    k = used
    for s in range(stages):
        for c in range(first_row, after_row):
            for i in range(first, after):
                arena[k] = totals[s, c, i]
                k += 1
    place[0], place[1], place[2], place[3], place[4] = first, first_row, layers, rows, used
    return past, arena


@compiled
def _clear(totals: FloatArray, box: tuple[int, int, int, int]) -> None:
    """Sets totals to infinity."""
    row, end, low, high = box
    for s in range(len(totals)):
        for c in range(row, end):
            for i in range(low, high):
                totals[s, c, i] = np.inf


@compiled
def _put_move(
    totals: FloatArray,
    behind: FloatArray,
    place: IntArray,
    spans: IntArray,
    seconds: FloatArray,
    extra: IntArray,
    takes_more: bool,
) -> None:
    """Lessens totals by others with a move before them.

    Args:
        totals: what is lessened, ``[stages, counts, layers]``.
        behind: values kept one after the other.
        place: which of them; see `_kept`.
        spans: between which layers they are finite; see `_kept`.
        seconds: of the move, by layer.
        extra: by how much the warm-up count rises, by layer.
        takes_more: whether the last number of stages stands for all above it too.
    """
    stages, counts, _ = totals.shape
    first, row, layers, rows, start = place
    for s in range(stages if takes_more else stages - 1):
        target = min(s + 1, stages - 1)
        for c in range(row, row + rows):
            here = start + (s * rows + c - row) * layers - first
            for i in range(spans[s, c, 0], spans[s, c, 1]):
                to, total = min(c + extra[i], counts - 1), behind[here + i] + seconds[i]
                if total < totals[target, to, i]:
                    totals[target, to, i] = total


@compiled
def _put_stage(
    totals: FloatArray,
    rests: FloatArray,
    place: IntArray,
    spans: IntArray,
    seconds: FloatArray,
    start: int,
    runs: IntArray,
    widths: IntArray,
    lows: IntArray,
    highs: IntArray,
) -> None:
    """Lessens totals by those of a stage and a rest behind it; see `Band.put_before`.

    Args:
        totals: what is lessened, ``[stages, counts, layers]``.
        rests: values kept one after the other.
        place: which of them is the rest; see `_kept`.
        spans: between which layers it is finite; see `_kept`.
        seconds: of stages, ``[counts, runs]``.
        start: where those of this one begin.
        runs: ``[L + 1, L + 1]``.
        widths: how many layers the stage has at most, by count.
        lows: the first layer that is of interest, by count, or for all of them.
        highs: the last one.
    """
    first, row, layers, rows, where = place
    size, of_stages, of_runs = len(runs), seconds.ravel(), runs.ravel()
    for s in range(len(totals)):
        for c in range(row, row + rows):
            window = c if len(lows) > 1 else 0
            begin, past = spans[s, c, 0], spans[s, c, 1]
            low, high = max(lows[window], begin - widths[c]), min(highs[window], past - 2)
            # An index without a sign is not looked at for being counted from the end.
            stage = np.uint64(c * seconds.shape[1] + start)
            for i in range(low, high + 1):
                least, j = totals[s, c, i], max(begin, i + 1)
                run = np.uint64(i * size + j)
                rest = np.uint64(where + (s * rows + c - row) * layers + j - first)
                for k in range(np.uint64(max(0, min(past, i + widths[c] + 1) - j))):
                    total = of_stages[stage + np.uint64(of_runs[run + k])] + rests[rest + k]
                    if total < least:
                        least = total
                totals[s, c, i] = least


@compiled
def _least_of_all(stages: int, heads: IntArray, values: FloatArray) -> tuple[int, int, FloatArray]:
    """The least totals of all suffixes; see `hetjax.planner.harp.fast_stages.least_of`.

    Args:
        stages: how many numbers of stages are told from each other.
        heads: the first layer of each, the first row, how many layers and rows there are, and where
            its values begin.
        values: of all, one after the other.

    Returns:
        The first layer, the first row, and the totals.
    """
    first, end, row, end_row = 1 << 30, 0, 1 << 30, 0
    for head in range(len(heads)):
        if heads[head, 2]:
            first, end = min(first, heads[head, 0]), max(end, heads[head, 0] + heads[head, 2])
            row, end_row = min(row, heads[head, 1]), max(end_row, heads[head, 1] + heads[head, 3])
    least = np.full((stages, max(end_row - row, 0), max(end - first, 0)), np.inf)
    for head in range(len(heads)):
        low, low_row, layers, rows, k = heads[head]
        for s in range(stages if layers else 0):
            for c in range(low_row - row, low_row - row + rows):
                for i in range(low - first, low - first + layers):
                    least[s, c, i] = min(least[s, c, i], values[k])
                    k += 1
    return first, row, least


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
) -> tuple[IntArray, FloatArray, IntArray, FloatArray, tuple[int, int, FloatArray]]:
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
        seconds: of stages, ``[C, runs of all slices]``.
        runs: ``[., L + 1, L + 1]``.
        widths: how many layers a stage has at most, ``[slices, C]``.
        moves: seconds by link and layer.
        extra: by how much they raise the warm-up count.
        outside: the least of what is in other subclusters, ``[stages, counts, layers]``, with the
            move to it.
        outside_first: its first layer.
        outside_row: its first row.

    Returns:
        By how many devices are used: the first layer, the first row, how many layers and rows, and
        where the values begin; where there are no layers, there are no suffixes. And the values,
        each ``[stages, rows, layers]``. The same of all that may lie behind so many devices, as far
        as a stage is before them. And the least of all suffixes: their first layer, their first row
        and the totals.
    """
    size, counts = runs.shape[1], len(seconds)
    devices = len(starts) - 2
    heads, rests = np.zeros((devices + 1, 5), np.int64), np.zeros((devices + 1, 5), np.int64)
    head_spans = np.empty((devices + 1, stages, counts, 2), np.int64)
    rest_spans = np.empty((devices + 1, stages, counts, 2), np.int64)
    is_known = np.zeros(devices + 1, np.bool_)
    best, behind = np.empty(1 << 16), np.empty(1 << 16)
    num_best, num_behind = 0, 0
    totals = np.empty((stages, counts, size))
    _, outside_rows, outside_layers = outside.shape
    for used in range(1, devices + 1):
        row, end, low, high = counts, 0, size, 0
        for c in range(lows.shape[1]):
            if lows[used, c] <= highs[used, c]:
                row, end = min(row, c), c + 1
                low, high = min(low, lows[used, c]), max(high, highs[used, c] + 1)
        if row >= end:
            continue
        window = (row, end if lows.shape[1] > 1 else counts, low, high)
        for each in range(starts[used], starts[used + 1]):
            before = extensions[each, 1]
            if is_known[before]:
                continue
            is_known[before] = True
            row, end, low, high = counts, 0, size, 0
            if leaving[before] and outside_layers:
                row, end = outside_row, outside_row + outside_rows
                low, high = outside_first, outside_first + outside_layers
            link = links[before]
            for head in range(before, before - idle[before], -1):
                first, first_row, layers, rows, _ = heads[head]
                if layers:
                    low, high = min(low, first), max(high, first + layers)
                    for i in range(first, first + layers):
                        row = min(row, first_row + extra[link, i], counts - 1)
                        end = max(end, min(first_row + extra[link, i] + rows, counts))
            if row >= end:
                continue
            box = (row, end, low, high)
            _clear(totals, box)
            if leaving[before]:
                for s in range(stages):
                    for c in range(outside_rows):
                        for i in range(outside_layers):
                            totals[s, outside_row + c, outside_first + i] = outside[s, c, i]
            for head in range(before, before - idle[before], -1):
                if heads[head, 2]:
                    _put_move(
                        totals,
                        best,
                        heads[head],
                        head_spans[head],
                        moves[link],
                        extra[link],
                        takes_more,
                    )
            num_behind, behind = _kept(
                totals, box, rests[before], rest_spans[before], behind, num_behind
            )
        _clear(totals, window)
        for each in range(starts[used], starts[used + 1]):
            chosen, before = extensions[each]
            if rests[before, 2]:
                _put_stage(
                    totals,
                    behind,
                    rests[before],
                    rest_spans[before],
                    seconds,
                    of_slices[chosen, 0],
                    runs[of_slices[chosen, 1]],
                    widths[chosen],
                    lows[used],
                    highs[used],
                )
        num_best, best = _kept(totals, window, heads[used], head_spans[used], best, num_best)
    best, behind = best[:num_best].copy(), behind[:num_behind].copy()
    return heads, best, rests, behind, _least_of_all(stages, heads, best)
