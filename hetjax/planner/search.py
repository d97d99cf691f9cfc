"""The exact search over a stage table: contiguous layers on slices of subclusters.

A plan's latency is ``sum_i (t_i + f_i + b_i) + (M - 1) pace`` (Harp equation 12): one microbatch's
way through the pipeline and back, then one more microbatch every pace, which no stage and no
transfer may exceed. For one pace a dynamic program from the last stage to the first finds the least
sum; its states hold the warm-up count, since that decides what fits in memory. The least sum does
not rise with the pace, so whole ranges of paces are ruled out by one of them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.pipeline.schedule import h_1f1b_counts
from hetjax.planner.stage_table import FloatArray, IntArray, Slice, StageTable, Transfers

# H-1F1B's tolerance: transfers below this share of the pace get no warm-up forward of their own.
_TOLERANCE = 0.1

# Sums of the same times in another order differ by less, relatively.
_ROUNDING = 1e-12

Head = tuple[int, int, int]
"""Where a suffix of the pipeline begins: the subclusters used by it as bits, the subcluster of its
first stage, and how many devices of that are used, counted from its end."""


@dataclass(frozen=True)
class Place:
    """Where a stage is.

    Args:
        layers: first layer, and the one after the last.
        subcluster: the place of the subcluster in the table.
        slice: the place of the submesh's shape in the subcluster's slices.
        start: the first device.
    """

    layers: tuple[int, int]
    subcluster: int
    slice: int
    start: int


@dataclass(frozen=True)
class Candidate:
    """A whole pipeline that the table allows.

    Args:
        places: the stages' places.
        options: the option that each stage runs with.
        warm_up_counts: the warm-up count of each stage.
        total: seconds of one microbatch's way through the pipeline and back.
        pace: seconds from one microbatch to the next.
        latency: seconds of a step.
    """

    places: tuple[Place, ...]
    options: tuple[int, ...]
    warm_up_counts: tuple[int, ...]
    total: float
    pace: float
    latency: float


def search(table: StageTable) -> tuple[Candidate, ...]:
    """Find the pipeline of the least latency.

    The search space: every division of the layers into contiguous stages; every order and subset of
    subclusters (unless the table fixes an order), each passed once; in a subcluster, submeshes of
    the table's shapes in the pipeline's order, with devices idle anywhere; every option of a stage;
    every pace. A stage fits if its live limit is at least its warm-up count.

    Args:
        table: what stages and transfers cost.

    Returns:
        The best candidate first, proven to be that, then others that were met on the way, by
        latency. Empty where nothing fits.

    Source: Harp section 5.2, equations 12 to 19.
    """
    paces = _paces(table)
    repeats = table.num_microbatches - 1
    solver = _Solver(table)
    found: dict[tuple[Place, ...], Candidate] = {}
    best = np.inf

    def settle(low: int, index: int) -> tuple[float, int]:
        """Solves one pace; returns a floor under the totals below it, and the index settled."""
        nonlocal best
        floor, candidate = solver.solve(paces[index], worth=best - repeats * paces[low])
        if candidate is None:
            return floor, index
        tightest = price(table, candidate.places, _own_pace(table, candidate))
        if tightest is not None and tightest.total <= candidate.total * (1 + _ROUNDING):
            # The same total at a lower pace: the paces between the two are settled as well.
            candidate = tightest
            index = int(np.searchsorted(paces, tightest.pace))
        known = found.get(candidate.places)
        if known is None or candidate.latency < known.latency:
            found[candidate.places] = candidate
        best = min(best, candidate.latency)
        return floor, index

    last = len(paces) - 1
    floor, index = settle(last, last)
    ranges = [(floor + repeats * paces[0], 0, index - 1, floor)]
    while ranges:
        _, low, high, floor = heapq.heappop(ranges)
        if repeats:
            # No pace above this can do better, whatever the total.
            high = min(high, int(np.searchsorted(paces, (best - floor) / repeats)) - 1)
        if low > high or floor + repeats * paces[low] >= best * (1 - _ROUNDING):
            continue
        middle = (low + high) // 2
        below, index = settle(low, middle)
        if np.isfinite(below):
            heapq.heappush(ranges, (below + repeats * paces[low], low, index - 1, below))
        if middle < high:
            bound = floor + repeats * paces[middle + 1]
            heapq.heappush(ranges, (bound, middle + 1, high, floor))
    return tuple(sorted(found.values(), key=lambda candidate: candidate.latency))


def price(table: StageTable, places: Sequence[Place], pace: float) -> Candidate | None:
    """What a pipeline costs at one pace, each stage with the fastest option that fits.

    Args:
        table: what stages and transfers cost.
        places: the stages' places.
        pace: seconds from one microbatch to the next.

    Returns:
        The candidate; None where a stage or a transfer is slower than the pace, or does not fit.
    """
    crossed = [
        (float(t.forward[b.layers[0]]), float(t.backward[b.layers[0]]))
        for a, b in itertools.pairwise(places)
        for t in [transfers_between(table, a, b)]
    ]
    if any(max(pair) > pace for pair in crossed):
        return None
    counts = [1]
    for pair in reversed(crossed):
        counts.append(counts[-1] + _extra(table.schedule, sum(pair) / 2, pace))
    if table.schedule == "gpipe":
        counts = [table.num_microbatches] * len(places)
    counts = [min(count, table.num_microbatches) for count in reversed(counts)]
    options, total = [], sum(map(sum, crossed))
    for place, count in zip(places, counts, strict=True):
        cut = table.slices[place.subcluster][place.slice]
        seconds = _within_limits(cut, count)[:, place.layers[0], place.layers[1]]
        options.append(int(np.argmin(seconds)))
        total += float(seconds.min())
        if seconds.min() > pace:
            return None
    latency = total + (table.num_microbatches - 1) * pace
    return Candidate(tuple(places), tuple(options), tuple(counts), total, pace, latency)


def transfers_between(table: StageTable, a: Place, b: Place) -> Transfers:
    """The transfers between two stages' submeshes."""
    if a.subcluster != b.subcluster:
        return table.between[a.subcluster][b.subcluster]
    _, per_node = table.nodes[a.subcluster]
    last = b.start + table.slices[b.subcluster][b.slice].num_devices - 1
    if a.start // per_node == last // per_node:
        return table.within[a.subcluster]
    return table.between[a.subcluster][a.subcluster]


def _own_pace(table: StageTable, candidate: Candidate) -> float:
    """The slowest stage or transfer of a candidate."""
    times = [
        float(table.slices[p.subcluster][p.slice].seconds[option, p.layers[0], p.layers[1]])
        for p, option in zip(candidate.places, candidate.options, strict=True)
    ]
    for a, b in itertools.pairwise(candidate.places):
        transfers = transfers_between(table, a, b)
        times += [float(transfers.forward[b.layers[0]]), float(transfers.backward[b.layers[0]])]
    return max(times)


def _extra(schedule: str, seconds: float, pace: float) -> int:
    """By how much the warm-up count rises over a boundary that takes ``seconds`` to cross."""
    match schedule:
        case "gpipe":
            return 0
        case "1f1b":
            return 1
        case "eager_1f1b":
            return 2
    return h_1f1b_counts([pace, pace], [seconds], _TOLERANCE)[0] - 1


def _paces(table: StageTable) -> FloatArray:
    """Every pace at which something changes, rising."""
    stages = [
        cut.seconds[np.isfinite(cut.seconds) & (cut.live_limits > 0)]
        for slices in table.slices
        for cut in slices
    ]
    links = [*table.within, *(each for row in table.between for each in row)]
    one_way = np.concatenate([t for link in links for t in (link.forward, link.backward)])
    changes = [*stages, one_way[one_way > 0]]
    if table.schedule == "h_1f1b":
        # Where a warm-up count falls; a hair above where the division rounds.
        mean = np.concatenate([(link.forward + link.backward) / 2 for link in links])
        mean = mean[mean > 0]
        changes += [2 * mean, mean / _TOLERANCE * (1 + _ROUNDING)]
    paces = np.unique(np.concatenate(changes))
    return paces if len(paces) else np.array([1.0])


def _within_limits(cut: Slice, count: int) -> FloatArray:
    """The options' seconds, infinite where ``count`` live microbatches do not fit."""
    return np.where(cut.live_limits >= count, cut.seconds, np.inf)


class _Solver:
    """Solves single paces, with the parts that they share computed once."""

    def __init__(self, table: StageTable):
        self.table = table
        self.fastest: dict[tuple[int, ...], list[list[FloatArray]]] = {}

    def solve(self, pace: float, worth: float) -> tuple[float, Candidate | None]:
        """The least total at one pace.

        Most models fit whatever the warm-up counts, so they are first left out of account; only
        where the pipeline found so does not fit, and could still be worth it, they are tracked.

        Args:
            pace: seconds from one microbatch to the next.
            worth: no candidate is needed whose total is this or more.

        Returns:
            A floor under the totals at this pace and below, and the candidate, if one is needed.
        """
        table = self.table
        everything = tuple(range(1, table.num_microbatches + 1))
        for counts in [everything[-1:]] if table.schedule == "gpipe" else [(1,), everything]:
            total, places = self._program(pace, counts).solution()
            if places is None:
                return np.inf, None
            candidate = price(table, places, pace)
            if candidate is not None and candidate.total <= total * (1 + _ROUNDING):
                return total, candidate
            if total >= worth:
                return total, None
        raise AssertionError("the dynamic program and the price of its pipeline differ")

    def _program(self, pace: float, counts: tuple[int, ...]) -> _Program:
        if counts not in self.fastest:
            self.fastest[counts] = [
                [
                    np.stack([_within_limits(cut, count).min(axis=0) for count in counts])
                    for cut in slices
                ]
                for slices in self.table.slices
            ]
        return _Program(self.table, self.fastest[counts], pace, len(counts))


@dataclass(frozen=True, eq=False)
class _Move:
    """What it adds to a suffix to put a stage before it, at each layer boundary."""

    seconds: FloatArray
    extra: IntArray


class _Program:
    """The dynamic program of one pace.

    Values are arrays ``[stages, counts, L + 1]`` over the number of stages of a suffix (as far as
    the table limits it), the warm-up count of its first stage, and its first layer. Where there
    is one count only, counts are not tracked.
    """

    def __init__(
        self, table: StageTable, fastest: list[list[FloatArray]], pace: float, num_counts: int
    ):
        self.table, self.num_counts = table, num_counts
        self.num_stage_rows = table.max_stages or table.min_stages
        self.seconds = [
            [np.where(times <= pace, times, np.inf) for times in slices] for slices in fastest
        ]
        self.within = [self._move(transfers, pace) for transfers in table.within]
        self.between = [[self._move(transfers, pace) for transfers in row] for row in table.between]
        self.best: dict[Head, FloatArray] = {}
        self.rests: dict[Head, FloatArray] = {}
        self.rows = np.arange(num_counts)
        self._fill()

    def solution(self) -> tuple[float, tuple[Place, ...] | None]:
        """The least total and its stages' places; None where nothing fits."""
        rows = slice(self.table.min_stages - 1, None)
        value, head = min(
            ((float(values[rows, :, 0].min()), head) for head, values in self.best.items()),
            default=(np.inf, None),
        )
        if head is None or not np.isfinite(value):
            return np.inf, None
        stage_row, row = np.unravel_index(
            np.argmin(self.best[head][rows, :, 0]), self.best[head][rows, :, 0].shape
        )
        return value, self._trace(head, int(stage_row) + self.table.min_stages - 1, int(row))

    def _move(self, transfers: Transfers, pace: float) -> _Move:
        slowest = np.maximum(transfers.forward, transfers.backward)
        seconds = np.where(slowest <= pace, transfers.forward + transfers.backward, np.inf)
        mean = (transfers.forward + transfers.backward) / 2
        extra = [
            _extra(self.table.schedule, float(each), pace) if self.num_counts > 1 else 0
            for each in mean
        ]
        return _Move(seconds, np.array(extra))

    def _fill(self) -> None:
        for used in range(1, 1 << len(self.table.nodes)):
            for subcluster in _members(used):
                if not self._may_lead(used, subcluster):
                    continue
                nodes, per_node = self.table.nodes[subcluster]
                for consumed in range(1, nodes * per_node + 1):
                    head = (used, subcluster, consumed)
                    values = [
                        (self.seconds[subcluster][each] + rest[:, :, None, :]).min(axis=-1)
                        for each, rest in self._extensions(head)
                    ]
                    if values:
                        self.best[head] = np.minimum.reduce(values)

    def _may_lead(self, used: int, subcluster: int) -> bool:
        """Whether a pipeline over these subclusters may begin with this one."""
        order = self.table.order
        return order is None or min(order.index(each) for each in _members(used)) == order.index(
            subcluster
        )

    def _extensions(self, head: Head) -> Iterator[tuple[int, FloatArray]]:
        """The slices that a suffix with this head may begin with, and the rest behind each."""
        used, subcluster, consumed = head
        _, per_node = self.table.nodes[subcluster]
        for place, cut in enumerate(self.table.slices[subcluster]):
            before = consumed - cut.num_devices
            if before < 0:
                continue
            in_one_node = before % per_node + cut.num_devices <= per_node
            if in_one_node or (cut.shape[1] == per_node and before % per_node == 0):
                rest = self._rest((used, subcluster, before))
                if np.isfinite(rest).any():
                    yield place, rest

    def _rest(self, start: Head) -> FloatArray:
        """The best of all that may lie behind a stage whose devices end where ``start`` says."""
        if start not in self.rests:
            shape = (self.num_stage_rows, self.num_counts, self.table.num_layers + 1)
            rest = np.full(shape, np.inf)
            used, subcluster, consumed = start
            if consumed == 0 and used == 1 << subcluster:
                rest[0, 0, -1] = 0.0
            for move, heads in self._sources(start):
                values = [self.best[head] for head in heads if head in self.best]
                if values:
                    np.minimum(rest, self._moved(np.minimum.reduce(values), move), out=rest)
            self.rests[start] = rest
        return self.rests[start]

    def _sources(self, start: Head) -> Iterator[tuple[_Move, list[Head]]]:
        """The suffixes that may follow such a stage, by the link to them."""
        used, subcluster, consumed = start
        _, per_node = self.table.nodes[subcluster]
        if consumed % per_node:
            yield self.within[subcluster], [(used, subcluster, consumed)]
        elif consumed:
            # The rest of the node that the next stage is on may lie idle.
            heads = [(used, subcluster, consumed - idle) for idle in range(per_node)]
            yield self.between[subcluster][subcluster], heads
        else:
            others = used & ~(1 << subcluster)
            for other in _members(others):
                nodes, per_node = self.table.nodes[other]
                heads = [(others, other, count) for count in range(1, nodes * per_node + 1)]
                yield self.between[subcluster][other], heads

    def _moved(self, values: FloatArray, move: _Move) -> FloatArray:
        """Values by the number of stages and the warm-up count of the stage put before them."""
        values = values + move.seconds
        if self.num_counts > 1:
            source = self.rows[:, None] - move.extra
            by_count = np.take_along_axis(values, np.maximum(source, 0)[None], axis=1)
            by_count[:, source < 0] = np.inf
            # The last count stands for all above it too: no more microbatches are there to hold.
            least = np.minimum.accumulate(values[:, ::-1], axis=1)[:, ::-1]
            at_least = np.maximum(source[-1], 0)[None, None]
            by_count[:, -1:] = np.take_along_axis(least, at_least, axis=1)
            values = by_count
        moved = np.full_like(values, np.inf)
        moved[1:] = values[:-1]
        if self.table.max_stages is None:
            # Likewise for the last number of stages, where more are allowed.
            np.minimum(moved[-1], values[-1], out=moved[-1])
        return moved

    def _trace(self, head: Head, stage_row: int, row: int) -> tuple[Place, ...]:
        """The stages of the best suffix with this head and these rows, from its first."""
        found: list[tuple[tuple[int, int], Head, int]] = []
        first = 0
        while True:
            used, subcluster, consumed = head
            _, end, chosen = min(
                (float(values[end]), end, place)
                for place, rest in self._extensions(head)
                for values in [self.seconds[subcluster][place][row, first] + rest[stage_row, row]]
                for end in [int(values.argmin())]
            )
            found.append(((first, end), head, chosen))
            if end == self.table.num_layers:
                return _placed(self.table, found)
            before = consumed - self.table.slices[subcluster][chosen].num_devices
            head, stage_row, row = self._source((used, subcluster, before), stage_row, row, end)
            first = end

    def _source(self, start: Head, stage_row: int, row: int, layer: int) -> tuple[Head, int, int]:
        """Which suffix, and which of its rows, the best rest at some rows came from."""
        last = self.num_stage_rows - 1
        stage_rows = [stage_row - 1] if stage_row else []
        if stage_row == last and self.table.max_stages is None:
            stage_rows.append(last)
        return min(
            (float(self.best[head][s, n, layer] + move.seconds[layer]), (head, s, int(n)))
            for move, heads in self._sources(start)
            for head in heads
            if head in self.best
            for s in stage_rows
            for n in np.flatnonzero(
                np.minimum(self.rows + move.extra[layer], self.num_counts - 1) == row
            )
        )[1]


def _members(used: int) -> list[int]:
    """The places of the bits that are set."""
    return [place for place in range(used.bit_length()) if used >> place & 1]


def _placed(
    table: StageTable, found: Sequence[tuple[tuple[int, int], Head, int]]
) -> tuple[Place, ...]:
    """Places counted from the subclusters' first devices, idle devices moved behind used ones.

    Each stage was found with the number of devices used from its subcluster's end. Nodes keep
    their stages, so links stay what they were; a node's idle devices become its last.
    """
    places: list[Place] = []
    for subcluster in dict.fromkeys(head[1] for _, head, _ in found):
        nodes, per_node = table.nodes[subcluster]
        here = [each for each in found if each[1][1] == subcluster]
        starts = [nodes * per_node - head[2] for _, head, _ in here]
        first_node = starts[0] // per_node
        for (layers, _, chosen), start in zip(here, starts, strict=True):
            node = start // per_node
            idle = min(s for s in starts if s // per_node == node) - node * per_node
            shifted = start - idle - first_node * per_node
            places.append(Place(layers, subcluster, chosen, shifted))
    return tuple(places)
