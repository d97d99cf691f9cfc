"""The analytic cost model: seconds and bytes of a stage, from its work and its devices' figures.

Every figure is an array over runs of layers, so that all candidates of a search are estimated at
once by the code that also predicts a finished plan. All times are linear in the work: a stage takes
the sum of what its layers take, but for what happens once in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetjax.pipeline.program.costs import Cost
from hetjax.pipeline.schedules.activation_copies import MOST_THERE, PLACES
from hetjax.pipeline.timeline.streamed_update import GroupTimes
from hetjax.pipeline.update.state_groups import state_groups
from hetjax.planner.intra_op.tensor_axis import TensorCosts
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.arrays import FloatArray
from hetjax.planner.work.execution import (
    Execution,
    offloaded_bytes,
    parameter_bytes,
    part_state_bytes,
)
from hetjax.planner.work.layer_runs import Runs
from hetjax.planner.work.profile import WayTimes
from hetjax.planner.work.rates import TASK_SECONDS, TRAFFIC_SHARE, ring_seconds
from hetjax.planner.work.stage_work import Work


@dataclass(frozen=True, eq=False)
class Memory:
    """What runs of layers hold, on one device; each field an array over the runs.

    Args:
        state_bytes: parameters, gradients and optimizer state.
        activation_bytes: what one microbatch keeps for its backward pass.
        working_bytes: what a task needs while it runs, beside these.
        update_bytes: what the update needs beside the state, after all tasks: optimizer state that
            is on its way from the hosts' memory and back.
        host_bytes: optimizer state in the hosts' memory.
        offloaded_bytes: of `activation_bytes`, what waits in the hosts' memory.
    """

    state_bytes: FloatArray
    activation_bytes: FloatArray
    working_bytes: FloatArray
    update_bytes: FloatArray
    host_bytes: FloatArray
    offloaded_bytes: FloatArray

    def memory_bytes(self, live: int) -> FloatArray:
        """Bytes on one device while ``live`` microbatches wait for their backward pass."""
        away = max(0, live - PLACES) * self.offloaded_bytes
        held = self.working_bytes + live * self.activation_bytes - away
        return self.state_bytes + np.maximum(held, self.update_bytes)

    def live_limit(
        self, memory_bytes: float, most: int, host_bytes: float = 0.0
    ) -> NDArray[np.int64]:
        """How many live microbatches fit, from 0 to ``most``, on a device and its host."""
        fits = (self.state_bytes + self.update_bytes <= memory_bytes) & (
            self.host_bytes <= host_bytes
        )
        # Of many runs, few hold so little that there is a question how many.
        places = np.nonzero(fits) if np.ndim(fits) else fits
        activation, offloaded = self.activation_bytes[places], self.offloaded_bytes[places]
        room = memory_bytes - self.state_bytes[places] - self.working_bytes[places]
        with np.errstate(divide="ignore", invalid="ignore"):
            count = room / np.maximum(activation, 0.0)
            # With a schedule of three microbatches, all of them are there at once.
            if most > MOST_THERE and np.any(offloaded):
                # Where two of those that travel are on the device.
                there = (room - PLACES * offloaded) / np.maximum(activation - offloaded, 0.0)
                away = (host_bytes - self.host_bytes[places]) / offloaded
                there = np.where(room >= PLACES * activation, np.fmin(there, away), 0.0)
                np.fmax(count, there, out=count)
        # What keeps nothing fits as often as is asked, also where it leaves no room.
        np.fmax(np.fmin(count, most, out=count), 0, out=count)
        limits = np.zeros(np.shape(fits), dtype=np.int64)
        limits[places] = count
        return limits


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


def memory(problem: PlanningProblem, runs: Runs, execution: Execution) -> Memory:
    """Estimate what runs of layers hold, without what they take.

    Args:
        problem: the planning problem.
        runs: the work; where `execution` recomputes, the backward pass has the repetition in it.
        execution: where and how.

    Returns:
        The estimate.
    """
    times = measured_times(problem, runs, execution)
    if times is not None:
        held = _memory(problem, runs, execution)
        temporary = execution.examples * runs.in_form(times.temporary_bytes.of(runs.layers))
        expected = runs.temporary_bytes / execution.example_parts
        return replace(held, working_bytes=held.working_bytes - expected + temporary)
    if execution.parameters:
        return _memory(problem, runs, execution)
    # Devices of all subclusters hold the same.
    way = (execution.mesh_shape, execution.sharding, execution.repeats, problem.optimizer_bytes)
    way = (*way, execution.examples, execution.updates, execution.members)
    way = (*way, execution.host_link is not None, execution.activation_link is not None)
    if runs.frozen.without_gradient:
        way = (*way, problem.num_microbatches)
    return runs.once(("memory", *way), lambda: _memory(problem, runs, execution))


def _memory(problem: PlanningProblem, runs: Runs, execution: Execution) -> Memory:
    """What runs hold, but for what was measured."""
    data = execution.example_parts
    on_device = problem.optimizer_bytes if execution.host_link is None else 0.0
    of = parameter_bytes(problem.program, on_device, runs, execution)
    host = group = np.broadcast_to(0.0, np.shape(of.held))
    if execution.host_link is not None:
        way = (problem.program, problem.optimizer_bytes, runs, execution)
        host, group = offloaded_bytes(*way)
    kept = runs.residual_bytes
    working = runs.boundary_bytes + runs.again_bytes + runs.temporary_bytes
    if execution.recompute:
        kept, working = runs.input_bytes, working + runs.residual_bytes
    # Without a backward pass, a stage does not wait for others: all that it sends may wait there.
    waiting = (1 - runs.has_backward) * (problem.num_microbatches - 1) * runs.boundary_bytes
    working = (working + waiting) / data
    if execution.sharding == "fully_sharded":
        working = working + of.whole
    # While one group of the state is updated, the next one is on its way.
    away = kept / data if execution.activation_link is not None else np.zeros_like(kept)
    return Memory(of.held, kept / data, working, 2 * group, host, offloaded_bytes=away)


def estimate(problem: PlanningProblem, runs: Runs, execution: Execution) -> Estimate:
    """Estimate runs of layers.

    Computation is a roofline, kernel by kernel: matrix products take their FLOPs over the peak that
    they reach, all else the bytes that fusion leaves over the memory's bandwidth; both are divided
    among the submesh's devices. To them come the collectives, as rings: over the data axis a
    reduction of gradients, once a step, with the update (under ``state_sharded`` a scatter of them
    and a gather of new parameters; under ``fully_sharded`` parameters are gathered twice and
    gradients scattered, each microbatch), and in each pass one of what it sums over the examples
    and goes on from, as the statistics of a batch normalisation. Over the tensor axis they are
    those that the integer program finds for the model's modules, a third of them forward, with what
    every device computes for itself; where it tells nothing, gathers of what matrix products write.
    Devices that see to transfers themselves, as processors do, lose the time that these take.

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
        forward = _share_of(runs.in_form(times.forward.of(runs.layers)), execution)
        again = forward * _again(runs, execution)
        backward = _share_of(runs.in_form(times.backward.of(runs.layers)), execution) + again
    else:
        forward, backward = _computation(problem, runs, execution)
        gathering, scattering = (
            _parameter_passes(problem, runs, execution) if fully_sharded else (0.0, 0.0)
        )
        forward = forward + gathering
        if execution.mesh_shape[0] > 1:
            told = _sums_of_examples(runs, execution)
            forward, backward = forward + told[0], backward + told[1]
        if execution.mesh_shape[1] > 1:
            product_pass = _tensor_pass(problem, runs, execution)
            forward = forward + product_pass
            passes = _backward_passes(runs) + _again(runs, execution)
            backward = backward + passes * product_pass
        backward = backward + (gathering + scattering)
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


def _backward_passes(runs: Runs) -> FloatArray:
    """How often the backward pass goes through the forward pass's products: twice, or less."""

    def found() -> FloatArray:
        written = np.maximum(runs.product_bytes, 1.0)
        passes = runs.backward_product_bytes / written
        return np.where(runs.product_bytes > 0, passes, 2.0 * runs.has_backward)

    return runs.once(("backward passes",), found)


def _sums_of_examples(runs: Runs, execution: Execution) -> tuple[FloatArray, FloatArray]:
    """Seconds in which the data axis sums over the examples what passes go on from."""
    devices, link = execution.mesh_shape[0], execution.link
    waiting = 2 * (devices - 1) * link.latency
    a_byte = 2 * (devices - 1) / devices / link.bandwidth
    return (
        runs.forward_moves * waiting + runs.forward_moved * a_byte,
        runs.backward_moves * waiting + runs.backward_moved * a_byte,
    )


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
        exchange = 2 * _parameter_passes(problem, runs, execution)[1] * once
        computed = TASK_SECONDS + of.updated / rate
        if execution.host_link is not None:
            computed = _streamed_seconds(problem, runs, execution, of.updated / rate)
        return computed + exchange, exchange

    rate = update_rate(problem, execution)
    if execution.parameters:
        return found()
    # Recomputation changes nothing of it.
    way = (execution.mesh_shape, execution.sharding, execution.link, problem.optimizer_bytes)
    way = (*way, execution.updates, execution.members, execution.host_link)
    return runs.once(("update", rate, *way), found)


def _parameter_passes(
    problem: PlanningProblem, runs: Runs, execution: Execution
) -> tuple[FloatArray, FloatArray]:
    """Seconds of one pass over the data axis of all parameters, and of those with gradients."""
    of = parameter_bytes(problem.program, problem.optimizer_bytes, runs, execution)
    devices = execution.mesh_shape[0]
    return (
        ring_seconds(execution.link, of.whole, devices),
        ring_seconds(execution.link, of.trained, devices),
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
    a_byte = updated / float(update_rate(problem, execution)) / max(sum(sizes), 1.0)
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
    return execution.kind.platform != "cpu"


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


def measured_times(problem: PlanningProblem, runs: Runs, execution: Execution) -> WayTimes | None:
    """What was measured of layers that are run so; None where nothing was.

    Args:
        problem: the planning problem, with its profile.
        runs: the work.
        execution: where and how.
    """
    ways = problem.profile.ways
    if not ways or execution.parameters or not runs.known_layers:
        return None
    return ways.get(execution.way)


def _share_of(seconds: FloatArray, execution: Execution) -> FloatArray:
    """Of what passes were measured to take, what a member's share of the examples does."""
    if execution.examples == 1:
        return seconds
    return TASK_SECONDS + execution.examples * (seconds - TASK_SECONDS)


def update_rate(problem: PlanningProblem, execution: Execution) -> float:
    """Bytes/s of parameters, gradients and optimizer state that a device's update gets through."""
    # Where it was not measured: each is read and written.
    assumed = execution.kind.memory_bandwidth / 2
    return problem.profile.updates.get(execution.subcluster, assumed)


@dataclass(frozen=True)
class HalfTimes:
    """What the parts of a stage's backward pass take, on one device.

    Args:
        recompute_seconds: the recomputation; 0 where there is none.
        input_gradient_seconds: the first half.
        weight_gradient_seconds: the second half.
        recomputed_bytes: what a recomputation leaves for the backward pass.
        deferred_bytes: what the first half leaves for the second.
    """

    recompute_seconds: float
    input_gradient_seconds: float
    weight_gradient_seconds: float
    recomputed_bytes: int
    deferred_bytes: int


def estimate_halves(
    problem: PlanningProblem, work: Work, runs: Runs, execution: Execution
) -> HalfTimes:
    """Estimate a backward pass in parts, by the rules of `estimate`.

    The gathers of matrix products over the tensor axis are divided evenly; what ``fully_sharded``
    gathers and scatters is the second half's. Where the whole pass was measured, the halves are as
    much longer or shorter as it is.

    Args:
        problem: the planning problem.
        work: the work, with that of the halves.
        runs: the same as `one_run` has it.
        execution: where and how.

    Returns:
        The estimate.
    """
    assert work.split is not None, "the work of the halves was not measured"
    if not work.backward_passes:
        return HalfTimes(0.0, 0.0, 0.0, 0, 0)
    data = execution.example_parts
    gathering, scattering = map(float, _parameter_passes(problem, runs, execution))
    product_pass = float(_tensor_pass(problem, runs, execution))

    slower, slower_backward = problem.profile.slowness(execution.subcluster, execution.shape)
    passes = float(_backward_passes(runs))
    scattered = (gathering + scattering) * (execution.sharding == "fully_sharded")

    def seconds(cost: Cost) -> float:
        return float(_roofline(problem, execution, cost.matmul_flops, cost.bytes))

    handling = float(handling_seconds(problem, runs, execution)[1])
    again = slower * seconds(work.recompute) + product_pass - TASK_SECONDS
    repeated, summing = map(float, _sums_of_examples(runs, execution))
    again, summing = again + repeated, summing - repeated * execution.recompute
    times = measured_times(problem, runs, execution)
    if times is not None:
        again = float(_share_of(times.forward.of(runs.layers), execution))
        expected = seconds(_difference(work.backward, work.recompute)) + passes * product_pass
        measured = float(_share_of(times.backward.of(runs.layers), execution))
        slower_backward = measured / (expected + scattered)
        product_pass, scattered = slower_backward * product_pass, slower_backward * scattered
        summing = 0.0
    first = slower_backward * seconds(work.split.input_gradient)
    second = slower_backward * seconds(work.split.weight_gradient)
    kept = work.residual_bytes / data if execution.recompute else 0.0
    of_inputs = min(passes, 1.0) + float(runs.again_share)
    of_weights = max(passes - 1.0, 0.0)
    return HalfTimes(
        recompute_seconds=again if execution.recompute else 0.0,
        input_gradient_seconds=first + of_inputs * product_pass + summing + handling,
        weight_gradient_seconds=second + of_weights * product_pass + scattered,
        recomputed_bytes=int(kept),
        deferred_bytes=int(work.split.deferred_bytes / data),
    )


def _difference(whole: Cost, part: Cost) -> Cost:
    return Cost(
        whole.flops - part.flops, whole.matmul_flops - part.matmul_flops, whole.bytes - part.bytes
    )


def _computation(
    problem: PlanningProblem, runs: Runs, execution: Execution
) -> tuple[FloatArray, FloatArray]:
    """Seconds of the passes' computation by their work, as measurements nearby correct it."""
    slower = problem.profile.slowness(execution.subcluster, execution.shape)

    def passes() -> tuple[FloatArray, FloatArray]:
        forward = _roofline(problem, execution, runs.forward_flops, runs.forward_traffic)
        backward = _roofline(problem, execution, runs.backward_flops, runs.backward_traffic)
        return forward * slower[0], backward * slower[1]

    # However many devices share it, it is divided evenly among them.
    devices = math.prod(execution.mesh_shape)
    key = (execution.kind, problem.dtype, devices, execution.examples, slower)
    return runs.once(("computation", execution.repeats, *key), passes)


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


def _roofline(
    problem: PlanningProblem,
    execution: Execution,
    flops: FloatArray | float,
    traffic: FloatArray | float,
) -> FloatArray:
    """Seconds of one program's computation, divided among the submesh's devices."""
    kind, devices = execution.kind, math.prod(execution.mesh_shape)
    speed = devices * kind.product_flops(problem.dtype)
    bandwidth = devices * kind.memory_bandwidth / TRAFFIC_SHARE
    share = execution.examples
    return np.asarray(TASK_SECONDS + share * flops / speed + share * traffic / bandwidth)


def _tensor_pass(problem: PlanningProblem, runs: Runs, execution: Execution) -> FloatArray:
    """Seconds of a third of what a tensor axis costs; there is one forward and two backward."""
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
