"""Evaluating a program of operators: one by one, or as a whole that can be compiled.

Whoever evaluates says what an operator gives. One by one, loops run their iterations and branches
are chosen, by the values that are there; as a whole they stay JAX's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import _compat
from hetjax.alignment.operators import ControlFlow, Operator, OperatorBlock, shapes_of
from hetjax.pipeline.program.traced_program import read_operand

Place = tuple[int, ...]
"""Which iteration of each loop that an operator stands in, the outermost first."""

Visit = Callable[[Operator, list[Any], Place], list[Any]]
"""From an operator and its operands to its results."""

Watch = Callable[[Operator, list[Any], list[Any]], Any]
"""From an operator, its operands and its results to whether something is wrong; or to None."""

_Control = Callable[[ControlFlow, list[Any], Visit, Place], list[Any]]


def evaluate(block: OperatorBlock, inputs: Sequence[Any], visit: Visit) -> list[Any]:
    """Evaluate operators one by one.

    Args:
        block: the operators.
        inputs: one array for each of its inputs.
        visit: gives the results of an operator; it is asked for each iteration of a loop anew.

    Returns:
        One array for each of its outputs.
    """
    return _evaluate(block, inputs, visit, _one_by_one, ())


def evaluate_whole(
    block: OperatorBlock, inputs: Sequence[Any], visit: Visit, watch: Watch
) -> tuple[list[Any], Any]:
    """Evaluate operators on values or tracers, with loops and branches as JAX has them.

    Args:
        block: the operators.
        inputs: one value for each of its inputs.
        visit: gives the results of an operator; the iterations of a loop are not told.
        watch: from an operator, its operands and its results to whether something is wrong there;
            None where it does not look.

    Returns:
        One value for each of its outputs, and whether something was wrong anywhere.
    """
    return _Whole(visit, watch).run(block, inputs)


def _evaluate(
    block: OperatorBlock, inputs: Sequence[Any], visit: Visit, control: _Control, place: Place
) -> list[Any]:
    environment = dict(zip(block.flat.inputs, inputs, strict=True))
    steps = zip(block.flat.steps, block.entries, block.last_uses, strict=True)
    for step, entry, dead in steps:
        operands = [read_operand(environment, operand) for operand in step.inputs]
        if isinstance(entry, Operator):
            results = visit(entry, operands, place)
        else:
            results = control(entry, operands, visit, place)
        environment.update(zip(step.outputs, results, strict=True))
        for value in dead:
            environment.pop(value, None)
    return [read_operand(environment, operand) for operand in block.flat.outputs]


def _one_by_one(entry: ControlFlow, operands: list[Any], visit: Visit, place: Place) -> list[Any]:
    def run(which: int, inputs: Sequence[Any], iteration: int) -> list[Any]:
        there = (*place, iteration)
        return _evaluate(entry.blocks[which], inputs, visit, _one_by_one, there)

    params = entry.equation.params
    if entry.name == "cond":
        which = min(max(int(operands[0]), 0), len(entry.blocks) - 1)
        return run(which, operands[1:], which)
    if entry.name == "while":
        condition, body, carry = _loop_operands(params, operands)
        iteration = 0
        while np.any(going := run(0, [*condition, *carry], iteration)[0]):
            carry = _going_on(going, run(1, [*body, *carry], iteration), carry)
            iteration += 1
        return carry
    constants, carry, rows = _scan_operands(params, operands)
    gathered: list[list[Any]] = []
    order = range(params["length"])
    for iteration in reversed(order) if params["reverse"] else order:
        made = run(0, [*constants, *carry, *(row[iteration] for row in rows)], iteration)
        carry, each = made[: len(carry)], made[len(carry) :]
        gathered.append(each)
    if params["reverse"]:
        gathered.reverse()
    stacked = [jnp.stack(each) for each in zip(*gathered, strict=True)]
    if not gathered:
        shapes = shapes_of(entry.equation.outvars[len(carry) :])
        stacked = [jnp.empty(shape.shape, shape.dtype) for shape in shapes]
    return [*carry, *stacked]


def _going_on(going: Any, made: Sequence[Any], carry: Sequence[Any]) -> list[Any]:
    """What a loop carries on: JAX batches one so that each example has a condition of its own."""
    dimensions = range(jnp.ndim(going))
    if not dimensions:
        return list(made)
    return [
        jax.lax.select(jax.lax.broadcast_in_dim(going, jnp.shape(new), dimensions), new, old)
        for new, old in zip(made, carry, strict=True)
    ]


class _Whole:
    """Evaluates blocks that may be traced, each with whether something was wrong in it."""

    def __init__(self, visit: Visit, watch: Watch) -> None:
        self._visit, self._watch = visit, watch

    def run(self, block: OperatorBlock, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        wrong: list[Any] = [jnp.asarray(False)]

        def visit(operator: Operator, operands: list[Any], place: Place) -> list[Any]:
            results = self._visit(operator, operands, place)
            seen = self._watch(operator, operands, results)
            if seen is not None:
                wrong.append(seen)
            return results

        def control(entry: ControlFlow, operands: list[Any], _: Visit, __: Place) -> list[Any]:
            results, seen = getattr(self, f"_{entry.name}")(entry, operands)
            wrong.append(seen)
            return results

        outputs = _evaluate(block, inputs, visit, control, ())
        return outputs, jnp.stack(wrong).any()

    def _cond(self, entry: ControlFlow, operands: list[Any]) -> tuple[list[Any], Any]:
        branches = [lambda *inputs, block=block: self.run(block, inputs) for block in entry.blocks]
        return jax.lax.switch(operands[0], branches, *operands[1:])

    def _while(self, entry: ControlFlow, operands: list[Any]) -> tuple[list[Any], Any]:
        condition, body, carry = _loop_operands(entry.equation.params, operands)
        asked, done = entry.blocks
        is_batched = bool(entry.equation.params["cond_jaxpr"].out_avals[0].shape)

        def going(carried: list[Any]) -> Any:
            return self.run(asked, [*condition, *carried])[0][0]

        def iterate(state: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
            carried, before = state
            made, seen = self.run(done, [*body, *carried])
            # Of a loop that is not batched the condition was asked, and holds.
            after = _going_on(going(carried), made, carried) if is_batched else made
            return after, before | seen

        return jax.lax.while_loop(
            lambda state: jnp.any(going(state[0])), iterate, (carry, jnp.asarray(False))
        )

    def _scan(self, entry: ControlFlow, operands: list[Any]) -> tuple[list[Any], Any]:
        params = entry.equation.params
        constants, carry, rows = _scan_operands(params, operands)

        def iterate(state: tuple[list[Any], Any], row: list[Any]) -> tuple[Any, list[Any]]:
            made, seen = self.run(entry.blocks[0], [*constants, *state[0], *row])
            return (made[: len(carry)], state[1] | seen), made[len(carry) :]

        (carry, wrong), gathered = jax.lax.scan(
            iterate,
            (carry, jnp.asarray(False)),
            rows,
            length=params["length"],
            reverse=params["reverse"],
        )
        return [*carry, *gathered], wrong


def _scan_operands(params: Any, operands: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """A scan's constants, its first carry, and what it goes over."""
    first, count = _compat.scan_sizes(params)
    last = first + count
    return operands[:first], operands[first:last], operands[last:]


def _loop_operands(params: Any, operands: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The constants of a loop's condition, those of its body, and its first carry."""
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    return operands[:first], operands[first:last], operands[last:]
