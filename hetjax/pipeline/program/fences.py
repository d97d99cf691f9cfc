"""Fences: values that a compiler for CPUs must not compute again in each kernel that reads them.

XLA fuses cheap arithmetic into every kernel that reads its result. On CPUs it does so without end:
the residual stream of a Transformer and its gradient are sums over all blocks, and each block's
kernels add them up from the start, so that work grows with the square of depth (measured: a third
of a GPT's step with 8 blocks). A fence puts the last step of such a sum into a conditional, whose
results are always stored. Its predicate is an input of the program, always true, which the
compiler cannot know.

What a backward pass makes again needs a fence on CPUs, too: XLA drops its own barriers there before
it puts a program into order, and makes everything again at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.pipeline.program.costs import is_expensive
from hetjax.pipeline.program.products import with_narrow_operand_first
from hetjax.pipeline.program.traced_program import (
    Operand,
    Step,
    evaluate_steps,
    num_bytes,
    operand_value,
)
from hetjax.sharding.deduction.region import REGION

_READS = 3
"""A value is fenced that takes at least this many times its own bytes to be computed again."""

_predicate: ContextVar[Any] = ContextVar("predicate", default=None)


@contextmanager
def fenced(predicate: Any) -> Iterator[None]:
    """Fence what `evaluate` traces in this block.

    Args:
        predicate: a traced boolean scalar that is always true.
    """
    token = _predicate.set(predicate)
    try:
        yield
    finally:
        _predicate.reset(token)


def evaluate(
    steps: Sequence[Step],
    environment: dict[int, Any],
    outputs: Sequence[Operand],
    avals: Sequence[jax.ShapeDtypeStruct],
) -> list[Any]:
    """Evaluate steps, with fences where `fenced` asks for them.

    Args:
        steps: what to evaluate, in order.
        environment: the values that are known, by number; it is filled with those that are made.
        outputs: the operands to return.
        avals: the shapes of all values, by number.

    Returns:
        One value for each operand of ``outputs``.
    """
    predicate = _predicate.get()
    if predicate is None:
        return evaluate_steps(steps, environment, outputs)
    chosen = fenced_values(steps, outputs, avals)
    behind = [
        _behind_fence(step, predicate)
        if step.name == REGION or chosen.intersection(step.outputs)
        else with_narrow_operand_first(step)
        for step in steps
    ]
    return evaluate_steps(behind, environment, outputs)


def fenced_values(
    steps: Sequence[Step], outputs: Sequence[Operand], avals: Sequence[jax.ShapeDtypeStruct]
) -> frozenset[int]:
    """The values that are read more than once and take much reading to be computed again.

    Args:
        steps: the steps, in order.
        outputs: their results.
        avals: the shapes of all values, by number.

    Returns:
        Numbers of values that cheap steps make.
    """
    uses: dict[int, int] = {}
    for step in steps:
        for value in set(step.values()):
            uses[value] = uses.get(value, 0) + 1
    for output in outputs:
        value = operand_value(output)
        if value is not None:
            uses[value] = uses.get(value, 0) + 1
    sources: dict[int, frozenset[int]] = {}
    chosen: set[int] = set()
    for step in steps:
        if is_expensive(step):
            sources.update({output: frozenset({output}) for output in step.outputs})
            continue
        read = frozenset[int]().union(*(sources.get(v, frozenset({v})) for v in step.values()))
        again = sum(num_bytes(avals[value]) for value in read)
        for output in step.outputs:
            if uses.get(output, 0) > 1 and again >= _READS * num_bytes(avals[output]) > 0:
                chosen.add(output)
                sources[output] = frozenset({output})
            else:
                sources[output] = read
    return frozenset(chosen)


def _behind_fence(step: Step, predicate: Any) -> Step:
    def evaluate_behind(*operands: Any) -> list[Any]:
        def nothing(*operands: Any) -> list[Any]:
            shapes = jax.eval_shape(step.evaluate, *operands)
            return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]

        return jax.lax.cond(predicate, step.evaluate, nothing, *operands)

    return Step(step.name, step.inputs, step.outputs, evaluate_behind, step.equation)
