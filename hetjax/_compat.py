"""Everything that hetjax takes from JAX's less stable surface, in one place.

A new JAX release that moves one of these is mended here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.core import eval_jaxpr as eval_open_jaxpr
from jax.extend import core

Jaxpr = core.Jaxpr
ClosedJaxpr = core.ClosedJaxpr
JaxprEqn = core.JaxprEqn
Var = core.Var
Literal = core.Literal

# An equation of one of these primitives only calls the jaxpr under the parameter named here, so
# it can be replaced by that jaxpr's own equations.
_CALLS = {"pjit": "jaxpr", "jit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}


def called_jaxpr(equation: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr that an equation merely calls, or None where it does more than call one."""
    parameter = _CALLS.get(equation.primitive.name)
    if parameter is None:
        return None
    inner = equation.params[parameter]
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, [])


def checkpointed_jaxpr(equation: JaxprEqn) -> ClosedJaxpr | None:
    """What a `jax.checkpoint` region computes; None for any other equation."""
    if equation.primitive.name not in ("checkpoint", "remat", "remat2"):
        return None
    return ClosedJaxpr(equation.params["jaxpr"], [])


def bind(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Evaluate one equation on values or tracers.

    Args:
        equation: the jaxpr equation.
        operands: one value for each of its inputs.

    Returns:
        One value for each of its outputs.
    """
    parameters = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        results = equation.primitive.bind(*operands, **parameters)
    return list(results) if equation.primitive.multiple_results else [results]


def eval_jaxpr(closed: ClosedJaxpr, *operands: Any) -> list[Any]:
    """Evaluate a closed jaxpr on flat operands."""
    return eval_open_jaxpr(closed.jaxpr, closed.consts, *operands)


def inner_jaxprs(equation: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs that an equation's parameters hold: a scan's body, a conditional's branches."""
    found: list[Jaxpr] = []
    for parameter in equation.params.values():
        for item in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found
