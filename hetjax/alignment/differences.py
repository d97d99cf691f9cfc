"""How far one operator's results on one kind are from the reference's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import _compat
from hetjax.alignment.operators import PRODUCTS, Operator
from hetjax.pipeline.program.loss import host_array

TOLERANCE = 1e-3
"""The largest error of an operator that is rounding, unless another is asked for."""


def operator_error(
    operator: Operator,
    operands: Sequence[Any],
    expected: Sequence[Any],
    found: Sequence[Any],
    tolerance: float = TOLERANCE,
) -> float:
    """The error of an operator's results, relative to the scale of the reference's.

    Of floating results it is the largest difference of two elements over the largest magnitude of
    the reference. Not counted is what rounding alone can make: a unit in the last place of the
    result's own dtype; and, of a sum of many, what another order of adding can: half such a unit of
    the sum of magnitudes, in the dtype that is summed in, times the root of their number. Of
    integers, truths and random keys it is the share of elements that differ.

    Args:
        operator: the operator.
        operands: what it was given.
        expected: the reference's results.
        found: the other kind's.
        tolerance: the largest error that is rounding; of what is far below it, the order of adding
            is not looked at.

    Returns:
        The error; infinite where one is finite and the other is not.
    """
    errors = [_error(host_array(a), host_array(b)) for a, b in zip(expected, found, strict=True)]
    worst = max(errors, default=0.0)
    if not tolerance / 100 < worst < math.inf or operator.name not in _TERMS:
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
    # Devices make 0 of what is below float32's normal numbers, but compute float16's in float32.
    least = float(info.tiny if info.minexp <= _FLUSHED else info.smallest_subnormal)
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
    rounding = np.maximum(float(info.eps) * size, slack) + least
    excess = float(np.max(np.abs(a - b) - rounding))
    return max(excess, 0.0) / max(float(size.max()), least)


_FLUSHED = -126
"""The exponent of float32's least normal number, which bfloat16 has, too."""


def _of_order(operator: Operator, operands: Sequence[Any]) -> np.ndarray:
    """What another order of adding can make of each result.

    Each of n additions rounds a partial sum, which is no larger than the sum of magnitudes, by half
    a unit in the last place; errors of either sign add up like a walk at random.
    """
    total = host_array(_sum_of_magnitudes(operator, operands))
    # Products are summed in float32 at least, other sums in their own dtype.
    summed = total.dtype if operator.name in PRODUCTS else operator.given[0].dtype
    terms = max(1, _TERMS[operator.name](operator))
    return total * (float(jnp.finfo(summed).eps) * math.sqrt(terms) / 2)


def _sum_of_magnitudes(operator: Operator, operands: Sequence[Any]) -> Any:
    """What an operator makes of its terms' magnitudes, in a dtype in which that is finite."""
    params = dict(operator.equation.params)
    operands = [_widened(each) for each in operands]
    if operator.name == "cumlogsumexp":
        # Sums on the way are rounded as logarithms; what is far below the last does not count.
        return jnp.abs(_compat.bind(operator.equation, operands)[0]) + 1
    if operator.name == "select_and_scatter_add":
        source, selected = operands
        return _compat.bind(operator.equation, [jnp.abs(source), selected])[0]
    magnitudes = [
        jnp.abs(each) if jnp.issubdtype(each.dtype, jnp.inexact) else each for each in operands
    ]
    if operator.name == "scatter-add":
        # The equation holds a sum of two numbers of its own dtype, which is left out.
        passed = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        options = {name: params[name] for name in passed}
        scattered, indices, updates = magnitudes
        return jax.lax.scatter_add(scattered, indices, updates, **options)
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = jnp.result_type(*magnitudes)
    return _compat.bind_with(operator.equation, params, magnitudes)[0]


def _widened(value: Any) -> Any:
    value = jnp.asarray(value)
    is_narrow = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4
    return value.astype(jnp.float32) if is_narrow else value


def _product_terms(operator: Operator) -> int:
    (contracted, _), _ = operator.equation.params["dimension_numbers"]
    return math.prod(operator.taken[0].shape[axis] for axis in contracted)


def _ragged_terms(operator: Operator) -> int:
    numbers = operator.equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    return math.prod(operator.taken[0].shape[axis] for axis in contracted)


def _convolution_terms(operator: Operator) -> int:
    kernel = operator.taken[1].shape
    numbers = operator.equation.params["dimension_numbers"]
    return math.prod(kernel) // max(1, kernel[numbers.rhs_spec[0]])


def _window_terms(operator: Operator) -> int:
    return math.prod(operator.equation.params["window_dimensions"])


def _running_terms(operator: Operator) -> int:
    return operator.taken[0].shape[operator.equation.params["axis"]]


def _reduced_terms(operator: Operator) -> int:
    return operator.taken[0].size // max(1, operator.given[0].size)


_TERMS: Mapping[str, Callable[[Operator], int]] = {
    "dot_general": _product_terms,
    "ragged_dot_general": _ragged_terms,
    "conv_general_dilated": _convolution_terms,
    "reduce_sum": _reduced_terms,
    "reduce_window_sum": _window_terms,
    "select_and_scatter_add": _window_terms,
    "cumsum": _running_terms,
    "cumlogsumexp": _running_terms,
    "scatter-add": lambda operator: operator.taken[-1].size,
}
"""How many numbers an operator that adds many adds to one, at most."""
