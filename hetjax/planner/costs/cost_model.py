"""The analytic cost model: seconds and bytes of a stage, from its work and its devices' figures.

Every figure is an array over runs of layers, so that all candidates of a search are estimated at
once by the code that also predicts a finished plan. All times are linear in the work: a stage takes
the sum of what its layers take, but for what happens once in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetjax.planner.costs.held_memory import Memory, memory
from hetjax.planner.costs.measured_times import measured_times, share_of
from hetjax.planner.costs.pass_cost import (
    backward_passes,
    computation,
    sums_of_examples,
    tensor_pass,
)
from hetjax.planner.costs.update_cost import copies_overlap, parameter_passes, update_seconds
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.arrays import FloatArray
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.layer_runs import Runs


@dataclass(frozen=True, eq=False)
class Estimate(Memory):
    """What runs of layers take beside what they hold.

    Args:
        forward_seconds: the forward pass of one microbatch.
        backward_seconds: its backward pass, recomputation included.
        update_seconds: the optimizer's update.
        exchange_seconds: of that, the exchange of gradients and parameters over the data axis.
        copy_seconds: the way of a microbatch's activations to the hosts' memory, and as much back;
            0 where they are not offloaded.
        paced_forward_seconds: the forward pass, and what it leaves open of another microbatch's way
            back.
        paced_backward_seconds: the backward pass, and what it leaves open of another one's way to
            the hosts.
    """

    forward_seconds: FloatArray
    backward_seconds: FloatArray
    update_seconds: FloatArray
    exchange_seconds: FloatArray
    copy_seconds: FloatArray
    paced_forward_seconds: FloatArray
    paced_backward_seconds: FloatArray


def estimate(problem: PlanningProblem, runs: Runs, execution: Execution) -> Estimate:
    """Estimate runs of layers.

    Computation is a roofline, kernel by kernel: matrix products take their FLOPs over the peak that
    they reach, all else the bytes that fusion leaves over the memory's bandwidth; both are divided
    among the submesh's devices. To them come the collectives, as rings: over the data axis a
    reduction of gradients, once a step, with the update (under ``state_sharded`` a scatter of them
    and a gather of new parameters; under ``fully_sharded`` parameters are gathered twice, and once
    more where layers are made again, and gradients scattered, each microbatch), and in each pass
    one of what it sums over the examples and goes on from, as the statistics of a batch
    normalisation. Over the tensor axis they are those that the integer program finds for the
    model's modules, a third of them forward, with what every device computes for itself; where it
    tells nothing, gathers of what matrix products write. Devices that see to transfers themselves,
    as processors do, lose the time that these take.

    Args:
        problem: the planning problem.
        runs: the work; where `execution` recomputes, the backward pass has the repetition in it.
        execution: where and how.

    Returns:
        The estimate.
    """
    fully_sharded = execution.sharding == "fully_sharded"
    times = measured_times(problem, runs, execution)
    if times is not None:
        forward = share_of(runs.in_form(times.forward.of(runs.layers)), execution)
        again = forward * _again(runs, execution)
        backward = share_of(runs.in_form(times.backward.of(runs.layers)), execution) + again
    else:
        forward, backward = computation(problem, runs, execution)
        gathering, scattering = (
            parameter_passes(problem, runs, execution) if fully_sharded else (0.0, 0.0)
        )
        forward = forward + gathering
        if execution.mesh_shape[0] > 1:
            told = sums_of_examples(runs, execution)
            forward, backward = forward + told[0], backward + told[1]
        if execution.mesh_shape[1] > 1:
            product_pass = tensor_pass(problem, runs, execution)
            forward = forward + product_pass
            passes = backward_passes(runs) + _again(runs, execution)
            backward = backward + passes * product_pass
        # What is made again is a forward pass of its own on divided parameters.
        backward = backward + ((1 + _again(runs, execution)) * gathering + scattering)
    handling, handling_back = handling_seconds(problem, runs, execution)
    update, exchange = update_seconds(problem, runs, execution)
    held = memory(problem, runs, execution)
    copy = _copy_seconds(held, execution)
    forward = forward + handling
    # Before the first layer that is trained there is nothing to do.
    backward = runs.has_backward * (backward + handling_back)
    return Estimate(
        **vars(held),
        forward_seconds=forward,
        backward_seconds=backward,
        update_seconds=update,
        exchange_seconds=exchange,
        copy_seconds=copy,
        paced_forward_seconds=forward + _left_open(copy, forward, execution),
        paced_backward_seconds=backward + _left_open(copy, backward, execution),
    )


def _left_open(copy: FloatArray, seconds: FloatArray, execution: Execution) -> FloatArray | float:
    """What a pass that takes so long leaves open of a copy beside it."""
    if execution.activation_link is None:
        return 0.0
    return np.maximum(copy - seconds, 0.0) if copies_overlap(execution) else copy


def _copy_seconds(held: Memory, execution: Execution) -> FloatArray:
    """Seconds of a microbatch's way to the hosts' memory, or back."""
    link, size = execution.activation_link, held.offloaded_bytes
    if link is None:
        return np.zeros_like(size)
    return np.where(size > 0, link.latency + size / link.bandwidth, 0.0)


def _again(runs: Runs, execution: Execution) -> FloatArray | float:
    """How often the backward pass makes the forward pass again."""
    return 1.0 if execution.recompute else runs.again_share


def computing_seconds(
    problem: PlanningProblem, runs: Runs, execution: Execution
) -> tuple[float, float]:
    """What passes take by themselves, without the transfers that their devices see to.

    Args:
        problem: the planning problem.
        runs: the work, of one run.
        execution: where and how.

    Returns:
        Seconds of the forward and the backward pass; 0 of a backward pass that there is none of.
    """
    whole, handling = estimate(problem, runs, execution), handling_seconds(problem, runs, execution)
    there, back = map(float, handling)
    forward, backward = float(whole.forward_seconds), float(whole.backward_seconds)
    return forward - there, backward and backward - back


def handling_seconds(
    problem: PlanningProblem, runs: Runs, execution: Execution
) -> tuple[FloatArray | float, FloatArray | float]:
    """What passes lose to the transfers that their devices see to themselves.

    Args:
        problem: the planning problem.
        runs: the work.
        execution: where and how.

    Returns:
        Seconds of the forward pass, with which values come and go, and of the backward pass, with
        which their cotangents do.
    """
    if not execution.subcluster:
        return 0.0, 0.0
    subcluster = problem.cluster.subcluster(execution.subcluster)
    if not subcluster.transfer_load and not subcluster.message_load:
        return 0.0, 0.0

    def seconds(size: FloatArray, messages: FloatArray) -> FloatArray:
        share = execution.examples * size / execution.mesh_shape[0]
        return subcluster.transfer_load * share + subcluster.message_load * messages

    return (
        seconds(runs.boundary_bytes, runs.messages),
        seconds(runs.returned_bytes, runs.returned_messages),
    )
