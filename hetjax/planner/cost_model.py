"""The analytic cost model: seconds and bytes of a stage, from its work and its devices' figures.

Every figure is an array over runs of layers, so that all candidates of a search are estimated at
once by the code that also predicts a finished plan. All times are linear in the work: a stage takes
the sum of what its layers take, but for what happens once in it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.mesh.kinds import DeviceKind
from hetjax.mesh.links import Link
from hetjax.pipeline.costs import Cost
from hetjax.pipeline.program import Program, num_bytes
from hetjax.pipeline.stages import ParameterPart
from hetjax.pipeline.update import accumulator_dtype
from hetjax.planner.plan import Spec
from hetjax.planner.problem import PlanningProblem
from hetjax.planner.profile import Way, WayTimes
from hetjax.planner.work import Work, part_shape
from hetjax.sharding.rules import REDUCTION_GROUPS, division, parameter_spec, state_spec

FloatArray = NDArray[np.float64]

PRODUCT_EFFICIENCY = 0.7
"""Share of the peak FLOP/s that matrix products of usual sizes reach."""

TRAFFIC_SHARE = 0.3
"""Share of the unfused memory traffic that is left once XLA has fused what it can."""

TASK_SECONDS = 50e-6
"""What it costs to start one program, whatever it computes."""

USABLE_MEMORY = 0.9
"""Share of a device's memory that a plan may fill; the rest is the runtime's."""


@dataclass(frozen=True, eq=False)
class Runs:
    """The work of many runs of layers, each field an array over the runs.

    Args:
        forward_flops: FLOPs of the forward pass's matrix products.
        forward_traffic: bytes that it reads and writes, were nothing fused.
        backward_flops: FLOPs of the backward pass's matrix products.
        backward_traffic: bytes that it reads and writes, were nothing fused.
        product_bytes: bytes that the forward pass's matrix products write.
        residual_bytes: bytes kept between the two passes.
        input_bytes: bytes of inputs, all that is kept with recomputation.
        boundary_bytes: bytes received and sent.
        parts: parameter parts that occur in any run.
        shapes: their shapes.
        used: for each part, the layers that use it, as 1 among 0: ``[len(parts), L]``; None where
            there is one run, which holds all parts.
        layers: where there is one run: its first layer, and the one after its last; None for layers
            that the planning problem does not have.
    """

    forward_flops: FloatArray
    forward_traffic: FloatArray
    backward_flops: FloatArray
    backward_traffic: FloatArray
    product_bytes: FloatArray
    residual_bytes: FloatArray
    input_bytes: FloatArray
    boundary_bytes: FloatArray
    parts: tuple[ParameterPart, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    used: FloatArray | None = None
    layers: tuple[int, int] | None = None

    def held(self, sizes: FloatArray) -> FloatArray:
        """What each run holds of its parts together.

        Args:
            sizes: of each part.

        Returns:
            The sum over the parts that a layer of the run uses.
        """
        if self.used is None:
            return np.asarray(sizes.sum())
        alone = self.used.sum(axis=1) == 1
        total = _sums(sizes[alone] @ self.used[alone])
        for size, layers in zip(sizes[~alone], self.used[~alone], strict=True):
            total = total + size * (_sums(layers) > 0)
        return total

    def of(self, layers: tuple[int, int]) -> Runs:
        """One of the runs, in arrays without dimensions.

        Args:
            layers: its first layer, and the one after its last.

        Returns:
            The run, with the parts that it holds.
        """
        first, end = layers
        assert self.used is not None, "this is one run already"
        places = np.flatnonzero(self.used[:, first:end].any(axis=1))
        sizes = {
            name: value[layers]
            for name, value in vars(self).items()
            if name not in ("parts", "shapes", "used", "layers")
        }
        parts = tuple(self.parts[place] for place in places)
        shapes = tuple(self.shapes[place] for place in places)
        return Runs(**sizes, parts=parts, shapes=shapes, layers=layers)

    def repeating_forward(self) -> Runs:
        """The same runs with a backward pass that computes the forward pass again."""
        return replace(
            self,
            backward_flops=self.backward_flops + self.forward_flops,
            backward_traffic=self.backward_traffic + self.forward_traffic,
        )


def all_runs(program: Program, works: Sequence[Work]) -> Runs:
    """Every contiguous run of layers.

    Args:
        program: the traced loss function.
        works: the work of each of L layers.

    Returns:
        Arrays ``[L + 1, L + 1]``: the entry ``[i, j]`` is for layers i to j - 1. Entries with
        j <= i have no meaning.
    """
    received = np.array([*(work.received_bytes for work in works), 0.0])
    # A run keeps the inputs of its first layer; the batch leaves that later ones read are small.
    first_inputs = np.array([*(work.input_bytes for work in works), 0.0])
    parts = tuple(dict.fromkeys(part for work in works for part in work.parts))
    places = {part: place for place, part in enumerate(parts)}
    used = np.zeros((len(parts), len(works)))
    for layer, work in enumerate(works):
        used[[places[part] for part in work.parts], layer] = 1.0
    return Runs(
        forward_flops=_sums([work.forward.matmul_flops for work in works]),
        forward_traffic=_sums([work.forward.bytes for work in works]),
        backward_flops=_sums([work.backward.matmul_flops for work in works]),
        backward_traffic=_sums([work.backward.bytes for work in works]),
        product_bytes=_sums([work.product_bytes for work in works]),
        residual_bytes=_sums([work.residual_bytes for work in works]),
        input_bytes=np.broadcast_to(first_inputs[:, None], (len(works) + 1,) * 2),
        boundary_bytes=received[:, None] + received[None, :],
        parts=parts,
        shapes=tuple(part_shape(program, part) for part in parts),
        used=used,
    )


def one_run(
    program: Program, work: Work, sent_bytes: int, layers: tuple[int, int] | None = None
) -> Runs:
    """One run alone, in arrays without dimensions.

    Args:
        program: the traced loss function.
        work: its work.
        sent_bytes: bytes that it sends to the run after.
        layers: its layers in the planning problem, where it begins and ends with such.
    """
    return Runs(
        forward_flops=np.array(work.forward.matmul_flops),
        forward_traffic=np.array(work.forward.bytes),
        backward_flops=np.array(work.backward.matmul_flops),
        backward_traffic=np.array(work.backward.bytes),
        product_bytes=np.array(work.product_bytes),
        residual_bytes=np.array(float(work.residual_bytes)),
        input_bytes=np.array(float(work.input_bytes)),
        boundary_bytes=np.array(float(work.received_bytes + sent_bytes)),
        parts=work.parts,
        shapes=tuple(part_shape(program, part) for part in work.parts),
        layers=layers,
    )


@dataclass(frozen=True)
class Execution:
    """How a stage runs on its devices.

    Args:
        kind: the kind of the devices.
        link: the link that carries the submesh's own collectives.
        mesh_shape: sizes of the data and the tensor axis.
        sharding: the sharding rule.
        recompute: whether forward steps run again in the backward pass.
        parameters: specifications that override the rule, by parameter path.
        subcluster: the name of the subcluster of the devices.
        shape: nodes of it, and devices in each.
    """

    kind: DeviceKind
    link: Link
    mesh_shape: tuple[int, int]
    sharding: str = "data"
    recompute: bool = False
    parameters: Mapping[str, Spec] = field(default_factory=dict)
    subcluster: str = ""
    shape: tuple[int, int] = (1, 1)

    @property
    def way(self) -> Way:
        """What measurements of its passes are kept under."""
        # Where only the optimizer's state is divided, passes are as where nothing is.
        sharding = "data" if self.sharding == "state_sharded" else self.sharding
        return Way(self.subcluster, self.shape, self.mesh_shape, sharding)


@dataclass(frozen=True, eq=False)
class Estimate:
    """What runs of layers take, on one device; each field an array over the runs.

    Args:
        forward_seconds: the forward pass of one microbatch.
        backward_seconds: its backward pass, recomputation included.
        update_seconds: the optimizer's update.
        exchange_seconds: of that, the exchange of gradients and parameters over the data axis.
        state_bytes: parameters, gradients and optimizer state.
        activation_bytes: what one microbatch keeps for its backward pass.
        working_bytes: what a task needs while it runs, beside these.
    """

    forward_seconds: FloatArray
    backward_seconds: FloatArray
    update_seconds: FloatArray
    exchange_seconds: FloatArray
    state_bytes: FloatArray
    activation_bytes: FloatArray
    working_bytes: FloatArray

    def memory_bytes(self, live: int) -> FloatArray:
        """Bytes on one device while ``live`` microbatches wait for their backward pass."""
        return self.state_bytes + self.working_bytes + live * self.activation_bytes

    def live_limit(self, memory_bytes: float, most: int) -> NDArray[np.int64]:
        """How many live microbatches fit, from 0 to ``most``."""
        room = memory_bytes - self.state_bytes - self.working_bytes
        count = np.full(room.shape, float(most))
        np.divide(room, self.activation_bytes, out=count, where=self.activation_bytes > 0)
        return np.where(room < 0, 0, np.clip(np.floor(count), 0, most)).astype(np.int64)


def estimate(problem: PlanningProblem, runs: Runs, execution: Execution) -> Estimate:
    """Estimate runs of layers.

    Computation is a roofline, kernel by kernel: matrix products take their FLOPs over the peak that
    they reach, all else the bytes that fusion leaves over the memory's bandwidth; both are divided
    among the submesh's devices. To them come the collectives, as rings: over the data axis a
    reduction of gradients, once a step, with the update (under ``state_sharded`` a scatter of them
    and a gather of new parameters; under ``fully_sharded`` parameters are gathered twice and
    gradients scattered, each microbatch); and gathers of what matrix products write over the tensor
    axis, once forward and twice backward.

    Args:
        problem: the planning problem.
        runs: the work; where `execution` recomputes, the backward pass has the repetition in it.
        execution: where and how.

    Returns:
        The estimate.
    """
    data, _ = execution.mesh_shape
    fully_sharded = execution.sharding == "fully_sharded"
    gathered, state, updated = _parameter_bytes(problem, runs, execution)
    parameter_pass, product_pass = _ring_passes(execution, gathered, runs.product_bytes)
    forward, backward = _computation(problem, runs, execution)
    forward = forward + parameter_pass * fully_sharded + product_pass
    backward = backward + (3 if execution.recompute else 2) * product_pass
    backward = backward + 2 * parameter_pass * fully_sharded
    temporary = 0.0
    times = measured_times(problem, runs, execution)
    if times is not None:
        forward = times.forward.of(runs.layers)
        again = forward if execution.recompute else 0.0
        backward = times.backward.of(runs.layers) + again
        temporary = times.temporary_bytes.of(runs.layers)
    exchange = 2 * parameter_pass * (not fully_sharded)

    kept = runs.input_bytes if execution.recompute else runs.residual_bytes
    repeated = runs.residual_bytes if execution.recompute else 0.0
    return Estimate(
        forward_seconds=forward,
        backward_seconds=backward,
        update_seconds=TASK_SECONDS + updated / update_rate(problem, execution) + exchange,
        exchange_seconds=exchange,
        state_bytes=state,
        activation_bytes=kept / data,
        working_bytes=(runs.boundary_bytes + repeated) / data
        + gathered * fully_sharded
        + temporary,
    )


def measured_times(problem: PlanningProblem, runs: Runs, execution: Execution) -> WayTimes | None:
    """What was measured of layers that are run so; None where nothing was.

    Args:
        problem: the planning problem, with its profile.
        runs: the work.
        execution: where and how.
    """
    known_layers = runs.used is not None or runs.layers is not None
    if execution.parameters or not known_layers:
        return None
    return problem.profile.ways.get(execution.way)


def update_rate(problem: PlanningProblem, execution: Execution) -> float:
    """Bytes/s of parameters, gradients and optimizer state that a device's update gets through."""
    # Where it was not measured: each is read and written.
    assumed = execution.kind.memory_bandwidth / 2
    return problem.profile.updates.get(execution.subcluster, assumed)


@dataclass(frozen=True)
class Halves:
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
) -> Halves:
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
    data, _ = execution.mesh_shape
    gathered, _, _ = _parameter_bytes(problem, runs, execution)
    passes = _ring_passes(execution, gathered, np.array(work.product_bytes))
    parameter_pass, product_pass = map(float, passes)

    slower, slower_backward = problem.profile.slowness(execution.subcluster, execution.shape)
    scattered = 2 * parameter_pass * (execution.sharding == "fully_sharded")

    def seconds(cost: Cost) -> float:
        return float(_roofline(problem, execution, cost.matmul_flops, cost.bytes))

    again = slower * seconds(work.recompute) + product_pass - TASK_SECONDS
    times = measured_times(problem, runs, execution)
    if times is not None:
        again = float(times.forward.of(runs.layers))
        expected = seconds(_difference(work.backward, work.recompute)) + 2 * product_pass
        measured = float(times.backward.of(runs.layers))
        slower_backward = measured / (expected + scattered)
        product_pass, scattered = slower_backward * product_pass, slower_backward * scattered
    first = slower_backward * seconds(work.split.input_gradient)
    second = slower_backward * seconds(work.split.weight_gradient)
    kept = work.residual_bytes / data if execution.recompute else 0.0
    return Halves(
        recompute_seconds=again if execution.recompute else 0.0,
        input_gradient_seconds=first + product_pass,
        weight_gradient_seconds=second + product_pass + scattered,
        recomputed_bytes=int(kept),
        deferred_bytes=int(work.split.deferred_bytes / data),
    )


def _difference(whole: Cost, part: Cost) -> Cost:
    return Cost(
        whole.flops - part.flops, whole.matmul_flops - part.matmul_flops, whole.bytes - part.bytes
    )


def ring_seconds(link: Link, size: FloatArray, devices: int) -> FloatArray:
    """One pass of a ring, an all-gather or a reduce-scatter; an all-reduce is two.

    Args:
        link: the link between neighbours.
        size: bytes of the whole array.
        devices: how many devices form the ring; with one there is nothing to do.

    Returns:
        Seconds: n - 1 messages of size / n bytes, one after another.
    """
    return (devices - 1) * (link.latency + size / devices / link.bandwidth)


def transfer_seconds(link: Link, size: float) -> float:
    """Seconds to move one microbatch's values between stages; nothing to move takes none."""
    return link.seconds(size) if size else 0.0


def collective_link(cluster: Cluster, submesh: SubMesh) -> Link:
    """The link that carries a submesh's own collectives."""
    return cluster.link_between(submesh, submesh)


def _computation(
    problem: PlanningProblem, runs: Runs, execution: Execution
) -> tuple[FloatArray, FloatArray]:
    """Seconds of the passes' computation by their work, as measurements nearby correct it."""
    forward = _roofline(problem, execution, runs.forward_flops, runs.forward_traffic)
    backward = _roofline(problem, execution, runs.backward_flops, runs.backward_traffic)
    slower = problem.profile.slowness(execution.subcluster, execution.shape)
    return forward * slower[0], backward * slower[1]


def _roofline(
    problem: PlanningProblem,
    execution: Execution,
    flops: FloatArray | float,
    traffic: FloatArray | float,
) -> FloatArray:
    """Seconds of one program's computation, divided among the submesh's devices."""
    kind, devices = execution.kind, math.prod(execution.mesh_shape)
    speed = devices * PRODUCT_EFFICIENCY * kind.flops(problem.dtype)
    bandwidth = devices * kind.memory_bandwidth / TRAFFIC_SHARE
    return np.asarray(TASK_SECONDS + flops / speed + traffic / bandwidth)


def _ring_passes(
    execution: Execution, gathered: FloatArray, product_bytes: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Seconds of a pass of the parameters over the data axis, and of the products over tensor's."""
    data, tensor = execution.mesh_shape
    return (
        ring_seconds(execution.link, gathered, data),
        ring_seconds(execution.link, product_bytes / data, tensor),
    )


def _parameter_bytes(
    problem: PlanningProblem, runs: Runs, execution: Execution
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Bytes on one device.

    Of whole parameters; of parameters, gradients and optimizer state as held; of the same as far as
    the device updates them.
    """
    program, mesh_shape = problem.program, execution.mesh_shape
    whole, held, updated = (np.zeros(len(runs.parts)) for _ in range(3))
    # The blocks of a model have parameters of few shapes.
    known: dict[Hashable, tuple[float, float, float]] = {}
    for place, (part, shape) in enumerate(zip(runs.parts, runs.shapes, strict=True)):
        override = execution.parameters.get(program.parameter_names[part.leaf])
        key = (shape.shape, shape.dtype, override)
        if key not in known:
            spec = _spec_of(shape.shape, override, execution)
            known[key] = (
                num_bytes(shape) / division(spec, (1, mesh_shape[1])),
                *state_bytes(shape, spec, execution.sharding, mesh_shape, problem.optimizer_bytes),
            )
        whole[place], held[place], updated[place] = known[key]
    return runs.held(whole), runs.held(held), runs.held(updated)


def state_bytes(
    shape: jax.ShapeDtypeStruct,
    spec: PartitionSpec,
    sharding: str,
    mesh_shape: tuple[int, int],
    optimizer_bytes: float,
) -> tuple[float, float]:
    """Bytes of a parameter, its gradient and its optimizer state on one device.

    Args:
        shape: the parameter's shape and dtype.
        spec: how it is divided.
        sharding: the stage's sharding rule.
        mesh_shape: sizes of the data and the tensor axis.
        optimizer_bytes: bytes of optimizer state for each element.

    Returns:
        What is held, at the moment of the most; and that of it which the device updates.
    """
    size = num_bytes(shape)
    elements = size / shape.dtype.itemsize
    summed = elements * accumulator_dtype(shape.dtype).itemsize
    state = elements * optimizer_bytes
    of_state = state_spec(sharding, spec, shape.shape, mesh_shape)
    parts, state_parts = division(spec, mesh_shape), division(of_state, mesh_shape)
    # Whole sums of gradients and the divided ones of a group are there at once.
    scattered = summed / state_parts / REDUCTION_GROUPS if state_parts != parts else 0.0
    held = (size + summed) / parts + state / state_parts + scattered
    return held, (size + summed + state) / state_parts


def state_division(program: Program, part: ParameterPart, execution: Execution) -> int:
    """In how many parts a stage's devices divide the optimizer's state of a parameter part."""
    override = execution.parameters.get(program.parameter_names[part.leaf])
    shape = part_shape(program, part).shape
    spec = _spec_of(shape, override, execution)
    of_state = state_spec(execution.sharding, spec, shape, execution.mesh_shape)
    return division(of_state, execution.mesh_shape)


def _spec_of(shape: tuple[int, ...], override: Spec | None, execution: Execution) -> PartitionSpec:
    """How a stage divides a parameter part of a shape."""
    if override is not None:
        return PartitionSpec(*override)
    return parameter_spec(execution.sharding, shape, execution.mesh_shape)


def _sums(values: Sequence[float] | FloatArray) -> FloatArray:
    """The sum of each contiguous run ``[i, j)``."""
    before = np.concatenate([[0.0], np.cumsum(values)])
    return before[None, :] - before[:, None]
