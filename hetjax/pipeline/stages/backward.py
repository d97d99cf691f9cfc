"""A stage's programs: forward, backward and its two halves, as functions ready to compile.

The stage is differentiated once, in one trace; the trace is then split into what the cotangents do
not reach (forward) and what they reach (backward). So nothing is computed twice that is expensive,
inputs such as weights are never copied into what is kept for the backward pass, and cotangents that
are zero for a structural reason are neither computed nor sent. The backward pass can be divided
again, into what the stage before waits for and the gradients of the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from hetjax.pipeline.program.costs import Cost, steps_cost
from hetjax.pipeline.program.loss import abstract
from hetjax.pipeline.program.step_program import StepProgram
from hetjax.pipeline.program.traced_program import Operand, Step, needed_steps, num_bytes
from hetjax.pipeline.program.values import Values
from hetjax.pipeline.stages.cutting import Stage
from hetjax.pipeline.stages.recomputing import Run, recomputing, with_open_regions
from hetjax.pipeline.stages.split_backward import divide
from hetjax.pipeline.stages.traced_stage import (
    TracedPasses,
    TracedStage,
    Tracer,
    halve,
    trace_stage,
)
from hetjax.sharding.annotation.annotation import HSharding

Shapes = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True)
class Reads:
    """What a program reads of a stage's values of one microbatch, by place.

    Args:
        batch: batch leaves.
        received: values received.
        residuals: residuals.
        cotangents: cotangents of values sent.
    """

    batch: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    residuals: tuple[int, ...] = ()
    cotangents: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class SplitBackward:
    """A stage's backward pass in two programs.

    Args:
        input_gradient: ``(parameters, batch, received, residuals, cotangents, light accumulators)
            -> (cotangents of received, deferred, light accumulators)``.
        weight_gradient: ``(parameters, batch, received, residuals, cotangents, deferred, heavy
            accumulators) -> heavy accumulators``.
        input_gradient_reads: what the first one reads.
        weight_gradient_reads: what the second one reads.
        light: the parameter parts whose gradients the first one makes, by place: those that take
            no matrix product.
        heavy: the other parameter parts that have a gradient.
        deferred: shapes of the values that the first one makes for the second.
        input_gradient_cost: work of the first one.
        weight_gradient_cost: work of the second one.
        deferred_bytes: bytes that one microbatch keeps between the two.
    """

    input_gradient: StepProgram
    weight_gradient: StepProgram
    input_gradient_reads: Reads
    weight_gradient_reads: Reads
    light: tuple[int, ...]
    heavy: tuple[int, ...]
    deferred: Shapes
    input_gradient_cost: Cost
    weight_gradient_cost: Cost
    deferred_bytes: int


@dataclass(frozen=True, eq=False)
class StagePrograms:
    """What a stage computes for one microbatch.

    Each function takes and returns flat sequences of arrays, and of each sort only those that it
    reads. ``accumulators`` hold one array for each parameter part that is trained; they come back
    with this microbatch's gradients added.

    Args:
        forward: ``(parameters, batch, received) -> (sent, residuals)``; a stage that recomputes
            returns no residuals.
        recompute: ``(parameters, batch, received) -> residuals``; None where the stage keeps them.
        backward: ``(parameters, batch, received, residuals, cotangents, accumulators) ->
            (cotangents of received, accumulators)``.
        recompute_reads: what `recompute` reads.
        backward_reads: what `backward` reads.
        parameters: shapes of the parameter parts.
        batch: shapes of the batch leaves.
        received: shapes of the values received.
        sent: shapes of the values sent; the program's outputs in the last stage.
        residuals: shapes of the values made for the backward pass beside the stage's inputs.
        cotangents_in: which sent values have a cotangent, by place.
        cotangents_out: which received values have a cotangent to give back, by place.
        forward_steps: what the forward pass computes.
        recompute_steps: what the recomputation does.
        backward_steps: what the backward pass does after it.
        divide: what makes `split`.
        trained: which parameter parts have a gradient, by place.
        gradient_annotations: how the gradients of the parameter parts lie, where that is deduced.
    """

    forward: StepProgram
    recompute: StepProgram | None
    backward: StepProgram
    recompute_reads: Reads
    backward_reads: Reads
    parameters: Shapes
    batch: Shapes
    received: Shapes
    sent: Shapes
    residuals: Shapes
    cotangents_in: tuple[int, ...]
    cotangents_out: tuple[int, ...]
    forward_steps: tuple[Step, ...]
    recompute_steps: tuple[Step, ...]
    backward_steps: tuple[Step, ...]
    divide: Callable[[], SplitBackward]
    trained: tuple[int, ...]
    gradient_annotations: tuple[HSharding | None, ...] = ()

    @property
    def has_backward(self) -> bool:
        """Whether there is a backward pass: something is trained in the stage, or before it."""
        return bool(self.trained or self.cotangents_out)

    @functools.cached_property
    def forward_cost(self) -> Cost:
        """Work of the forward pass."""
        return steps_cost(self.forward_steps)

    @functools.cached_property
    def recompute_cost(self) -> Cost:
        """Work of the recomputation."""
        return steps_cost(self.recompute_steps)

    @functools.cached_property
    def backward_cost(self) -> Cost:
        """Work of the backward pass after it."""
        return steps_cost(self.backward_steps)

    @functools.cached_property
    def split(self) -> SplitBackward:
        """The backward pass in two programs; divided when it is first asked for."""
        return self.divide()

    @property
    def kept_bytes(self) -> int:
        """Bytes that one microbatch keeps from its forward pass on."""
        if self.recompute is not None:
            return _input_bytes(self, self.recompute_reads, self.backward_reads)
        return self.residual_bytes

    @property
    def residual_bytes(self) -> int:
        """Bytes that its backward pass reads, beside weights and cotangents."""
        return _input_bytes(self, self.backward_reads) + sum(map(num_bytes, self.residuals))


def _input_bytes(programs: StagePrograms, *reads: Reads) -> int:
    """Bytes of the stage's inputs that some of its programs read."""
    batch = {i for each in reads for i in each.batch}
    received = {i for each in reads for i in each.received}
    kept = [programs.batch[i] for i in batch] + [programs.received[i] for i in received]
    return sum(map(num_bytes, kept))


def differentiate(
    stage: Stage,
    parameters: Sequence[jax.ShapeDtypeStruct],
    batch: Sequence[jax.ShapeDtypeStruct],
    received: Sequence[jax.ShapeDtypeStruct],
    *,
    is_last: bool,
    cotangents_in: Sequence[int],
    recompute: bool = False,
    recompute_runs: Sequence[Run] = (),
    accumulate: bool = True,
    tracer: Tracer = trace_stage,
) -> StagePrograms:
    """Differentiate a stage.

    Args:
        stage: the stage.
        parameters: shapes of its parameter parts.
        batch: shapes of the batch leaves it reads, for one microbatch.
        received: shapes of the values it receives, for one microbatch.
        is_last: whether it returns the loss.
        cotangents_in: which of its outputs have a cotangent, by place; ignored in the last stage,
            where the summed loss has one.
        recompute: keep only the stage's inputs, and make the residuals again before the backward
            pass.
        recompute_runs: runs of positions that keep only their inputs, and are computed again in the
            backward pass.
        accumulate: whether gradients are added to those of earlier microbatches.
        tracer: what traces the stage.

    Returns:
        The stage's programs.
    """
    seeds = (0,) if is_last else tuple(cotangents_in)
    if recompute_runs:
        stage = recomputing(stage, recompute_runs)
    traced = tracer(stage, parameters, batch, received, seeds)
    if recompute_runs:
        traced = with_open_regions(traced)
    halves = halve(traced, is_last=is_last)
    # Where there is no backward pass, nothing is to be made again for it.
    recompute = recompute and bool(traced.trained or halves.returned)
    again = needed_steps(halves.before, halves.residuals)
    forward = needed_steps(halves.before, traced.sent) if recompute else halves.forward
    kept = () if recompute else halves.residuals
    return StagePrograms(
        forward=_forward(traced, forward, kept),
        recompute=_recompute(traced, again, halves.residuals) if recompute else None,
        backward=_backward(traced, halves, accumulate),
        recompute_reads=_reads(traced, (), again, halves.residuals) if recompute else Reads(),
        backward_reads=_backward_reads(traced, halves),
        parameters=_shapes(parameters),
        batch=_shapes(batch),
        received=_shapes(received),
        sent=_shapes(traced.sent_shapes),
        residuals=tuple(traced.flat.avals[value] for value in halves.residuals),
        cotangents_in=traced.seeds,
        cotangents_out=halves.returned_places,
        forward_steps=tuple(forward),
        recompute_steps=tuple(again) if recompute else (),
        backward_steps=tuple(halves.backward),
        divide=lambda: _divide(traced, halves, accumulate),
        trained=traced.trained,
        gradient_annotations=_annotations(traced),
    )


def _annotations(traced: TracedStage) -> tuple[HSharding | None, ...]:
    """How gradients lie, where that was deduced."""
    known = traced.flat.annotations
    gradients = traced.gradients if known else ()
    return tuple(known[each] if isinstance(each, int) else None for each in gradients)


def _shapes(items: Sequence[Any]) -> Shapes:
    return tuple(abstract(list(items)))


def _divide(traced: TracedStage, halves: TracedPasses, accumulate: bool) -> SplitBackward:
    values = Values(traced.flat.avals)
    division = divide(
        halves.backward,
        halves.returned,
        traced.trained_gradients,
        values=values,
        free=traced.parameters,
        kept=(*traced.batch, *traced.received, *halves.residuals, *traced.cotangents),
        cotangents=traced.cotangents,
    )
    made = {output for step in division.first for output in step.outputs}
    deferred = tuple(value for value in division.crossing if value in made)
    light = tuple(traced.trained[i] for i in division.moved)
    heavy = tuple(i for i in traced.trained if i not in light)
    light_gradients = [traced.gradients[i] for i in light]
    heavy_gradients = [traced.gradients[i] for i in heavy]
    first_outputs = [*halves.returned, *deferred, *light_gradients]
    first_reads = _reads(traced, halves.residuals, division.first, first_outputs)
    second_reads = _reads(traced, halves.residuals, division.second, heavy_gradients)

    input_gradient = StepProgram(
        division.first,
        _arguments(traced, halves.residuals, first_reads),
        (halves.returned, deferred),
        values.avals,
        tuple(light_gradients),
        accumulate,
    )
    weight_gradient = StepProgram(
        division.second,
        (*_arguments(traced, halves.residuals, second_reads), deferred),
        (),
        values.avals,
        tuple(heavy_gradients),
        accumulate,
    )
    return SplitBackward(
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        input_gradient_reads=first_reads,
        weight_gradient_reads=second_reads,
        light=light,
        heavy=heavy,
        deferred=tuple(values.avals[value] for value in deferred),
        input_gradient_cost=steps_cost(division.first),
        weight_gradient_cost=steps_cost(division.second),
        deferred_bytes=sum(map(values.size, division.crossing)),
    )


def _reads(
    traced: TracedStage,
    residuals: Sequence[int],
    steps: Sequence[Step],
    outputs: Sequence[Operand],
) -> Reads:
    """What steps and outputs read of a stage's values."""
    read = {value for step in steps for value in step.values()}
    read.update(operand for operand in outputs if isinstance(operand, int))
    return Reads(
        *(
            _places(values, read)
            for values in (traced.batch, traced.received, residuals, traced.cotangents)
        )
    )


def _backward_reads(traced: TracedStage, halves: TracedPasses) -> Reads:
    outputs = (*halves.returned, *traced.trained_gradients)
    return _reads(traced, halves.residuals, halves.backward, outputs)


def _places(values: Sequence[int], read: Collection[int]) -> tuple[int, ...]:
    return tuple(place for place, value in enumerate(values) if value in read)


def _forward(
    traced: TracedStage, steps: tuple[Step, ...], residuals: tuple[int, ...]
) -> StepProgram:
    arguments = (traced.parameters, traced.batch, traced.received)
    return StepProgram(steps, arguments, (traced.sent, residuals), traced.flat.avals)


def _recompute(
    traced: TracedStage, steps: tuple[Step, ...], residuals: tuple[int, ...]
) -> StepProgram:
    arguments = _arguments(traced, (), _reads(traced, (), steps, residuals))[:3]
    return StepProgram(steps, arguments, (residuals,), traced.flat.avals)


def _backward(traced: TracedStage, halves: TracedPasses, accumulate: bool) -> StepProgram:
    return StepProgram(
        halves.backward,
        _arguments(traced, halves.residuals, _backward_reads(traced, halves)),
        (halves.returned,),
        traced.flat.avals,
        traced.trained_gradients,
        accumulate,
    )


def _arguments(
    traced: TracedStage, residuals: Sequence[int], reads: Reads
) -> tuple[tuple[int, ...], ...]:
    """The values of a program's inputs: parameters, batch, received, residuals, cotangents."""
    return (
        traced.parameters,
        tuple(traced.batch[i] for i in reads.batch),
        tuple(traced.received[i] for i in reads.received),
        tuple(residuals[i] for i in reads.residuals),
        tuple(traced.cotangents[i] for i in reads.cotangents),
    )
