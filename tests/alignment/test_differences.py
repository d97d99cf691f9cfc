"""How far an operator's results are off, and what of it rounding alone can make."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.alignment import Operator, bind_kind, parse_kinds, trace_operators
from hetjax.alignment.differences import operator_error
from hetjax.alignment.evaluation import evaluate

(SAME,) = map(bind_kind, parse_kinds(["cpu"], least=1))


def product(rows: int, inner: int, dtype: Any = np.float32):
    program = trace_operators(
        lambda w, x: jnp.sum(x @ w), jnp.ones((inner, 2), dtype), jnp.ones((rows, inner), dtype)
    )
    return next(each for each in program.operators if each.name == "dot_general")


def test_another_order_of_adding_is_no_error():
    operator = product(1, 4096)
    rng = np.random.default_rng(0)
    # All but cancels: the sum's own rounding is large beside the sum.
    x = rng.normal(size=(1, 4096)).astype(np.float32)
    x[0, 2048:] = -x[0, :2048] + np.float32(1e-6)
    w = np.ones((4096, 2), np.float32)
    exact = (x.astype(np.float64) @ w).astype(np.float32)
    # Backwards, one after another.
    other = np.cumsum(x[0, ::-1], dtype=np.float32)[-1:].reshape(1, 1).repeat(2, 1)
    assert np.abs(other - exact).max() / np.abs(exact).max() > 1e-3
    assert operator_error(operator, [x, w], [exact], [other]) == 0.0
    assert operator_error(operator, [x, w], [exact], [exact * np.float32(20)]) > 1.0


def cancelling(dtype: Any) -> np.ndarray:
    """Numbers whose sum is so small that the order of adding is large beside it."""
    half = np.random.default_rng(0).normal(size=256)
    return np.concatenate([half, -half * (1 + 1e-6)]).astype(dtype)


LOW, ZERO = np.array(-np.inf, jnp.bfloat16), np.array(0, jnp.bfloat16)
PEAK = np.zeros(1023, jnp.bfloat16)
PEAK[511] = 1


def window(x: Any) -> Any:
    return jax.lax.reduce_window(x, ZERO, jax.lax.add, (512,), (1,), "VALID")


def scattered(x: Any) -> Any:
    """All to the peak, which is the largest of each window."""

    def largest(peak: Any) -> Any:
        return jax.lax.reduce_window(peak, LOW, jax.lax.max, (512,), (1,), "VALID")

    return jax.vjp(largest, jnp.asarray(PEAK))[1](x)[0]


def ragged(x: Any) -> Any:
    return jax.lax.ragged_dot(x[None], jnp.ones((1, x.size, 1), x.dtype), jnp.array([1]))


def operator_of(name: str, function: Any, x: np.ndarray) -> tuple[Operator, list[Any]]:
    """An operator of a function of a batch, and what it is given."""
    inputs = [np.float32(1), x]
    program = trace_operators(
        lambda w, x: w * jnp.abs(jax.lax.stop_gradient(function(x))).sum().astype(w.dtype), *inputs
    )
    found: list[tuple[Operator, list[Any]]] = []

    def visit(operator: Operator, operands: list[Any], _: Any) -> list[Any]:
        if operator.name == name:
            found.append((operator, operands))
        return SAME.give(operator, operands)

    evaluate(program.block, inputs, visit)
    return found[0]


@pytest.mark.parametrize(
    ("name", "function", "x"),
    [
        ("reduce_sum", jnp.sum, cancelling(np.float32) * np.complex64(1 + 1j)),
        ("ragged_dot_general", ragged, cancelling(np.float32)),
        ("reduce_window_sum", window, cancelling(jnp.bfloat16)),
        ("select_and_scatter_add", scattered, cancelling(jnp.bfloat16)),
    ],
)
def test_another_order_of_adding_is_no_error_of_any_sum(name: str, function: Any, x: np.ndarray):
    operator, operands = operator_of(name, function, x)
    forth, back = (np.zeros(operator.given[0].shape, x.dtype) for _ in range(2))
    middle = forth.size // 2
    forth.flat[middle], back.flat[middle] = sum(x, x[0] * 0), sum(x[::-1], x[0] * 0)
    # By a tolerance that large the order is not looked at.
    assert operator_error(operator, operands, [forth], [back], tolerance=1e9) > 1e-2
    assert operator_error(operator, operands, [forth], [back]) == 0.0
    assert operator_error(operator, operands, [forth], [back + np.abs(x).sum()]) > 0.5


def test_logarithms_of_running_sums_are_rounded_on_the_way():
    x = (np.abs(np.random.default_rng(0).normal(size=256)) - 4).astype(jnp.bfloat16)
    operator, operands = operator_of("cumlogsumexp", jax.lax.cumlogsumexp, x)
    wide = np.logaddexp.accumulate(x.astype(np.float32)).astype(jnp.bfloat16)
    narrow = np.asarray(jax.lax.associative_scan(np.logaddexp, x))
    assert operator_error(operator, operands, [wide], [narrow], tolerance=1e9) > 3e-3
    assert operator_error(operator, operands, [wide], [narrow]) == 0.0
    assert operator_error(operator, operands, [wide], [wide + 1]) > 0.05


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rows_of_two_bytes_that_are_added_up_may_be_added_in_another_order(dtype: Any):
    """As in the gradient of an embedding."""

    def loss(table: Any, tokens: Any) -> Any:
        return jnp.mean(table[tokens].astype(jnp.float32) ** 2)

    tokens = np.zeros(256, np.int32)
    program = trace_operators(loss, jnp.ones((4, 3), dtype), tokens)
    operator = next(each for each in program.operators if each.name == "scatter-add")
    table, rows = jnp.zeros((4, 3), dtype), np.random.default_rng(0).normal(size=(256, 3))
    rows = jnp.asarray(rows, dtype)
    operands = [table, tokens.reshape(256, 1), rows]
    forth, back = (table.at[0].set(sum(each, table[0])) for each in (rows, rows[::-1]))
    assert np.abs(np.asarray(forth - back, np.float32)).max() > 0.02
    assert operator_error(operator, operands, [forth], [back]) == 0.0
    assert operator_error(operator, operands, [forth], [10 * forth]) > 0.1


def test_a_unit_in_the_last_place_of_two_bytes_is_no_error():
    operator = product(2, 2, jnp.bfloat16)
    ones = jnp.ones((2, 2), jnp.bfloat16)
    next_up = ones * jnp.bfloat16(1 + 2**-7)
    assert operator_error(operator, [ones, ones], [ones], [next_up]) == 0.0
    assert operator_error(operator, [ones, ones], [ones], [ones * jnp.bfloat16(1.03)]) > 1e-2


@pytest.mark.parametrize(
    ("expected", "found", "error"),
    [
        ([1.0, -2.0], [1.0, -2.2], 0.1),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([np.nan, 1.0], [np.nan, 1.0], 0.0),
        ([np.inf, 1.0], [np.inf, 1.0], 0.0),
        ([np.inf, 1.0], [-np.inf, 1.0], math.inf),
        ([1.0, 1.0], [np.nan, 1.0], math.inf),
        ([np.nan, 1.0], [1.0, 1.0], math.inf),
        ([np.nan, np.nan], [np.nan, np.nan], 0.0),
    ],
)
def test_errors_of_floats(expected: list[float], found: list[float], error: float):
    a, b = np.array(expected, np.float32), np.array(found, np.float32)
    operator, _ = operator_of("tanh", jnp.tanh, a)
    assert operator_error(operator, [a], [a], [b]) == pytest.approx(error, rel=1e-4)


def test_errors_of_integers_are_the_share_that_differs():
    a, b = np.array([1, 2, 3, 4], np.int32), np.array([1, 2, 3, 5], np.int32)
    operator, _ = operator_of("neg", jnp.negative, a)
    assert operator_error(operator, [], [a], [b]) == 0.25


def test_what_is_small_in_float16_is_compared_all_the_same():
    """As backward passes have it: most cotangents are below the least normal number."""
    operator = product(2, 2, jnp.float16)
    small, none = np.full((2, 2), 3e-5, np.float16), np.zeros((2, 2), np.float16)
    assert operator_error(operator, [small, small], [small], [none]) > 0.9
    larger = np.full((2, 2), 1e-3, np.float16)
    off = (larger * np.float16(1.06)).astype(np.float16)
    assert operator_error(operator, [larger, larger], [larger], [off]) > 0.05
    # A sum of magnitudes that float16 does not have is no excuse.
    x, w = np.full((2, 2), 200, np.float16), np.full((2, 2), 200, np.float16)
    x[:, 1] = -200
    ones = np.ones((2, 2), np.float16)
    assert operator_error(operator, [x, w], [ones], [2 * ones]) > 0.9


def test_the_order_of_adding_is_looked_at_by_the_tolerance():
    operator = product(1, 4096)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 4096)).astype(np.float32)
    w = np.ones((4096, 2), np.float32)
    exact = x.astype(np.float64) @ w
    near = (exact * (1 + 3e-6)).astype(np.float32)
    asked = [exact.astype(np.float32)]
    assert operator_error(operator, [x, w], asked, [near]) > 1e-6
    assert operator_error(operator, [x, w], asked, [near], tolerance=1e-6) == 0.0
