"""Coupled examples: whether a loss is another one for another number of microbatches.

The loss of a batch is the sum of its microbatches' totals over the sum of their counts. That is the
same for every number of equal microbatches where the total and the count are sums over the examples
of what is made of each by itself. It is not where an example is normalised by statistics of all, is
compared with others, or draws a number by its place; nor where a total has a summand that no
example has a part in, which then counts once for each microbatch.

It is told from the traced program, as what members would have to exchange that share its examples.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from hetjax import _compat
from hetjax.pipeline.program.traced_program import Constant, Operand, Program, needed_steps
from hetjax.planner.work.example_shares import (
    ExampleWalk,
    WalkedEquation,
    WalkedValue,
    examples_of,
)
from hetjax.planner.work.growth import Growth, growth_of
from hetjax.planner.work.value_facts import ValueFacts
from hetjax.sharding.deduction.top_tier import WHOLE

OTHERS, PLACE, NUMBER = (
    "the others of its microbatch",
    "its place in the microbatch",
    "how many examples its microbatch has",
)


_LONGEST = 500
"""Characters of a line's path that are shown."""


@dataclass(frozen=True)
class Coupling:
    """Why a loss may be another one for another number of microbatches.

    Args:
        cause: what else than itself an example's part in the loss may depend on.
        equation: the primitive that makes it so; empty where it is what the loss returns.
        line: where that stands in the user's program.
    """

    cause: str
    equation: str = ""
    line: str = ""

    def __str__(self) -> str:
        where = f" ({self.equation} at {self.line})" if self.equation else ""
        return f"what the loss makes of an example may depend on {self.cause}{where}"


def coupling_of(program: Program, other: Program | None = None) -> Coupling | None:
    """Why a loss may be another one for another number of microbatches.

    Args:
        program: the traced loss function.
        other: the same, traced for another number of examples: it tells what is divided by that
            number from what is not, which is not asked where there is none, or where the two differ
            in more than sizes.

    Returns:
        The first reason; None where the loss is the same for every number of equal microbatches.

    Example:
        >>> import jax.numpy as jnp
        >>> from hetjax.pipeline.program.tracing import trace
        >>> spread = trace(lambda w, x: jnp.mean((w * x - jnp.mean(x)) ** 2), 1.0, jnp.ones(4))
        >>> found = coupling_of(spread)
        >>> found and found.cause
        'the others of its microbatch'
        >>> coupling_of(trace(lambda w, x: jnp.mean((w * x) ** 2), 1.0, jnp.ones(4)))
    """
    growth = None if other is None else growth_of(program, other)
    return _Look(growth).at(program)


class _Look:
    """One look at a program.

    Args:
        growth: what grows with the number of examples; None for what is not asked.
    """

    def __init__(self, growth: Growth | None):
        self._is_asked = growth is not None
        self._facts = ValueFacts(growth or Growth())
        self._found: dict[str, Coupling] = {}

    def at(self, program: Program) -> Coupling | None:
        """The first reason that is found in a program."""
        values = {number: WalkedValue(program.avals[number]) for number in program.parameters}
        for number in program.batch:
            shape = program.avals[number]
            values[number] = examples_of(shape, shape.shape[0])

        def value(operand: Operand) -> WalkedValue:
            if isinstance(operand, Constant):
                return WalkedValue(jax.typeof(operand.value), constant=operand)
            assert isinstance(operand, int), "a traced program has no slices"
            return values[operand]

        walk, sums = ExampleWalk(self._exchanged, self._computed), (program.total, program.count)
        for step in needed_steps(program.steps, sums):
            assert step.equation is not None, "a traced program has equations"
            results = walk.follow(step.equation, [value(each) for each in step.inputs])
            values.update(zip(step.outputs, results, strict=True))
        if self._is_asked and not self._grow_alike(*map(value, sums)):
            self._found.setdefault(NUMBER, Coupling(NUMBER))
        # What depends on others is seldom known to the end.
        causes = (cause for cause in (OTHERS, PLACE, NUMBER) if cause in self._found)
        return next((self._found[cause] for cause in causes), None)

    def _exchanged(self, equation: _compat.JaxprEqn, size: float, times: int) -> None:
        del size, times
        self._find(OTHERS, equation)

    def _computed(self, found: WalkedEquation) -> None:
        for place, taken in found.taken.items():
            operand, dimension = found.operands[place], taken.dimension
            if dimension is not None and not self._is_even(operand, dimension):
                self._find(PLACE, found.equation)
        self._facts.learn(found)
        unknown = any(self._facts.of(each).power is None for each in found.results)
        if unknown and self._is_asked:
            self._find(NUMBER, found.equation)

    def _find(self, cause: str, equation: _compat.JaxprEqn) -> None:
        if cause not in self._found:
            line = _compat.source_line(equation)
            # A plan's file takes no longer one, nor one that cannot be seen.
            is_plain = line.isprintable() and len(line) < _LONGEST
            line = line if is_plain else "a line of an odd path"
            self._found[cause] = Coupling(cause, equation.primitive.name, line)

    def _is_even(self, value: WalkedValue, dimension: int) -> bool:
        facts = self._facts.of(value)
        return facts.is_zero or dimension in facts.even or value.shape.shape[dimension] == 1

    def _grow_alike(self, total: WalkedValue, count: WalkedValue) -> bool:
        """Whether the sums over microbatches of both grow alike with the size of these."""
        facts = [self._facts.of(each) for each in (total, count)]
        powers = [
            None if each.power is None else each.power - (value.top == WHOLE)
            for each, value in zip(facts, (total, count), strict=True)
        ]
        return facts[0].is_zero or (None not in powers and powers[0] == powers[1])
