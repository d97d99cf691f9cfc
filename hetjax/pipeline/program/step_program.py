"""Programs of steps: what a task computes, as data that can be looked into and divided."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from hetjax.pipeline.program.fences import evaluate
from hetjax.pipeline.program.loss import accumulator_dtype
from hetjax.pipeline.program.traced_program import Operand, Step, needed_steps


@dataclass(frozen=True, eq=False)
class Otherwise:
    """What is computed where a program's steps are not.

    Args:
        predicate: the value that tells: a boolean scalar, one of the program's arguments.
        steps: the steps.
        outputs: the operands that stand in the place of the program's outputs.
    """

    predicate: int
    steps: tuple[Step, ...]
    outputs: tuple[Operand, ...]


@dataclass(frozen=True, eq=False, repr=False)  # JAX writes down what it compiles.
class StepProgram:
    """A function of sequences of arrays that evaluates steps.

    Args:
        steps: what it computes, in order.
        arguments: the values that each of its arguments holds.
        outputs: the operands that it returns, in as many sequences.
        avals: shapes of all values, by number.
        summands: operands that are added to sums, which are one argument more, and returned after
            all else; None where it adds nothing.
        accumulate: whether there are sums already; else that argument is empty, and the summands
            come back in the dtype of sums.
        otherwise: what it returns in the place of its outputs where a value is false.
    """

    steps: tuple[Step, ...]
    arguments: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[Operand, ...], ...]
    avals: Sequence[jax.ShapeDtypeStruct]
    summands: tuple[Operand, ...] | None = None
    accumulate: bool = True
    otherwise: Otherwise | None = None

    def __call__(self, *arrays: Sequence[Any]) -> tuple[list[Any], ...]:
        """Evaluate it on arrays or tracers."""
        given, sums = arrays, ()
        if self.summands is not None:
            *given, sums = arrays
        known = zip(itertools.chain(*self.arguments), itertools.chain(*given), strict=True)
        wanted = [*itertools.chain(*self.outputs), *(self.summands or ())]
        results = iter(self._evaluated(dict(known), wanted))
        returned = (*(list(itertools.islice(results, len(part))) for part in self.outputs),)
        if self.summands is None:
            return returned
        return (*returned, accumulated(list(results), sums, self.accumulate))

    def _evaluated(self, known: dict[int, Any], wanted: Sequence[Operand]) -> list[Any]:
        if self.otherwise is None:
            return evaluate(self.steps, known, wanted, self.avals)
        other = self.otherwise
        return jax.lax.cond(
            known[other.predicate],
            lambda: evaluate(self.steps, dict(known), wanted, self.avals),
            lambda: evaluate(other.steps, dict(known), other.outputs, self.avals),
        )

    def returning(self, *outputs: tuple[Operand, ...]) -> StepProgram:
        """The same of other outputs, with the steps alone that these need."""
        wanted = list(itertools.chain(*outputs))
        return replace(self, outputs=outputs, steps=needed_steps(self.steps, wanted))


def accumulated(summands: Sequence[Any], sums: Sequence[Any], accumulate: bool) -> list[Any]:
    """Summands added to sums; where there are none yet, in the dtype of sums.

    Args:
        summands: arrays.
        sums: as many arrays, which may be wider; empty where there are none yet.
        accumulate: whether there are.
    """
    if not accumulate:
        return [each.astype(accumulator_dtype(each.dtype)) for each in summands]
    return [a + each.astype(a.dtype) for a, each in zip(sums, summands, strict=True)]
