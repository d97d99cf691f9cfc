"""Scans whose iterations keep little for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from hetjax import _compat
from hetjax.pipeline.program.costs import REPEATABLE
from hetjax.pipeline.program.traced_program import Step


def keeping_little(step: Step) -> Step:
    """A scan that keeps of each iteration what took more than cheap steps, and what goes in.

    By itself a differentiated scan keeps all that its backward pass reads. What elementwise
    arithmetic makes of the rest is made again, as in the backward pass of steps outside of scans.

    Args:
        step: any step.

    Returns:
        A step of the same results.
    """
    if step.name != "scan" or step.equation is None:
        return step
    evaluate = _lean_scan(step.equation.params)
    return replace(step, evaluate=evaluate, beside=(step.beside, "keeps little"))


def _lean_scan(params: dict[str, Any]) -> Callable[..., list[Any]]:
    num_consts, num_carry = _compat.scan_sizes(params)
    body = params["jaxpr"]

    def evaluate(*operands: Any) -> list[Any]:
        consts = operands[:num_consts]
        carry = operands[num_consts : num_consts + num_carry]

        def iteration(carry: Any, rows: Any) -> tuple[Any, Any]:
            results = _compat.eval_jaxpr(body, *consts, *carry, *rows)
            return tuple(results[:num_carry]), tuple(results[num_carry:])

        # Nothing in one iteration of a loop can be taken for what is in another loop.
        remade = jax.checkpoint(iteration, prevent_cse=False, policy=_is_kept)
        final, stacked = jax.lax.scan(
            iteration if _has_loops(body.jaxpr) else remade,
            tuple(carry),
            tuple(operands[num_consts + num_carry :]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*final, *stacked]

    return evaluate


def _has_loops(jaxpr: _compat.Jaxpr) -> bool:
    """Whether something in it is computed in turns, or in one of several ways.

    That is kept or made again as a whole, which would do its products twice.
    """
    return any(
        equation.primitive.name in ("scan", "while", "cond")
        or any(map(_has_loops, _compat.inner_jaxprs(equation)))
        for equation in jaxpr.eqns
    )


def _is_kept(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """Whether what an equation makes is kept for the backward pass, if that reads it."""
    # The backward pass of an exponential reads what it made, and what went in seldom does else.
    return primitive.name not in REPEATABLE or primitive.name in ("exp", "exp2")
