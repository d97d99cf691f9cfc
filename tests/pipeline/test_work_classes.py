"""Work by class: products by their smallest side, all else by what is done with its bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hetjax.pipeline.program.costs import steps_cost
from hetjax.pipeline.program.traced_program import flatten_jaxpr
from hetjax.pipeline.program.work_classes import is_product, steps_work


def work_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> dict[str, float]:
    """The work of a function of float32 arrays."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return dict(steps_work(flatten_jaxpr(jax.make_jaxpr(function)(*arrays)).steps))


def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)


def test_a_product_counts_between_the_knots_beside_its_smallest_side():
    assert work_of(jnp.matmul, (64, 512), (512, 1024)) == {"product 64": 2 * 64 * 512 * 1024}
    found = work_of(jnp.matmul, (1024, 512), (512, 181))  # 181 is halfway from 128 to 256.
    flops = 2 * 1024 * 512 * 181
    assert found == {
        "product 128": pytest.approx(flops / 2, rel=0.01),
        "product 256": pytest.approx(flops / 2, rel=0.01),
    }
    assert list(work_of(jnp.matmul, (4096, 4096), (4096, 4096))) == ["product 512"]
    assert list(work_of(jnp.matmul, (4, 4096), (4096, 4096))) == ["product 8"]


def test_products_of_batches_are_a_class_of_their_own():
    assert list(work_of(jnp.matmul, (6, 64, 64), (6, 64, 64))) == ["batched product 64"]


def test_convolutions_gradients_of_kernels_and_small_images_are_told_apart():
    shapes = ((32, 16, 16, 64), (3, 3, 64, 64))
    assert list(work_of(convolved, *shapes)) == ["convolution 64", "convolved"]
    gradient = jax.grad(lambda kernel, x: convolved(x, kernel).sum())
    found = work_of(gradient, shapes[1], shapes[0])
    assert "kernel gradient 64" in found
    beyond = work_of(convolved, (32, 2, 2, 64), (3, 3, 64, 64))
    assert list(beyond) == ["convolution beyond images 64", "convolved"]


def test_a_scan_counts_all_its_iterations_and_a_conditional_its_larger_branch():
    def repeated(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=5)[0]

    def chosen(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x)

    once = 2 * 64**3
    assert work_of(repeated, (64, 64), (64, 64))["product 64"] == 5 * once
    assert work_of(chosen, (64, 64), (64, 64))["product 64"] == once


def test_products_have_as_many_flops_as_costs_say():
    def loss(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.tanh(x @ w) @ v).var()

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((24, 40), (40, 72), (72, 9))]
    steps = flatten_jaxpr(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*shapes)).steps
    products = sum(amount for name, amount in steps_work(steps).items() if is_product(name))
    assert products == pytest.approx(steps_cost(steps).matmul_flops)
