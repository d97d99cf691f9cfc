"""A stage's forward and backward pass in one trace, split by what the cotangents reach."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import _compat
from hetjax.pipeline.program.computations import is_large
from hetjax.pipeline.program.costs import is_expensive
from hetjax.pipeline.program.pieces import key_of, pieces_of
from hetjax.pipeline.program.selections import selected_comparisons
from hetjax.pipeline.program.step_program import StepProgram
from hetjax.pipeline.program.traced_program import (
    Constant,
    FlatJaxpr,
    Operand,
    Step,
    flatten_jaxpr,
    needed_steps,
    num_bytes,
)
from hetjax.pipeline.stages.cutting import Body, Stage
from hetjax.pipeline.stages.residuals import choose_residuals
from hetjax.sharding.deduction.remembering import Remembered
from hetjax.sharding.deduction.reshard import leaves_early


@dataclass(frozen=True, eq=False)
class TracedStage:
    """A stage's forward and backward pass in one trace, with its inputs and outputs by role.

    Args:
        flat: all its steps and values.
        parameters: the numbers of the parameter parts.
        batch: the numbers of the batch leaves.
        received: the numbers of the values received.
        cotangents: the numbers of the cotangents that come in.
        sent: what the stage sends; total and count in the last stage.
        gradients: the gradient of each parameter part; zeros of those that are not trained.
        returned: the cotangents of values received, as far as these have any.
        returned_places: which received values these belong to, by place.
        seeds: which sent values have a cotangent, by place.
        sent_shapes: shapes of what is sent.
        trained: the places of the parameter parts whose gradients are computed.
    """

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
    trained: tuple[int, ...]

    @property
    def trained_gradients(self) -> tuple[Operand, ...]:
        """The gradients that are computed."""
        return tuple(self.gradients[place] for place in self.trained)


Tracer = Callable[
    [
        Stage,
        Sequence[jax.ShapeDtypeStruct],
        Sequence[jax.ShapeDtypeStruct],
        Sequence[jax.ShapeDtypeStruct],
        tuple[int, ...],
    ],
    TracedStage,
]
"""What traces a stage, as `trace_stage` does."""


def trace_stage(
    stage: Stage,
    parameters: Sequence[jax.ShapeDtypeStruct],
    batch: Sequence[jax.ShapeDtypeStruct],
    received: Sequence[jax.ShapeDtypeStruct],
    seeds: tuple[int, ...],
    flatten: Callable[[_compat.ClosedJaxpr], FlatJaxpr] = flatten_jaxpr,
) -> TracedStage:
    """Trace a stage's outputs, and the cotangents of its inputs given those of some outputs.

    Args:
        stage: the stage.
        parameters: shapes of its parameter parts.
        batch: shapes of the batch leaves it reads, for one microbatch.
        received: shapes of the values it receives, for one microbatch.
        seeds: which of its outputs have a cotangent, by place.
        flatten: what makes a flat jaxpr of the trace.

    Returns:
        The trace.
    """
    # What inlines calls in another way is given none.
    by_pieces = flatten is flatten_jaxpr
    passes = _KNOWN.of(
        _structure(stage, (parameters, batch, received), seeds, by_pieces),
        lambda: _both_passes(stage, (parameters, batch, received), seeds, by_pieces),
    )
    return traced_as(
        passes.closed, passes.arguments, passes.sent, stage.trained, passes.movable, seeds, flatten
    )


@dataclass(frozen=True, eq=False)
class _BothPasses:
    """A stage's forward and backward pass, as JAX traced them, and its arguments by role."""

    closed: _compat.ClosedJaxpr
    arguments: Sequence[Sequence[jax.ShapeDtypeStruct]]
    sent: Sequence[jax.ShapeDtypeStruct]
    movable: tuple[int, ...]


_KNOWN = Remembered[Hashable, _BothPasses](128)
"""Stages that were traced before: planners count what they do, and then trainers build them."""


def _structure(
    stage: Stage,
    inputs: Sequence[Sequence[jax.ShapeDtypeStruct]],
    seeds: tuple[int, ...],
    by_pieces: bool,
) -> Hashable:
    """What tells a stage's passes from others; None where nothing small does."""
    body = stage.function
    if not isinstance(body, Body) or any(map(_has_large_constant, body.steps)):
        return None
    program = StepProgram(body.steps, (body.inputs,), (body.outputs,), stage.avals)
    shapes = tuple(tuple((each.shape, each.dtype) for each in part) for part in inputs)
    config: Any = jax.config
    told = (
        config.jax_enable_x64,
        config.jax_default_matmul_precision,
        config.jax_numpy_dtype_promotion,
    )
    computed = key_of(program, differentiated=True)
    return computed, shapes, stage.trained, stage.moving, seeds, by_pieces, told


def _has_large_constant(step: Step) -> bool:
    return any(isinstance(each, Constant) and is_large(each.value) for each in step.inputs)


def _both_passes(
    stage: Stage,
    inputs: Sequence[Sequence[jax.ShapeDtypeStruct]],
    seeds: tuple[int, ...],
    by_pieces: bool,
) -> _BothPasses:
    parameters, batch, received = inputs
    function = called_by_pieces(stage) if by_pieces else stage.function
    sent = jax.eval_shape(function, parameters, batch, received)
    movable = tuple(i for i in stage.moving if jnp.issubdtype(received[i].dtype, jnp.inexact))
    trained = stage.trained

    def forward_and_backward(
        parameters: Sequence[Any],
        batch: Sequence[Any],
        received: Sequence[Any],
        cotangents: Sequence[Any],
    ) -> tuple[Any, Any, Any]:
        def run(weights: Sequence[Any], moving: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            held, values = list(parameters), list(received)
            for place, weight in zip(trained, weights, strict=True):
                held[place] = weight
            for place, value in zip(movable, moving, strict=True):
                values[place] = value
            results = function(held, batch, values)
            return [results[i] for i in seeds], results

        _, pullback, results = jax.vjp(
            run, [parameters[i] for i in trained], [received[i] for i in movable], has_aux=True
        )
        return results, *pullback(list(cotangents))

    arguments = (list(parameters), list(batch), list(received), [sent[i] for i in seeds])
    return _BothPasses(jax.make_jaxpr(forward_and_backward)(*arguments), arguments, sent, movable)


def called_by_pieces(stage: Stage) -> Callable[..., list[Any]]:
    """A stage's function that calls pieces of it: JAX traces and differentiates alike ones once.

    Args:
        stage: the stage, as it was cut.
    """
    body = stage.function
    if not isinstance(body, Body):
        return body
    program = StepProgram(body.steps, (body.inputs,), (body.outputs,), stage.avals)
    pieces = pieces_of(program, differentiated=True)
    if not pieces:
        return body
    functions = {piece.key: jax.jit(piece.program) for piece in reversed(pieces)}

    def run(*arrays: Sequence[Any]) -> list[Any]:
        values: dict[Operand, Any] = dict(zip(body.inputs, itertools.chain(*arrays), strict=True))
        for piece in pieces:
            (made,) = functions[piece.key]([values[value] for value in piece.reads])
            values.update(zip(piece.makes, made, strict=True))
        return [values[operand] for operand in body.outputs]

    return run


def traced_as(
    closed: _compat.ClosedJaxpr,
    arguments: Sequence[Sequence[jax.ShapeDtypeStruct]],
    sent: Sequence[jax.ShapeDtypeStruct],
    trained: tuple[int, ...],
    movable: tuple[int, ...],
    seeds: tuple[int, ...],
    flatten: Callable[[_compat.ClosedJaxpr], FlatJaxpr],
) -> TracedStage:
    """A trace of both passes, with its inputs and outputs by role.

    Args:
        closed: from parameters, batch, received values and cotangents to what is sent, gradients
            of what is trained, and cotangents of the received values.
        arguments: shapes of these four.
        sent: shapes of what is sent.
        trained: which parameter parts have a gradient, by place.
        movable: which received values have a cotangent, by place.
        seeds: which of the stage's outputs have one.
        flatten: what makes a flat jaxpr of it.
    """
    parameters, batch, received, _ = arguments
    flat = flatten(closed)
    inputs, outputs = iter(flat.inputs), iter(flat.outputs)
    results = tuple(itertools.islice(outputs, len(sent)))
    gradients: list[Operand] = [Constant(_zeros(each.shape, each.dtype)) for each in parameters]
    for place in trained:
        gradients[place] = next(outputs)
    return TracedStage(
        flat=flat,
        parameters=tuple(itertools.islice(inputs, len(parameters))),
        batch=tuple(itertools.islice(inputs, len(batch))),
        received=tuple(itertools.islice(inputs, len(received))),
        cotangents=tuple(inputs),
        sent=results,
        gradients=tuple(gradients),
        returned=tuple(outputs),
        returned_places=movable,
        seeds=seeds,
        sent_shapes=sent,
        trained=trained,
    )


@functools.lru_cache(maxsize=256)
def _zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros that take no memory, of one shape the same ones."""
    return np.broadcast_to(np.zeros((), dtype), shape)


@dataclass(frozen=True, eq=False)
class TracedPasses:
    """The steps of the forward and of the backward pass, and what goes from one to the other.

    Args:
        before: all steps that no cotangent reaches.
        forward: those of them that what is sent and the residuals need.
        backward: the steps of the backward pass, cheap ones of the forward pass among them.
        residuals: the values that the forward pass makes for the backward pass.
        returned: the cotangents that are worth giving back.
        returned_places: which received values these belong to, by place.
    """

    before: tuple[Step, ...]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    residuals: tuple[int, ...]
    returned: tuple[Operand, ...]
    returned_places: tuple[int, ...]


def halve(traced: TracedStage, *, is_last: bool) -> TracedPasses:
    """Split a trace into the forward and the backward pass.

    Args:
        traced: the stage's trace.
        is_last: whether it returns the loss.

    Returns:
        The two passes.
    """
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
    outputs = (*returned, *traced.trained_gradients)
    inputs = {*traced.parameters, *traced.batch, *traced.received}
    needed = {value for step in after for value in step.values()}
    needed.update(operand for operand in outputs if isinstance(operand, int))
    needed -= reached | inputs

    def size(value: int) -> int:
        return num_bytes(flat.avals[value])

    compared = selected_comparisons(before)

    def is_kept(step: Step) -> bool:
        return step in compared or _is_kept(step)

    residuals = tuple(sorted(choose_residuals(before, inputs, needed, size, is_kept)))
    return TracedPasses(
        before=tuple(before),
        forward=needed_steps(before, [*traced.sent, *residuals]),
        backward=needed_steps(flat.steps, outputs, residuals),
        residuals=residuals,
        returned=returned,
        returned_places=tuple(place for place, _ in alive),
    )


def _is_kept(step: Step) -> bool:
    """Whether what a step makes is kept rather than made again.

    A backward pass moves early what it moves early: it takes keys and values round a ring again,
    of which a member never has more than two groups' at once.
    """
    return is_expensive(step) and not leaves_early(step.equation, step.beside)


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
