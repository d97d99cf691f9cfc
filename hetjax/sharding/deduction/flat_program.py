"""Flat programs: the equations of a jaxpr and of all that it merely calls, in one list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from hetjax import _compat


@dataclass(frozen=True, eq=False)
class FlatEquation:
    """An equation with its operands and results by number.

    Args:
        index: its place in the program.
        equation: the equation.
        operands: the variables that it takes.
        results: the variables that it makes.
    """

    index: int
    equation: _compat.JaxprEqn
    operands: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class FlatProgram:
    """A jaxpr without calls.

    Args:
        inputs: the variables that it takes.
        outputs: the variables that it gives.
        shapes: shape and dtype of every variable.
        constants: the variables that are given.
        equations: the equations, in order.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    constants: Mapping[int, Any]
    equations: tuple[FlatEquation, ...]

    def operand_shapes(self, equation: FlatEquation) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of what an equation reads."""
        return [self.shapes[variable] for variable in equation.operands]

    def last_uses(self) -> list[set[int]]:
        """For each equation the variables that nothing needs after it."""
        seen, found = set(self.outputs), []
        for each in reversed(self.equations):
            found.append({*each.operands, *each.results} - seen)
            seen.update(each.operands)
        return found[::-1]


def flat_program(program: _compat.ClosedJaxpr) -> FlatProgram:
    """Take what a jaxpr calls as part of it.

    Args:
        program: what `jax.make_jaxpr` gives.

    Returns:
        Its equations; barriers against optimization are left out, which change no value.

    Example:
        >>> closed = jax.make_jaxpr(lambda x: jax.jit(jax.numpy.tanh)(x) + x)(1.0)
        >>> [each.equation.primitive.name for each in flat_program(closed).equations]
        ['tanh', 'add']
    """
    return _CallInliner().flat(program)


class _CallInliner:
    def __init__(self) -> None:
        self.shapes: list[jax.ShapeDtypeStruct] = []
        self.constants: dict[int, Any] = {}
        self.equations: list[FlatEquation] = []

    def flat(self, program: _compat.ClosedJaxpr) -> FlatProgram:
        inputs = tuple(self.variable(each.aval) for each in program.jaxpr.invars)
        outputs = tuple(self.walk(program, inputs))
        shapes, equations = tuple(self.shapes), tuple(self.equations)
        return FlatProgram(inputs, outputs, shapes, self.constants, equations)

    def variable(self, aval: Any) -> int:
        self.shapes.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return len(self.shapes) - 1

    def constant(self, array: Any, aval: Any) -> int:
        number = self.variable(aval)
        self.constants[number] = array
        return number

    def walk(self, program: _compat.ClosedJaxpr, inputs: Sequence[int]) -> list[int]:
        known: dict[Any, int] = dict(zip(program.jaxpr.invars, inputs, strict=True))
        for variable, array in zip(program.jaxpr.constvars, program.consts, strict=True):
            known[variable] = self.constant(array, variable.aval)

        def read(atom: Any) -> int:
            if isinstance(atom, _compat.Literal):
                return self.constant(atom.val, atom.aval)
            return known[atom]

        for equation in program.jaxpr.eqns:
            operands = tuple(read(atom) for atom in equation.invars)
            inner = _compat.inlined_jaxpr(equation)
            if inner is not None:
                results = self.walk(inner, operands)
            elif equation.primitive.name == "optimization_barrier":
                results = operands
            else:
                results = [self.variable(each.aval) for each in equation.outvars]
                place = len(self.equations)
                self.equations.append(FlatEquation(place, equation, operands, tuple(results)))
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in program.jaxpr.outvars]
