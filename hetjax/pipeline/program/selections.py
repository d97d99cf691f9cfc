"""Comparisons with a number that was selected from others: the largest, a sorted one, a threshold.

Whether a number is the largest one hangs on its last bit. Compiled in another program, it may be
rounded otherwise, and nothing is then equal to the maximum: the gradient through it is lost. So
such a comparison belongs where the selection was made, and its result is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from hetjax import _compat
from hetjax.pipeline.program.traced_program import Step

_SELECTIONS = frozenset(
    """
    reduce_max reduce_min cummax cummin sort top_k approx_top_k reduce_window_max
    reduce_window_min
    """.split()
)

_COMPARISONS = frozenset("eq ne lt le gt ge".split())

_PASSING = frozenset(
    """
    reshape broadcast_in_dim squeeze expand_dims transpose slice dynamic_slice gather rev
    concatenate copy stop_gradient select_n pad hetjax_constraint
    """.split()
)
"""What gives on what was selected, bit for bit."""


def selected_comparisons(steps: Sequence[Step]) -> frozenset[Step]:
    """The comparisons of a run of steps that hang on the bits of a selected number.

    Args:
        steps: the steps, in order.

    Returns:
        Those that compare floating-point numbers with what one of the steps selected.
    """
    selected: set[int] = set()
    found = []
    for step in steps:
        reads = selected.intersection(step.values())
        if step.name in _SELECTIONS or (reads and step.name in _PASSING):
            selected.update(step.outputs)
        elif reads and step.name in _COMPARISONS and _is_floating(step.equation):
            found.append(step)
    return frozenset(found)


def _is_floating(equation: _compat.JaxprEqn | None) -> bool:
    """Whether an equation's first operand is of floating-point numbers."""
    if equation is None:
        return False
    aval: Any = equation.invars[0].aval
    return jnp.issubdtype(aval.dtype, jnp.floating)
