"""Numbered values that can be added to, and steps under other numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from hetjax.pipeline.program.traced_program import (
    Constant,
    FlatJaxpr,
    Operand,
    num_bytes,
)


class Values:
    """The shapes of numbered values, to which new ones can be added."""

    def __init__(self, avals: Sequence[jax.ShapeDtypeStruct]):
        self.avals = list(avals)

    def new(self, shape: Sequence[int], dtype: Any) -> int:
        """The number of a new value."""
        self.avals.append(jax.ShapeDtypeStruct(tuple(shape), dtype))
        return len(self.avals) - 1

    def size(self, value: int) -> int:
        """A value's bytes."""
        return num_bytes(self.avals[value])


def renumbered(flat: FlatJaxpr, inputs: Sequence[Operand], values: Values) -> FlatJaxpr:
    """A flat jaxpr with given operands for its inputs and new numbers for all else."""
    known: dict[int, Operand] = dict(zip(flat.inputs, inputs, strict=True))

    def rename(operand: Operand) -> Operand:
        if isinstance(operand, Constant):
            return operand
        assert isinstance(operand, int), "nothing is sliced before a program is cut"
        return known[operand]

    steps = []
    for step in flat.steps:
        outputs = []
        for output in step.outputs:
            aval = flat.avals[output]
            known[output] = values.new(aval.shape, aval.dtype)
            outputs.append(known[output])
        operands = tuple(rename(operand) for operand in step.inputs)
        steps.append(replace(step, inputs=operands, outputs=tuple(outputs)))
    outputs = tuple(rename(operand) for operand in flat.outputs)
    return FlatJaxpr(tuple(values.avals), (), tuple(steps), outputs)
