"""The stage table: what every candidate stage and every transfer costs, as plain numbers.

It is all that the search looks at, so that a measured profile can take the cost model's place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetjax.mesh.cluster import SubMesh
from hetjax.planner.costs.union_cost import UnionExecution
from hetjax.planner.harp.lost_devices import is_power_of_two
from hetjax.planner.work.arrays import FloatArray, IntArray
from hetjax.planner.work.execution import Execution


@dataclass(frozen=True, eq=False)
class Slice:
    """What candidate stages cost on one shape of submesh of one subcluster.

    Args:
        shape: nodes, and devices in each.
        runs: ``[L + 1, L + 1]``: entry ``[i, j]`` tells where in the lists below layers i to j - 1
            are. Runs that cost the same share an entry, but for those from the first layer on;
            where j <= i, it is one that does not fit. Entries past the end of the lists stand for
            runs that do not fit, as the last one then does; no longer one is in the lists than one
            that is past their end.
        seconds: forward plus backward pass of one microbatch, and in all but a pipeline's first
            stage its share of the exchange of gradients that a step has once,
            ``[options, runs]``: entry ``[o, r]`` is for runs r run with option o, infinite where
            they do not fit.
        live_limits: how many live microbatches fit; 0 where the stage does not fit at all.
        options: how each option runs a stage; for whoever reads the result, not for the search.
            Each is of one submesh, or of several that share the examples.
        closing: what the first stage does once a step, after its last backward pass, which is the
            last of all: its exchange and its update, ``[options, L + 1]``: entry ``[o, j]`` is for
            layers 0 to j - 1. None for nothing.
    """

    shape: tuple[int, int]
    runs: IntArray
    seconds: FloatArray
    live_limits: IntArray
    options: tuple[Execution | UnionExecution, ...] = ()
    closing: FloatArray | None = None

    @property
    def num_options(self) -> int:
        """In how many ways a stage may run."""
        return len(self.seconds)

    @property
    def num_runs(self) -> int:
        """How many runs are in the lists."""
        return self.seconds.shape[1]

    def seconds_of(self, layers: tuple[int, int]) -> FloatArray:
        """The seconds of a stage by option: see `seconds`."""
        return self.seconds.take(self.runs[layers], axis=1, mode="clip")

    def limits_of(self, layers: tuple[int, int]) -> IntArray:
        """How many live microbatches of a stage fit, by option."""
        return self.live_limits.take(self.runs[layers], axis=1, mode="clip")

    @functools.cached_property
    def num_devices(self) -> int:
        """How many devices the submesh has."""
        return self.shape[0] * self.shape[1]

    @functools.cached_property
    def num_candidates(self) -> int:
        """How many stages fit, each with one way to run it."""
        fits = np.isfinite(self.seconds) & (self.live_limits > 0)
        times = np.bincount(self.runs.ravel(), minlength=self.num_runs)[: self.num_runs]
        return int((fits.sum(axis=0) * times).sum())

    @functools.cached_property
    def by_length(self) -> IntArray:
        """Where runs are by their length and first layer; see the function of this name."""
        return by_length(self.runs, len(self.runs) - 1)

    @functools.cached_property
    def fastest(self) -> FloatArray:
        """What each of the runs takes at least where it fits, with what closes a step."""
        seconds = np.where(self.live_limits > 0, self.seconds, np.inf)
        fastest = seconds.min(axis=0)
        if self.closing is not None:
            ends = np.flatnonzero(self.runs[0, 1:] < self.num_runs) + 1
            first = self.runs[0, ends]
            fastest[first] = (seconds[:, first] + self.closing[:, ends]).min(axis=0)
        return fastest

    @functools.cached_property
    def fastest_by_length(self) -> FloatArray:
        """The fastest stage that fits, of so many layers or more: the first entry is for one."""
        fastest, _ = self.bounds_by_length
        every = np.full(len(self.runs) - 1, np.inf)
        every[: fastest.shape[1]] = fastest.min(axis=0)
        return every

    @functools.cached_property
    def bounds_by_length(self) -> tuple[FloatArray, IntArray]:
        """The least seconds of so many layers or more, and the most microbatches that fit.

        Both are ``[options, lengths]``: the first entry is for one layer, the last for as many as
        any run has that is in the lists.
        """
        firsts, ends = np.nonzero(np.triu(self.runs < self.num_runs, k=1))
        longest = np.zeros(self.num_runs, dtype=int)
        # The same run elsewhere is as long.
        longest[self.runs[firsts, ends]] = ends - firsts
        order = np.argsort(longest, kind="stable")
        lengths, starts = np.unique(longest[order], return_index=True)
        if lengths[0] == 0:
            lengths, starts = lengths[1:], starts[1:]
        fits = self.live_limits > 0
        seconds = np.where(fits, self.seconds, np.inf)[:, order]
        limits = np.where(np.isfinite(self.seconds), self.live_limits, 0)[:, order]
        fastest = np.full((self.num_options, longest.max(initial=0)), np.inf)
        most = np.zeros(fastest.shape, dtype=np.int32)
        fastest[:, lengths - 1] = np.minimum.reduceat(seconds, starts, axis=1)
        most[:, lengths - 1] = np.maximum.reduceat(limits, starts, axis=1)
        return (
            np.ascontiguousarray(np.minimum.accumulate(fastest[:, ::-1], axis=1)[:, ::-1]),
            np.ascontiguousarray(np.maximum.accumulate(most[:, ::-1], axis=1)[:, ::-1]),
        )

    def widest(self, pace: float) -> int:
        """The most layers of a stage that is no slower than a pace, whichever they are.

        Args:
            pace: seconds that it may not exceed.
        """
        return int(np.searchsorted(self.fastest_by_length, pace, side="right"))

    def most_layers(self, pace: float, counts: IntArray) -> IntArray:
        """The most layers of a stage, whichever they are, by its warm-up count.

        Args:
            pace: seconds that it may not exceed.
            counts: warm-up counts.
        """
        fastest, limits = self.bounds_by_length
        width = self.widest(pace)
        if not width:
            return np.zeros(len(counts), dtype=int)
        held = np.where(fastest[:, :width] <= pace, limits[:, :width], 0).max(axis=0)
        return np.searchsorted(-held, -counts, side="right")


def by_length(values: NDArray[Any], width: int) -> NDArray[Any]:
    """Values of runs of layers, by length and first layer.

    Args:
        values: ``[L + 1, L + 1]``: the entry ``[i, j]`` is for layers i to j - 1.
        width: how many lengths, at most L.

    Returns:
        The same memory as ``[width, L]``: the entry ``[k, i]`` is for layers i to i + k; where
        there are no so many layers, an entry that stands for no run.

    Example:
        >>> by_length(np.array([[0, 1, 2], [0, 0, 3], [0, 0, 0]]), 2)
        array([[1, 3],
               [2, 0]])
    """
    size, step = len(values), values.itemsize
    assert values.flags.c_contiguous, "rows follow each other"
    # One layer on is one row and one column on; past a row's end begins the next one, below its
    # diagonal.
    shape, strides = (width, size - 1), (step, (size + 1) * step)
    return np.ndarray(shape, values.dtype, values.data, step, strides)


class Bounds(NamedTuple):
    """`Slice.bounds_by_length` of several slices, one after the other.

    Args:
        fastest: the seconds, of one slice after the other by option and length.
        limits: the microbatches, likewise.
        sizes: how many options each slice has, and how many lengths.
    """

    fastest: FloatArray
    limits: IntArray
    sizes: IntArray

    @classmethod
    def of(cls, slices: Sequence[Slice]) -> Bounds:
        """The bounds of some slices."""
        every = [cut.bounds_by_length for cut in slices]
        return cls(
            np.concatenate([np.zeros(0), *(fastest.ravel() for fastest, _ in every)]),
            np.concatenate([np.zeros(0, int), *(limits.ravel() for _, limits in every)]),
            np.array([fastest.shape for fastest, _ in every]).reshape(-1, 2),
        )


@dataclass(frozen=True, eq=False)
class Transfers:
    """What it takes to cross each layer boundary on one link, in seconds.

    Args:
        forward: an activation of one microbatch, ``[L + 1]``: entry j is for the boundary before
            layer j.
        backward: its cotangent.
    """

    forward: FloatArray
    backward: FloatArray


@dataclass(frozen=True)
class PartOfJoined:
    """What a subcluster gives to one that is several joined together.

    Args:
        subcluster: its name.
        nodes: how many nodes it gives to a node of the joined one.
        devices: how many devices of each to a device.
    """

    subcluster: str
    nodes: int
    devices: int

    def submesh(self, shape: tuple[int, int], start: int) -> SubMesh:
        """What it gives to a slice of the joined one.

        Args:
            shape: of the slice.
            start: the slice's first device.

        Example:
            >>> str(PartOfJoined("fast", 1, 4).submesh((1, 2), 2))
            'fast[8:16] 1x8'
        """
        nodes, devices = shape
        first = start * self.nodes * self.devices
        return SubMesh(self.subcluster, first, (nodes * self.nodes, devices * self.devices))


@dataclass(frozen=True, eq=False)
class StageTable:
    """What the search needs to know.

    Args:
        num_layers: L.
        num_microbatches: M.
        schedule: the schedule, which sets the warm-up counts.
        nodes: nodes and devices per node of each subcluster.
        slices: for each subcluster, the shapes of submesh that may be cut from it.
        within: for each subcluster, transfers inside a node.
        between: ``between[a][b]``: transfers between subclusters a and b; between the nodes of one
            where they are the same. Over all network cards of a node, which stages of less than a
            node may not have.
        order: subclusters in the one order in which the pipeline may pass them; None for any.
        min_stages: the least number of stages.
        max_stages: the largest; None for any.
        lost: for each subcluster, how many devices of each node cannot be used, as if they were its
            first ones; empty where there are none. Such a subcluster's nodes keep their order along
            the pipeline.
        widest: likewise how many devices a submesh inside of each node may have; empty where all
            of what is left.
        joined: for each subcluster what it is made of; empty where these are the cluster's own.
    """

    num_layers: int
    num_microbatches: int
    schedule: str
    nodes: tuple[tuple[int, int], ...]
    slices: tuple[tuple[Slice, ...], ...]
    within: tuple[Transfers, ...]
    between: tuple[tuple[Transfers, ...], ...]
    order: tuple[int, ...] | None = None
    min_stages: int = 1
    max_stages: int | None = None
    lost: tuple[tuple[int, ...], ...] = ()
    widest: tuple[tuple[int, ...], ...] = ()
    joined: tuple[tuple[PartOfJoined, ...], ...] = ()

    @functools.cached_property
    def fastest_by_length(self) -> tuple[FloatArray, ...]:
        """For each subcluster `Slice.fastest_by_length` of all its slices, ``[slices, L]``."""
        return tuple(
            np.array([cut.fastest_by_length for cut in slices]).reshape(-1, self.num_layers)
            for slices in self.slices
        )

    @functools.cached_property
    def bounds_by_length(self) -> tuple[Bounds, ...]:
        """For each subcluster `Slice.bounds_by_length` of all its slices."""
        return tuple(map(Bounds.of, self.slices))

    @functools.cached_property
    def quickest(self) -> FloatArray:
        """The slower of both transfers between subclusters, over the boundary that takes least."""
        return np.array(
            [
                [np.maximum(t.forward, t.backward)[1:-1].min(initial=np.inf) for t in row]
                for row in self.between
            ]
        )

    @functools.cached_property
    def extensions(self) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
        """The stages that may come before so many devices of a subcluster, counted from its end.

        For each subcluster, by how many are used with such a stage: its slice, and how many are
        used without it.
        """
        none = [()] * len(self.nodes)
        parts = zip(self.nodes, self.slices, self.lost or none, self.widest or none, strict=True)
        return tuple(
            _extensions(nodes, tuple(cut.shape for cut in slices), lost, widest)
            for nodes, slices, lost, widest in parts
        )

    @functools.cached_property
    def num_extensions(self) -> int:
        """How many of them there are."""
        return sum(len(each) for of_one in self.extensions for each in of_one)

    def is_damaged(self, subcluster: int) -> bool:
        """Whether some nodes of a subcluster have devices that cannot be used."""
        return bool(self.lost) and any(self.lost[subcluster])

    def may_hold(self, subcluster: int, start: int, cut: Slice) -> bool:
        """Whether a submesh is without devices that cannot be used.

        Args:
            subcluster: the place of the subcluster.
            start: the submesh's first device.
            cut: its shape.
        """
        lost = self.lost[subcluster] if self.lost else ()
        widest = self.widest[subcluster] if self.widest else ()
        return _may_hold(self.nodes[subcluster][1], lost, widest, start, cut.shape)


@functools.lru_cache(maxsize=32)
def _extensions(
    nodes: tuple[int, int],
    shapes: tuple[tuple[int, int], ...],
    lost: tuple[int, ...],
    widest: tuple[int, ...],
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The stages that may come before so many devices of one subcluster."""
    per_node, devices = nodes[1], nodes[0] * nodes[1]

    def before(used: int) -> Iterator[tuple[int, int]]:
        for place, shape in enumerate(shapes):
            size = shape[0] * shape[1]
            rest = used - size
            in_one_node = rest % per_node + size <= per_node
            whole = shape[1] == per_node and rest % per_node == 0
            is_free = rest >= 0 and _may_hold(per_node, lost, widest, devices - used, shape)
            if is_free and (in_one_node or whole):
                yield place, rest

    return tuple(tuple(before(used)) for used in range(devices + 1))


def _may_hold(
    per_node: int,
    lost: tuple[int, ...],
    widest: tuple[int, ...],
    start: int,
    shape: tuple[int, int],
) -> bool:
    """Whether a submesh is without devices that cannot be used; see `StageTable.may_hold`."""
    if not lost:
        return True
    node = start // per_node
    if shape[0] > 1:
        return not any(lost[node : node + shape[0]])
    if lost[node] and is_power_of_two(per_node) and not is_power_of_two(shape[1]):
        # What is left may be in several pieces, which only powers of two are sure to fill.
        return False
    is_too_wide = bool(widest) and shape[1] > widest[node]
    return start % per_node >= lost[node] and not is_too_wide
