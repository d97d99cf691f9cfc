"""The cotangent of the summed loss, which gradients are sums times.

Backward passes go back from sums over a microbatch's examples, where plain JAX goes back from a
mean. In float32 and bfloat16 that is all the same, since derivatives are linear in the cotangent,
but for two exceptions. What divides the sums is then multiplied by the cotangent.

Floats of fewer exponents, such as float16 with its largest number of 65,504, overflow by so many
examples, so that models with these begin by a power of two near one over the examples. But for
numbers too small to be held, powers of two change no bit.

A rule of `jax.custom_vjp` need not be linear: it may clip the gradient that passes. Models with one
begin by what plain JAX begins by, one over what divides the loss of all microbatches, where that is
known before they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from hetjax import _compat
from hetjax.pipeline.program.traced_program import Constant, Program, operand_value


def loss_seed(programs: Sequence[Program], num_microbatches: Sequence[int]) -> float:
    """The cotangent of the summed loss: of all pipelines one, since their gradients are added up.

    Args:
        programs: the loss function, traced at the size of each pipeline's microbatches.
        num_microbatches: how many of them each pipeline has.

    Returns:
        One. With rules of `jax.custom_vjp`, and a loss that is divided by the same number in every
        step, one over that. Else, where there are floats of fewer exponents than float32 has, the
        largest power of two that times the examples of any microbatch is one at most. Both as far
        as the loss can hold it.

    Example:
        >>> import jax
        >>> from hetjax.pipeline.program.tracing import trace
        >>> batch = jax.ShapeDtypeStruct((48, 3), "float32")
        >>> def loss(w, x):
        ...     return jnp.mean(x.astype(w.dtype) @ w)
        >>> def seed(dtype):
        ...     return loss_seed([trace(loss, jax.ShapeDtypeStruct((3,), dtype), batch)], [2])
        >>> seed("bfloat16"), seed("float16") == 1 / 64
        (1.0, True)
    """
    total = operand_value(programs[0].total)
    dtype = programs[0].loss_dtype if total is None else programs[0].avals[total].dtype
    least = float(jnp.finfo(dtype).smallest_normal)
    equations = [step.equation for step in programs[0].steps if step.equation is not None]
    divisor = _divisor(programs, num_microbatches)
    if divisor is not None and _has_rule(equations):
        return max(1.0 / divisor, least)
    if any(map(_is_narrow, {aval.dtype for aval in programs[0].avals} | _dtypes(equations))):
        examples = max(program.num_examples for program in programs)
        return max(2.0 ** -(examples - 1).bit_length(), least)
    return 1.0


def _divisor(programs: Sequence[Program], num_microbatches: Sequence[int]) -> float | None:
    """What the summed loss of a step is divided by; None where the batch tells it."""
    counts = [program.count.value for program in programs if isinstance(program.count, Constant)]
    if len(counts) < len(programs):
        return None
    found = sum(float(c) * m for c, m in zip(counts, num_microbatches, strict=True))
    return found if found > 0 else None


def _has_rule(equations: Iterable[_compat.JaxprEqn]) -> bool:
    """Whether a derivative is told by `jax.custom_vjp`; that of `jax.custom_jvp` is transposed."""
    return any(
        each.primitive.name == "custom_vjp_call" or _has_rule(_within(each)) for each in equations
    )


def _is_narrow(dtype: Any) -> bool:
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return is_float and jnp.finfo(dtype).maxexp < jnp.finfo(jnp.float32).maxexp


def _dtypes(equations: Iterable[_compat.JaxprEqn]) -> set[Any]:
    """The dtypes of all values inside of loops and branches."""
    inner = [each for equation in equations for each in _within(equation)]
    found = {getattr(made.aval, "dtype", None) for each in inner for made in each.outvars}
    return found | _dtypes(inner) if inner else found


def _within(equation: _compat.JaxprEqn) -> list[_compat.JaxprEqn]:
    return [each for jaxpr in _compat.inner_jaxprs(equation) for each in jaxpr.eqns]
