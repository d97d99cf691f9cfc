"""The equations of a program, with those that its calls hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import _compat
from hetjax.pipeline.program.traced_program import Constant, Step


@dataclass(frozen=True, eq=False)
class OpenedEquation:
    """An equation of a step, or inside one.

    Its operands and results are values of the program, or objects that stand for values inside.
    One that is a call with a derivative of the user's own stands before what it calls.
    """

    place: int
    name: str
    equation: _compat.JaxprEqn | None
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    calls: tuple[_compat.JaxprEqn, ...] = ()
    has_own_rule: bool = False

    @property
    def line(self) -> str:
        """Where it stands in the user's program, or a call of it."""
        known = (each for each in (self.equation, *reversed(self.calls)) if each is not None)
        lines = [line for each in known for line in _compat.source_lines(each)]
        return lines[0] if lines else "an unknown line"


def opened_equations(place: int, step: Step) -> Iterator[OpenedEquation]:
    """The equations of a step: it itself, or what it calls.

    Args:
        place: the step's place in its program.
        step: the step.

    Yields:
        The equations, in an order in which they can run.
    """
    if step.equation is None:
        yield OpenedEquation(place, step.name, None, step.inputs, step.outputs)
        return
    yield from _inside(place, step.equation, step.inputs, step.outputs, step.calls)


def _inside(
    place: int,
    equation: _compat.JaxprEqn,
    operands: Sequence[Any],
    results: Sequence[Any],
    calls: tuple[_compat.JaxprEqn, ...],
) -> Iterator[OpenedEquation]:
    inner, name = _compat.inlined_jaxpr(equation), equation.primitive.name
    if inner is None:
        yield OpenedEquation(place, name, equation, tuple(operands), tuple(results), calls)
        return
    if name.startswith("custom") and not _compat.has_rule_of_jax(equation):
        yield OpenedEquation(place, name, equation, tuple(operands), tuple(results), calls, True)
    yield from called_equations(place, inner, operands, results, (*calls, equation))


def called_equations(
    place: int,
    inner: _compat.ClosedJaxpr,
    operands: Sequence[Any],
    results: Sequence[Any],
    calls: tuple[_compat.JaxprEqn, ...],
) -> Iterator[OpenedEquation]:
    """The equations of what is called, with those that it calls.

    Args:
        place: the place of the step that calls it.
        inner: what is called.
        operands: what stands for its inputs.
        results: what stands for its outputs.
        calls: the equations that call it, the outermost first.

    Yields:
        The equations, in an order in which they can run.
    """
    known: dict[Any, Any] = dict(zip(inner.jaxpr.invars, operands, strict=True))
    known |= {
        variable: Constant(value)
        for variable, value in zip(inner.jaxpr.constvars, inner.consts, strict=True)
    }
    passed_on = []
    for variable, result in zip(inner.jaxpr.outvars, results, strict=True):
        if isinstance(variable, _compat.Literal) or variable in known:
            passed_on.append((variable, result))
        else:
            known[variable] = result

    def read(atom: Any) -> Any:
        if isinstance(atom, _compat.Literal):
            return Constant(atom.val)
        return known.setdefault(atom, atom)

    for each in inner.jaxpr.eqns:
        taken, made = [*map(read, each.invars)], [*map(read, each.outvars)]
        yield from _inside(place, each, taken, made, calls)
    for variable, result in passed_on:
        shape = jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype)
        (copy,) = jax.make_jaxpr(jnp.copy)(shape).eqns
        yield OpenedEquation(place, "copy", copy, (read(variable),), (result,), calls)


def own_derivative(
    equation: _compat.JaxprEqn,
) -> tuple[_compat.ClosedJaxpr, list[int], list[int]] | None:
    """What a call computes whose derivative is the user's own, where that is asked for.

    Args:
        equation: the call.

    Returns:
        From its operands and the cotangents of results to gradients; which of its results these
        are of, and which of its operands have gradients: not what its function closes over, for
        which there is no rule. None where nothing has any.
    """
    given, made = map(_shapes, (equation.invars, equation.outvars))
    graded, seeded = map(_inexact, (given, made))
    graded = [place for place in graded if place >= equation.params["num_consts"]]
    if not graded or not seeded:
        return None

    def gradients(operands: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def run(*values: Any) -> list[Any]:
            every = list(operands)
            for place, value in zip(graded, values, strict=True):
                every[place] = value
            results = _compat.bind(equation, every)
            return [results[i] for i in seeded]

        return jax.vjp(run, *(operands[i] for i in graded))[1](cotangents)

    closed = jax.make_jaxpr(gradients)(given, [made[i] for i in seeded])
    return closed, seeded, graded


def _shapes(variables: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in variables]


def _inexact(shapes: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
    return [i for i, each in enumerate(shapes) if jnp.issubdtype(each.dtype, jnp.inexact)]
