"""The matrix products of a program, which set its pace where they are large."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from hetjax import _compat
from hetjax.pipeline.program.costs import equation_cost
from hetjax.pipeline.program.traced_program import Program, Step, num_bytes


@dataclass(frozen=True)
class Product:
    """A matrix product or convolution, with all its repetitions.

    Args:
        dtype: the dtype of its first operand.
        flops: its FLOPs.
        output_bytes: the bytes that it writes.
    """

    dtype: str
    flops: float
    output_bytes: float


def products(step: Step) -> Iterator[Product]:
    """The matrix products of a step, those of the jaxprs inside it too.

    Args:
        step: a step of a program.
    """
    if step.equation is not None:
        yield from _equation_products(step.equation, 1)


def product_bytes(step: Step) -> float:
    """Bytes that a step's matrix products write.

    Args:
        step: a step of a program.
    """
    return sum(product.output_bytes for product in products(step))


def product_dtype(program: Program) -> str:
    """The dtype that most of the matrix products' FLOPs run in; float32 where there are none.

    Args:
        program: the traced loss function.
    """
    flops: dict[str, float] = {}
    for step in program.steps:
        for product in products(step):
            flops[product.dtype] = flops.get(product.dtype, 0.0) + product.flops
    return max(flops, key=lambda dtype: flops[dtype]) if flops else "float32"


_PRODUCTS = frozenset(
    """
    dot_general conv_general_dilated attention attention_backward linear_cross_entropy
    linear_cross_entropy_backward
    """.split()
)


def _equation_products(equation: _compat.JaxprEqn, times: float) -> Iterator[Product]:
    name = equation.primitive.name
    if name in _PRODUCTS:
        first: Any = equation.invars[0].aval
        output: Any = equation.outvars[0].aval
        size = num_bytes(jax.ShapeDtypeStruct(output.shape, output.dtype))
        yield Product(str(first.dtype), times * equation_cost(equation).matmul_flops, times * size)
        return
    inner = _compat.inner_jaxprs(equation)
    # The further jaxprs of a function with a rule of its own are that rule's, not the function's.
    for jaxpr in inner[:1] if "jvp" in name else inner:
        repeated = times * equation.params["length"] if name == "scan" else times
        for each in jaxpr.eqns:
            yield from _equation_products(each, repeated)
