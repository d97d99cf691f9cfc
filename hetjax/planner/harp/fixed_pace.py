"""The least total of a pipeline at one fixed pace: Harp's dynamic program, last stage first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetjax.pipeline.schedules.warm_up import h_1f1b_counts
from hetjax.planner.harp.compiled import is_worth_compiling
from hetjax.planner.harp.compiled_fill import StackedBands, suffixes_before
from hetjax.planner.harp.counted_reach import CountedReach
from hetjax.planner.harp.fast_stages import Band, BeginningsByDevices, Suffixes, least_of
from hetjax.planner.harp.reach import most_layers
from hetjax.planner.harp.stage_table import StageTable, Transfers
from hetjax.planner.harp.subcluster_sets import (
    may_be_last,
    members,
    sets_and_firsts,
    sets_behind,
)
from hetjax.planner.work.arrays import FloatArray, IntArray

TOLERANCE = 0.1
"""H-1F1B's tolerance: shorter transfers, as a share of the pace, get no warm-up of their own."""

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


def extra_forwards(schedule: str, seconds: float, pace: float) -> int:
    """By how much the warm-up count rises over a boundary, from the stage after to the one before.

    Args:
        schedule: the schedule's name.
        seconds: one transfer over the boundary, the mean of both directions.
        pace: seconds from one microbatch to the next.

    Returns:
        The number of forward tasks; 0 for GPipe, which holds all microbatches everywhere.
    """
    match schedule:
        case "gpipe":
            return 0
        case "1f1b":
            return 1
        case "eager_1f1b":
            return 2
    if not pace:
        # Nothing takes any time, transfers neither.
        return 1
    return h_1f1b_counts([pace, pace], [seconds], TOLERANCE)[0] - 1


@dataclass(frozen=True, eq=False)
class BoundaryCosts:
    """What it adds to a suffix of the pipeline to put a stage before it.

    Args:
        seconds: both transfers over each layer boundary, infinite where one exceeds the pace.
        extra: by how much the warm-up count rises there.
    """

    seconds: FloatArray
    extra: IntArray


class _Behind(NamedTuple):
    """What is known of a pipeline, from its first stage on, and what is left of it.

    Args:
        found: the layers, head and slice of the stages that are known.
        head: where the rest begins.
        stage_row: the row of its number of stages.
        row: the row of its warm-up count.
        first: its first layer.
    """

    found: tuple[tuple[tuple[int, int], Head, int], ...]
    head: Head
    stage_row: int
    row: int
    first: int


class FixedPace:
    """The dynamic program of one pace.

    Args:
        table: what stages and transfers cost.
        counts: the warm-up counts that are told from each other. The last one stands for all above
            it too; if there is one, counts are not tracked.
        pace: seconds that no stage and no transfer may exceed.
        reach: what stages hold at this pace where memory binds, which leaves out suffixes that no
            stages that fit complete; None where it is not known.

    Totals are kept by the number of stages of a suffix (as far as the table limits it), the warm-up
    count of its first stage, and its first layer. Suffixes are left out that no stages on the
    devices left can complete.

    Source: Harp section 5.2.3, equations 13 to 18.
    """

    def __init__(
        self,
        table: StageTable,
        counts: Sequence[int],
        pace: float,
        reach: CountedReach | None = None,
    ):
        self.table = table
        self.pace = pace
        self.counts = counts
        self.num_counts = len(counts)
        self.num_stage_rows = table.max_stages or table.min_stages
        self.best: dict[Head, Suffixes] = {}
        self.rests: dict[Head, Suffixes | None] = {}
        self.rows = np.arange(self.num_counts)
        self._bands: dict[tuple[int, int], Band] = {}
        self._moves: dict[tuple[int, int | None], BoundaryCosts] = {}
        self._leaving: dict[tuple[int, int], Suffixes | None] = {}
        self._reach = reach
        self._is_compiled = is_worth_compiling(table)
        self._stacks: dict[int, StackedBands] = {}
        self._layers = most_layers(table, pace)
        if sum(int(each[-1]) for each in self._layers) >= table.num_layers:
            self._fill()

    def solution(self) -> tuple[float, tuple[Place, ...] | None]:
        """The least total and its stages' places; None where nothing fits."""
        value, head, stage_row, row = min(self._whole(), default=(np.inf, None, 0, 0))
        if head is None:
            return np.inf, None
        return value, self._trace(head, stage_row, row)

    def _whole(self) -> Iterator[tuple[float, Head, int, int]]:
        """The totals of whole pipelines, with what is known of them; only those that are finite."""
        least = self.table.min_stages - 1
        for head, suffixes in self.best.items():
            if suffixes.first == 0:
                values = suffixes.values[least:, :, 0]
                for s, n in zip(*map(np.ndarray.tolist, np.nonzero(values < np.inf)), strict=True):
                    yield float(values[s, n]), head, s + least, n + suffixes.row

    def pipelines(self, most: float = np.inf) -> Iterator[tuple[float, tuple[Place, ...]]]:
        """The pipelines of this pace, the least total first.

        Args:
            most: totals above this are left out.

        Yields:
            The total, and the stages' places: each the best of all with these places.
        """
        ties = itertools.count()
        waiting: list[tuple[float, int, float, _Behind]] = []

        def push(value: float, before: float, behind: _Behind) -> None:
            if value <= most and np.isfinite(value):
                heapq.heappush(waiting, (value, next(ties), before, behind))

        for value, head, s, n in self._whole():
            push(value, 0.0, _Behind((), head, s, n, 0))
        while waiting:
            value, _, before, behind = heapq.heappop(waiting)
            if behind.first == self.table.num_layers:
                yield value, _placed(self.table, behind.found)
                continue
            for seconds, then in self._steps(behind):
                rest = 0.0
                if then.first < self.table.num_layers:
                    rest = self.best[then.head].at(then.stage_row, then.row, then.first)
                push(before + seconds + rest, before + seconds, then)

    def _steps(self, behind: _Behind) -> Iterator[tuple[float, _Behind]]:
        """Each first stage of a suffix: what it takes with its transfers, and what is left."""
        used, subcluster, _ = behind.head
        layers = self.table.num_layers
        for chosen, before, rest in self._extensions(behind.head):
            band = self._band(subcluster, chosen)
            of_rest = rest.totals(behind.stage_row, behind.row)
            if of_rest is None:
                continue
            alone = band.from_layer(behind.first, behind.row, np.zeros(len(of_rest)), rest.first)
            start = used, subcluster, before
            for place in map(int, np.flatnonzero(np.isfinite(alone + of_rest))):
                end = rest.first + place
                stage = (behind.first, end), behind.head, chosen
                found = (*behind.found, stage)
                if end == layers:
                    yield float(alone[place]), _Behind(found, behind.head, 0, 0, end)
                    continue
                for seconds, (head, s, n) in self._sources_at(
                    start, behind.stage_row, behind.row, end
                ):
                    yield float(alone[place]) + seconds, _Behind(found, head, s, n, end)

    def _band(self, subcluster: int, chosen: int) -> Band:
        """The stages of a slice."""
        key = subcluster, chosen
        if key not in self._bands:
            if not self._is_compiled:
                cut = self.table.slices[subcluster][chosen]
                self._bands[key] = Band.of(cut, self.counts[0], self.num_counts, self.pace)
            else:
                self._bands[key] = self._stacked(subcluster).band(chosen)
        return self._bands[key]

    def _stacked(self, subcluster: int) -> StackedBands:
        """The stages of all slices of a subcluster."""
        if subcluster not in self._stacks:
            slices, bounds = self.table.slices[subcluster], self.table.bounds_by_length[subcluster]
            self._stacks[subcluster] = StackedBands.of(
                slices, bounds, self.counts[0], self.num_counts, self.pace
            )
        return self._stacks[subcluster]

    def _move(self, subcluster: int, other: int | None) -> BoundaryCosts:
        """What it adds to cross from a subcluster to another one, or inside a node of it."""
        key = subcluster, other
        if key not in self._moves:
            table = self.table
            within, between = table.within[subcluster], table.between[subcluster]
            self._moves[key] = self._found_move(within if other is None else between[other])
        return self._moves[key]

    def _found_move(self, transfers: Transfers) -> BoundaryCosts:
        slowest = np.maximum(transfers.forward, transfers.backward)
        seconds = np.where(slowest <= self.pace, transfers.forward + transfers.backward, np.inf)
        mean = (transfers.forward + transfers.backward) / 2
        if self.num_counts == 1:
            return BoundaryCosts(seconds, np.zeros(len(mean), int))
        # The blocks of a model cross in few ways.
        means, which = np.unique(mean, return_inverse=True)
        extra = [extra_forwards(self.table.schedule, float(each), self.pace) for each in means]
        return BoundaryCosts(seconds, np.array(extra)[which])

    def _fill(self) -> None:
        for used, subcluster in sets_and_firsts(len(self.table.nodes), self.table.order):
            self._fill_before(used, subcluster)

    def _fill_before(self, used: int, subcluster: int) -> None:
        """The suffixes over some subclusters that begin with one of them."""
        others = [int(each[-1]) for each in self._layers]
        inside = sum(others[each] for each in members(used)) - others[subcluster]
        outside = sum(others) - inside - others[subcluster]
        mine, layers = self._layers[subcluster], self.table.num_layers
        lows = np.maximum(layers - inside - mine, 0)
        highs = np.minimum(outside + mine[::-1], layers - 1)
        windows = self._counted_windows(used, subcluster, lows[:, None], highs[:, None])
        if not self.table.slices[subcluster] or not windows.is_open.any():
            return
        if not self._is_compiled:
            self._fill_heads(used, subcluster, windows)
            return
        found = suffixes_before(
            self.table,
            subcluster,
            self._stacked(subcluster),
            windows,
            self._outside(used, subcluster),
            [(m.seconds, m.extra) for o in (None, subcluster) for m in [self._move(subcluster, o)]],
            self.num_stage_rows,
        )
        self.best.update(((used, subcluster, n), each) for n, each in found.best.items())
        nodes, per_node = self.table.nodes[subcluster]
        self.rests.update(
            ((used, subcluster, n), found.rests.get(n)) for n in range(nodes * per_node)
        )
        self._leaving[used, subcluster] = found.anywhere

    def _fill_heads(self, used: int, subcluster: int, windows: BeginningsByDevices) -> None:
        """The same suffixes by NumPy."""
        for consumed in map(int, np.flatnonzero(windows.is_open)):
            head = used, subcluster, consumed
            window = windows.at(consumed)
            every = [
                found
                for chosen, _, rest in self._extensions(head)
                for found in [self._band(subcluster, chosen).put_before(rest, window)]
                if found is not None
            ]
            best = window.inside(least_of(every)).shrunk() if every else None
            if best is not None:
                self.best[head] = best

    def _counted_windows(
        self, used: int, subcluster: int, lows: IntArray, highs: IntArray
    ) -> BeginningsByDevices:
        """What suffixes may begin with, by the devices used and their warm-up counts.

        Args:
            used: the subclusters used, as bits.
            subcluster: the one that they begin in.
            lows: the first layer that they may begin with, whatever the count.
            highs: the last one.
        """
        if self._reach is None:
            return BeginningsByDevices(lows, highs)
        behind = self._reach.behind.get((used, subcluster))
        if behind is None:
            return BeginningsByDevices(lows, lows - 1)
        nodes, per_node = self.table.nodes[subcluster]
        others = (1 << len(self.table.nodes)) - 1 & ~used
        before = self._reach.before(others, subcluster)
        devices = np.arange(nodes * per_node + 1)
        counts = np.minimum(self.rows + 1, behind.shape[1] - 1)
        held = behind[-(-devices // per_node)]
        # The last count stands for all above it too.
        held = np.concatenate([held[:, counts[:-1]], held[:, -1:]], axis=1)
        left = before[nodes - devices // per_node][:, counts]
        return BeginningsByDevices(
            np.maximum(lows, self.table.num_layers - held), np.minimum(highs, left)
        )

    def _extensions(self, head: Head) -> Iterator[tuple[int, int, Suffixes]]:
        """The slices that a suffix may begin with, the devices behind, and the rest there."""
        used, subcluster, consumed = head
        for place, before in self.table.extensions[subcluster][consumed]:
            rest = self._rest((used, subcluster, before))
            if rest is not None:
                yield place, before, rest

    def _rest(self, start: Head) -> Suffixes | None:
        """The best of all that may lie behind a stage whose devices end where ``start`` says."""
        if start not in self.rests:
            self.rests[start] = self._found_rest(start)
        return self.rests[start]

    def _found_rest(self, start: Head) -> Suffixes | None:
        used, subcluster, _ = start
        outside = self._outside(used, subcluster) if self._may_leave(start) else None
        every = [] if outside is None else [outside]
        for move, heads in self._near_sources(start):
            values = [self.best[head] for head in heads if head in self.best]
            if values:
                every.append(self._moved(least_of(values), move))
        return least_of(every).shrunk() if every else None

    def _outside(self, used: int, subcluster: int) -> Suffixes | None:
        """The best of all outside of this subcluster that may lie behind a stage of it."""
        order = self.table.order
        every = [
            self._moved(behind, self._move(subcluster, other))
            for others, other in sets_behind(used, subcluster, order)
            for behind in [self._anywhere(others, other)]
            if behind is not None
        ]
        if may_be_last(used, subcluster, order):
            nothing = np.full((self.num_stage_rows, 1, 1), np.inf)
            nothing[0] = 0.0
            every.append(Suffixes(self.table.num_layers, 0, nothing))
        return least_of(every) if every else None

    def _anywhere(self, used: int, subcluster: int) -> Suffixes | None:
        """The best suffixes over some subclusters that begin anywhere in one of them."""
        key = used, subcluster
        if key not in self._leaving:
            heads = self._every_head(used, subcluster)
            values = [self.best[head] for head in heads if head in self.best]
            self._leaving[key] = least_of(values) if values else None
        return self._leaving[key]

    def _every_head(self, used: int, subcluster: int) -> list[Head]:
        nodes, per_node = self.table.nodes[subcluster]
        return [(used, subcluster, count) for count in range(1, nodes * per_node + 1)]

    def _near_sources(self, start: Head) -> Iterator[tuple[BoundaryCosts, list[Head]]]:
        """The suffixes in the same subcluster that may follow such a stage, by the link to them."""
        used, subcluster, consumed = start
        _, per_node = self.table.nodes[subcluster]
        if consumed % per_node:
            yield self._move(subcluster, None), [(used, subcluster, consumed)]
        elif consumed:
            # The rest of the node that the next stage is on may lie idle, and whole nodes where
            # nodes are not alike.
            most_idle = consumed if self.table.is_damaged(subcluster) else per_node
            heads = [(used, subcluster, consumed - idle) for idle in range(most_idle)]
            yield self._move(subcluster, subcluster), heads

    def _sources(self, start: Head) -> Iterator[tuple[BoundaryCosts, list[Head]]]:
        """The suffixes that may follow such a stage, by the link to them."""
        yield from self._near_sources(start)
        used, subcluster, _ = start
        if self._may_leave(start):
            for others, other in sets_behind(used, subcluster, self.table.order):
                yield self._move(subcluster, other), self._every_head(others, other)

    def _may_leave(self, start: Head) -> bool:
        """Whether what lies behind such a stage may be outside its subcluster."""
        _, subcluster, consumed = start
        _, per_node = self.table.nodes[subcluster]
        # Nodes behind that lie idle are counted at the other end, but for those that are unlike.
        return consumed == 0 or (consumed % per_node == 0 and self.table.is_damaged(subcluster))

    def _moved(self, suffixes: Suffixes, move: BoundaryCosts) -> Suffixes:
        """Totals by the number of stages and the warm-up count of the stage put before them."""
        layers = slice(suffixes.first, suffixes.end)
        values, row = suffixes.values + move.seconds[layers], suffixes.row
        if self.num_counts > 1:
            values, row = self._by_count_before(values, row, move.extra[layers])
        moved = np.full_like(values, np.inf)
        moved[1:] = values[:-1]
        if self.table.max_stages is None:
            # Likewise for the last number of stages, where more are allowed.
            np.minimum(moved[-1], values[-1], out=moved[-1])
        return Suffixes(suffixes.first, row, moved)

    def _by_count_before(
        self, values: FloatArray, row: int, extra: IntArray
    ) -> tuple[FloatArray, int]:
        """Totals by the warm-up count of the stage put before, and the row of the first one.

        Args:
            values: by the warm-up count of the stage behind.
            row: the row of the first of these.
            extra: by how much the count rises, by layer.
        """
        last, num_rows = self.num_counts - 1, values.shape[1]
        low = min(row + int(extra.min()), last)
        high = min(row + num_rows - 1 + int(extra.max()), last)
        rows = np.arange(low, high + 1)[:, None] - extra - row
        place = np.arange(len(extra))
        by_count = values[:, np.clip(rows, 0, num_rows - 1), place]
        by_count[:, (rows < 0) | (rows >= num_rows)] = np.inf
        if high == last:
            # The last count stands for all above it too.
            least = np.minimum.accumulate(values[:, ::-1], axis=1)[:, ::-1]
            of_last = np.maximum(rows[-1], 0)
            there = of_last < num_rows
            of_last = least[:, np.minimum(of_last, num_rows - 1), place]
            by_count[:, -1] = np.where(there, of_last, np.inf)
        return by_count, low

    def _trace(self, head: Head, stage_row: int, row: int) -> tuple[Place, ...]:
        """The stages of the best suffix with this head and these rows, from its first."""
        found: list[tuple[tuple[int, int], Head, int]] = []
        first = 0
        while True:
            used, subcluster, _ = head
            _, end, chosen, before = min(
                (float(values[place]), rest.first + place, chosen, before)
                for chosen, before, rest in self._extensions(head)
                for of_rest in [rest.totals(stage_row, row)]
                if of_rest is not None
                for band in [self._band(subcluster, chosen)]
                for values in [band.from_layer(first, row, of_rest, rest.first)]
                for place in [int(values.argmin())]
            )
            found.append(((first, end), head, chosen))
            if end == self.table.num_layers:
                return _placed(self.table, found)
            head, stage_row, row = self._source((used, subcluster, before), stage_row, row, end)
            first = end

    def _source(self, start: Head, stage_row: int, row: int, layer: int) -> tuple[Head, int, int]:
        """Which suffix, and which of its rows, the best rest at some rows came from."""
        return min(
            (self.best[head].at(s, n, layer) + seconds, (head, s, n))
            for seconds, (head, s, n) in self._sources_at(start, stage_row, row, layer)
        )[1]

    def _sources_at(
        self, start: Head, stage_row: int, row: int, layer: int
    ) -> Iterator[tuple[float, tuple[Head, int, int]]]:
        """The suffixes and their rows that a rest may come from, each with its transfers."""
        last = self.num_stage_rows - 1
        stage_rows = [stage_row - 1] if stage_row else []
        if stage_row == last and self.table.max_stages is None:
            stage_rows.append(last)
        for move, heads in self._sources(start):
            rows = np.flatnonzero(
                np.minimum(self.rows + move.extra[layer], self.num_counts - 1) == row
            )
            for head in heads:
                if head in self.best:
                    for s in stage_rows:
                        for n in map(int, rows):
                            yield float(move.seconds[layer]), (head, s, n)


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
        if table.is_damaged(subcluster):
            # Its nodes are not alike.
            places += [
                Place(layers, subcluster, chosen, start)
                for (layers, _, chosen), start in zip(here, starts, strict=True)
            ]
            continue
        first_node = starts[0] // per_node
        for (layers, _, chosen), start in zip(here, starts, strict=True):
            node = start // per_node
            idle = min(s for s in starts if s // per_node == node) - node * per_node
            shifted = start - idle - first_node * per_node
            places.append(Place(layers, subcluster, chosen, shifted))
    return tuple(places)
