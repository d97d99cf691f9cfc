"""Gradients of weights in the form that compilers for CPUs do well.

A weight's gradient is a product that contracts the leading axes of both operands, examples and
positions. XLA for CPUs computes it from a transposed copy of whichever operand comes out first,
into which it fuses what makes that operand, read with strides, and then often takes a kernel that
is a third slower. Here the narrower operand is transposed, after it is made, and comes first; the
compiler is kept from turning that round again.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from hetjax import _compat
from hetjax.pipeline.program.traced_program import Step


def with_narrow_operand_first(step: Step) -> Step:
    """The same step; a weight's gradient in the form that CPUs do well.

    Args:
        step: any step.

    Returns:
        The step as it is where it is no such product.
    """
    equation = step.equation
    if equation is None or equation.primitive.name != "dot_general":
        return step
    contracted, batch = equation.params["dimension_numbers"]
    leading = tuple(range(len(contracted[0])))
    if batch != ((), ()) or contracted != (leading, leading) or not leading:
        return step
    product = equation.replace(
        params={**equation.params, "dimension_numbers": (((1,), (0,)), batch)}
    )

    def evaluate(first: Any, second: Any) -> list[Any]:
        widths = _width(first, leading), _width(second, leading)
        # JAX transposes most of these products: where both are as wide, two transposes are none.
        is_turned = widths[0] >= widths[1]
        narrow, wide = (second, first) if is_turned else (first, second)
        transposed = jax.lax.optimization_barrier(_as_matrix(narrow, leading).T)
        (found,) = _compat.bind(product, [transposed, _as_matrix(wide, leading)])
        shape = (*narrow.shape[len(leading) :], *wide.shape[len(leading) :])
        found = jax.lax.optimization_barrier(found).reshape(shape)
        if is_turned:
            own = narrow.ndim - len(leading)
            found = found.transpose(*range(own, found.ndim), *range(own))
        return [found]

    return Step(step.name, step.inputs, step.outputs, evaluate, equation)


def _width(operand: Any, contracted: tuple[int, ...]) -> int:
    return math.prod(operand.shape[len(contracted) :])


def _as_matrix(operand: Any, contracted: tuple[int, ...]) -> Any:
    return operand.reshape(math.prod(operand.shape[: len(contracted)]), _width(operand, contracted))
