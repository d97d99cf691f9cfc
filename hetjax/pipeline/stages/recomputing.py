"""Stages that keep of some runs of positions only what goes in, and compute these runs again.

Each run is made again right before its own backward pass, so that what it would have kept is there
for one run at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from hetjax import _compat
from hetjax.pipeline.program.traced_program import (
    Operand,
    Step,
    evaluate_steps,
    flatten_jaxpr,
)
from hetjax.pipeline.program.values import Values, renumbered
from hetjax.pipeline.stages.cutting import Body, Stage
from hetjax.pipeline.stages.split_backward import copies, values_read
from hetjax.pipeline.stages.traced_stage import TracedStage
from hetjax.sharding.deduction.region import REGION_BARRIER

Run = tuple[int, int]
"""The first position of a run, and the one after its last."""


def recomputing(stage: Stage, runs: Sequence[Run]) -> Stage:
    """A stage that computes some runs of its positions again before their backward passes.

    Args:
        stage: the stage, as its program was cut.
        runs: runs of positions inside it, in order.

    Returns:
        The stage, which computes the same.
    """
    body = stage.function
    assert isinstance(body, Body), "the stage is as it was cut"
    values = Values(stage.avals)
    pieces = [
        (step, _run_at(runs, position))
        for step, position in zip(body.steps, body.positions, strict=True)
    ]
    steps: list[Step] = []
    # By value, the place of the last step that reads it.
    last_read = {value: p for p, (step, _) in enumerate(pieces) for value in step.values()}
    last_read |= dict.fromkeys(values_read(body.outputs), len(pieces))
    end = 0
    for run, group in itertools.groupby(pieces, key=lambda piece: piece[1]):
        found = [step for step, _ in group]
        end += len(found)
        steps += found if run is None else _region(found, last_read, end)
    # Where a step stands is of no use once it is a part of a region.
    function = replace(body, steps=tuple(steps), positions=(-1,) * len(steps))
    return replace(stage, function=function, avals=values.avals)


def _run_at(runs: Sequence[Run], position: int) -> int | None:
    """The number of the run that has a position."""
    found = (number for number, (first, end) in enumerate(runs) if first <= position < end)
    return next(found, None)


def _region(steps: Sequence[Step], last_read: Mapping[int, int], end: int) -> list[Step]:
    """Steps as one that is made again before its backward pass; none where nothing is read of it.

    Args:
        steps: the steps.
        last_read: by value, the place of the last step that reads it.
        end: the place after them.
    """
    made = {output for step in steps for output in step.outputs}
    reads = dict.fromkeys(value for step in steps for value in step.values())
    inputs = tuple(value for value in reads if value not in made)
    outputs = tuple(v for step in steps for v in step.outputs if last_read.get(v, -1) >= end)

    def run(*arrays: Any) -> list[Any]:
        return evaluate_steps(steps, dict(zip(inputs, arrays, strict=True)), outputs)

    again = jax.checkpoint(run)
    return [Step("checkpoint", inputs, outputs, again, None)] if outputs else []


def with_open_regions(traced: TracedStage) -> TracedStage:
    """A trace with the steps of what is made again, in the place of the regions that they are in.

    The compiler must neither take what is made again for what the forward pass made, nor make it
    before the cotangents are there that it is made for: both go through one barrier first.

    Args:
        traced: the trace of a stage that `recomputing` made.

    Returns:
        A trace of the same results.
    """
    flat, values = traced.flat, Values(traced.flat.avals)
    steps: list[Step] = []
    reached = set(traced.cotangents)
    for step in flat.steps:
        is_again = not reached.isdisjoint(step.values())
        if is_again:
            reached.update(step.outputs)
        inner = None if step.equation is None else _compat.checkpointed_jaxpr(step.equation)
        if inner is None:
            steps.append(step)
            continue
        if not is_again:
            # Nothing is trained in it or before it: it has no backward pass to be made again for.
            steps += _opened(inner, step.inputs, step.outputs, values)
            continue
        moving = [v for v in dict.fromkeys(step.values()) if v not in traced.parameters]
        barrier, behind = _barrier(moving, values)
        inputs = [behind.get(each, each) if isinstance(each, int) else each for each in step.inputs]
        steps += [barrier, *_opened(inner, inputs, step.outputs, values)]
    return replace(traced, flat=replace(flat, avals=tuple(values.avals), steps=tuple(steps)))


def with_open_calls(traced: TracedStage) -> TracedStage:
    """A trace with the steps of functions that have a rule of their own, in the place of the calls.

    Where nothing is trained before such a function it is not differentiated, and stays a call.

    Args:
        traced: the trace of a stage.

    Returns:
        A trace of the same results.
    """
    flat, values = traced.flat, Values(traced.flat.avals)
    steps: list[Step] = []
    for step in flat.steps:
        inner = None if step.equation is None else _compat.inlined_jaxpr(step.equation)
        steps += [step] if inner is None else _opened(inner, step.inputs, step.outputs, values)
    return replace(traced, flat=replace(flat, avals=tuple(values.avals), steps=tuple(steps)))


def _opened(
    inner: _compat.ClosedJaxpr, inputs: Sequence[Operand], outputs: Sequence[int], values: Values
) -> list[Step]:
    """The steps inside of a step, from its operands to its results."""
    opened = renumbered(flatten_jaxpr(inner), inputs, values)
    return [*opened.steps, *copies(opened.outputs, outputs)]


def _barrier(moving: Sequence[int], values: Values) -> tuple[Step, dict[int, int]]:
    """A barrier that values go through together, and their numbers behind it."""
    shapes = [values.avals[value] for value in moving]
    behind = {
        value: values.new(shape.shape, shape.dtype)
        for value, shape in zip(moving, shapes, strict=True)
    }
    (step,) = flatten_jaxpr(jax.make_jaxpr(REGION_BARRIER.bind)(*shapes)).steps
    return replace(step, inputs=tuple(moving), outputs=tuple(behind.values())), behind


def with_barriers(
    closed: _compat.ClosedJaxpr, num_parameters: int, num_cotangents: int
) -> _compat.ClosedJaxpr:
    """A trace whose regions that are made again take their operands from behind barriers.

    For whoever opens regions, and so would forget when they are to be made again: a step behind a
    barrier depends on the cotangents that come to it.

    Args:
        closed: the trace of a stage that `recomputing` made.
        num_parameters: how many inputs are parameters, the first ones.
        num_cotangents: how many are cotangents, the last ones.

    Returns:
        The trace; as it is where it has no such region.
    """
    jaxpr = closed.jaxpr
    if not any(_compat.checkpointed_jaxpr(each) for each in jaxpr.eqns):
        return closed
    held = set(jaxpr.invars[:num_parameters])
    reached = set(jaxpr.invars[len(jaxpr.invars) - num_cotangents :])
    equations: list[_compat.JaxprEqn] = []
    for equation in jaxpr.eqns:
        reads = [each for each in equation.invars if not isinstance(each, _compat.Literal)]
        if reached.isdisjoint(reads):
            equations.append(equation)
            continue
        reached.update(equation.outvars)
        if _compat.checkpointed_jaxpr(equation) is None:
            equations.append(equation)
            continue
        moving = [each for each in dict.fromkeys(reads) if each not in held]
        made = jax.make_jaxpr(REGION_BARRIER.bind)(*(each.aval for each in moving))
        (barrier,) = made.jaxpr.eqns
        behind = dict(zip(moving, barrier.outvars, strict=True))
        taken = [
            each if isinstance(each, _compat.Literal) else behind.get(each, each)
            for each in equation.invars
        ]
        equations += [barrier.replace(invars=moving), equation.replace(invars=taken)]
    return _compat.ClosedJaxpr(jaxpr.replace(eqns=equations), closed.consts)
