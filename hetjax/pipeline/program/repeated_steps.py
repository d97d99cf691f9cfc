"""Steps that compute what another one has computed, left out of a flat jaxpr.

A compiler finds them inside a program; what is divided into several programs it does not see whole.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from hetjax import _compat
from hetjax.pipeline.program.computations import constant_of
from hetjax.pipeline.program.traced_program import Constant, FlatJaxpr, Operand, Step


def without_repeats(flat: FlatJaxpr) -> FlatJaxpr:
    """Leave out steps that compute the same of the same values as one before them.

    Args:
        flat: the steps.

    Returns:
        The others, which read what the first of those makes; values keep their numbers.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from hetjax.pipeline.program.traced_program import flatten_jaxpr
        >>> flat = flatten_jaxpr(jax.make_jaxpr(lambda x: (jnp.sin(x) + 1, jnp.sin(x) * 2))(1.0))
        >>> len(flat.steps), len(without_repeats(flat).steps)
        (4, 3)
    """
    first: dict[Hashable, Step] = {}
    same: dict[int, int] = {}

    def known(operand: Operand) -> Operand:
        return operand if isinstance(operand, Constant) else same.get(operand, operand)

    kept: list[Step] = []
    for step in flat.steps:
        inputs = tuple(map(known, step.inputs))
        key = _key(step, inputs)
        earlier = None if key is None else first.setdefault(key, step)
        if earlier is not None and earlier is not step:
            same.update(zip(step.outputs, earlier.outputs, strict=True))
        else:
            kept.append(step if inputs == step.inputs else replace(step, inputs=inputs))
    return replace(flat, steps=tuple(kept), outputs=tuple(map(known, flat.outputs)))


def _key(step: Step, inputs: tuple[Operand, ...]) -> Hashable:
    """Equal for steps that make the same; None for one that is not to be left out."""
    equation = step.equation
    if equation is None or equation.effects:
        return None
    operands = tuple(constant_of(o.value) if isinstance(o, Constant) else o for o in inputs)
    key = step.name, operands, tuple(equation.params.items()), _compat.context_of(equation)
    try:
        hash(key)
    except TypeError:  # Of a parameter that it holds.
        return None
    return key
