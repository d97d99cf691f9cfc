"""A stage traced module by module: each differentiated by itself, and put together again.

Modules that are alike then have traces that are alike, equation by equation: what is said of the
equations of one can be said of all. Moves among members are written into them as reshards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.pipeline.program.traced_program import (
    FlatJaxpr,
    Operand,
    Program,
    Step,
    evaluate_steps,
    flatten_jaxpr,
    read_operand,
)
from hetjax.pipeline.stages.cutting import ParameterPart, Stage, cut
from hetjax.pipeline.stages.traced_stage import (
    TracedPasses,
    TracedStage,
    halve,
    trace_stage,
    traced_as,
)
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.deduction.opening import EXTREMA, opened_program
from hetjax.sharding.deduction.reshard import RESHARD, reshard

Shapes = Sequence[jax.ShapeDtypeStruct]

OperandMoves = Mapping[tuple[int, int], Sequence[Any]]
"""How operands are brought to lie, by the numbers of equation and operand: in these ways in turn.
None: whole on each member."""

Lying = Callable[[tuple[int, ...], Any], HSharding]
"""From the shape of a value, and how it shall lie, to its annotation."""


@dataclass(frozen=True, eq=False)
class TracedModule:
    """A module of a stage, traced.

    Args:
        run: its steps as a stage of their own.
        traced: its forward and backward pass.
        forward: the steps that no cotangent reaches, with the moves of their operands.
        backward: the others, with theirs.
        returned: the cotangents that it gives back.
    """

    run: Stage
    traced: TracedStage
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    returned: tuple[Operand, ...]


def trace_module(run: Stage, inputs: Sequence[Shapes], seeds: tuple[int, ...]) -> TracedStage:
    """Trace a module: its forward and backward pass.

    Calls, short scans and long extrema are opened.

    Args:
        run: the module's steps.
        inputs: shapes of its parameter parts, of the batch leaves it reads, of what it receives.
        seeds: which of its outputs have a cotangent, by place.

    Returns:
        The trace.
    """
    parameters, batch, received = inputs
    return trace_stage(run, parameters, batch, received, seeds, _opened)


def _opened(closed: _compat.ClosedJaxpr) -> FlatJaxpr:
    scans = [each for each in closed.jaxpr.eqns if each.primitive.name == "scan"]
    size = sum(each.params["length"] * len(each.params["jaxpr"].eqns) for each in scans)
    names = ("scan", *EXTREMA) if size <= _MOST_OPENED else EXTREMA
    return flatten_jaxpr(opened_program(closed, names))


_MOST_OPENED = 4000
"""How many equations a module's scans may become; others are computed as they are."""


def modules_of(program: Program, edges: Sequence[int]) -> tuple[Stage, ...]:
    """The modules of a stage, each as a stage of its own.

    Args:
        program: the traced loss function.
        edges: the positions where the stage's modules begin, and its end.

    Returns:
        The modules.
    """
    boundaries = sorted({0, *edges, program.num_positions})
    first = boundaries.index(edges[0])
    return cut(program, boundaries)[first : first + len(edges) - 1]


def trace_modules(
    stage: Stage,
    modules: Sequence[Stage],
    parameters: Shapes,
    batch: Shapes,
    received: Shapes,
    seeds: tuple[int, ...],
    moves: Sequence[OperandMoves],
    lying: Lying,
    flatten: Callable[[_compat.ClosedJaxpr], FlatJaxpr] = flatten_jaxpr,
) -> TracedStage:
    """Trace a stage module by module.

    Args:
        stage: the stage.
        modules: its modules, in order; see `modules_of`.
        parameters: shapes of its parameter parts.
        batch: shapes of the batch leaves it reads, for one microbatch.
        received: shapes of the values it receives, for one microbatch.
        seeds: which of its outputs have a cotangent, by place.
        moves: for each module how operands shall lie.
        lying: what makes annotations of that.
        flatten: what makes a flat jaxpr of the trace.

    Returns:
        The trace of the whole stage.
    """
    assert modules[0].receives == stage.receives, "modules begin as their stage does"
    shapes = dict(zip(stage.parameters, parameters, strict=True))
    leaves = dict(zip(stage.batch, batch, strict=True))
    written: list[TracedModule] = []
    cotangents = seeds
    for run, of in zip(reversed(modules), reversed(moves), strict=True):
        parts = [shapes[part] for part in run.parameters]
        values = [run.avals[value] for value in run.receives]
        found = trace_module(run, (parts, [leaves[leaf] for leaf in run.batch], values), cotangents)
        passes = halve(found, is_last=not run.sends)
        written.insert(0, _with_moves(run, found, passes, of, lying))
        cotangents = passes.returned_places
    function = functools.partial(_evaluate, stage, written)
    sent = written[-1].traced.sent_shapes
    arguments = (list(parameters), list(batch), list(received), [sent[i] for i in seeds])
    movable = written[0].traced.returned_places
    closed = jax.make_jaxpr(function)(*arguments)
    return traced_as(closed, arguments, sent, stage.trained, movable, seeds, flatten)


def _with_moves(
    run: Stage, traced: TracedStage, passes: TracedPasses, moves: OperandMoves, lying: Lying
) -> TracedModule:
    """A module in whose trace operands are brought to lie as they shall."""
    flat = traced.flat
    check_operands(flat, moves, "plan: what a module is told")
    number = len(flat.avals)
    held: dict[tuple[int, HSharding], int] = {}
    places = {step: place for place, step in enumerate(flat.steps)}
    wholes = {
        flat.steps[e].inputs[place]: ways for (e, place), ways in moves.items() if ways[-1] is None
    }

    def brought(operand: int, ways: Sequence[Any]) -> Iterator[Step]:
        """A value that lies as it shall, where no other operand does so already."""
        nonlocal number
        shape, source = flat.avals[operand].shape, operand
        if (operand, lying(shape, ways[-1])) in held:
            return
        if ways[-1] is not None and operand in wholes:
            # Of what every member has whole sometime, a part is free.
            yield from brought(operand, wholes[operand])
            source, ways = held[operand, lying(shape, None)], ways[-1:]
        for annotation in (lying(shape, how) for how in ways):
            yield _resharding(source, number, annotation)
            source, number = number, number + 1
        held[operand, lying(shape, ways[-1])] = source

    def written(steps: Sequence[Step]) -> Iterator[Step]:
        for step in steps:
            inputs = list(step.inputs)
            for place, operand in enumerate(inputs):
                if (places[step], place) not in moves or not isinstance(operand, int):
                    continue
                ways = moves[places[step], place]
                yield from brought(operand, ways)
                inputs[place] = held[operand, lying(flat.avals[operand].shape, ways[-1])]
            yield replace(step, inputs=tuple(inputs))

    forward = tuple(written(passes.before))
    before = set(passes.before)
    backward = tuple(written([step for step in flat.steps if step not in before]))
    return TracedModule(run, traced, forward, backward, passes.returned)


def check_operands(flat: FlatJaxpr, operands: Iterable[tuple[int, int]], where: str) -> None:
    """Check that a module's trace has operands.

    Args:
        flat: the trace.
        operands: their numbers of equation and operand.
        where: what errors name as what tells of them.

    Raises:
        InputError: it has not.
    """
    for equation, place in operands:
        if equation >= len(flat.steps) or place >= len(flat.steps[equation].inputs):
            raise InputError(
                f"{where} has operand {place} of equation {equation}; it has "
                f"{len(flat.steps)} equations"
                + (
                    f", and this one {len(flat.steps[equation].inputs)} operands"
                    if equation < len(flat.steps)
                    else ""
                )
            )


def _resharding(value: int, result: int, annotation: HSharding) -> Step:
    return Step(RESHARD.name, (value,), (result,), lambda x: [reshard(x, annotation)], None)


def _evaluate(
    stage: Stage,
    modules: Sequence[TracedModule],
    parameters: Sequence[Any],
    batch: Sequence[Any],
    received: Sequence[Any],
    cotangents: Sequence[Any],
) -> tuple[list[Any], list[Any], list[Any]]:
    """What `trace_stage` traces, with the modules' own passes."""
    held = dict(zip(stage.parameters, parameters, strict=True))
    leaves = dict(zip(stage.batch, batch, strict=True))
    environments: list[dict[int, Any]] = []
    values = list(received)
    for module in modules:
        traced, run = module.traced, module.run
        environment: dict[int, Any] = dict(zip(traced.received, values, strict=True))
        parts = (held[part] for part in run.parameters)
        environment.update(zip(traced.parameters, parts, strict=True))
        environment.update(zip(traced.batch, (leaves[leaf] for leaf in run.batch), strict=True))
        values = evaluate_steps(module.forward, environment, traced.sent)
        environments.append(environment)
    results = values
    given: dict[ParameterPart, list[Any]] = {}
    flowing = list(cotangents)
    for module, environment in zip(reversed(modules), reversed(environments), strict=True):
        traced = module.traced
        environment.update(zip(traced.cotangents, flowing, strict=True))
        evaluate_steps(module.backward, environment, ())
        for place in traced.trained:
            gradient = read_operand(environment, traced.gradients[place])
            given.setdefault(module.run.parameters[place], []).append(gradient)
        flowing = _read(environment, module.returned)
    first = modules[0].traced
    returned = _read(environments[0], first.returned)
    trained = [stage.parameters[place] for place in stage.trained]
    gradients = [
        _added(given[part]) if part in given else jnp.zeros(held[part].shape, held[part].dtype)
        for part in trained
    ]
    return results, gradients, returned


def _read(environment: Mapping[int, Any], operands: Sequence[Operand]) -> list[Any]:
    return [read_operand(environment, operand) for operand in operands]


def _added(arrays: Sequence[Any]) -> Any:
    return sum(arrays[1:], arrays[0])
