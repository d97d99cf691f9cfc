"""A scan in pieces: consecutive iterations of it, each a scan of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import _compat
from hetjax.pipeline.program.costs import REPEATABLE
from hetjax.pipeline.program.traced_program import Constant, Operand, SliceOf, Step


def split_scan(
    step: Step, cuts: Sequence[int], new_value: Callable[[Sequence[int], Any], int]
) -> tuple[list[Step], list[Step]]:
    """Cut a scan between iterations.

    Args:
        step: a ``scan`` step.
        cuts: iterations that begin a new piece, strictly inside.
        new_value: makes the number of a new value, from its shape and dtype.

    Returns:
        The pieces in the order of computation, and the concatenations that make the scan's stacked
        outputs whole again.
    """
    assert step.equation is not None
    params = step.equation.params
    num_consts, num_carry, length = params["num_consts"], params["num_carry"], params["length"]
    consts = step.inputs[:num_consts]
    carry: tuple[Operand, ...] = step.inputs[num_consts : num_consts + num_carry]
    stacked = step.inputs[num_consts + num_carry :]
    edges = (0, *cuts, length)
    out_avals: list[Any] = [variable.aval for variable in step.equation.outvars]
    pieces: list[Step] = []
    for start, stop in itertools.pairwise(edges):
        lo, hi = (length - stop, length - start) if params["reverse"] else (start, stop)
        carry_outputs = (
            step.outputs[:num_carry]
            if stop == length
            else tuple(new_value(a.shape, a.dtype) for a in out_avals[:num_carry])
        )
        stacked_outputs = tuple(
            new_value((hi - lo, *a.shape[1:]), a.dtype) for a in out_avals[num_carry:]
        )
        rows = tuple(_rows(operand, lo, hi) for operand in stacked)
        evaluate = _scan_piece(params, stop - start)
        equation = step.equation.replace(params={**params, "length": stop - start})
        outputs = (*carry_outputs, *stacked_outputs)
        inputs = (*consts, *carry, *rows)
        pieces.append(Step("scan", inputs, outputs, evaluate, equation, stop - start))
        carry = carry_outputs
    ordered = pieces[::-1] if params["reverse"] else pieces
    joins = [
        Step(
            "concatenate",
            tuple(piece.outputs[num_carry + i] for piece in ordered),
            (output,),
            lambda *arrays: [jnp.concatenate(arrays)],
            None,
        )
        for i, output in enumerate(step.outputs[num_carry:])
    ]
    return pieces, joins


def _rows(operand: Operand, start: int, stop: int) -> Operand:
    if isinstance(operand, Constant):
        return Constant(operand.value[start:stop])
    if isinstance(operand, SliceOf):
        return SliceOf(operand.value, operand.start + start, operand.start + stop)
    return SliceOf(operand, start, stop)


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
    evaluate = _scan_piece(step.equation.params, step.iterations)
    return replace(step, evaluate=evaluate, beside=(step.beside, "keeps little"))


def repeating_iterations(step: Step) -> Step:
    """A scan that keeps of each iteration only what goes in, and computes it again.

    Args:
        step: a ``scan`` step, or a piece of one.

    Returns:
        A step of the same results.
    """
    assert step.equation is not None, "a scan has an equation"
    evaluate = _scan_piece(step.equation.params, step.iterations, repeats=True)
    return replace(step, evaluate=evaluate, beside=(step.beside, "repeats"))


def _scan_piece(
    params: dict[str, Any], length: int, *, repeats: bool = False
) -> Callable[..., list[Any]]:
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    body = params["jaxpr"]

    def evaluate(*operands: Any) -> list[Any]:
        consts = operands[:num_consts]
        carry = operands[num_consts : num_consts + num_carry]

        def iteration(carry: Any, rows: Any) -> tuple[Any, Any]:
            results = _compat.eval_jaxpr(body, *consts, *carry, *rows)
            return tuple(results[:num_carry]), tuple(results[num_carry:])

        policy = jax.checkpoint_policies.nothing_saveable if repeats else _is_kept
        # Nothing in one iteration of a loop can be taken for what is in another loop.
        remade = jax.checkpoint(iteration, prevent_cse=False, policy=policy)
        final, stacked = jax.lax.scan(
            remade if repeats or not _has_loops(body.jaxpr) else iteration,
            tuple(carry),
            tuple(operands[num_consts + num_carry :]),
            length=length,
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
