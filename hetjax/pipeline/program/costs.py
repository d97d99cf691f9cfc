"""Arithmetic and memory traffic of a program's steps, counted from shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jax.numpy as jnp

from hetjax import _compat
from hetjax.pipeline.program.traced_program import Step
from hetjax.sharding.attention.work import attention_work
from hetjax.sharding.cross_entropy.work import cross_entropy_work

# These move or relabel data, or make it from nothing: they do no arithmetic worth counting.
FREE = frozenset(
    """
    broadcast_in_dim reshape squeeze expand_dims transpose slice dynamic_slice
    dynamic_update_slice concatenate pad rev iota copy convert_element_type bitcast_convert_type
    stop_gradient gather tile random_wrap random_unwrap hetjax_constraint hetjax_region
    """.split()
)


# Elementwise arithmetic and changes of shape: cheap to do again, and often fused away.
REPEATABLE = frozenset(
    """
    abs add add_any and broadcast_in_dim ceil clamp concatenate convert_element_type copy cos
    div eq erf exp exp2 expand_dims expm1 floor ge gt hetjax_constraint integer_pow iota
    is_finite le log log1p logistic lt max min mul ne neg not or pad pow real
    reduce_precision rem reshape rev round rsqrt select_n sign sin slice sqrt square squeeze
    stop_gradient sub tanh tile transpose xor
    """.split()
)


@dataclass(frozen=True)
class Cost:
    """Work of a run of equations.

    Args:
        flops: floating-point operations.
        matmul_flops: those of them in matrix products and convolutions.
        bytes: bytes read and written, were nothing fused.
    """

    flops: float = 0.0
    matmul_flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.matmul_flops + other.matmul_flops,
            self.bytes + other.bytes,
        )

    def scaled(self, factor: float) -> Cost:
        """This work, done ``factor`` times."""
        return Cost(self.flops * factor, self.matmul_flops * factor, self.bytes * factor)


def equation_cost(equation: _compat.JaxprEqn) -> Cost:
    """The work of one equation, with that of the jaxprs inside it.

    A scan counts its length; a conditional its dearest branch; a while loop one turn, since its
    number of turns is not known.
    """
    inner = [jaxpr_cost(jaxpr) for jaxpr in _compat.inner_jaxprs(equation)]
    name = equation.primitive.name
    if name == "reduce_precision" and _keeps_precision(equation):
        # A checkpoint puts it behind what it keeps, and XLA drops it.
        return Cost()
    if name == "cond":
        return max(inner, key=lambda cost: cost.flops)
    if inner and "jvp" in name:
        return inner[0]
    if inner and not name.startswith(("reduce", "scatter", "sort", "argm")):
        total = sum(inner[1:], inner[0])
        return total.scaled(equation.params["length"]) if name == "scan" else total
    traffic = float(sum(_bytes(variable) for variable in (*equation.invars, *equation.outvars)))
    tiled = attention_work(equation) or cross_entropy_work(equation)
    if tiled is not None:
        flops = tiled.products + tiled.arithmetic
        return Cost(flops, tiled.products, traffic + tiled.traffic)
    heavy = _matmul_flops(equation)
    if heavy:
        return Cost(heavy, heavy, traffic)
    if name in FREE:
        return Cost(0.0, 0.0, traffic)
    largest = max(
        (_size(variable) for variable in (*equation.invars, *equation.outvars)), default=0
    )
    return Cost(float(largest), 0.0, traffic)


def jaxpr_cost(jaxpr: _compat.Jaxpr) -> Cost:
    """The work of all equations of a jaxpr."""
    return sum((equation_cost(equation) for equation in jaxpr.eqns), Cost())


_counted: WeakKeyDictionary[Step, Cost] = WeakKeyDictionary()
"""The work of steps that was counted before: cutting and planning ask for it many times."""


def step_cost(step: Step) -> Cost:
    """The work of one step of a program, all its iterations."""
    cost = _counted.get(step)
    if cost is None:
        cost = Cost() if step.equation is None else equation_cost(step.equation)
        _counted[step] = cost
    return cost


def share_cost(step: Step, like: Step) -> None:
    """Says that a step's work is that of another one, so that it need not be counted.

    Args:
        step: a step.
        like: one with the same equation.
    """
    _counted[step] = step_cost(like)


def steps_cost(steps: Sequence[Step]) -> Cost:
    """The work of several steps."""
    flops = matmul_flops = num_bytes = 0.0
    for step in steps:
        cost = step_cost(step)
        flops += cost.flops
        matmul_flops += cost.matmul_flops
        num_bytes += cost.bytes
    return Cost(flops, matmul_flops, num_bytes)


def is_heavy(step: Step) -> bool:
    """Whether a step is a matrix product or a convolution, or has one inside it."""
    return step_cost(step).matmul_flops > 0


def is_expensive(step: Step) -> bool:
    """Whether a step must not run twice: all but elementwise arithmetic and changes of shape."""
    if step.equation is not None and step.name in ("custom_jvp_call", "custom_vjp_call"):
        return is_heavy(step)
    return step.name not in REPEATABLE


def _keeps_precision(equation: _compat.JaxprEqn) -> bool:
    """Whether an equation reduces the precision to what its operand has."""
    aval: Any = equation.invars[0].aval
    info, params = jnp.finfo(aval.dtype), equation.params
    return params["exponent_bits"] >= info.nexp and params["mantissa_bits"] >= info.nmant


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)


def _bytes(variable: Any) -> int:
    dtype = variable.aval.dtype
    return _size(variable) * getattr(dtype, "itemsize", 8)


def _matmul_flops(equation: _compat.JaxprEqn) -> float:
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left: Any = equation.invars[0].aval
        depth = math.prod(left.shape[d] for d in contracted)
        return 2.0 * _size(equation.outvars[0]) * float(depth)
    if equation.primitive.name == "conv_general_dilated":
        return _convolution_flops(equation)
    return 0.0


def _convolution_flops(equation: _compat.JaxprEqn) -> float:
    """Two operations for each pair of a number and a weight that meet.

    Along a dimension of the window every number before and every number after it meets a weight at
    most once. So the zeros between the numbers of a strided convolution's cotangent are no work,
    and both products of its backward pass count what the forward pass does.
    """
    left, kernel, out = convolution_sizes(equation)
    pairs = 2.0 * out[0] * out[1] * kernel[1]
    for before, window, after in zip(left[2:], kernel[2:], out[2:], strict=True):
        pairs *= window * min(before, after)
    return pairs


def convolution_sizes(equation: _compat.JaxprEqn) -> tuple[list[int], list[int], list[int]]:
    """The sizes of what a convolution takes, of its kernel and of what it makes.

    Args:
        equation: the convolution.

    Returns:
        Of each examples, features, and the window's dimensions; of the kernel features out and
        features in first.
    """
    numbers = equation.params["dimension_numbers"]
    specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    avals: Sequence[Any] = [each.aval for each in (*equation.invars, *equation.outvars)]
    left, kernel, out = (
        [aval.shape[d] for d in spec] for aval, spec in zip(avals, specs, strict=True)
    )
    return left, kernel, out
