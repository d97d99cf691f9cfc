"""Which values a stage keeps for its backward pass, as far as its forward steps tell."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax

from hetjax.pipeline.program.costs import is_expensive
from hetjax.pipeline.program.traced_program import Step, num_bytes, operand_value
from hetjax.pipeline.stages.residuals import choose_residuals
from hetjax.sharding.deduction.signatures import signature_of

_OF_RESULT = frozenset({"exp", "exp2", "logistic", "tanh", "rsqrt", "sqrt", "div"})
"""Functions whose derivative is computed from what they return."""

_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})


def kept_values(
    steps: Sequence[Step],
    avals: Sequence[jax.ShapeDtypeStruct],
    sources: Collection[int],
    moving: Collection[int],
) -> frozenset[int]:
    """The values that a forward pass keeps, its inputs among them.

    Args:
        steps: the forward steps, in order.
        avals: shape and dtype of each value.
        sources: the values that the stage is given.
        moving: the values that have a cotangent.

    Returns:
        Those that the backward pass reads, or makes again what it reads from.
    """
    needed = {value for step in steps for value in _needed(step, moving)}
    chosen = choose_residuals(
        steps, set(sources), needed, lambda value: num_bytes(avals[value]), is_expensive
    )
    return chosen | _read_inputs(steps, needed, chosen, sources)


def _needed(step: Step, moving: Collection[int]) -> set[int]:
    """What the backward pass of one step reads."""
    inputs = [operand_value(operand) for operand in step.inputs]
    if not any(output in moving for output in step.outputs):
        return set()
    if step.name in _PRODUCTS:
        left, right = inputs
        wanted = {left if right in moving else None, right if left in moving else None}
    elif step.name == "attention":
        wanted = {*inputs, *step.outputs}
    elif step.name == "linear_cross_entropy":
        wanted = {*inputs, step.outputs[1]}
    elif step.name == "div":
        wanted = {inputs[1], *(step.outputs if inputs[1] in moving else ())}
    elif step.name in _OF_RESULT:
        wanted = set(step.outputs)
    elif _is_linear(step):
        wanted = {value for value in inputs if value not in moving}
    else:
        wanted = set(inputs)
    return {value for value in wanted if value is not None}


def _is_linear(step: Step) -> bool:
    """Whether the derivative of a step is the same wherever it is taken."""
    signature = None if step.equation is None else signature_of(step.equation)
    return signature is not None and bool(signature.linear)


def _read_inputs(
    steps: Sequence[Step], needed: set[int], chosen: Collection[int], sources: Collection[int]
) -> set[int]:
    """The stage's inputs that the backward pass reads, also to make other values again."""
    found: set[int] = set()
    pending = set(needed)
    for step in reversed(steps):
        if pending.intersection(step.outputs) and not set(step.outputs) & set(chosen):
            pending.update(v for o in step.inputs if (v := operand_value(o)) is not None)
    found.update(value for value in pending if value in sources)
    return found
