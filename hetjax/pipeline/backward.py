"""A stage's programs: forward, backward, and both at once, as functions ready to compile.

The stage is differentiated once, in one trace; the trace is then split into what the cotangents do
not reach (forward) and what they reach (backward). So nothing is computed twice that is expensive,
inputs such as weights are never copied into what is kept for the backward pass, and cotangents that
are zero for a structural reason are neither computed nor sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.pipeline.costs import Cost, is_heavy, steps_cost
from hetjax.pipeline.program import (
    Constant,
    Operand,
    Step,
    abstract,
    evaluate_steps,
    flatten_jaxpr,
    num_bytes,
)
from hetjax.pipeline.residuals import choose_residuals
from hetjax.pipeline.stages import Stage

Shapes = tuple[jax.ShapeDtypeStruct, ...]

# Cheap to do again while the backward pass runs, and often fused away there.
_REPEATABLE = frozenset(
    """
    abs add and broadcast_in_dim ceil clamp concatenate convert_element_type copy cos div eq erf exp
    exp2 expand_dims expm1 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min
    mul ne neg not or pad pow real rem reshape rev round rsqrt select_n sign sin slice sqrt square
    squeeze stop_gradient sub tanh transpose xor
    """.split()
)


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


@dataclass(frozen=True)
class _Layout:
    """How the flat inputs and outputs of the one trace are divided."""

    parameters: int
    batch: int
    received: int
    cotangents: int
    outputs: int


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
    outputs = jax.eval_shape(stage.function, parameters, batch, received)
    seeds = (0,) if is_last else tuple(cotangents_in)
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

    seed_shapes = [outputs[i] for i in seeds]
    closed = jax.make_jaxpr(forward_and_backward)(
        list(parameters), list(batch), list(received), seed_shapes
    )
    layout = _Layout(len(parameters), len(batch), len(received), len(seeds), len(outputs))
    return _Splitter(
        flatten_jaxpr(closed), layout, movable, is_last, recompute, accumulate, seeds
    ).programs(parameters, batch, received, outputs)


class _Splitter:
    def __init__(self, flat, layout, movable, is_last, recompute, accumulate, seeds):
        self.flat, self.layout, self.movable = flat, layout, movable
        self.is_last, self.recompute, self.accumulate = is_last, recompute, accumulate
        self.seeds = seeds
        inputs = list(flat.inputs)
        self.parameter_values = _take(inputs, layout.parameters)
        self.batch_values = _take(inputs, layout.batch)
        self.received_values = _take(inputs, layout.received)
        self.cotangent_values = _take(inputs, layout.cotangents)
        outputs = list(flat.outputs)
        self.sent = _take(outputs, layout.outputs)
        self.gradients = _take(outputs, layout.parameters)
        self.returned = outputs
        self._split()

    def _split(self) -> None:
        reached = set(self.cotangent_values)
        self.after: list[Step] = []
        self.before: list[Step] = []
        for step in self.flat.steps:
            if reached.intersection(step.values()):
                reached.update(step.outputs)
                self.after.append(step)
            else:
                self.before.append(step)
        self.reached = reached
        alive = reached if not self.is_last else None
        self.cotangents_out = tuple(
            place
            for place, operand in zip(self.movable, self.returned, strict=True)
            if not _is_zero(operand, alive, self.flat.steps)
        )
        self.returned = [
            operand
            for place, operand in zip(self.movable, self.returned, strict=True)
            if place in self.cotangents_out
        ]
        self.backward_outputs = [*self.returned, *self.gradients]
        inputs = {*self.parameter_values, *self.batch_values, *self.received_values}
        needed = {value for step in self.after for value in step.values()}
        needed.update(o for o in self.backward_outputs if isinstance(o, int))
        needed -= reached | inputs
        size = lambda value: num_bytes(self.flat.avals[value])  # noqa: E731
        self.residuals = (
            ()
            if self.recompute
            else tuple(sorted(choose_residuals(self.before, inputs, needed, size, _expensive)))
        )
        self.forward_steps = _needed_steps(self.before, [*self.sent, *self.residuals], ())
        self.backward_steps = _needed_steps(self.flat.steps, self.backward_outputs, self.residuals)

    def programs(
        self, parameters: Sequence[Any], batch: Sequence[Any], received: Sequence[Any], outputs: Any
    ) -> StagePrograms:
        read = {value for step in self.backward_steps for value in step.values()}
        read.update(o for o in self.backward_outputs if isinstance(o, int))
        kept_batch = tuple(i for i, v in enumerate(self.batch_values) if v in read)
        kept_received = tuple(i for i, v in enumerate(self.received_values) if v in read)
        shapes = lambda items: tuple(abstract(list(items)))  # noqa: E731
        return StagePrograms(
            forward=self._forward,
            backward=self._backward_function(kept_batch, kept_received),
            both=self._both if self.is_last else None,
            parameters=shapes(parameters),
            batch=shapes(batch),
            received=shapes(received),
            sent=shapes(outputs),
            residuals=tuple(self.flat.avals[value] for value in self.residuals),
            kept_batch=kept_batch,
            kept_received=kept_received,
            cotangents_in=self.seeds,
            cotangents_out=self.cotangents_out,
            forward_cost=steps_cost(self.forward_steps),
            backward_cost=steps_cost(self.backward_steps),
        )

    def _environment(self, parameters: Any, batch: Any, received: Any) -> dict[int, Any]:
        environment = dict(zip(self.parameter_values, parameters, strict=True))
        environment.update(zip(self.batch_values, batch, strict=True))
        environment.update(zip(self.received_values, received, strict=True))
        return environment

    def _forward(self, parameters: Any, batch: Any, received: Any) -> tuple[list[Any], list[Any]]:
        environment = self._environment(parameters, batch, received)
        results = evaluate_steps(self.forward_steps, environment, [*self.sent, *self.residuals])
        return results[: len(self.sent)], results[len(self.sent) :]

    def _backward_function(
        self, kept_batch: tuple[int, ...], kept_received: tuple[int, ...]
    ) -> Callable[..., Any]:
        def backward(
            parameters: Any,
            batch: Any,
            received: Any,
            residuals: Any,
            cotangents: Any,
            accumulators: Any,
        ) -> tuple[list[Any], list[Any]]:
            environment = dict(zip(self.parameter_values, parameters, strict=True))
            environment.update(zip((self.batch_values[i] for i in kept_batch), batch, strict=True))
            environment.update(
                zip((self.received_values[i] for i in kept_received), received, strict=True)
            )
            environment.update(zip(self.residuals, residuals, strict=True))
            environment.update(zip(self.cotangent_values, cotangents, strict=True))
            results = evaluate_steps(self.backward_steps, environment, self.backward_outputs)
            return self._accumulated(results, accumulators)

        return backward

    def _both(
        self, parameters: Any, batch: Any, received: Any, accumulators: Any
    ) -> tuple[list[Any], list[Any], Any, Any]:
        environment = self._environment(parameters, batch, received)
        seed = self.flat.avals[self.cotangent_values[0]]
        environment[self.cotangent_values[0]] = jnp.ones(seed.shape, seed.dtype)
        results = evaluate_steps(self.flat.steps, environment, [*self.backward_outputs, *self.sent])
        split = len(self.backward_outputs)
        returned, accumulators = self._accumulated(results[:split], accumulators)
        return returned, accumulators, *results[split:]

    def _accumulated(self, results: list[Any], accumulators: Any) -> tuple[list[Any], list[Any]]:
        returned, gradients = results[: len(self.returned)], results[len(self.returned) :]
        if self.accumulate:
            gradients = [
                a + g.astype(a.dtype) for a, g in zip(accumulators, gradients, strict=True)
            ]
        else:
            gradients = [g.astype(accumulator_dtype(g.dtype)) for g in gradients]
        return returned, gradients


def accumulator_dtype(dtype: Any) -> Any:
    """The dtype in which gradients of a parameter are summed: at least float32."""
    return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype


def _take(items: list[Any], count: int) -> list[Any]:
    taken = items[:count]
    del items[:count]
    return taken


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


def _expensive(step: Step) -> bool:
    if step.name in _REPEATABLE:
        return False
    inner = step.equation is not None and step.name in ("custom_jvp_call", "custom_vjp_call")
    return not inner or is_heavy(step.equation)  # type: ignore[arg-type]


def _needed_steps(
    steps: Sequence[Step], outputs: Sequence[Operand], known: Sequence[int]
) -> tuple[Step, ...]:
    """The steps that the outputs need, given values that are known."""
    at_hand = set(known)
    needed = {o for o in outputs if isinstance(o, int)} - at_hand
    kept = []
    for step in reversed(steps):
        if needed.intersection(step.outputs):
            kept.append(step)
            needed.update(value for value in step.values() if value not in at_hand)
    return tuple(reversed(kept))
