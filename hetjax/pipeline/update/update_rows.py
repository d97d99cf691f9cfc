"""Computing one stage's share of a traced update, row by row where a leaf is cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.errors import InputError
from hetjax.pipeline.program.row_steps import ELEMENTWISE, JOINS
from hetjax.pipeline.program.traced_program import (
    FlatJaxpr,
    Operand,
    Step,
    operand_value,
    read_operand,
)
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.pipeline.update.update_analysis import Message, UpdateAnalysis


class RowEvaluator:
    """Evaluates a stage's share of a traced update, on demand.

    Args:
        analysis: the update.
        stage: which stage.
        scalars: the messages that other stages have sent.
    """

    def __init__(self, analysis: UpdateAnalysis, stage: int, scalars: dict[Message, Any]):
        self.analysis, self.stage, self.scalars = analysis, stage, scalars
        self.known: dict[int, Any] = {}
        self.joined: dict[int, Any] = {}
        self.reciprocals: dict[int, Any] = {}

    def with_scalars(self) -> RowEvaluator:
        """An evaluator that knows the scalars that this one knows, and no arrays."""
        other = RowEvaluator(self.analysis, self.stage, dict(self.scalars))
        other.joined, other.reciprocals = dict(self.joined), dict(self.reciprocals)
        other.known = {v: each for v, each in self.known.items() if not jnp.ndim(each)}
        return other

    def read(self, operand: Operand) -> Any:
        """The value of an operand: the stage's rows of it, where it is an array that is cut."""
        value = operand_value(operand)
        if value is None:
            return read_operand({}, operand)
        messages = self.analysis.messages.get(value)
        if messages is not None:
            return self._joined(value, messages)
        return self._computed(value)

    def output(self, operand: Operand, part: ParameterPart) -> Any:
        """The stage's part of an output of the update."""
        array = self.read(operand)
        local = operand_value(operand) in self.analysis.local
        return array if local or part.stop is None else part.take(array)

    def message(self, message: Message) -> Any:
        """A scalar that this stage tells the others."""
        if message not in self.scalars:
            self.scalars[message] = self._computed(message.value)
        return self.scalars[message]

    def _joined(self, value: int, messages: list[Message]) -> Any:
        if value not in self.joined:
            arrays = [
                self.message(m) if m.stage == self.stage else self.scalars[m] for m in messages
            ]
            if len(arrays) > 1:
                arrays = [reduce(JOINS[self.analysis.producer[value].name], arrays)]
            self.joined[value] = arrays[0]
        return self.joined[value]

    def _computed(self, value: int) -> Any:
        # Not by recursion: a norm is a sum over all leaves, a chain deeper than the stack.
        wanted = [value]
        while wanted:
            if wanted[-1] in self.known:
                wanted.pop()
                continue
            step = self.analysis.producer[wanted[-1]]
            missing = self._missing(step)
            if not missing:
                operands = [self.read(operand) for operand in step.inputs]
                self.known.update(zip(step.outputs, self._evaluate(step, operands), strict=True))
            wanted += missing
        return self.known[value]

    def _missing(self, step: Step) -> list[int]:
        """What has to be computed before a step; what stages tell each other is joined instead."""
        values = (operand_value(operand) for operand in step.inputs)
        return [
            value
            for value in values
            if value is not None and value not in self.known and value not in self.analysis.messages
        ]

    def _reciprocal(self, value: int, scalar: Any) -> Any:
        if value not in self.reciprocals:
            self.reciprocals[value] = 1 / scalar
        return self.reciprocals[value]

    def _evaluate(self, step: Step, operands: list[Any]) -> list[Any]:
        if step.name == "div" and _divides_by_scalar(*operands) and len(step.values()) == 2:
            # XLA does so too, or not, by how many arrays a scalar divides: programs of other
            # groups of parameters would round unlike.
            return [operands[0] * self._reciprocal(step.values()[1], operands[1])]
        placement = self.analysis.step_placement(step)
        if placement is None or not placement.is_cut:
            return step.evaluate(*operands)
        part = placement.holders[self.stage]
        if part.stop is None:
            return step.evaluate(*operands)
        aligned = [
            array
            if operand_value(operand) in self.analysis.local
            else _align(
                array, part, placement.rows, self.analysis.flat.avals[step.outputs[0]].shape
            )
            for operand, array in zip(step.inputs, operands, strict=True)
        ]
        results = _evaluate_rows(step, aligned, part, placement.rows, self.analysis.flat)
        if results is None:
            raise InputError(self.analysis.refusal(self.stage, placement, step.name))
        return results


def _divides_by_scalar(array: Any, scalar: Any) -> bool:
    """Whether a division is of an array by one number, of as many digits as a reciprocal needs."""
    if not jnp.ndim(array) or jnp.ndim(scalar):
        return False
    return jnp.result_type(scalar) in (jnp.float32, jnp.float64)


def _align(array: Any, part: ParameterPart, rows: int, shape: Sequence[int]) -> Any:
    """The rows of a part, of an array that all stages have whole."""
    whole = jnp.ndim(array) > 0 and jnp.shape(array)[0] == rows and jnp.shape(array) == tuple(shape)
    return part.take(array) if whole else array


def _evaluate_rows(
    step: Step, operands: list[Any], part: ParameterPart, rows: int, flat: FlatJaxpr
) -> list[Any] | None:
    """A step on some of its rows; None where the rows depend on each other."""
    assert part.stop is not None
    count = part.stop - part.start
    shape = flat.avals[step.outputs[0]].shape
    leading = bool(shape) and shape[0] == rows
    if step.name in ELEMENTWISE:
        return step.evaluate(*operands)
    if step.equation is None:
        return None
    params = step.equation.params
    if step.name in JOINS:
        keeps_rows = 0 not in params["axes"]
        return step.evaluate(*operands) if keeps_rows or not shape else None
    if step.name == "broadcast_in_dim" and leading and params["broadcast_dimensions"][:1] == (0,):
        dimensions = params["broadcast_dimensions"]
        return [jax.lax.broadcast_in_dim(operands[0], (count, *shape[1:]), dimensions)]
    if step.name == "reshape" and leading:
        return [jax.lax.reshape(operands[0], (count, *shape[1:]))]
    if step.name == "squeeze" and leading and 0 not in params["dimensions"]:
        return step.evaluate(*operands)
    if step.name == "transpose" and params["permutation"][0] == 0:
        return step.evaluate(*operands)
    return None


def pack(scalars: list[Any]) -> list[Any]:
    """Scalars as one vector for each dtype, so that a message is few arrays."""
    groups: dict[Any, list[Any]] = {}
    for scalar in scalars:
        groups.setdefault(jnp.asarray(scalar).dtype, []).append(scalar)
    return [jnp.stack(group) for _, group in sorted(groups.items(), key=lambda item: str(item[0]))]


def unpack(messages: list[Message], vectors: Sequence[Any], flat: FlatJaxpr) -> dict[Message, Any]:
    """The scalars in what `pack` made of them."""
    dtypes = [str(flat.avals[message.value].dtype) for message in messages]
    order = sorted(set(dtypes))
    used = dict.fromkeys(order, 0)
    scalars = {}
    for message, dtype in zip(messages, dtypes, strict=True):
        scalars[message] = vectors[order.index(dtype)][used[dtype]]
        used[dtype] += 1
    return scalars
