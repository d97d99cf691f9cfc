"""What runs of a program are given, and which of them are the same work."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from weakref import WeakKeyDictionary

import jax

from hetjax.pipeline.program.forms import form_of
from hetjax.pipeline.program.traced_program import Constant, Operand, Program
from hetjax.pipeline.stages.cutting import ParameterPart, Stage

ShapeList = list[jax.ShapeDtypeStruct]
Inputs = tuple[ShapeList, ShapeList, ShapeList]
"""Shapes of a run's parameter parts, of the batch leaves it reads, of the values it receives."""


def part_shape(program: Program, part: ParameterPart) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a parameter part.

    Args:
        program: the traced loss function.
        part: a part of one of its parameters.
    """
    whole = program.avals[program.parameters[part.leaf]]
    return jax.ShapeDtypeStruct(part.shape(whole.shape), whole.dtype)


def inputs_of(program: Program, runs: Sequence[Stage]) -> list[Inputs]:
    """The shapes of the inputs of a program's runs.

    Args:
        program: the traced loss function.
        runs: its runs, as it was cut.
    """
    return [
        (
            [part_shape(program, part) for part in run.parameters],
            [program.avals[program.batch[leaf]] for leaf in run.batch],
            [run.avals[value] for value in run.receives],
        )
        for run in runs
    ]


def shape_keys(inputs: Inputs) -> Hashable:
    """The shapes of a run's inputs, to tell runs by: what only passes through is in no equation.

    Args:
        inputs: what the run is given.
    """
    return tuple(tuple((each.shape, str(each.dtype)) for each in group) for group in inputs)


def structure_of(program: Program, run: Stage) -> Hashable:
    """What makes two runs the same work: their steps on values of the same shapes.

    Values are numbered anew, by what they are to the run, so that the blocks of a model, which
    differ in nothing but their parameters, are differentiated once.

    Args:
        program: the traced loss function.
        run: a run of it.
    """
    if run in _structures:
        return _structures[run]
    codes: dict[int, Hashable] = {}
    for place, part in enumerate(run.parameters):
        codes[program.parameters[part.leaf]] = ("parameter", place)
    codes |= {program.batch[leaf]: ("batch", place) for place, leaf in enumerate(run.batch)}
    codes |= {value: ("received", place) for place, value in enumerate(run.receives)}

    def code(operand: Operand) -> Hashable:
        if isinstance(operand, Constant):
            return "constant"
        return codes.get(operand)

    steps = []
    for step in run.steps:
        codes |= {output: len(codes) + place for place, output in enumerate(step.outputs)}
        steps.append((form_of(step), tuple(code(operand) for operand in step.inputs)))
    sent = tuple(code(value) for value in run.sends)
    _structures[run] = tuple(steps), sent, run.trained, run.moving
    return _structures[run]


_structures: WeakKeyDictionary[Stage, Hashable] = WeakKeyDictionary()
"""The structures of runs that were looked at before."""
