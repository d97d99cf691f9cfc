"""Goes over a stage's trace: how values lie after each of its steps and moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import jax

from hetjax import _compat
from hetjax.pipeline.program.traced_program import Constant, Operand, Step
from hetjax.pipeline.stages.traced_stage import TracedStage
from hetjax.planner.work.example_shares import ExampleWalk, WalkedEquation, WalkedValue
from hetjax.sharding.annotation.annotation import PARTIAL
from hetjax.sharding.deduction.reshard import RESHARD, Resharding
from hetjax.sharding.deduction.top_tier import WHOLE, TopTier

Noted = TypeVar("Noted")
"""What is noted of a step."""


class TraceWalk(ABC, Generic[Noted]):
    """Goes over a stage's trace, whose moves are reshards, by the signatures of its equations.

    Steps whose equation and operands are as those of another are not gone over again: blocks that
    are alike have the same equations.

    Args:
        traced: the stage's trace, with the moves of its attentions and tokens in it.

    Attributes:
        values: by its number in the trace, each value that was met.
        noted: what is noted of the step that is gone over.
    """

    def __init__(self, traced: TracedStage):
        self.traced = traced
        self.values: dict[int, WalkedValue] = {}
        self.noted = self.nothing_noted()
        self._walk = ExampleWalk(self.note_exchange, self.note_equation)
        self._known: dict[object, tuple[Noted, tuple[TopTier, ...]]] = {}
        self._origins: dict[int, TopTier] = {}

    @abstractmethod
    def nothing_noted(self) -> Noted:
        """What is noted of a step before it is gone over."""

    @abstractmethod
    def note_exchange(self, equation: _compat.JaxprEqn, size: float, times: int) -> None:
        """Note that bytes are exchanged for an equation, so often."""

    @abstractmethod
    def note_equation(self, walked: WalkedEquation) -> None:
        """Note an equation."""

    @abstractmethod
    def wanted(self, resharding: Resharding, shape: Sequence[int]) -> TopTier:
        """How a value is to lie after a move that is not the way back of another."""

    @abstractmethod
    def note_move(self, step: Step, operand: WalkedValue, top: TopTier) -> None:
        """Note that a value comes to lie in another way, or in the same."""

    def follow(
        self, equation: _compat.JaxprEqn, operands: Sequence[WalkedValue]
    ) -> list[WalkedValue]:
        """Go over an equation of the trace that moves nothing; what it makes."""
        return self._walk.follow(equation, operands)

    def walk(self, lies: Mapping[int, TopTier]) -> dict[Step, Noted]:
        """Go over the trace.

        Args:
            lies: how inputs of the trace lie that are not whole everywhere, by their numbers.

        Returns:
            What was noted of each step.
        """
        flat, values = self.traced.flat, self.values
        values.update((n, WalkedValue(flat.avals[n], lies.get(n, WHOLE))) for n in flat.inputs)
        noted: dict[Step, Noted] = {}
        for step in flat.steps:
            operands = [self._value(each) for each in step.inputs]
            self.noted = self.nothing_noted()
            if step.equation is None:
                # It gives a value another number.
                results = operands
            elif step.equation.primitive is RESHARD:
                results = [self._moved(step, step.equation.params["resharding"], operands[0])]
            else:
                results = self._followed(step, step.equation, operands)
            values.update(zip(step.outputs, results, strict=True))
            noted[step] = self.noted
        return noted

    def _value(self, operand: Operand) -> WalkedValue:
        if isinstance(operand, Constant):
            return WalkedValue(jax.typeof(operand.value), constant=operand)
        assert isinstance(operand, int), "a trace has no slices"
        return self.values[operand]

    def _followed(
        self, step: Step, equation: _compat.JaxprEqn, operands: Sequence[WalkedValue]
    ) -> list[WalkedValue]:
        tops = tuple(each.top for each in operands)
        key = id(equation), tops
        # Of a sum the bytes that are exchanged depend on what it is a sum of.
        is_sum = any(top.hdim == PARTIAL for top in tops)
        if not is_sum and key in self._known:
            self.noted, made = self._known[key]
            avals = (self.traced.flat.avals[number] for number in step.outputs)
            return [WalkedValue(*pair) for pair in zip(avals, made, strict=True)]
        results = self.follow(equation, operands)
        if not is_sum:
            self._known[key] = self.noted, tuple(each.top for each in results)
        return results

    def _moved(self, step: Step, resharding: Resharding, operand: WalkedValue) -> WalkedValue:
        if resharding.is_reverse:
            before = self._origins[resharding.number]
            top = WHOLE if before.hdim == PARTIAL else before
        else:
            self._origins[resharding.number] = operand.top
            top = self.wanted(resharding, operand.shape.shape)
        self.note_move(step, operand, top)
        return WalkedValue(operand.shape, top)
