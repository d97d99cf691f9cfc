"""What runs of layers take once a step: the update of their parameters, and its exchange."""

from __future__ import annotations

import numpy as np

from hetjax.pipeline.program.loss import accumulator_dtype
from hetjax.pipeline.timeline.streamed_update import GroupTimes
from hetjax.pipeline.update.state_groups import state_groups
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.arrays import FloatArray
from hetjax.planner.work.execution import (
    Execution,
    offloaded_bytes,
    parameter_bytes,
    part_state_bytes,
)
from hetjax.planner.work.layer_runs import Runs
from hetjax.planner.work.rates import TASK_SECONDS, ring_seconds


def update_seconds(
    problem: PlanningProblem, runs: Runs, execution: Execution
) -> tuple[FloatArray, FloatArray]:
    """Estimate what runs of layers do once a step.

    Args:
        problem: the planning problem.
        runs: the work.
        execution: where and how.

    Returns:
        Seconds of the optimizer's update, and of that the exchange over the data axis.
    """

    def found() -> tuple[FloatArray, FloatArray]:
        of = parameter_bytes(problem.program, problem.optimizer_bytes, runs, execution)
        once = execution.sharding != "fully_sharded"
        exchange = _exchange_seconds(of.trained, runs, execution) * once
        updating = of.updated / rate + _product_seconds(problem, runs, execution)
        computed = TASK_SECONDS + updating
        if execution.host_link is not None:
            computed = _streamed_seconds(problem, runs, execution, updating)
        return computed + exchange, exchange

    rate = update_rate(problem, execution)
    if execution.parameters:
        return found()
    # Recomputation changes nothing of it.
    way = (execution.mesh_shape, execution.sharding, execution.data_link, problem.optimizer_bytes)
    way = (*way, execution.updates, execution.members, execution.host_link)
    way = (*way, execution.kind, problem.update_products) if problem.update_products else way
    return runs.once(("update", rate, *way), found)


def _product_seconds(
    problem: PlanningProblem, runs: Runs, execution: Execution
) -> FloatArray | float:
    """Seconds of the matrix products of an update, where no measured rate has them in it.

    An optimizer that makes products of a parameter mixes its rows, so no devices divide them.
    """
    if not problem.update_products or execution.subcluster in problem.profile.updates:
        return 0.0
    kinds, of_parts = runs.kinds
    sizes = [
        shape.size if kinds[place].is_updated else 0
        for shape, place in zip(runs.shapes, of_parts, strict=True)
    ]
    flops = problem.update_products * runs.held(np.array(sizes, dtype=float))
    return flops / execution.kind.product_flops(problem.dtype)


def sum_factor(runs: Runs) -> float:
    """How many times as large sums of gradients are as the parameters.

    Args:
        runs: the work.
    """

    def found() -> float:
        sizes = [
            (s.size, s.dtype.itemsize, accumulator_dtype(s.dtype).itemsize) for s in runs.shapes
        ]
        held = sum(size * each for size, each, _ in sizes)
        return sum(size * each for size, _, each in sizes) / held if held else 1.0

    return runs.once(("sums over parameters",), found)


def _exchange_seconds(trained: FloatArray, runs: Runs, execution: Execution) -> FloatArray:
    """Seconds over the data axis in which gradients are summed, and given to all or to updaters.

    Whoever updates a part of the parameters gives it to the others.
    """
    link, devices = execution.data_link, execution.mesh_shape[0]
    sums = ring_seconds(link, sum_factor(runs) * trained, devices)
    given = sums if execution.sharding == "data" else ring_seconds(link, trained, devices)
    return sums + given


def parameter_passes(
    problem: PlanningProblem, runs: Runs, execution: Execution
) -> tuple[FloatArray, FloatArray]:
    """Seconds of one pass over the data axis of all parameters, and of those with gradients.

    Args:
        problem: the planning problem.
        runs: the work.
        execution: where and how.
    """
    of = parameter_bytes(problem.program, problem.optimizer_bytes, runs, execution)
    link, devices = execution.data_link, execution.mesh_shape[0]
    return (
        ring_seconds(link, of.whole, devices),
        ring_seconds(link, of.trained, devices),
    )


def _streamed_seconds(
    problem: PlanningProblem, runs: Runs, execution: Execution, updating: FloatArray
) -> FloatArray:
    """Seconds of an update whose state comes and goes in groups, all taken to be alike.

    What `hetjax.pipeline.timeline.streamed_update.stream_update` finds of groups as they are.
    """
    link = execution.host_link
    assert link is not None, "the state is offloaded"
    way = (problem.program, problem.optimizer_bytes, runs, execution)
    total, group = offloaded_bytes(*way)
    count = np.where(group > 0, total / np.where(group > 0, group, 1.0), 1.0)
    copy, each = link.latency + group / link.bandwidth, TASK_SECONDS + updating / count
    if not copies_overlap(execution):
        return count * (2 * copy + each)
    return 2 * copy + each + (count - 1) * np.maximum(each, copy + each / 2)


def update_groups(
    problem: PlanningProblem, runs: Runs, execution: Execution
) -> tuple[GroupTimes, ...]:
    """What the groups of an update take whose optimizer state is offloaded.

    Args:
        problem: the planning problem.
        runs: one run.
        execution: where and how.

    Returns:
        The groups in their order; none where nothing is offloaded.
    """
    link = execution.host_link
    if link is None:
        return ()
    way = (problem.program, problem.optimizer_bytes, runs, execution)
    kinds, of_parts = runs.kinds
    # What is frozen is in no group.
    is_updated = [kinds[place].is_updated for place in of_parts]
    sizes = part_state_bytes(*way)[np.array(is_updated, dtype=bool)].tolist()
    updated = float(parameter_bytes(*way).updated)
    taken = updated / update_rate(problem, execution) + _product_seconds(problem, runs, execution)
    a_byte = float(taken) / max(sum(sizes), 1.0)
    groups = [sum(sizes[place] for place in group) for group in state_groups(sizes)]
    return tuple(
        GroupTimes(link.seconds(size), TASK_SECONDS + a_byte * size, link.seconds(size))
        for size in groups
    )


def copies_overlap(execution: Execution) -> bool:
    """Whether devices compute while copies to and from their hosts' memory are under way.

    A processor copies by itself, and computes no less for it.

    Args:
        execution: where and how.
    """
    return not execution.kind.is_processor


def update_rate(problem: PlanningProblem, execution: Execution) -> float:
    """Bytes/s of parameters, gradients and optimizer state that a device's update gets through.

    Args:
        problem: the planning problem, with its profile.
        execution: where and how.
    """
    # Where it was not measured: each is read and written.
    assumed = execution.kind.memory_bandwidth / 2
    return problem.profile.updates.get(execution.subcluster, assumed)
