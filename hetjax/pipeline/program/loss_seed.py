"""The cotangent of the summed loss, which gradients are sums times.

Backward passes go back from sums over a microbatch's examples, where plain JAX goes back from a
mean. In float32 and bfloat16 that is all the same. Floats of fewer exponents, such as float16 with
its largest number of 65,504, overflow by so many examples, so that models with these begin by a
power of two near one over the examples; what divides the sums is then multiplied by it. But for
numbers too small to be held, powers of two change no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from hetjax import _compat
from hetjax.pipeline.program.traced_program import Program, operand_value


def loss_seed(programs: Sequence[Program]) -> float:
    """The cotangent of the summed loss: of all pipelines one, since their gradients are added up.

    Args:
        programs: the loss function, traced at the size of each pipeline's microbatches.

    Returns:
        One; where there are floats of fewer exponents than float32 has, the largest power of two
        that times the examples of any microbatch is one at most, as far as the loss can hold it.

    Example:
        >>> import jax
        >>> from hetjax.pipeline.program.tracing import trace
        >>> batch = jax.ShapeDtypeStruct((48, 3), "float32")
        >>> def loss(w, x):
        ...     return jnp.mean(x.astype(w.dtype) @ w)
        >>> def seed(dtype):
        ...     return loss_seed([trace(loss, jax.ShapeDtypeStruct((3,), dtype), batch)])
        >>> seed("bfloat16"), seed("float16") == 1 / 64
        (1.0, True)
    """
    if not any(map(_is_narrow, _dtypes(programs[0]))):
        return 1.0
    examples = max(program.num_examples for program in programs)
    total = operand_value(programs[0].total)
    dtype = programs[0].loss_dtype if total is None else programs[0].avals[total].dtype
    return 2.0 ** -min((examples - 1).bit_length(), -int(jnp.finfo(dtype).minexp))


def _is_narrow(dtype: Any) -> bool:
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return is_float and jnp.finfo(dtype).maxexp < jnp.finfo(jnp.float32).maxexp


def _dtypes(program: Program) -> set[Any]:
    """The dtypes of all values, those inside of loops and branches among them."""
    equations = [step.equation for step in program.steps if step.equation is not None]
    inner = (inner for equation in equations for inner in _compat.inner_jaxprs(equation))
    return {aval.dtype for aval in program.avals}.union(*map(_dtypes_within, inner))


def _dtypes_within(jaxpr: _compat.Jaxpr) -> set[Any]:
    found = {getattr(each.aval, "dtype", None) for eqn in jaxpr.eqns for each in eqn.outvars}
    inner = (inner for eqn in jaxpr.eqns for inner in _compat.inner_jaxprs(eqn))
    return found.union(*map(_dtypes_within, inner))
