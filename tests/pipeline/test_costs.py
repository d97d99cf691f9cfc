"""Counting work: products by hand, and what surrounds them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hetjax
from hetjax.models import RECIPES, model_of
from hetjax.pipeline.program.costs import Cost, jaxpr_cost, steps_cost
from hetjax.pipeline.program.tracing import trace
from hetjax.sharding.attention.tiles import LARGEST, tile_of


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


@pytest.mark.parametrize("size", [8, 9])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("window", [1, 3])
def test_the_backward_pass_of_a_convolution_takes_twice_its_forward_pass(
    size: int, stride: int, groups: int, window: int
):
    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        padding = ((window // 2, window // 2),) * 2
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (stride, stride),
            padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    def gradients(x: jax.Array, kernel: jax.Array) -> Any:
        return jax.grad(lambda *both: jnp.sum(convolve(*both)), (0, 1))(x, kernel)

    shapes = (2, size, size, 4), (window, window, 4 // groups, 6)
    side = -(-size // stride)
    forward = cost(convolve, *shapes)
    assert forward.matmul_flops == 2 * (2 * side * side * 6) * (4 // groups * window * window)
    both = cost(lambda *arrays: (convolve(*arrays), gradients(*arrays)), *shapes)
    assert both.matmul_flops == pytest.approx(4 * forward.matmul_flops)  # Forward is traced twice.


@pytest.mark.parametrize(
    ("name", "products"), [("resnet-50", 4.09e9), ("vgg-19", 19.63e9), ("vit-base", 17.56e9)]
)
def test_image_models_take_the_published_work(name: str, products: float):
    model = model_of(RECIPES[name])
    parameters = jax.eval_shape(model.init, jax.random.key(0))
    program = trace(model.loss, parameters, model.batch_shapes(1))
    assert steps_cost(program.steps).matmul_flops / 2 == pytest.approx(products, rel=2e-3)


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


def test_attention_takes_two_products_forward_and_five_backward_of_the_tiles_it_computes():
    def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return hetjax.attention(q, k, v, causal=True)

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return jax.vjp(causal, q, k, v)[1](q)

    def shapes(length: int) -> list[tuple[int, ...]]:
        return [(3, length, n, 16) for n in (4, 2, 2)]

    short, long = cost(causal, *shapes(100)), cost(causal, *shapes(8192))
    assert short.matmul_flops == 2 * 2 * 3 * 4 * 100 * 100 * 16
    tile = tile_of(8192, LARGEST)
    padded = -(-8192 // tile) * tile
    assert padded < 1.02 * 8192
    assert long.matmul_flops == 2 * 2 * 3 * 4 * (padded * (padded + tile) / 2) * 16
    assert cost(both, *shapes(8192)).matmul_flops == 3.5 * long.matmul_flops


def test_losses_of_tokens_take_a_product_forward_and_three_backward():
    def losses(hidden: jax.Array, weights: jax.Array) -> jax.Array:
        labels = jnp.zeros(hidden.shape[:-1], jnp.int32)
        return jnp.sum(hetjax.linear_cross_entropy(hidden, weights, labels, chunk=4))

    forward = cost(losses, (2, 9, 16), (64, 16))
    assert forward.matmul_flops == 2 * 2 * 9 * 16 * 64
    both = cost(jax.grad(losses, argnums=(0, 1)), (2, 9, 16), (64, 16))
    assert both.matmul_flops == 4 * forward.matmul_flops


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
