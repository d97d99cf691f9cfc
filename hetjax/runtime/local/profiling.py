"""Measuring runs of layers on this process's devices: the programs that training would run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from hetjax.pipeline.program.loss import accumulator_dtype
from hetjax.pipeline.program.traced_program import Program, num_bytes
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.program.work_classes import steps_work
from hetjax.pipeline.stages.backward import Reads, StagePrograms, differentiate
from hetjax.pipeline.stages.cutting import Stage, crossing_values, cut
from hetjax.pipeline.update.traced_update import settled_init
from hetjax.pipeline.update.unchanged_leaves import with_frozen_leaves
from hetjax.pipeline.update.whole_update import update_function
from hetjax.planner.profiler.measurement import Measured, Measurement, Request, typical
from hetjax.planner.work.run_structure import part_shape
from hetjax.runtime.compilation.late_sums import typed_mesh
from hetjax.runtime.compilation.partitioners import MeshPartitioner
from hetjax.runtime.compilation.task_programs import TaskPrograms
from hetjax.runtime.compilation.yardstick import Yardstick
from hetjax.runtime.instructions.stage_annotator import partial_sums
from hetjax.sharding.annotation.rules import DATA, MESH_AXES, example_spec, parameter_spec
from hetjax.sharding.annotation.subgroup import axes_of

_REPETITIONS = (3, 14)
"""A pass is repeated at least and at most so often."""

_SECONDS = 0.2
"""Between these, until it has run for so long."""

_WINDOW = 0.1
"""What is shorter is repeated in a row: a device may be fast for a moment and pay for it later,
as a GPU that grows hot does, or a container with a quota."""

_DRAWN = 2**16 - 1
"""How many numbers are drawn to fill arrays; odd, so that rows are unlike."""


class StageMeasurer:
    """Measures runs of a program's layers.

    Args:
        measured: the program.
        devices: the devices of this process that may be used; all where none are given.
    """

    def __init__(self, measured: Measured, devices: Sequence[Any] | None = None):
        self._measured = measured
        self._devices = list(devices or jax.local_devices())
        program = trace(
            measured.loss_function,
            measured.parameters,
            measured.batch,
            divides_sequences=measured.divides_sequences,
        )
        self._program = with_frozen_leaves(program, measured.optimizer, measured.parameters)
        self._yardstick = Yardstick(self._devices[0])
        self._compiled: dict[Request, tuple[TaskPrograms, dict[str, Any]]] = {}

    def measure(self, request: Request) -> Measurement:
        """Time a run's programs, which are compiled when they are first asked for.

        The optimizer's update is only measured then.

        Args:
            request: which run, and how devices share it.

        Returns:
            The measurement.
        """
        first = request not in self._compiled
        if first:
            self._compiled[request] = self._compile(request)
        tasks, compiled = self._compiled[request]
        # Before the first layer that is trained there is no backward pass.
        backward_pass = compiled.get("backward")
        forward, backward, moments = _time_passes(
            tasks, compiled["forward"], backward_pass, self._yardstick
        )
        forward_seconds, one = typical(forward)
        backward_seconds, other = typical(backward) if backward_pass else (0.0, 0.0)
        updates = request.updates and first
        return Measurement(
            forward_seconds=forward_seconds,
            backward_seconds=backward_seconds,
            update_bytes_per_second=(
                _update_rate(tasks, *self._updated(request)) if updates else 0.0
            ),
            forward_bytes=_temporary_bytes(compiled["forward"]),
            backward_bytes=_temporary_bytes(backward_pass),
            repetitions=len(forward),
            spread=max(one, other),
            yardstick_seconds=typical(moments)[0],
            forward_work=steps_work(tasks.shapes.forward_steps),
            backward_work=steps_work(tasks.shapes.backward_steps),
        )

    def _updated(self, request: Request) -> tuple[Sequence[int], optax.GradientTransformation]:
        """The places of a run's parameter parts that are updated, and the optimizer of these."""
        optimizer, frozen = self._measured.optimizer, self._program.frozen.without_update
        parts = _stage_of(self._program, self._measured.layers, request).parameters
        if not frozen:
            return range(len(parts)), optimizer
        chosen = {part.leaf: place for place, part in enumerate(parts) if part.leaf not in frozen}
        leaves = [self._program.leaves.places[each][0] for each in chosen]
        return tuple(chosen.values()), _of_some(optimizer, self._measured.parameters, leaves)

    def _compile(self, request: Request) -> tuple[TaskPrograms, dict[str, Any]]:
        programs = _differentiated(self._program, self._measured.layers, request)
        count = request.mesh_shape[0] * request.mesh_shape[1]
        grid = np.array(self._devices[:count]).reshape(request.mesh_shape)
        tasks = _tasks(programs, request, self._measured.microbatch_size, Mesh(grid, MESH_AXES))
        return tasks, dict(tasks.programs(("forward", "backward")))


def _stage_of(program: Program, layers: Sequence[int], request: Request) -> Stage:
    """A run of layers as a stage."""
    first, end = (layers[layer] for layer in request.layers)
    boundaries = sorted({0, first, end, program.num_positions})
    return cut(program, boundaries)[boundaries.index(first)]


def _differentiated(program: Program, layers: Sequence[int], request: Request) -> StagePrograms:
    """The programs of a run of layers."""
    first, end = (layers[layer] for layer in request.layers)
    stage = _stage_of(program, layers, request)
    parameters = [part_shape(program, part) for part in stage.parameters]
    batch = [program.avals[program.batch[leaf]] for leaf in stage.batch]
    received = list(crossing_values(program, first)) if first else []
    return differentiate(
        stage,
        parameters,
        batch,
        received,
        is_last=end == program.num_positions,
        cotangents_in=request.cotangents,
    )


def _tasks(
    programs: StagePrograms, request: Request, microbatch_size: int, mesh: Mesh
) -> TaskPrograms:
    """The compiler of a run's programs, by the shardings that a stage of a plan would have."""
    shape = request.mesh_shape

    def examples(shapes: Sequence[jax.ShapeDtypeStruct]) -> list[NamedSharding]:
        specs = [example_spec(each.shape, microbatch_size, shape) for each in shapes]
        return [NamedSharding(mesh, spec) for spec in specs]

    specs = [parameter_spec(request.sharding, each.shape, shape) for each in programs.parameters]
    parameters = [NamedSharding(mesh, spec) for spec in specs]
    whole = [not any(DATA in axes_of(entry) for entry in spec) for spec in specs]
    late = shape[0] > 1 and any(whole[place] for place in programs.trained)
    return TaskPrograms(
        shapes=programs,
        partitioner=MeshPartitioner(mesh),
        parameters=parameters,
        batch=examples(programs.batch),
        received=examples(programs.received),
        sent=examples(programs.sent),
        sums=[
            NamedSharding(typed_mesh(mesh), partial_sums(spec)) if late and stays else sharding
            for spec, sharding, stays in zip(specs, parameters, whole, strict=True)
        ],
        accumulates=True,
        late=late,
    )


def _time_passes(
    tasks: TaskPrograms, forward: Any, backward: Any | None, yardstick: Yardstick
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of forward and backward passes, which take turns as in training, and of a yardstick.

    A forward pass has the microbatch put on its devices. Where passes are short, each figure is the
    mean of several.
    """
    shapes = tasks.shapes
    fill = _Filler()
    parameters = fill(shapes.parameters, tasks.parameters)
    rows = [fill.array(each) for each in shapes.batch]
    batch: list[jax.Array] = []
    received = fill(shapes.received, tasks.received)
    seeds = fill(shapes.sent, tasks.sent)
    cotangents = [seeds[place] for place in shapes.cotangents_in]
    sums = _zero_sums(tasks)
    residuals: Any = None

    def run_forward() -> None:
        nonlocal batch, residuals
        batch = jax.device_put(rows, tasks.batch)
        _, residuals = jax.block_until_ready(forward(parameters, batch, received))

    def run_backward() -> None:
        nonlocal sums
        if backward is None:
            return
        arguments = _read(shapes.backward_reads, batch, received, residuals, cotangents)
        _, sums = jax.block_until_ready(backward(parameters, *arguments, sums))

    passes = (run_forward, run_backward)
    # The first repetition pays for memory and caches.
    for run in passes:
        run()
    in_a_row = _in_a_row(sum(_mean_seconds(passes, 1)))
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    began = time.perf_counter()
    while not _enough(len(times[0]), time.perf_counter() - began):
        found = (*_mean_seconds(passes, in_a_row), yardstick.seconds())
        for seconds, each in zip(times, found, strict=True):
            seconds.append(each)
    return times


def _in_a_row(seconds: float) -> int:
    """How many runs of what takes so long are timed together."""
    return max(1, math.ceil(_WINDOW / seconds))


def _mean_seconds(runs: Sequence[Callable[[], None]], count: int) -> list[float]:
    """What each of these takes, which take turns so many times."""
    totals = [0.0] * len(runs)
    end = time.perf_counter()
    for _ in range(count):
        for place, run in enumerate(runs):
            began = end
            run()
            end = time.perf_counter()
            totals[place] += end - began
    return [total / count for total in totals]


def _enough(count: int, seconds: float) -> bool:
    least, most = _REPETITIONS
    return count >= most or (count >= least and seconds >= _SECONDS)


def _read(
    reads: Reads,
    batch: Sequence[Any],
    received: Sequence[Any],
    residuals: Sequence[Any],
    cotangents: Sequence[Any],
) -> list[list[Any]]:
    return [
        [batch[place] for place in reads.batch],
        [received[place] for place in reads.received],
        [residuals[place] for place in reads.residuals],
        [cotangents[place] for place in reads.cotangents],
    ]


def _of_some(
    optimizer: optax.GradientTransformation, parameters: PyTree, leaves: Sequence[int]
) -> optax.GradientTransformation:
    """The optimizer of some leaves alone, or rows of them, in a list.

    One that leaves others as they are knows each by its place in the whole tree: in the place of
    all that are not among these stand arrays without elements. Several rows of a leaf are a list in
    its place.
    """
    shapes, tree = jax.tree.flatten(parameters)
    extended = optax.with_extra_args_support(optimizer)

    def whole(arrays: Sequence[Any]) -> Any:
        every: list[Any] = [jnp.zeros((0,), shape.dtype) for shape in shapes]
        rows: dict[int, list[Any]] = {}
        for leaf, array in zip(leaves, arrays, strict=True):
            rows.setdefault(leaf, []).append(array)
        for leaf, found in rows.items():
            every[leaf] = found[0] if len(found) == 1 else found
        return jax.tree.unflatten(tree, every)

    def init(params: Any) -> Any:
        return extended.init(whole(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = extended.update(whole(updates), state, whole(params), **extra)
        every = [iter(jax.tree.leaves(each)) for each in tree.flatten_up_to(updates)]
        return [next(every[leaf]) for leaf in leaves], state

    return optax.GradientTransformationExtraArgs(init, update)


def _update_rate(
    tasks: TaskPrograms, places: Sequence[int], optimizer: optax.GradientTransformation
) -> float:
    """Bytes/s at which a step's update gets through some of a run's parameters on one device.

    It counts what a device holds of parameters, gradients and state, each once.
    """
    shapes = [tasks.shapes.parameters[place] for place in places]
    if not shapes:
        return 0.0
    device = tasks.partitioner.whole.mesh.devices.flat[0]
    single = jax.sharding.SingleDeviceSharding(device)
    fill = _Filler()
    parameters = fill(shapes, [single] * len(shapes))
    gradients = fill(
        [jax.ShapeDtypeStruct(each.shape, accumulator_dtype(each.dtype)) for each in shapes],
        [single] * len(shapes),
    )

    one, whole_update = jnp.float32(1.0), update_function(optimizer, list)

    def update(parameters: Any, gradients: Any, state: Any, one: Any) -> Any:
        # As in training, which sets the sums back.
        updated, leaves, shown, zeros = whole_update(
            parameters, gradients, state, one, one, set_back=True
        )
        return updated, zeros, jax.tree.unflatten(jax.tree.structure(state), leaves), shown

    # Optimizers mix dtypes freely.
    with jax.numpy_dtype_promotion("standard"):
        state = jax.jit(settled_init(optimizer, shapes))(parameters)
        jitted = jax.jit(update, donate_argnames=("parameters", "gradients", "state"))
        compiled = jitted.lower(parameters, gradients, state, one).compile()
    held = jax.tree.leaves((parameters, gradients, state))
    size = sum(num_bytes(each) for each in held)

    def run() -> None:
        nonlocal parameters, gradients, state
        parameters, gradients, state, _ = jax.block_until_ready(
            compiled(parameters, gradients, state, one)
        )

    run()
    count = _in_a_row(_mean_seconds([run], 1)[0])
    seconds: list[float] = []
    began = time.perf_counter()
    while not _enough(len(seconds), time.perf_counter() - began):
        seconds.append(_mean_seconds([run], count)[0])
    return size / typical(seconds)[0]


def _zero_sums(tasks: TaskPrograms) -> Any:
    def zeros() -> list[jax.Array]:
        shapes = (tasks.gradient_shapes[place] for place in tasks.shapes.trained)
        return [jnp.zeros(each.shape, each.dtype) for each in shapes]

    sums = [tasks.sums[place] for place in tasks.shapes.trained]
    return tasks.partitioner.program(zeros, (), sums, keeps_sums=tasks.late)() if sums else []


class _Filler:
    """Makes arrays of small numbers; integers are 0, since they index."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        # Over and over: to draw the numbers of large parameters takes longer than to measure.
        self._values = 0.02 * random.standard_normal(_DRAWN, np.float32)

    def __call__(
        self, shapes: Sequence[jax.ShapeDtypeStruct], shardings: Sequence[Any]
    ) -> list[jax.Array]:
        return [
            jax.device_put(self.array(shape), sharding)
            for shape, sharding in zip(shapes, shardings, strict=True)
        ]

    def array(self, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        """Its values on the host."""
        if not jnp.issubdtype(shape.dtype, jnp.floating):
            return np.zeros(shape.shape, shape.dtype)
        return np.resize(self._values, shape.shape).astype(shape.dtype)


def _temporary_bytes(program: Any) -> int:
    """What a compiled program needs beside arguments and results, where the compiler tells."""
    analysis: Callable[[], Any] | None = getattr(program, "memory_analysis", None)
    found = analysis() if analysis is not None else None
    return int(getattr(found, "temp_size_in_bytes", 0) or 0)
