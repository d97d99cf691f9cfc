"""A scan in pieces: consecutive iterations of it, each a scan of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from hetjax import _compat
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


def repeating_iterations(step: Step) -> Step:
    """A scan that keeps of each iteration only what goes in, and computes it again.

    Args:
        step: a ``scan`` step, or a piece of one.

    Returns:
        A step of the same results.
    """
    assert step.equation is not None, "a scan has an equation"
    evaluate = _scan_piece(step.equation.params, step.iterations, repeats=True)
    return replace(step, evaluate=evaluate)


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

        final, stacked = jax.lax.scan(
            # Nothing in one iteration of a loop can be taken for what is in another loop.
            jax.checkpoint(iteration, prevent_cse=False) if repeats else iteration,
            tuple(carry),
            tuple(operands[num_consts + num_carry :]),
            length=length,
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*final, *stacked]

    return evaluate
