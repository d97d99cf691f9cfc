"""The stage table of a problem by the analytic cost model: its slices and their ways to run."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.mesh.links import Link
from hetjax.mesh.subcluster import Subcluster
from hetjax.planner.costs.union_cost import UnionExecution
from hetjax.planner.harp.lost_devices import is_power_of_two, lost_of_nodes, widest_of_nodes
from hetjax.planner.harp.slice_questions import SliceQuestion
from hetjax.planner.harp.stage_options import StageOption, best_options, fitting
from hetjax.planner.harp.stage_table import Slice, StageTable, Transfers
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.alike_runs import alike_layers
from hetjax.planner.work.arrays import FloatArray, IntArray
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.layer_runs import Runs
from hetjax.planner.work.rates import collective_link, transfer_seconds
from hetjax.planner.work.repeating_layers import (
    LayerRun,
    RepeatingRuns,
    listed_by_repetition,
    repetitions,
)
from hetjax.sharding.annotation.rules import RULES

ALL_ORDERS_UP_TO = 4
"""Up to this many subclusters the search tries every order of them along the pipeline."""


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
        widest=widest_of_nodes(cluster, problem.lost) if problem.lost else (),
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
    return slice_of_options(runs, shape, kept)


def slice_of_options(
    runs: RepeatingRuns,
    shape: tuple[int, int],
    kept: Sequence[StageOption[Execution]] | Sequence[StageOption[UnionExecution]],
) -> Slice:
    """The slice of a submesh on which a stage runs in some ways.

    Args:
        runs: the runs of layers, in a list.
        shape: the submesh's nodes, and devices in each.
        kept: the ways, one or more.
    """
    listed = runs["nothing"]
    assert listed.places is not None, "they are in a list"
    end = _first_that_do_not_fit(listed, np.any([each.limits > 0 for each in kept], axis=0))
    return Slice(
        shape,
        listed.places,
        np.array([each.seconds[:end] for each in kept]),
        np.array([each.limits[:end] for each in kept]),
        tuple(each.option for each in kept),
        np.array([each.closing for each in kept]),
    )


def _first_that_do_not_fit(runs: Runs, fits: NDArray[np.bool_]) -> int:
    """How many runs of a list there are up to one that is longer than all that fit, with it."""
    assert runs.listed is not None, "they are in a list"
    lengths = runs.listed[1] - runs.listed[0]
    longest = lengths[fits].max(initial=0)
    return int(np.searchsorted(lengths, longest, side="right")) + 1


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
        where the subcluster's nodes have memory for it, those without it with activations there,
        and all of these again with the optimizer's state.
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
        for repeats in repetitions(allow_recompute=problem.options.allow_recompute)
        for sharding in (RULES if data > 1 else ("data",))
    )
    if subcluster.host_memory_bytes is None:
        return kept
    # What is made again is not worth its way.
    whole = (each for each in kept if each.repeats == "nothing")
    kept = (*kept, *(each.offloading_activations(subcluster) for each in whole))
    return (*kept, *(each.offloaded(subcluster) for each in kept))


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

    def over(num_bytes: Sequence[float]) -> FloatArray:
        # The blocks of a model cross in few ways.
        seconds = {each: transfer_seconds(link, each) for each in set(num_bytes)}
        return np.array([*map(seconds.__getitem__, num_bytes), 0.0])

    return Transfers(
        over([each.received_bytes for each in problem.works]),
        over([each.returned_bytes for each in problem.works]),
    )
