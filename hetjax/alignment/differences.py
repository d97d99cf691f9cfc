"""How far one operator's results on one kind are from the reference's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from hetjax import _compat
from hetjax.alignment.operators import Operator
from hetjax.pipeline.program.loss import host_array

TOLERANCE = 1e-3
"""The largest error of an operator that is rounding, unless another is asked for."""


def operator_error(
    operator: Operator, operands: Sequence[Any], expected: Sequence[Any], found: Sequence[Any]
) -> float:
    """The error of an operator's results, relative to the scale of the reference's.

    Of floating results it is the largest difference of two elements over the largest magnitude of
    the reference. Not counted is what rounding alone can make: a unit in the last place of the
    result's own dtype; and, of a sum of many that all but cancels, what another order of adding
    can: a unit in the last place of the sum of magnitudes. Of integers, truths and random keys it
    is the share of elements that differ.

    Args:
        operator: the operator.
        operands: what it was given.
        expected: the reference's results.
        found: the other kind's.

    Returns:
        The error; infinite where one is finite and the other is not.
    """
    errors = [_error(host_array(a), host_array(b)) for a, b in zip(expected, found, strict=True)]
    worst = max(errors, default=0.0)
    if not TOLERANCE / 100 < worst < math.inf or operator.name not in _SUMS:
        return worst
    slack = _of_order(operator, operands)
    pairs = zip(expected, found, strict=True)
    return max(_error(host_array(a), host_array(b), slack) for a, b in pairs)


def has_nonfinite(values: Sequence[Any]) -> bool:
    """Whether an element of floating arrays is infinite or no number."""
    return any(
        jnp.issubdtype(each.dtype, jnp.inexact) and not np.isfinite(_wide(each)).all()
        for each in map(host_array, values)
    )


def _wide(value: np.ndarray) -> np.ndarray:
    """Floats of two bytes as float32, in which NumPy computes them."""
    return value.astype(np.float32) if value.dtype.itemsize < 4 else value


def _error(expected: np.ndarray, found: np.ndarray, slack: np.ndarray | float = 0.0) -> float:
    if not expected.size:
        return 0.0
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return float(np.mean(expected != found))
    info = jnp.finfo(expected.dtype)
    a, b = _wide(expected), _wide(found)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return math.inf
    # What is infinite must be so alike; numbers that are none have no size.
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return math.inf
    if not finite.any():
        return 0.0
    a, b = a[finite], b[finite]
    size = np.abs(a)
    slack = np.broadcast_to(slack, expected.shape)[finite]
    rounding = float(info.eps) * size + float(info.tiny) + slack
    excess = float(np.max(np.abs(a - b) - rounding))
    return max(excess, 0.0) / max(float(size.max()), float(info.tiny))


def _of_order(operator: Operator, operands: Sequence[Any]) -> np.ndarray:
    """What another order of adding can make of each result.

    Partial sums of numbers whose signs are mixed are about the sum of magnitudes over the root of
    their number, and as many of them are rounded: about a unit in the last place of that sum in
    all. Of numbers of one sign it is more, and small beside the result.
    """
    magnitudes = [
        jnp.abs(each) if jnp.issubdtype(jnp.result_type(each), jnp.floating) else each
        for each in operands
    ]
    (total, *_) = _compat.bind(operator.equation, magnitudes)
    wide = _wide(host_array(total))
    return wide * float(np.finfo(wide.dtype).eps)


_SUMS = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "cumsum", "scatter-add"})
"""The operators that add many numbers to one."""
