"""Counting work: products by hand, and what surrounds them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hetjax.pipeline.costs import Cost, jaxpr_cost, steps_cost
from hetjax.pipeline.program import trace


def cost(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Cost:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jaxpr_cost(jax.make_jaxpr(function)(*arrays).jaxpr)


@pytest.mark.parametrize(
    ("equation", "shapes", "flops"),
    [
        ("ab,bc->ac", [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
        ("nab,nbc->nac", [(4, 3, 5), (4, 5, 7)], 2 * 4 * 3 * 5 * 7),
        ("nab,ab->n", [(4, 3, 5), (3, 5)], 2 * 4 * 3 * 5),
        ("a,a->", [(6,), (6,)], 2 * 6),
    ],
)
def test_a_product_takes_two_operations_a_term(equation: str, shapes: Any, flops: float):
    found = cost(lambda *arrays: jnp.einsum(equation, *arrays), *shapes)
    assert found.matmul_flops == flops
    assert found.flops == flops


@pytest.mark.parametrize(("groups", "inputs"), [(1, 4), (2, 2)])
def test_a_convolution_multiplies_its_window_with_its_input_features(groups: int, inputs: int):
    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", feature_group_count=groups)

    found = cost(convolve, (2, 4, 8, 8), (6, inputs, 3, 3))
    assert found.matmul_flops == 2 * (2 * 6 * 6 * 6) * (inputs * 3 * 3)


def test_a_scan_repeats_its_body():
    once = cost(lambda x, w: x @ w, (3, 5), (5, 5))
    scanned = cost(
        lambda x, w: jax.lax.scan(lambda x, row: (x @ row, None), x, w)[0], (3, 5), (4, 5, 5)
    )
    assert scanned.matmul_flops == 4 * once.matmul_flops


def test_a_conditional_is_as_dear_as_its_dearest_branch():
    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)

    assert cost(function, (3, 5), (5, 5)).matmul_flops == 2 * (2 * 3 * 5 * 5)


def test_a_custom_rule_counts_the_function_and_not_the_rule():
    assert cost(lambda x: jax.nn.relu(x), (10,)).flops == 10


def test_elementwise_work_counts_once_an_element_and_moving_counts_nothing():
    assert cost(jnp.sin, (3, 4)) == Cost(12.0, 0.0, 2 * 12 * 4.0)
    assert cost(lambda x: x.T.reshape(12), (3, 4)).flops == 0
    assert cost(lambda x: jnp.sum(x), (3, 4)).flops == 12


def test_costs_add_and_scale():
    assert Cost(1, 2, 3) + Cost(10, 20, 30) == Cost(11, 22, 33)
    assert Cost(1, 2, 3).scaled(2) == Cost(2, 4, 6)


def test_a_program_costs_what_its_jaxpr_costs():
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w) @ w)

    program = trace(lambda w, x: (loss(w, x), 1.0), jnp.ones((5, 5)), jnp.ones((3, 5)))
    assert steps_cost(program.steps) == cost(loss, (5, 5), (3, 5))
