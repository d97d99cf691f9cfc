"""Why a model fits nowhere, and what would help."""

from __future__ import annotations

from collections.abc import Iterator

from hetjax.mesh.quantities import format_bytes
from hetjax.planner.costs.cost_model import estimate
from hetjax.planner.harp.candidate_plans import candidate_estimates, slice_of
from hetjax.planner.harp.search import Candidate, search
from hetjax.planner.harp.stage_table import StageTable
from hetjax.planner.harp.table_making import (
    execution_options,
    make_stage_table,
    submesh_shapes,
)
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.execution import Execution, parameter_bytes
from hetjax.planner.work.layer_runs import Runs
from hetjax.planner.work.rates import USABLE_MEMORY
from hetjax.planner.work.repeating_layers import runs_by_repetition


def does_not_fit(problem: PlanningProblem) -> str:
    """Why no plan fits: the plan that needs the least extra memory, with its figures.

    Args:
        problem: a problem without a plan.

    Returns:
        What an error says: a layer that is too large by itself, or the plan that comes nearest,
        which takes several searches to find.
    """
    runs, least = problem.runs, problem.options.min_stages
    left = problem.cluster.num_devices - len(problem.lost)
    if left < least:
        return f"min_stages is {least}, and without the lost ones there are {left} devices"
    too_large = _too_large(problem, runs)
    if too_large is not None:
        return too_large
    nearest = _least_memory(problem, runs)
    if nearest is None:
        most = problem.options.max_stages
        return (
            f"there is no plan on cluster {problem.cluster.name!r}, however much memory it had, "
            f"with min_stages = {least}, max_stages = {most} and {left} devices"
        )
    factor, table, candidate = nearest
    estimates = candidate_estimates(problem, runs, table, candidate)
    lines = []
    for s, (place, each) in enumerate(zip(candidate.places, estimates, strict=True)):
        subcluster = problem.cluster.subclusters[place.subcluster]
        cut, (first, end) = slice_of(table, place), place.layers
        live = candidate.warm_up_counts[s]
        need = format_bytes(int(each.memory_bytes(live)))
        state = format_bytes(int(each.state_bytes))
        activation = format_bytes(int(each.activation_bytes))
        lines.append(
            f"stage {s} (layers {first}-{end - 1} on {cut.shape[0]}x{cut.shape[1]} "
            f"{subcluster.name}) needs {need} a device ({state} of parameters, gradients and "
            f"optimizer state, {live} x {activation} of activations), a device has "
            f"{format_bytes(subcluster.kind.memory_bytes)}"
        )
    return (
        f"the model does not fit on cluster {problem.cluster.name!r} by any plan: about "
        f"{factor:.3g} times its memory is needed. The plan that comes nearest: "
        + "; ".join(lines)
        + f". What would help: {', '.join(_remedies(problem, candidate))}"
    )


def _too_large(problem: PlanningProblem, runs: Runs) -> str | None:
    """The first layer that fits on no submesh by itself, with what it needs."""
    table = make_stage_table(problem, runs)
    for layer in range(problem.num_layers):
        run = layer, layer + 1
        if not any((cut.limits_of(run) > 0).any() for cuts in table.slices for cut in cuts):
            needs = [*_needs(problem, runs, layer)]
            share, need, _, execution = min(needs, key=lambda each: each[0])
            helps = _less_memory(problem) if any(bare <= 1 for _, _, bare, _ in needs) else []
            return (
                f"layer {layer} of {problem.num_layers} is too large for any device of cluster "
                f"{problem.cluster.name!r}: a stage of it alone needs {format_bytes(int(need))} a "
                f"device on {execution.shape[0]}x{execution.shape[1]} {execution.subcluster}, "
                f"{share:.3g} times what may be used of one. What would help: "
                f"{', '.join([*helps, *_OTHER_REMEDIES])}"
            )
    return None


def _needs(
    problem: PlanningProblem, runs: Runs, layer: int
) -> Iterator[tuple[float, float, float, Execution]]:
    """By any way to run a layer as a stage: its memory over what a device has, and in bytes.

    Yields:
        These, what its parameters and gradients alone are over what a device has, and the way.
    """
    by_repetition = runs_by_repetition(runs, problem.repeatable_layers)
    alone = {repeats: each.of((layer, layer + 1)) for repeats, each in by_repetition.items()}
    for subcluster in problem.cluster.subclusters:
        for shape in submesh_shapes(subcluster.nodes, subcluster.devices_per_node):
            for option in execution_options(problem, subcluster, shape):
                run, usable = alone[option.repeats], USABLE_MEMORY * subcluster.kind.memory_bytes
                need = float(estimate(problem, run, option).memory_bytes(1))
                bare = float(parameter_bytes(problem.program, 0.0, run, option).held)
                yield need / usable, need, bare / usable, option


_MOST_MEMORY = 2.0**40
"""Whoever does not fit into so many times the memory does not lack it."""


def _least_memory(
    problem: PlanningProblem, runs: Runs
) -> tuple[float, StageTable, Candidate] | None:
    """By about how much the memory would have to grow, and a plan that then fits; None if none."""

    def attempt(factor: float) -> tuple[float, StageTable, Candidate] | None:
        table = make_stage_table(problem, runs, memory_factor=factor)
        found = search(table)
        return (factor, table, found[0]) if found else None

    low, high = 1.0, 2.0
    while (fits := attempt(high)) is None:
        if high >= _MOST_MEMORY:
            return None
        low, high = high, high * 2
    while high / low > 1.05:
        middle = (low * high) ** 0.5
        nearer = attempt(middle)
        low, high, fits = (middle, high, fits) if nearer is None else (low, middle, nearer)
    return fits


_OTHER_REMEDIES = "more devices, or devices with more memory", "a smaller model"
"""What helps whatever it is that does not fit."""


def _remedies(problem: PlanningProblem, nearest: Candidate) -> list[str]:
    """What would help a plan of several layers."""
    remedies, counts = _less_memory(problem), nearest.warm_up_counts
    # 1F1B holds a microbatch for each stage from here to the last one.
    if any(count > len(counts) - s for s, count in enumerate(counts)):
        remedies.append(f"schedule = '1f1b', which holds less than {problem.options.schedule!r}")
    if problem.options.max_stages is not None:
        remedies.append(f"more stages than max_stages = {problem.options.max_stages}")
    return [*remedies, *_OTHER_REMEDIES]


def _less_memory(problem: PlanningProblem) -> list[str]:
    """What leaves less in memory beside parameters and gradients, of any layer."""
    remedies = []
    if problem.microbatch_size > 1:
        remedies.append(f"more microbatches than num_microbatches = {problem.num_microbatches}")
    if not problem.options.allow_recompute:
        remedies.append("recomputation, which allow_recompute = False rules out")
    if problem.optimizer_bytes > 0:
        remedies.append(
            f"an optimizer with less state than {problem.optimizer_bytes:.3g} bytes a parameter"
        )
        if all(each.host_memory_bytes is None for each in problem.cluster.subclusters):
            remedies.append("host_memory in the cluster, to which its state can be offloaded")
    return remedies
