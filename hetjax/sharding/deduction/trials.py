"""Trying an equation as its operands lie: what comes of it, or what is wrong with that."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from hetjax import _compat
from hetjax.sharding.deduction.annotated_program import AnnotatedProgram, Union
from hetjax.sharding.deduction.bottom_tier import OperandError
from hetjax.sharding.deduction.computing import (
    Annotations,
    Computed,
    EquationLayouts,
    kind_of,
)
from hetjax.sharding.deduction.evaluation import holds_jaxprs
from hetjax.sharding.deduction.flat_program import FlatEquation, FlatProgram
from hetjax.sharding.deduction.numbered_layouts import NumberedLayouts
from hetjax.sharding.deduction.origins import Origins
from hetjax.sharding.deduction.remembering import Remembered

MOST_REMEMBERED = 2**15
"""How many ways to compute an equation are remembered for other programs, which mostly have the
same equations: another form of the program, its other stages, the same one built again."""

_NUMBERS = itertools.count()
_KINDS = Remembered[Any, int](MOST_REMEMBERED)
_COMPUTED = Remembered[Any, Computed | OperandError](MOST_REMEMBERED)

DeduceBody = Callable[[Union, _compat.ClosedJaxpr, Annotations, Origins], AnnotatedProgram]
"""Deduces a jaxpr inside an equation, on a union, given how its inputs lie and how operands of
reshards around it lay."""


class Trials:
    """Tries a program's equations; none twice in one way.

    Args:
        flat: the program.
        layouts: how values lie.
        deduce_body: deduces the jaxprs inside equations.
        sums_stay: whether all sums over divided dimensions stay partial.
    """

    def __init__(
        self,
        flat: FlatProgram,
        layouts: NumberedLayouts,
        deduce_body: DeduceBody,
        *,
        sums_stay: bool,
    ):
        self._flat, self._layouts, self._sums_stay = flat, layouts, sums_stay
        self._deduce_body = deduce_body
        self._computing = EquationLayouts(self._body, sums_stay=sums_stay)
        self._tried: dict[Any, tuple[Computed | OperandError, Origins]] = {}
        self._kind_of: dict[int, int] = {}
        self._body_origins = Origins()

    def of(
        self, flat: FlatEquation, numbers: tuple[int, ...], origins: Origins
    ) -> tuple[Computed | OperandError, Origins]:
        """An equation computed as its operands lie, or what is wrong with that.

        Args:
            flat: the equation.
            numbers: how its operands lie.
            origins: how operands of reshards lay.

        Returns:
            What comes of it, and how operands of reshards lay then.
        """
        holds = holds_jaxprs(flat.equation)
        key = (flat.index, numbers, origins.key()) if holds else (self.kind(flat), numbers)
        if key not in self._tried:
            if holds:
                self._body_origins = Origins(origins)
                found = self._computed(flat, numbers)
                if isinstance(found, OperandError):
                    self._tried[key] = found, origins
                else:
                    self._body_origins.leave()
                    self._tried[key] = found, self._body_origins
            else:
                asked = self.asked(flat, numbers)
                self._tried[key] = (
                    _COMPUTED.of(asked, lambda: self._computed(flat, numbers)),
                    origins,
                )
        found, after = self._tried[key]
        return found, after if holds else origins

    def kind(self, flat: FlatEquation) -> int:
        """A number that equations share which compute alike: models repeat their blocks."""
        if flat.index not in self._kind_of:
            kind = kind_of(flat.equation)
            # What is like no other has a number here alone.
            number = -1 - flat.index if kind is None else _KINDS.of(kind, _NUMBERS.__next__)
            self._kind_of[flat.index] = number
        return self._kind_of[flat.index]

    def asked(self, flat: FlatEquation, numbers: tuple[int, ...]) -> Hashable:
        """What the ways to compute an equation depend on, in any program; None: it is alone."""
        kind = self.kind(flat)
        return None if kind < 0 else (kind, self._layouts.held(numbers), self._sums_stay)

    def _computed(self, flat: FlatEquation, numbers: tuple[int, ...]) -> Computed | OperandError:
        shapes = self._flat.operand_shapes(flat)
        try:
            return self._computing(flat.equation, shapes, self._layouts.held(numbers))
        except OperandError as problem:
            # It is kept, which what it was raised through should not be.
            return problem.with_traceback(None)

    def _body(
        self, union: Union, program: _compat.ClosedJaxpr, annotations: Annotations
    ) -> AnnotatedProgram:
        inside = self._body_origins.inside(program)
        return self._deduce_body(union, program, annotations, inside)


def replaced(numbers: Sequence[int], place: int, number: int) -> tuple[int, ...]:
    """How operands lie with another layout of one.

    Example:
        >>> replaced((4, 5, 6), 1, 0)
        (4, 0, 6)
    """
    return (*numbers[:place], number, *numbers[place + 1 :])
