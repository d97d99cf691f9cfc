"""Runs cases on the local executor, and gathers what its stages hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases import Case
from small_models import Batch, Model, make_batch

from hetjax.pipeline.program.loss import host_array, host_shape
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.runtime.instructions.buffers import Gradient, OptimizerState, Parameter
from hetjax.runtime.local.local_executor import LocalExecutor
from hetjax.runtime.workers.feed import BatchSource
from hetjax.runtime.workers.job import Job, build
from hetjax.runtime.workers.step_report import StepReport
from hetjax.runtime.workers.worker import StageWorker


class GradientsState(NamedTuple):
    """The gradients that an optimizer was given last."""

    gradients: Any


def keep_gradients() -> optax.GradientTransformation:
    """An optimizer that changes nothing and remembers the gradients it was given."""

    def init(params: Any) -> GradientsState:
        return GradientsState(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, GradientsState]:
        return jax.tree.map(jnp.zeros_like, updates), GradientsState(updates)

    return optax.GradientTransformation(init, update)


def job_of(
    case: Case,
    optimizer: optax.GradientTransformation,
    *,
    source: BatchSource | None = None,
    deadline: float = 60.0,
) -> Job:
    """A case as a job."""
    batch = jax.eval_shape(lambda: make_batch(case.plan.batch_size))
    return Job(
        case.model.loss, case.model.init(), batch, optimizer, case.plan, source, deadline=deadline
    )


def summed_late(executor: LocalExecutor) -> list[bool]:
    """Of each parameter of the first stage, whether partial sums of its gradients are added up."""
    leaves = executor.workers[0].placement.leaves(0, Gradient)
    return [annotation.is_partial for annotation in leaves.annotations]


@contextmanager
def running(job: Job) -> Iterator[LocalExecutor]:
    """A local executor that holds a job's initial state."""
    executor = LocalExecutor(job, build(job))
    try:
        executor.start()
        yield executor
    finally:
        executor.close()


def train(executor: LocalExecutor, batches: Sequence[Batch]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each of several training steps."""
    seen = []
    for step, batch in enumerate(batches):
        report = _of_loss_stage(executor, step, batch)
        assert report.loss is not None
        assert report.gradient_norm is not None
        seen.append((report.loss, report.gradient_norm))
    return seen


def _of_loss_stage(executor: LocalExecutor, step: int, batch: Batch) -> StepReport:
    """The report of the stage that adds up the loss of all pipelines."""
    return executor.train_step(step, batch)[executor.workers[0].pipelines.loss_stages[0]]


def gather(
    held: Sequence[tuple[Sequence[ParameterPart], Sequence[Any]]],
    shapes: Sequence[jax.ShapeDtypeStruct],
    tolerance: float = 0.0,
) -> list[np.ndarray]:
    """Whole leaves from the parts that stages hold; what several stages hold must be equal.

    Random keys are gathered as their words.

    Args:
        held: for each stage its parts, and an array for each of them.
        shapes: the shapes of the leaves.
        tolerance: by how much it may differ, relatively.

    Returns:
        The leaves.
    """
    leaves = empty_leaves(shapes)
    counts = [np.zeros(shape.shape, np.int32) for shape in shapes]
    for parts, arrays in held:
        for part, array in zip(parts, arrays, strict=True):
            rows = (slice(part.start, part.stop),) if part.stop is not None else ...
            seen = counts[part.leaf][rows].astype(bool)
            new = host_array(array)
            np.testing.assert_allclose(leaves[part.leaf][rows][seen], new[seen], tolerance)
            leaves[part.leaf][rows] = new
            counts[part.leaf][rows] += 1
    for count in counts:
        assert np.all(count), "some rows are held by no stage"
    return leaves


def empty_leaves(shapes: Sequence[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
    """Zeros for leaves of some shapes, of random keys for their words."""
    return [np.zeros(each.shape, each.dtype) for each in map(host_shape, shapes)]


def gathered_parameters(executor: LocalExecutor) -> list[np.ndarray]:
    """The parameter leaves, whole."""
    pipelines = executor.workers[0].pipelines
    held = [
        (stage.parameters, _of_stage(executor, stage.index, Parameter))
        for stage in pipelines.stages
    ]
    return pipelines.program.leaves.join(gather(held, pipelines.parameter_shapes), np.stack)


def gathered_state(executor: LocalExecutor, *, rounded: bool = False) -> list[np.ndarray]:
    """The leaves of the optimizer's state, whole; what several stages hold may be rounded."""
    pipelines = executor.workers[0].pipelines
    held = [
        (update.state, _of_stage(executor, stage, OptimizerState))
        for stage, update in enumerate(pipelines.updates)
    ]
    # XLA multiplies by reciprocals in some programs: where several stages update the same rows, and
    # a stage has several members, copies of the state differ in their last bits.
    rounding = 1e-14 if any(s.dtype == np.float64 for s in pipelines.state_shapes) else 1e-6
    has_unions = executor.workers[0].placement.plan.has_unions
    tolerance = rounding if has_unions or rounded else 0.0
    return pipelines.state_leaves.join(gather(held, pipelines.state_shapes, tolerance), np.stack)


def _of_stage(
    executor: LocalExecutor, stage: int, kind: type[Parameter | OptimizerState]
) -> list[np.ndarray]:
    """What a stage holds, put together of what its members do; what several hold is the same."""
    workers = [worker for worker in executor.workers if worker.stage == stage]
    leaves = workers[0].placement.leaves(stage, kind)
    wholes = empty_leaves(leaves.shapes)
    seen = [np.zeros(shape.shape, bool) for shape in leaves.shapes]
    for worker in workers:
        state = worker.state()
        arrays = state.parameters if kind is Parameter else state.optimizer
        for place, (array, annotation) in enumerate(zip(arrays, leaves.annotations, strict=True)):
            whole, before = wholes[place], seen[place]
            region = annotation.regions(before.shape)[worker.member]
            at = tuple(slice(*bounds) for bounds in region)
            new = host_array(array)
            np.testing.assert_allclose(
                whole[at][before[at]], new[before[at]], 0, _apart(worker, new)
            )
            whole[at], before[at] = new, True
    assert all(map(np.all, seen)), "some of the stage's state is on no member"
    return wholes


def _apart(worker: StageWorker, array: np.ndarray) -> float:
    """By how much copies may differ that members update by themselves: their last bits."""
    updates = worker.placement.stage_plan(worker.stage).shares.updates
    if None not in updates.values():
        return 0.0
    is_half = any(shape.dtype == jnp.bfloat16 for shape in worker.pipelines.program.avals)
    rounding = 0.05 if is_half else 1e-14 if array.dtype == np.float64 else 1e-6
    return rounding * float(np.max(np.abs(array), initial=0.0))


def one_device_gradients(model: Model, batch: Batch) -> tuple[float, float, list[np.ndarray]]:
    """Loss, gradient norm and gradients of a whole batch by plain `jax.jit`."""

    @jax.jit
    def compute(parameters: Any, batch: Any) -> tuple[Any, Any, Any]:
        loss, gradients = jax.value_and_grad(model.mean_loss)(parameters, batch)
        wide = jax.tree.map(lambda leaf: leaf.astype(model.dtype), gradients)
        return loss, optax.tree.norm(wide), gradients

    loss, norm, gradients = compute(model.init(), batch)
    return float(loss), float(norm), [np.asarray(leaf) for leaf in jax.tree.leaves(gradients)]


def one_device_steps(
    model: Model, optimizer: optax.GradientTransformation, batches: Sequence[Batch]
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each of several training steps by plain `jax.jit`."""

    @jax.jit
    def step(parameters: Any, state: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
        loss, gradients = jax.value_and_grad(model.mean_loss)(parameters, batch)
        updates, state = optimizer.update(gradients, state, parameters)
        norm = optax.tree.norm(gradients)
        return optax.apply_updates(parameters, updates), state, loss, norm

    parameters = model.init()
    state = optimizer.init(parameters)
    seen = []
    for batch in batches:
        parameters, state, loss, norm = step(parameters, state, batch)
        seen.append((float(loss), float(norm)))
    return seen


def one_device_training(
    loss: Callable[[Any, Any], jax.Array],
    parameters: Any,
    optimizer: optax.GradientTransformation,
    batches: Sequence[Any],
) -> tuple[list[float], Any, Any]:
    """Losses of training steps by plain `jax.jit`, and parameters and state after the last."""
    extended = optax.with_extra_args_support(optimizer)

    @jax.jit
    def step(parameters: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, gradients = jax.value_and_grad(loss)(parameters, batch)
        updates, state = extended.update(gradients, state, parameters, value=value)
        return optax.apply_updates(parameters, updates), state, value

    losses, state = [], optimizer.init(parameters)
    # Optax mixes dtypes in its own arithmetic.
    with jax.numpy_dtype_promotion("standard"):
        for batch in batches:
            parameters, state, value = step(parameters, state, batch)
            losses.append(float(value))
    return losses, parameters, state
