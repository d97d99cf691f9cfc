"""A stage's programs: forward, backward, and both at once, as functions ready to compile.

The stage is differentiated once, in one trace; the trace is then split into what the cotangents do
not reach (forward) and what they reach (backward). So nothing is computed twice that is expensive,
inputs such as weights are never copied into what is kept for the backward pass, and cotangents that
are zero for a structural reason are neither computed nor sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.pipeline.costs import REPEATABLE, Cost, is_heavy, steps_cost
from hetjax.pipeline.program import (
    Constant,
    FlatJaxpr,
    Operand,
    Step,
    abstract,
    evaluate_steps,
    flatten_jaxpr,
    needed_steps,
    num_bytes,
)
from hetjax.pipeline.residuals import choose_residuals
from hetjax.pipeline.stages import Stage

Shapes = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True, eq=False)
class StagePrograms:
    """What a stage computes for one microbatch.

    Each function takes and returns flat sequences of arrays. ``accumulators`` hold one array for
    each parameter part; they come back with this microbatch's gradients added.

    Args:
        forward: ``(parameters, batch, received) -> (sent, residuals)``.
        backward: ``(parameters, batch, received, residuals, cotangents, accumulators) ->
            (cotangents of received, accumulators)``.
        both: ``(parameters, batch, received, accumulators) -> (cotangents of received,
            accumulators, total, count)``; of the last stage only, whose backward pass follows its
            forward pass at once.
        parameters: shapes of the parameter parts.
        batch: shapes of the batch leaves.
        received: shapes of the values received.
        sent: shapes of the values sent; total and count in the last stage.
        residuals: shapes of the values kept for the backward pass beside the stage's inputs.
        kept_batch: the batch leaves that the backward pass reads again, by place.
        kept_received: the received values that the backward pass reads again, by place.
        cotangents_in: which sent values have a cotangent, by place.
        cotangents_out: which received values have a cotangent to give back, by place.
        forward_cost: work of the forward pass.
        backward_cost: work of the backward pass, recomputation included.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    both: Callable[..., Any] | None
    parameters: Shapes
    batch: Shapes
    received: Shapes
    sent: Shapes
    residuals: Shapes
    kept_batch: tuple[int, ...]
    kept_received: tuple[int, ...]
    cotangents_in: tuple[int, ...]
    cotangents_out: tuple[int, ...]
    forward_cost: Cost
    backward_cost: Cost

    @property
    def residual_bytes(self) -> int:
        """Bytes that one microbatch keeps between its forward and its backward pass."""
        kept = [self.batch[i] for i in self.kept_batch]
        kept += [self.received[i] for i in self.kept_received]
        return sum(num_bytes(shape) for shape in (*kept, *self.residuals))


def differentiate(
    stage: Stage,
    parameters: Sequence[jax.ShapeDtypeStruct],
    batch: Sequence[jax.ShapeDtypeStruct],
    received: Sequence[jax.ShapeDtypeStruct],
    *,
    is_last: bool,
    cotangents_in: Sequence[int],
    recompute: bool = False,
    accumulate: bool = True,
) -> StagePrograms:
    """Differentiate a stage.

    Args:
        stage: the stage.
        parameters: shapes of its parameter parts.
        batch: shapes of the batch leaves it reads, for one microbatch.
        received: shapes of the values it receives, for one microbatch.
        is_last: whether it returns the loss.
        cotangents_in: which of its outputs have a cotangent, by place; ignored in the last stage,
            where that of the summed loss is one.
        recompute: keep only the stage's inputs, and run its forward steps again before its
            backward ones.
        accumulate: whether gradients are added to those of earlier microbatches.

    Returns:
        The stage's programs.
    """
    traced = _trace(stage, parameters, batch, received, (0,) if is_last else tuple(cotangents_in))
    halves = _split(traced, is_last=is_last, recompute=recompute)
    return StagePrograms(
        forward=_forward(traced, halves),
        backward=_backward(traced, halves, accumulate),
        both=_both(traced, halves, accumulate) if is_last else None,
        parameters=_shapes(parameters),
        batch=_shapes(batch),
        received=_shapes(received),
        sent=_shapes(traced.sent_shapes),
        residuals=tuple(traced.flat.avals[value] for value in halves.residuals),
        kept_batch=halves.kept_batch,
        kept_received=halves.kept_received,
        cotangents_in=traced.seeds,
        cotangents_out=halves.returned_places,
        forward_cost=steps_cost(halves.forward),
        backward_cost=steps_cost(halves.backward),
    )


def _shapes(items: Sequence[Any]) -> Shapes:
    return tuple(abstract(list(items)))


@dataclass(frozen=True, eq=False)
class _Traced:
    """A stage's forward and backward pass in one trace, with its inputs and outputs by role."""

    flat: FlatJaxpr
    parameters: tuple[int, ...]
    batch: tuple[int, ...]
    received: tuple[int, ...]
    cotangents: tuple[int, ...]
    sent: tuple[Operand, ...]
    gradients: tuple[Operand, ...]
    returned: tuple[Operand, ...]
    returned_places: tuple[int, ...]
    seeds: tuple[int, ...]
    sent_shapes: Sequence[jax.ShapeDtypeStruct]


def _trace(
    stage: Stage,
    parameters: Sequence[jax.ShapeDtypeStruct],
    batch: Sequence[jax.ShapeDtypeStruct],
    received: Sequence[jax.ShapeDtypeStruct],
    seeds: tuple[int, ...],
) -> _Traced:
    """Trace a stage's outputs, and the cotangents of its inputs given those of some outputs."""
    sent = jax.eval_shape(stage.function, parameters, batch, received)
    movable = tuple(i for i, s in enumerate(received) if jnp.issubdtype(s.dtype, jnp.inexact))

    def forward_and_backward(
        parameters: Sequence[Any],
        batch: Sequence[Any],
        received: Sequence[Any],
        cotangents: Sequence[Any],
    ) -> tuple[Any, Any, Any]:
        def run(parameters: Sequence[Any], moving: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            values = list(received)
            for place, value in zip(movable, moving, strict=True):
                values[place] = value
            results = stage.function(parameters, batch, values)
            return [results[i] for i in seeds], results

        _, pullback, results = jax.vjp(
            run, list(parameters), [received[i] for i in movable], has_aux=True
        )
        return results, *pullback(list(cotangents))

    closed = jax.make_jaxpr(forward_and_backward)(
        list(parameters), list(batch), list(received), [sent[i] for i in seeds]
    )
    flat = flatten_jaxpr(closed)
    inputs, outputs = iter(flat.inputs), iter(flat.outputs)
    return _Traced(
        flat=flat,
        parameters=tuple(itertools.islice(inputs, len(parameters))),
        batch=tuple(itertools.islice(inputs, len(batch))),
        received=tuple(itertools.islice(inputs, len(received))),
        cotangents=tuple(inputs),
        sent=tuple(itertools.islice(outputs, len(sent))),
        gradients=tuple(itertools.islice(outputs, len(parameters))),
        returned=tuple(outputs),
        returned_places=movable,
        seeds=seeds,
        sent_shapes=sent,
    )


@dataclass(frozen=True, eq=False)
class _Halves:
    """The steps of the forward and of the backward pass, and what goes from one to the other."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    residuals: tuple[int, ...]
    returned: tuple[Operand, ...]
    returned_places: tuple[int, ...]
    kept_batch: tuple[int, ...]
    kept_received: tuple[int, ...]


def _split(traced: _Traced, *, is_last: bool, recompute: bool) -> _Halves:
    flat = traced.flat
    reached = set(traced.cotangents)
    before: list[Step] = []
    after: list[Step] = []
    for step in flat.steps:
        if reached.intersection(step.values()):
            reached.update(step.outputs)
            after.append(step)
        else:
            before.append(step)
    # The last stage's cotangent is a constant that may have been folded into what it reaches.
    flows = None if is_last else reached
    alive = [
        (place, operand)
        for place, operand in zip(traced.returned_places, traced.returned, strict=True)
        if not _is_zero(operand, flows, flat.steps)
    ]
    returned = tuple(operand for _, operand in alive)
    outputs = (*returned, *traced.gradients)
    inputs = {*traced.parameters, *traced.batch, *traced.received}
    needed = {value for step in after for value in step.values()}
    needed.update(operand for operand in outputs if isinstance(operand, int))
    needed -= reached | inputs

    def size(value: int) -> int:
        return num_bytes(flat.avals[value])

    chosen = () if recompute else choose_residuals(before, inputs, needed, size, _is_expensive)
    residuals = tuple(sorted(chosen))
    backward = needed_steps(flat.steps, outputs, residuals)
    read = {value for step in backward for value in step.values()}
    read.update(operand for operand in outputs if isinstance(operand, int))
    return _Halves(
        forward=needed_steps(before, [*traced.sent, *residuals]),
        backward=backward,
        residuals=residuals,
        returned=returned,
        returned_places=tuple(place for place, _ in alive),
        kept_batch=tuple(i for i, value in enumerate(traced.batch) if value in read),
        kept_received=tuple(i for i, value in enumerate(traced.received) if value in read),
    )


def _forward(traced: _Traced, halves: _Halves) -> Callable[..., Any]:
    def forward(parameters: Any, batch: Any, received: Any) -> tuple[list[Any], list[Any]]:
        environment = _environment(traced, parameters, batch, received)
        outputs = [*traced.sent, *halves.residuals]
        results = evaluate_steps(halves.forward, environment, outputs)
        return results[: len(traced.sent)], results[len(traced.sent) :]

    return forward


def _backward(traced: _Traced, halves: _Halves, accumulate: bool) -> Callable[..., Any]:
    def backward(
        parameters: Any,
        batch: Any,
        received: Any,
        residuals: Any,
        cotangents: Any,
        accumulators: Any,
    ) -> tuple[list[Any], list[Any]]:
        names = (
            *traced.parameters,
            *(traced.batch[i] for i in halves.kept_batch),
            *(traced.received[i] for i in halves.kept_received),
            *halves.residuals,
            *traced.cotangents,
        )
        arrays = (*parameters, *batch, *received, *residuals, *cotangents)
        environment = dict(zip(names, arrays, strict=True))
        outputs = [*halves.returned, *traced.gradients]
        results = evaluate_steps(halves.backward, environment, outputs)
        returned, gradients = results[: len(halves.returned)], results[len(halves.returned) :]
        return returned, _accumulated(gradients, accumulators, accumulate)

    return backward


def _both(traced: _Traced, halves: _Halves, accumulate: bool) -> Callable[..., Any]:
    def both(
        parameters: Any, batch: Any, received: Any, accumulators: Any
    ) -> tuple[list[Any], list[Any], Any, Any]:
        environment = _environment(traced, parameters, batch, received)
        (seed,) = traced.cotangents
        environment[seed] = jnp.ones((), traced.flat.avals[seed].dtype)
        outputs = [*halves.returned, *traced.gradients, *traced.sent]
        results = iter(evaluate_steps(traced.flat.steps, environment, outputs))
        returned = list(itertools.islice(results, len(halves.returned)))
        gradients = list(itertools.islice(results, len(traced.gradients)))
        total, count = results
        return returned, _accumulated(gradients, accumulators, accumulate), total, count

    return both


def _environment(traced: _Traced, parameters: Any, batch: Any, received: Any) -> dict[int, Any]:
    names = (*traced.parameters, *traced.batch, *traced.received)
    return dict(zip(names, (*parameters, *batch, *received), strict=True))


def _accumulated(gradients: list[Any], accumulators: Any, accumulate: bool) -> list[Any]:
    if not accumulate:
        return [g.astype(accumulator_dtype(g.dtype)) for g in gradients]
    return [a + g.astype(a.dtype) for a, g in zip(accumulators, gradients, strict=True)]


def accumulator_dtype(dtype: Any) -> Any:
    """The dtype in which gradients of a parameter are summed: at least float32."""
    return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype


def _is_zero(operand: Operand, reached: set[int] | None, steps: Sequence[Step]) -> bool:
    """Whether a cotangent is zero whatever comes: no gradient flows to that value."""
    if isinstance(operand, Constant):
        return not np.any(np.asarray(operand.value))
    if reached is not None and operand in reached:
        return False
    producer = next((s for s in steps if operand in s.outputs), None)
    return (
        producer is not None
        and producer.name == "broadcast_in_dim"
        and isinstance(producer.inputs[0], Constant)
        and not np.any(np.asarray(producer.inputs[0].value))
    )


def _is_expensive(step: Step) -> bool:
    if step.equation is not None and step.name in ("custom_jvp_call", "custom_vjp_call"):
        return is_heavy(step.equation)
    return step.name not in REPEATABLE
