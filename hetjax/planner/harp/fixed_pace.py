"""The least total of a pipeline at one fixed pace: Harp's dynamic program, last stage first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetjax.pipeline.schedules.warm_up import h_1f1b_counts
from hetjax.planner.harp.fast_stages import Band
from hetjax.planner.harp.stage_table import StageTable, Transfers
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
    return h_1f1b_counts([pace, pace], [seconds], TOLERANCE)[0] - 1


@dataclass(frozen=True, eq=False)
class BoundaryCosts:
    """What it adds to a suffix of the pipeline to put a stage before it.

    Args:
        seconds: both transfers over each layer boundary, infinite where one exceeds the pace.
        extra: by how much the warm-up count rises there.
        rows: ``[counts, L + 1]``: which row of the suffix has the count that becomes a row's; below
            0 where none has.
    """

    seconds: FloatArray
    extra: IntArray
    rows: IntArray

    @classmethod
    def of(cls, seconds: FloatArray, extra: IntArray, num_counts: int) -> BoundaryCosts:
        """The move to all warm-up counts."""
        return cls(seconds, extra, np.arange(num_counts)[:, None] - extra)


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

    Values are arrays ``[stages, counts, L + 1]`` over the number of stages of a suffix (as far as
    the table limits it), the warm-up count of its first stage, and its first layer.

    Source: Harp section 5.2.3, equations 13 to 18.
    """

    def __init__(self, table: StageTable, counts: Sequence[int], pace: float):
        self.table = table
        self.num_counts = len(counts)
        self.num_stage_rows = table.max_stages or table.min_stages
        self.stages = [
            [Band.of(cut, counts[0], len(counts), pace) for cut in slices]
            for slices in table.slices
        ]
        self.within = [self._move(transfers, pace) for transfers in table.within]
        self.between = [[self._move(transfers, pace) for transfers in row] for row in table.between]
        self.best: dict[Head, FloatArray] = {}
        self.rests: dict[Head, FloatArray | None] = {}
        self.rows = np.arange(self.num_counts)
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

        for head, values in self.best.items():
            for s in range(self.table.min_stages - 1, self.num_stage_rows):
                for n in range(self.num_counts):
                    push(float(values[s, n, 0]), 0.0, _Behind((), head, s, n, 0))
        while waiting:
            value, _, before, behind = heapq.heappop(waiting)
            if behind.first == self.table.num_layers:
                yield value, _placed(self.table, behind.found)
                continue
            for seconds, then in self._steps(behind):
                rest = 0.0
                if then.first < self.table.num_layers:
                    rest = float(self.best[then.head][then.stage_row, then.row, then.first])
                push(before + seconds + rest, before + seconds, then)

    def _steps(self, behind: _Behind) -> Iterator[tuple[float, _Behind]]:
        """Each first stage of a suffix: what it takes with its transfers, and what is left."""
        used, subcluster, consumed = behind.head
        layers = self.table.num_layers
        for chosen, rest in self._extensions(behind.head):
            band = self.stages[subcluster][chosen]
            alone = band.from_layer(behind.first, behind.row, np.zeros(layers + 1))
            whole = alone + rest[behind.stage_row, behind.row]
            before = consumed - self.table.slices[subcluster][chosen].num_devices
            start = used, subcluster, before
            for end in map(int, np.flatnonzero(np.isfinite(whole))):
                stage = (behind.first, end), behind.head, chosen
                found = (*behind.found, stage)
                if end == layers:
                    yield float(alone[end]), _Behind(found, behind.head, 0, 0, end)
                    continue
                for seconds, (head, s, n) in self._sources_at(
                    start, behind.stage_row, behind.row, end
                ):
                    yield float(alone[end]) + seconds, _Behind(found, head, s, n, end)

    def _move(self, transfers: Transfers, pace: float) -> BoundaryCosts:
        slowest = np.maximum(transfers.forward, transfers.backward)
        seconds = np.where(slowest <= pace, transfers.forward + transfers.backward, np.inf)
        mean = (transfers.forward + transfers.backward) / 2
        if self.num_counts == 1:
            return BoundaryCosts.of(seconds, np.zeros(len(mean), int), 1)
        # The blocks of a model cross in few ways.
        means, which = np.unique(mean, return_inverse=True)
        extra = [extra_forwards(self.table.schedule, float(each), pace) for each in means]
        return BoundaryCosts.of(seconds, np.array(extra)[which], self.num_counts)

    def _fill(self) -> None:
        for used in range(1, 1 << len(self.table.nodes)):
            for subcluster in _members(used):
                if not self._may_lead(used, subcluster):
                    continue
                nodes, per_node = self.table.nodes[subcluster]
                for consumed in range(1, nodes * per_node + 1):
                    head = (used, subcluster, consumed)
                    values = [
                        self.stages[subcluster][each].put_before(rest)
                        for each, rest in self._extensions(head)
                    ]
                    best = np.minimum.reduce(values) if values else None
                    if best is not None and np.isfinite(best).any():
                        self.best[head] = best

    def _may_lead(self, used: int, subcluster: int) -> bool:
        """Whether a pipeline over these subclusters may begin with this one."""
        order = self.table.order
        return order is None or min(order.index(each) for each in _members(used)) == order.index(
            subcluster
        )

    def _extensions(self, head: Head) -> Iterator[tuple[int, FloatArray]]:
        """The slices that a suffix with this head may begin with, and the rest behind each."""
        used, subcluster, consumed = head
        nodes, per_node = self.table.nodes[subcluster]
        for place, cut in enumerate(self.table.slices[subcluster]):
            before = consumed - cut.num_devices
            start = nodes * per_node - consumed
            if before < 0 or not self.table.may_hold(subcluster, start, cut):
                continue
            in_one_node = before % per_node + cut.num_devices <= per_node
            if in_one_node or (cut.shape[1] == per_node and before % per_node == 0):
                rest = self._rest((used, subcluster, before))
                if rest is not None:
                    yield place, rest

    def _rest(self, start: Head) -> FloatArray | None:
        """The best of all that may lie behind a stage whose devices end where ``start`` says."""
        if start not in self.rests:
            shape = (self.num_stage_rows, self.num_counts, self.table.num_layers + 1)
            rest = np.full(shape, np.inf)
            used, subcluster, _ = start
            if self._may_leave(start) and used == 1 << subcluster:
                rest[0, 0, -1] = 0.0
            for move, heads in self._sources(start):
                values = [self.best[head] for head in heads if head in self.best]
                if values:
                    np.minimum(rest, self._moved(np.minimum.reduce(values), move), out=rest)
            self.rests[start] = rest if np.isfinite(rest).any() else None
        return self.rests[start]

    def _sources(self, start: Head) -> Iterator[tuple[BoundaryCosts, list[Head]]]:
        """The suffixes that may follow such a stage, by the link to them."""
        used, subcluster, consumed = start
        _, per_node = self.table.nodes[subcluster]
        if consumed % per_node:
            yield self.within[subcluster], [(used, subcluster, consumed)]
        elif consumed:
            # The rest of the node that the next stage is on may lie idle, and whole nodes where
            # nodes are not alike.
            most_idle = consumed if self._is_damaged(subcluster) else per_node
            heads = [(used, subcluster, consumed - idle) for idle in range(most_idle)]
            yield self.between[subcluster][subcluster], heads
        if self._may_leave(start):
            others = used & ~(1 << subcluster)
            for other in _members(others):
                nodes, per_node = self.table.nodes[other]
                heads = [(others, other, count) for count in range(1, nodes * per_node + 1)]
                yield self.between[subcluster][other], heads

    def _is_damaged(self, subcluster: int) -> bool:
        """Whether some of its nodes have devices that cannot be used."""
        return bool(self.table.lost) and any(self.table.lost[subcluster])

    def _may_leave(self, start: Head) -> bool:
        """Whether what lies behind such a stage may be outside its subcluster."""
        _, subcluster, consumed = start
        _, per_node = self.table.nodes[subcluster]
        # Nodes behind that lie idle are counted at the other end, but for those that are unlike.
        return consumed == 0 or (consumed % per_node == 0 and self._is_damaged(subcluster))

    def _moved(self, values: FloatArray, move: BoundaryCosts) -> FloatArray:
        """Values by the number of stages and the warm-up count of the stage put before them."""
        values = values + move.seconds
        if self.num_counts > 1:
            layers = np.arange(values.shape[-1])
            by_count = values[:, np.maximum(move.rows, 0), layers]
            by_count[:, move.rows < 0] = np.inf
            # The last count stands for all above it too.
            least = np.minimum.accumulate(values[:, ::-1], axis=1)[:, ::-1]
            by_count[:, -1] = least[:, np.maximum(move.rows[-1], 0), layers]
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
                for band in [self.stages[subcluster][place]]
                for values in [band.from_layer(first, row, rest[stage_row, row])]
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
        return min(
            (float(self.best[head][s, n, layer]) + seconds, (head, s, n))
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
        if table.lost and any(table.lost[subcluster]):
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
