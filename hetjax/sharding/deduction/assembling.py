"""Assembling: what deduction has decided, as an annotated program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.deduction.annotated_program import AnnotatedProgram, Compute, Mend, Move
from hetjax.sharding.deduction.flat_program import FlatEquation, FlatProgram


@dataclass(frozen=True, eq=False)
class EquationDone:
    """An equation that is computed, by the layouts of what it takes and makes.

    Args:
        flat: the equation.
        operands: the number of each operand's layout.
        node: what is computed.
        results: the number of each result's layout.
    """

    flat: FlatEquation
    operands: tuple[int, ...]
    node: Compute
    results: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class MoveDone:
    """A variable that comes to lie in another way; what comes of it may be another variable.

    Args:
        variable: the variable.
        source: the number of its layout.
        result: the variable that it becomes.
        destination: the number of that one's layout; the same where nothing changes.
        mend: what is told of it, where the program did not ask for it.
        is_early: whether it is done as soon as the value is there.
    """

    variable: int
    source: int
    result: int
    destination: int
    mend: Mend | None = None
    is_early: bool = False


Chain = tuple[Any, EquationDone | MoveDone] | None
"""What is done, the last of it and all before."""


def assembled(
    flat: FlatProgram,
    layouts: Sequence[HSharding | None],
    given: Mapping[int, Sequence[int]],
    done: Chain,
    held: Mapping[int, Sequence[int]],
) -> AnnotatedProgram:
    """Give every layout of every variable a number as a value, and put down what is done.

    Args:
        flat: the program.
        layouts: the layouts, by number.
        given: how inputs and constants lie.
        done: what is done.
        held: at the end, how the outputs lie.

    Returns:
        The annotated program.
    """
    assembler = _Assembler(flat, layouts)
    for variable, (layout,) in given.items():
        assembler.value(variable, layout)
    for each in _in_order(done):
        assembler.add(each)
    return AnnotatedProgram(
        tuple(assembler.at(variable, given[variable][0]) for variable in flat.inputs),
        tuple(assembler.at(variable, held[variable][0]) for variable in flat.outputs),
        tuple(assembler.shapes),
        tuple(assembler.annotations),
        {assembler.at(v, given[v][0]): array for v, array in flat.constants.items()},
        tuple(assembler.nodes),
        tuple(assembler.mends),
    )


def _in_order(done: Chain) -> list[EquationDone | MoveDone]:
    found = []
    while done is not None:
        done, last = done
        found.append(last)
    return found[::-1]


class _Assembler:
    def __init__(self, flat: FlatProgram, layouts: Sequence[HSharding | None]):
        self.flat, self.layouts = flat, layouts
        self.shapes: list[Any] = []
        self.annotations: list[HSharding | None] = []
        self.nodes: list[Compute | Move] = []
        self.mends: list[Mend] = []
        self.values: dict[tuple[int, int], int] = {}

    def value(self, variable: int, layout: int) -> int:
        """A new value."""
        self.shapes.append(self.flat.shapes[variable])
        self.annotations.append(self.layouts[layout])
        self.values[variable, layout] = len(self.shapes) - 1
        return len(self.shapes) - 1

    def at(self, variable: int, layout: int) -> int:
        """The value that a variable is in some layout."""
        return self.values[variable, layout]

    def add(self, done: EquationDone | MoveDone) -> None:
        """Put down what is done next."""
        if isinstance(done, EquationDone):
            taken = zip(done.flat.operands, done.operands, strict=True)
            made = zip(done.flat.results, done.results, strict=True)
            inputs = tuple(self.at(*each) for each in taken)
            outputs = tuple(self.value(*each) for each in made)
            # What is computed may have been found for another equation of the kind.
            equation = done.flat.equation
            self.nodes.append(replace(done.node, equation=equation, inputs=inputs, outputs=outputs))
            return
        before = self.at(done.variable, done.source)
        if done.source == done.destination:
            self.values[done.result, done.destination] = before
            return
        source, destination = self.layouts[done.source], self.layouts[done.destination]
        assert destination is not None, "a move brings a value somewhere"
        after = self.value(done.result, done.destination)
        self.nodes.append(Move(before, after, source, destination, done.is_early))
        if done.mend is not None:
            self.mends.append(done.mend)
