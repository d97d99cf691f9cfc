"""What runs of layers hold on one device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetjax.pipeline.schedules.activation_copies import MOST_THERE, PLACES
from hetjax.pipeline.update.alike_leaves import RESULT_BYTES
from hetjax.planner.costs.measured_times import measured_times
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.arrays import FloatArray
from hetjax.planner.work.execution import (
    Execution,
    ParameterBytes,
    offloaded_bytes,
    parameter_bytes,
)
from hetjax.planner.work.layer_runs import Runs

_COPIED = 0.7
"""What XLA for CPUs copies of what an update makes, as a share; measured of AdamW."""


@dataclass(frozen=True, eq=False)
class Memory:
    """What runs of layers hold, on one device; each field an array over the runs.

    Args:
        state_bytes: parameters, gradients and optimizer state.
        activation_bytes: what one microbatch keeps for its backward pass.
        working_bytes: what a task needs while it runs, beside these.
        update_bytes: what the update needs beside the state, after all tasks: optimizer state that
            is on its way from the hosts' memory and back; on CPUs copies of what it makes.
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
        expected = _temporary_bytes(runs, execution) / execution.example_parts
        return replace(held, working_bytes=held.working_bytes - expected + temporary)
    if execution.parameters:
        return _memory(problem, runs, execution)
    # Devices of all subclusters hold the same, but for what compilers differ in.
    way = (execution.mesh_shape, execution.sharding, execution.repeats, problem.optimizer_bytes)
    way = (*way, execution.examples, execution.updates, execution.members)
    way = (*way, execution.host_link is not None, execution.activation_link is not None)
    way = (*way, execution.kind.is_processor)
    if runs.frozen.without_gradient:
        way = (*way, problem.num_microbatches)
    return runs.once(("memory", *way), lambda: _memory(problem, runs, execution))


def _temporary_bytes(runs: Runs, execution: Execution) -> FloatArray:
    """The most that a pass holds beside what goes in and comes out, by its devices' compiler."""
    if _is_in_pieces(execution):
        return runs.temporary_bytes_on_cpu
    _, tensor = execution.mesh_shape
    # A tensor axis divides an attention by heads.
    return runs.untiled_bytes + (runs.temporary_bytes - runs.untiled_bytes) / tensor


def _is_in_pieces(execution: Execution) -> bool:
    """Whether its tasks are compiled for CPUs, piece by piece.

    Programs of several members are cut where they exchange.
    """
    return execution.kind.is_processor and execution.members == 1


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
    working = runs.boundary_bytes + runs.again_bytes + _temporary_bytes(runs, execution)
    if execution.recompute:
        kept, working = runs.input_bytes, working + runs.residual_bytes
    # Without a backward pass, a stage does not wait for others: all that it sends may wait there.
    waiting = (1 - runs.has_backward) * (problem.num_microbatches - 1) * runs.boundary_bytes
    working = (working + waiting) / data
    if execution.sharding == "fully_sharded":
        working = working + of.whole
    # While one group of the state is updated, the next one is on its way.
    away = kept / data if execution.activation_link is not None else np.zeros_like(kept)
    update = np.maximum(2 * group, _copied(of, execution))
    return Memory(of.held, kept / data, working, update, host, offloaded_bytes=away)


def _copied(of: ParameterBytes, execution: Execution) -> FloatArray | float:
    """Bytes that a device's compiler copies while parameters and their state are updated."""
    if not execution.kind.is_processor or execution.host_link is not None:
        return 0.0
    # Gradients are read, and all else is made; a large update makes it in several calls.
    made = of.updated * (1 - of.trained / np.maximum(of.held, 1.0))
    return _COPIED * np.minimum(np.maximum(made, 0.0), 2 * RESULT_BYTES)
