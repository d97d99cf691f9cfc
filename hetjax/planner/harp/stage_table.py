"""The stage table: what every candidate stage and every transfer costs, as plain numbers.

It is all that the search looks at, so that a measured profile can take the cost model's place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.mesh.host_links import host_share, link_to_host
from hetjax.mesh.links import Link
from hetjax.mesh.subcluster import Subcluster
from hetjax.planner.costs.union_cost import UnionExecution
from hetjax.planner.harp.lost_devices import is_power_of_two, lost_of_nodes
from hetjax.planner.harp.slice_questions import SliceQuestion
from hetjax.planner.harp.stage_options import best_options, fitting
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.arrays import FloatArray, IntArray
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.layer_runs import Runs, alike_layers
from hetjax.planner.work.rates import collective_link, transfer_seconds
from hetjax.planner.work.repeating_layers import (
    REPETITIONS,
    LayerRun,
    RepeatingRuns,
    listed_by_repetition,
)
from hetjax.sharding.annotation.rules import RULES

ALL_ORDERS_UP_TO = 4
"""Up to this many subclusters the search tries every order of them along the pipeline."""


@dataclass(frozen=True, eq=False)
class Slice:
    """What candidate stages cost on one shape of submesh of one subcluster.

    Args:
        shape: nodes, and devices in each.
        runs: ``[L + 1, L + 1]``: entry ``[i, j]`` tells where in the lists below layers i to j - 1
            are. Runs that cost the same share an entry, but for those from the first layer on;
            where j <= i, it is one that does not fit.
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

    def seconds_of(self, layers: tuple[int, int]) -> FloatArray:
        """The seconds of a stage by option: see `seconds`."""
        return self.seconds[:, self.runs[layers]]

    def limits_of(self, layers: tuple[int, int]) -> IntArray:
        """How many live microbatches of a stage fit, by option."""
        return self.live_limits[:, self.runs[layers]]

    @functools.cached_property
    def num_devices(self) -> int:
        """How many devices the submesh has."""
        return self.shape[0] * self.shape[1]

    @functools.cached_property
    def num_candidates(self) -> int:
        """How many stages fit, each with one way to run it."""
        fits = np.isfinite(self.seconds) & (self.live_limits > 0)
        times = np.bincount(self.runs.ravel(), minlength=fits.shape[1])
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
            first = self.runs[0, 1:]
            fastest[first] = (seconds[:, first] + self.closing[:, 1:]).min(axis=0)
        return fastest

    @functools.cached_property
    def fastest_by_length(self) -> FloatArray:
        """The fastest stage that fits, of so many layers or more: the first entry is for one."""
        fastest = np.where(self.live_limits > 0, self.seconds, np.inf).min(axis=0)
        by_length = fastest[self.by_length].min(axis=1)
        return np.minimum.accumulate(by_length[::-1])[::-1]


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
    joined: tuple[tuple[PartOfJoined, ...], ...] = ()

    @functools.cached_property
    def fastest_by_length(self) -> tuple[FloatArray, ...]:
        """For each subcluster `Slice.fastest_by_length` of all its slices, ``[slices, L]``."""
        return tuple(
            np.array([cut.fastest_by_length for cut in slices]).reshape(-1, self.num_layers)
            for slices in self.slices
        )

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
        return tuple(
            tuple(tuple(self._extensions(subcluster, used)) for used in range(nodes * per_node + 1))
            for subcluster, (nodes, per_node) in enumerate(self.nodes)
        )

    def _extensions(self, subcluster: int, used: int) -> Iterator[tuple[int, int]]:
        nodes, per_node = self.nodes[subcluster]
        for place, cut in enumerate(self.slices[subcluster]):
            before = used - cut.num_devices
            if before < 0:
                continue
            in_one_node = before % per_node + cut.num_devices <= per_node
            whole = cut.shape[1] == per_node and before % per_node == 0
            start = nodes * per_node - used
            if (in_one_node or whole) and self.may_hold(subcluster, start, cut):
                yield place, before

    def may_hold(self, subcluster: int, start: int, cut: Slice) -> bool:
        """Whether a submesh is without devices that cannot be used.

        Args:
            subcluster: the place of the subcluster.
            start: the submesh's first device.
            cut: its shape.
        """
        if not self.lost:
            return True
        _, per_node = self.nodes[subcluster]
        lost = self.lost[subcluster]
        node = start // per_node
        if cut.shape[0] > 1:
            return not any(lost[node : node + cut.shape[0]])
        if lost[node] and is_power_of_two(per_node) and not is_power_of_two(cut.shape[1]):
            # What is left may be in two pieces, which only powers of two are sure to fill.
            return False
        return start % per_node >= lost[node]


def make_stage_table(
    problem: PlanningProblem, runs: Runs, memory_factor: float = 1.0
) -> StageTable:
    """The stage table of a problem, by the analytic cost model.

    Args:
        problem: the planning problem.
        runs: the work of every run of its layers.
        memory_factor: by how much every device's memory is multiplied, to see what a model that
            does not fit would need.

    Returns:
        The table.
    """
    cluster = problem.cluster
    names = [subcluster.name for subcluster in cluster.subclusters]
    any_order = len(names) <= ALL_ORDERS_UP_TO
    return StageTable(
        num_layers=problem.num_layers,
        num_microbatches=problem.num_microbatches,
        schedule=problem.warm_up_schedule,
        nodes=tuple((s.nodes, s.devices_per_node) for s in cluster.subclusters),
        slices=_all_slices(problem, runs, memory_factor),
        within=tuple(transfers_over(problem, s.intra_node) for s in cluster.subclusters),
        between=tuple(
            tuple(transfers_over(problem, cluster.node_link(a, b)) for b in names) for a in names
        ),
        order=None if any_order else memory_first_order(cluster, problem.dtype),
        min_stages=problem.options.min_stages,
        max_stages=problem.options.max_stages
        and min(problem.options.max_stages, problem.num_layers),
        lost=lost_of_nodes(cluster, problem.lost) if problem.lost else (),
    )


def memory_first_order(cluster: Cluster, dtype: str) -> tuple[int, ...]:
    """Subclusters by falling memory per FLOP/s: the first stages hold the most microbatches.

    Args:
        cluster: the cluster.
        dtype: the dtype whose rate counts.

    Returns:
        The places of the subclusters in the cluster, first stage first.

    Source: Harp section 5.2.1.
    """

    def memory_per_flops(place: int) -> float:
        kind = cluster.subclusters[place].kind
        return kind.memory_bytes / kind.flops(dtype)

    return tuple(sorted(range(len(cluster.subclusters)), key=memory_per_flops, reverse=True))


def may_fit(problem: PlanningProblem, runs: Runs) -> bool:
    """Whether a model might fit with one live microbatch on each device; if not, nothing fits.

    Args:
        problem: the planning problem.
        runs: the work of every run of its layers.
    """
    return _may_fit(problem, runs, 1.0)


def listed_runs(problem: PlanningProblem, runs: Runs) -> RepeatingRuns:
    """The runs of a problem's layers, by what they make again, in lists of those that differ.

    Args:
        problem: the planning problem.
        runs: the work of every run of its layers.
    """
    pieces = problem.repeatable_layers
    if problem.profile.measurements:
        return listed_by_repetition(runs, pieces)
    return listed_by_repetition(runs, pieces, _alike_layers(problem, pieces))


def _alike_layers(problem: PlanningProblem, pieces: Sequence[LayerRun]) -> IntArray:
    """Which layers are alike: in their work, along a tensor axis, and in what is made again."""
    place = np.arange(problem.num_layers, dtype=float)
    begin, end = place.copy(), place.copy()
    for a, b in pieces:
        begin[a:b], end[a:b] = a, b
    figures = [place - begin, end - place]
    if problem.tensor_axis is not None:
        per_node = {each.devices_per_node for each in problem.cluster.subclusters}
        axes = {
            n for most in per_node for n in range(2, most + 1) if most % n == 0 or n & (n - 1) == 0
        }
        costs = map(problem.tensor_costs, sorted(axes))
        figures += [values for each in costs if each for values in vars(each).values()]
    return alike_layers(problem.program, problem.works, figures)


def submesh_shapes(nodes: int, devices_per_node: int) -> tuple[tuple[int, int], ...]:
    """The shapes of submesh that may be cut from a subcluster.

    Args:
        nodes: how many nodes it has.
        devices_per_node: devices in each.

    Returns:
        A power of two devices of one node, or three times one; one node, and several whole nodes;
        the fewest devices first.

    Source: Alpa (Zheng et al., 2022), section 5.2; Harp section 5.2.2. Neither has 3, 6, 12, ...

    Example:
        >>> submesh_shapes(2, 6)
        ((1, 1), (1, 2), (1, 3), (1, 4), (1, 6), (2, 6))
    """
    powers = [1 << k for k in range(devices_per_node.bit_length())]
    parts = sorted(m for m in (*powers, *(3 * each for each in powers)) if m < devices_per_node)
    whole = [(n, devices_per_node) for n in range(1, nodes + 1)]
    return (*((1, m) for m in parts), *whole)


def _all_slices(
    problem: PlanningProblem, runs: Runs, memory_factor: float
) -> tuple[tuple[Slice, ...], ...]:
    if problem.tensor_axis is not None and not _may_fit(problem, runs, memory_factor):
        # Whatever a tensor axis costs, there is no plan: what it takes to tell is saved.
        problem = replace(problem, tensor_axis=None)
    by_repetition = listed_runs(problem, runs)

    def find(subcluster: Subcluster, shape: tuple[int, int]) -> Slice:
        question = SliceQuestion("slice", problem, subcluster, shape, memory_factor)
        return problem.slices.answer(
            question, lambda: _slice(problem, by_repetition, subcluster, shape, memory_factor)
        )

    return tuple(
        tuple(find(subcluster, shape) for shape in _usable_shapes(problem, subcluster))
        for subcluster in problem.cluster.subclusters
    )


def _usable_shapes(problem: PlanningProblem, subcluster: Subcluster) -> Iterator[tuple[int, int]]:
    """The shapes of submesh that there is a way to run a stage on."""
    for shape in submesh_shapes(subcluster.nodes, subcluster.devices_per_node):
        if any(_logical_meshes(problem, subcluster, shape)):
            yield shape


def _may_fit(problem: PlanningProblem, runs: Runs, memory_factor: float) -> bool:
    """Whether runs that fit follow each other from the first layer to the last.

    That is, on no more devices than there are, of whichever kind, one live microbatch on each.
    """
    # What they hold does not depend on what a tensor axis costs.
    by_repetition = listed_runs(replace(problem, tensor_axis=None), runs)
    size, total = problem.num_layers + 1, problem.cluster.num_devices
    devices = np.full((size, size), np.inf)
    for subcluster in problem.cluster.subclusters:
        for shape in _usable_shapes(problem, subcluster):
            asked = SliceQuestion("what fits", problem, subcluster, shape, memory_factor)
            fits = problem.slices.answer(asked, functools.partial(_fitting, by_repetition, asked))
            devices[fits] = np.minimum(devices[fits], shape[0] * shape[1])
            if _fewest_devices(devices) <= total:
                return True
    return False


def _fitting(by_repetition: RepeatingRuns, asked: SliceQuestion) -> NDArray[np.bool_]:
    """The runs of layers that fit on a submesh with one live microbatch, in some way."""
    options = execution_options(asked.problem, asked.subcluster, asked.shape)
    fits = fitting(asked.problem, by_repetition, options, asked.memory_factor)
    return by_repetition["nothing"].on_square(fits)


def _fewest_devices(devices: FloatArray) -> float:
    """The fewest devices for all layers, from what every run of them needs."""
    needed = np.full(len(devices), np.inf)
    needed[0] = 0
    for first, of_runs in enumerate(devices):
        np.minimum(needed, needed[first] + of_runs, out=needed)
    return float(needed[-1])


def _slice(
    problem: PlanningProblem,
    runs: RepeatingRuns,
    subcluster: Subcluster,
    shape: tuple[int, int],
    memory_factor: float,
) -> Slice:
    """The options that are the best for any run of layers."""
    options = execution_options(problem, subcluster, shape)
    kept = best_options(problem, runs, options, memory_factor)
    places = runs["nothing"].places
    assert places is not None, "they are in a list"
    return Slice(
        shape,
        places,
        np.array([each.seconds for each in kept]),
        np.array([each.limits for each in kept]),
        tuple(each.option for each in kept),
        np.array([each.closing for each in kept]),
    )


def execution_options(
    problem: PlanningProblem, subcluster: Subcluster, shape: tuple[int, int]
) -> tuple[Execution, ...]:
    """The ways to run a stage on a submesh, those that need the least of the compiler first.

    Args:
        problem: the planning problem.
        subcluster: what the submesh is cut from.
        shape: its nodes, and devices in each.

    Returns:
        Every logical mesh whose data axis divides the microbatch, and whose tensor axis is no wider
        than the subcluster allows, by every sharding rule, without and with recomputation; and
        where the subcluster's nodes have memory for it, all of these again with the optimizer's
        state in it.
    """
    link = collective_link(problem.cluster, SubMesh(subcluster.name, 0, shape))
    kept = tuple(
        Execution(
            subcluster.kind,
            link,
            (data, tensor),
            sharding,
            repeats,
            subcluster=subcluster.name,
            shape=shape,
        )
        for data, tensor in _logical_meshes(problem, subcluster, shape)
        for repeats in (REPETITIONS if problem.options.allow_recompute else REPETITIONS[:1])
        for sharding in (RULES if data > 1 else ("data",))
    )
    if subcluster.host_memory_bytes is None:
        return kept
    host_link, share = link_to_host(subcluster), host_share(subcluster)
    away = (replace(each, host_link=host_link, host_bytes=share) for each in kept)
    return (*kept, *away)


def _logical_meshes(
    problem: PlanningProblem, subcluster: Subcluster, shape: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """The sizes of the data and the tensor axis that a stage may have, the widest data first."""
    devices = shape[0] * shape[1]
    for data in range(devices, 0, -1):
        tensor = devices // data
        if devices % data or problem.microbatch_size % data:
            continue
        # Few models can be divided by the 3 of 3 devices out of 4, and nothing tells what it costs.
        is_usual = not _is_odd_part(subcluster, shape) or is_power_of_two(tensor)
        if is_usual and subcluster.allows_tensor_axis(tensor):
            yield data, tensor


def _is_odd_part(subcluster: Subcluster, shape: tuple[int, int]) -> bool:
    """Whether a slice is neither a power of two devices nor divides a node, as 3 devices of 4."""
    nodes, devices = shape
    is_odd = not is_power_of_two(devices) and subcluster.devices_per_node % devices > 0
    return nodes == 1 and is_odd


def transfers_over(problem: PlanningProblem, link: Link) -> Transfers:
    """What it takes to cross each layer boundary on a link.

    Args:
        problem: the planning problem.
        link: the link.
    """
    return Transfers(
        np.array([*(transfer_seconds(link, w.received_bytes) for w in problem.works), 0.0]),
        np.array([*(transfer_seconds(link, w.returned_bytes) for w in problem.works), 0.0]),
    )
