"""What no pipeline goes beyond where memory binds: layers that devices hold, by warm-up count.

A stage that is far from a pipeline's end keeps many microbatches, and so has few layers. Here
stages are told apart by their warm-up count and their devices alone, not by which layers they have:
each has as many as any run that fits. So it is soon known at which paces there is no pipeline, and
which layers a stage may begin with.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from hetjax.planner.harp.compiled import is_worth_compiling
from hetjax.planner.harp.stage_table import StageTable
from hetjax.planner.harp.subcluster_sets import (
    may_be_last,
    sets_and_firsts,
    sets_before,
    sets_behind,
)
from hetjax.planner.work.arrays import IntArray

_NONE = -(1 << 20)
"""Layers where there is no stage: a sum with it is below any number of layers."""

MOST_COUNTS = 64
"""Warm-up counts above this one are taken for it: what fits them is seldom more."""


@dataclass(frozen=True, eq=False)
class _Chains:
    """What stages on a subcluster's nodes have at most, by the warm-up count of the first of them.

    Args:
        nodes: how many nodes there are.
        one: a stage on so many nodes, ``[nodes + 1, counts + 1]``.
        inside: so many stages inside one node, by their number; only of two or more.
    """

    nodes: int
    one: IntArray
    inside: dict[int, IntArray]

    @functools.cached_property
    def stacked(self) -> tuple[IntArray, IntArray, IntArray]:
        """The same as arrays: one stage, the numbers of stages inside a node, and these."""
        inside = np.array(list(self.inside.values()), np.int64).reshape(-1, self.one.shape[1])
        return self.one, np.array(list(self.inside), np.int64), inside


class CountedReach:
    """The most layers of stages that are no slower than a pace and fit.

    Args:
        table: what stages and transfers cost.
        pace: seconds that no stage and no transfer may exceed.
        least: the least warm-up count; the stages before it have one more each.
        num_counts: how many counts are told from each other; the last stands for all above it.

    Attributes:
        behind: by the subclusters of a pipeline's last stages, as bits, and by the one of these
            that they begin in: their layers, ``[nodes + 1, counts + 1]``, by how many of its nodes
            they use and by the warm-up count of their first stage, which is this or less.
    """

    def __init__(self, table: StageTable, pace: float, least: int, num_counts: int):
        self._table, self._pace = table, pace
        self._is_compiled = is_worth_compiling(table)
        self._least, self._last = least, num_counts
        self._places = [
            place for place, (nodes, _) in enumerate(table.nodes) if nodes and table.slices[place]
        ]
        self._chains = {place: self._chains_of(place) for place in self._places}
        self._before: dict[tuple[int, int], IntArray] = {}
        self.behind: dict[tuple[int, int], IntArray] = {}
        for used, place in sets_and_firsts(len(table.nodes), table.order):
            nearest = self._nearest_behind(used, place) if place in self._chains else None
            if nearest is not None:
                self.behind[used, place] = self._with_stages_before(place, nearest)

    @functools.cached_property
    def least_count(self) -> int | None:
        """The least warm-up count of the first stage with which all layers are held; if any is."""
        most = [each[-1] for each in self.behind.values()]
        if not most:
            return None
        enough = np.flatnonzero(np.max(most, axis=0) >= self._table.num_layers)
        return int(enough[0]) if len(enough) else None

    def before(self, others: int, place: int) -> IntArray:
        """The most layers of the stages before a stage.

        Args:
            others: the subclusters of which they may use all nodes, as bits.
            place: the subcluster of the stage, of which they may use some nodes.

        Returns:
            ``[nodes + 1, counts + 1]``: by the number of these nodes, and by the warm-up count of
            the stage, which is this or more.
        """
        key = others, place
        if key not in self._before:
            left = [
                self.before(earlier, other)[-1]
                for earlier, other in sets_before(others, place, self._table.order)
                if other in self._chains and self._are_joined(other, place)
            ]
            nearest = np.max(left, axis=0) if left else np.zeros(self._last + 1, dtype=int)
            self._before[key] = self._with_stages_behind(place, nearest)
        return self._before[key]

    def _are_joined(self, a: int, b: int) -> bool:
        """Whether some boundary can be crossed from one subcluster to another in time."""
        return bool(self._table.quickest[a][b] <= self._pace)

    def _nearest_behind(self, used: int, place: int) -> IntArray | None:
        """The most layers behind all stages of a subcluster, by the warm-up count there."""
        order = self._table.order
        every = [
            self.behind[others, other][-1]
            for others, other in sets_behind(used, place, order)
            if (others, other) in self.behind and self._are_joined(place, other)
        ]
        if may_be_last(used, place, order):
            every.append(np.zeros(self._last + 1, dtype=int))
        return np.max(every, axis=0) if every else None

    def _chains_of(self, place: int) -> _Chains:
        nodes, per_node = self._table.nodes[place]
        one = np.full((nodes + 1, self._last + 1), _NONE)
        parts: dict[int, IntArray] = {}
        for cut, most in zip(self._table.slices[place], self._most_of(place), strict=True):
            if most[1] <= 0:
                continue
            if cut.shape[0] > 1:
                np.maximum(one[cut.shape[0]], most, out=one[cut.shape[0]])
            else:
                parts[cut.shape[1]] = np.maximum(parts.get(cut.shape[1], _NONE), most)
        inside = self._inside_a_node(per_node, parts)
        if 1 in inside:
            np.maximum(one[1], inside.pop(1), out=one[1])
        return _Chains(nodes, one, inside)

    def _most_of(self, place: int) -> IntArray:
        """The most layers of one stage on each slice of a subcluster, by its warm-up count."""
        slices = self._table.slices[place]
        found = np.full((len(slices), self._last + 1), _NONE)
        if self._is_compiled:
            from hetjax.planner.harp import reach_kernels

            bounds = self._table.bounds_by_length[place]
            found[:, 1:] = reach_kernels.most_layers(*bounds, self._pace, self._least, self._last)
        else:
            counts = np.arange(self._last) + self._least
            found[:, 1:] = [cut.most_layers(self._pace, counts) for cut in slices]
        return _or_none(found)

    def _inside_a_node(self, devices: int, parts: dict[int, IntArray]) -> dict[int, IntArray]:
        """Stages that share a node, by their number and the warm-up count of the first."""
        if self._is_compiled and parts:
            from hetjax.planner.harp import reach_kernels

            sizes = np.array(list(parts), np.int64)
            every = np.array(list(parts.values()), np.int64)
            stages = reach_kernels.inside_a_node(devices, sizes, every, _NONE)
            return dict(enumerate(stages, start=1))
        found: dict[int, IntArray] = {}
        # By how many of its devices are used, with one stage less.
        fewer = {used: np.zeros(self._last + 1, dtype=int) for used in range(devices + 1)}
        for number in range(1, devices + 1):
            shifted = {used: self._one_before(each) for used, each in fewer.items()}
            more: dict[int, IntArray] = {}
            for used in range(1, devices + 1):
                every = [
                    most + shifted[used - size]
                    for size, most in parts.items()
                    if used - size in shifted
                ]
                if every:
                    more[used] = np.max(every, axis=0)
            if not more or max(each.max() for each in more.values()) <= 0:
                break
            found[number] = _or_none(more[max(more)])
            fewer = more
        return found

    def _one_before(self, by_count: IntArray, steps: int = 1) -> IntArray:
        """Layers by the warm-up count of the stage before, or some stages before.

        The last count stands for all above it, so it is behind itself as well.
        """
        found = np.full(by_count.shape, _NONE)
        found[..., steps:] = by_count[..., : max(0, by_count.shape[-1] - steps)]
        found[..., -1] = by_count[..., -1]
        return found

    def _with_stages_before(self, place: int, nearest: IntArray) -> IntArray:
        """What lies behind, with the stages of a subcluster before it, by nodes used."""
        chains = self._chains[place]
        if self._is_compiled:
            from hetjax.planner.harp import reach_kernels

            return reach_kernels.with_stages_before(*chains.stacked, nearest)
        most = np.full((chains.nodes + 1, self._last + 1), _NONE)
        shifted = most.copy()
        most[0], shifted[0] = nearest, self._one_before(nearest)
        for used in range(1, chains.nodes + 1):
            best = (chains.one[1 : used + 1] + shifted[used - 1 :: -1][:used]).max(axis=0)
            for number, inside in chains.inside.items():
                np.maximum(best, inside + self._one_before(most[used - 1], number), out=best)
            np.maximum(best, most[used - 1], out=best)
            most[used] = np.maximum.accumulate(best)
            shifted[used] = self._one_before(most[used])
        return most

    def _with_stages_behind(self, place: int, nearest: IntArray) -> IntArray:
        """What lies before, with the stages of a subcluster behind it, by nodes left."""
        chains = self._chains[place]
        if self._is_compiled:
            from hetjax.planner.harp import reach_kernels

            return reach_kernels.with_stages_behind(*chains.stacked, nearest)
        last = self._last
        most = np.full((chains.nodes + 1, last + 1), _NONE)
        most[0] = nearest
        places = np.arange(last + 1)
        after = np.minimum(places + 1, last)
        one = chains.one[:, after]
        then = {number: np.minimum(places + number, last) for number in chains.inside}
        inside = [(each[then[number]], then[number]) for number, each in chains.inside.items()]
        shifted = np.full_like(most, _NONE)
        shifted[0] = nearest[after]
        for left in range(1, chains.nodes + 1):
            best = (one[1 : left + 1] + shifted[left - 1 :: -1][:left]).max(axis=0)
            for each, counts in inside:
                np.maximum(best, each + most[left - 1][counts], out=best)
            most[left] = np.maximum(best, most[left - 1])
            shifted[left] = most[left][after]
        return most


def _or_none(most: IntArray) -> IntArray:
    return np.where(most > 0, most, _NONE)
