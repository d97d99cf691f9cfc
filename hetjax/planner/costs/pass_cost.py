"""What passes take by their work: rooflines, and the collectives of both axes of a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hetjax.planner.intra_op.tensor_axis import TensorCosts
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.arrays import FloatArray
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.layer_runs import Runs
from hetjax.planner.work.rates import TASK_SECONDS, TRAFFIC_SHARE, ring_seconds


def computation(
    problem: PlanningProblem, runs: Runs, execution: Execution
) -> tuple[FloatArray, FloatArray]:
    """Seconds of the passes' computation by their work, as measurements nearby correct it.

    Args:
        problem: the planning problem.
        runs: the work.
        execution: where and how.
    """
    slower = problem.profile.slowness(execution.subcluster, execution.shape)

    def passes() -> tuple[FloatArray, FloatArray]:
        forward = roofline(problem, execution, runs.forward_flops, runs.forward_traffic)
        backward = roofline(problem, execution, runs.backward_flops, runs.backward_traffic)
        return forward * slower[0], backward * slower[1]

    # However many devices share it, it is divided evenly among them.
    devices = math.prod(execution.mesh_shape)
    key = (execution.kind, problem.dtype, devices, execution.examples, slower)
    return runs.once(("computation", execution.repeats, *key), passes)


def roofline(
    problem: PlanningProblem,
    execution: Execution,
    flops: FloatArray | float,
    traffic: FloatArray | float,
) -> FloatArray:
    """Seconds of one program's computation, divided among the submesh's devices.

    Args:
        problem: the planning problem.
        execution: where and how.
        flops: of matrix products.
        traffic: bytes of all else.
    """
    kind, devices = execution.kind, math.prod(execution.mesh_shape)
    speed = devices * kind.product_flops(problem.dtype)
    bandwidth = devices * kind.memory_bandwidth / TRAFFIC_SHARE
    share = execution.examples
    return np.asarray(TASK_SECONDS + share * flops / speed + share * traffic / bandwidth)


def least_seconds(problem: PlanningProblem, devices: Mapping[str, int]) -> float:
    """A floor under the computation of one microbatch, by the rules of `estimate`.

    Args:
        problem: the planning problem.
        devices: how many devices of each subcluster share it, as evenly as they are fast.

    Returns:
        Seconds. Where passes were measured, of this program or another one, which may be faster
        than the rules have it, they count the products alone, at the peak.
    """
    works = problem.works
    flops = sum(work.forward.matmul_flops + work.backward.matmul_flops for work in works)
    traffic = sum(work.forward.bytes + work.backward.bytes for work in works)
    corrected = problem.profile.corrects_costs
    rate = 0.0
    for name, count in devices.items():
        kind = problem.cluster.subcluster(name).kind
        if corrected:
            rate += count / (flops / kind.flops(problem.dtype))
        else:
            moving = traffic * TRAFFIC_SHARE / kind.memory_bandwidth
            rate += count / (flops / kind.product_flops(problem.dtype) + moving)
    return 1 / rate


def tensor_pass(problem: PlanningProblem, runs: Runs, execution: Execution) -> FloatArray:
    """Seconds of a third of what a tensor axis costs; there is one forward and two backward.

    Args:
        problem: the planning problem.
        runs: the work.
        execution: where and how.
    """
    key = ("tensor pass", problem.tensor_axis, problem.dtype, execution.kind, execution.link)
    return runs.once(
        (*key, execution.subcluster, execution.mesh_shape, execution.examples),
        lambda: _found_tensor_pass(problem, runs, execution),
    )


def _found_tensor_pass(problem: PlanningProblem, runs: Runs, execution: Execution) -> FloatArray:
    data, tensor = execution.example_parts, execution.mesh_shape[1]
    costs = told_tensor_costs(problem, execution)
    if costs is None or not runs.known_layers:
        return ring_seconds(execution.link, runs.product_bytes / data, tensor)
    kind, link = execution.kind, problem.cluster.subcluster(execution.subcluster).intra_node
    waiting = (tensor - 1) * link.latency * runs.total(costs.passes)
    moving = (tensor - 1) / tensor / link.bandwidth * runs.total(costs.bytes)
    speed = kind.product_flops(problem.dtype)
    computing = runs.total(costs.flops) / speed
    computing = computing + runs.total(costs.traffic) * TRAFFIC_SHARE / kind.memory_bandwidth
    return (waiting + (moving + computing) / data) / 3


def told_tensor_costs(problem: PlanningProblem, execution: Execution) -> TensorCosts | None:
    """What the integer program tells of a tensor axis, by layer.

    Args:
        problem: the planning problem.
        execution: where and how.

    Returns:
        The costs; None where there are none to be told, or the axis leaves its node.
    """
    tensor = execution.mesh_shape[1]
    if tensor == 1 or not execution.subcluster:
        return None
    per_node = problem.cluster.subcluster(execution.subcluster).devices_per_node
    return None if per_node % tensor else problem.tensor_costs(tensor)


def sums_of_examples(runs: Runs, execution: Execution) -> tuple[FloatArray, FloatArray]:
    """Seconds in which the data axis sums over the examples what passes go on from.

    Args:
        runs: the work.
        execution: where and how.
    """
    devices, link = execution.mesh_shape[0], execution.data_link
    waiting = 2 * (devices - 1) * link.latency
    a_byte = 2 * (devices - 1) / devices / link.bandwidth
    return (
        runs.forward_moves * waiting + runs.forward_moved * a_byte,
        runs.backward_moves * waiting + runs.backward_moved * a_byte,
    )


def backward_passes(runs: Runs) -> FloatArray:
    """How often the backward pass goes through the forward pass's products: twice, or less.

    Args:
        runs: the work.
    """

    def found() -> FloatArray:
        written = np.maximum(runs.product_bytes, 1.0)
        passes = runs.backward_product_bytes / written
        return np.where(runs.product_bytes > 0, passes, 2.0 * runs.has_backward)

    return runs.once(("backward passes",), found)
