"""Starts of slices, clamped before: XLA forgets to where it divides what is sliced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import _compat

_FIRST_START = {"dynamic_slice": 1, "dynamic_update_slice": 2}
"""Of each primitive that starts somewhere, the first operand that says where."""


def with_clamped_starts(
    equation: _compat.JaxprEqn, params: Mapping[str, Any], operands: Sequence[Any]
) -> tuple[Mapping[str, Any], Sequence[Any]]:
    """An equation's parameters and operands, with starts of which nothing is left to clamp.

    Args:
        equation: the equation.
        params: its parameters; in bodies that they hold slices start likewise.
        operands: traced arrays.

    Returns:
        The parameters and the operands.
    """
    name = equation.primitive.name
    if name in _FIRST_START:
        return params, _clamped(name, params, operands)
    if any(map(_starts, _compat.inner_jaxprs(equation))):
        return {each: _of_parameter(value) for each, value in params.items()}, operands
    return params, operands


def _clamped(name: str, params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    first = _FIRST_START[name]
    sliced = params["slice_sizes"] if name == "dynamic_slice" else operands[1].shape
    room = [whole - size for whole, size in zip(operands[0].shape, sliced, strict=True)]
    starts = [
        jnp.clip(start, 0, min(most, jnp.iinfo(start.dtype).max))
        for start, most in zip(operands[first:], room, strict=True)
    ]
    return [*operands[:first], *starts]


def _starts(jaxpr: _compat.Jaxpr) -> bool:
    return any(
        each.primitive.name in _FIRST_START or any(map(_starts, _compat.inner_jaxprs(each)))
        for each in jaxpr.eqns
    )


def _of_parameter(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_of_parameter, value))
    if isinstance(value, _compat.ClosedJaxpr):
        return _compat.ClosedJaxpr(_of_jaxpr(value.jaxpr), value.consts)
    return _of_jaxpr(value) if isinstance(value, _compat.Jaxpr) else value


def _of_jaxpr(jaxpr: _compat.Jaxpr) -> _compat.Jaxpr:
    if not _starts(jaxpr):
        return jaxpr
    equations: list[_compat.JaxprEqn] = []
    for each in jaxpr.eqns:
        if each.primitive.name in _FIRST_START:
            equations += _compat.spliced(_standing_for(each), each.invars, each)
        else:
            params = {name: _of_parameter(value) for name, value in each.params.items()}
            equations.append(each.replace(params=params))
    return jaxpr.replace(eqns=equations)


def _standing_for(equation: _compat.JaxprEqn) -> _compat.Jaxpr:
    """A slice's own jaxpr, whose variables are those of no other."""

    def run(*operands: Any) -> Any:
        clamped = _clamped(equation.primitive.name, equation.params, operands)
        return _compat.bind(equation, clamped)[0]

    avals: list[Any] = [atom.aval for atom in equation.invars]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    return _compat.without_calls(jax.make_jaxpr(run)(*shapes)).jaxpr
