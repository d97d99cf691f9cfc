"""Fences change no number, and stand where sums would be computed again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import BLOCKS, Model, make_batch

from hetjax.pipeline.program.fences import evaluate, fenced, fenced_values
from hetjax.pipeline.program.traced_program import FlatJaxpr, flatten_jaxpr


def residual_stream(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = x + jnp.tanh(x @ weight)
    return jnp.sum(x * x)


def flat_gradient(depth: int) -> FlatJaxpr:
    weights = [jnp.full((4, 4), 0.1) for _ in range(depth)]
    return flatten_jaxpr(jax.make_jaxpr(jax.grad(residual_stream))(weights, jnp.ones((3, 4))))


def test_a_fence_stands_at_sums_that_grow_with_depth():
    """Of each block's two sums over the blocks, forward and backward, in deep models."""
    shallow, deep = (
        len(fenced_values(flat.steps, flat.outputs, flat.avals))
        for flat in (flat_gradient(2), flat_gradient(10))
    )
    assert shallow < deep <= 2 * 10


def test_no_value_is_fenced_that_is_read_once_or_cheap_to_make_again():
    def plain(x: jax.Array) -> jax.Array:
        y = x * 2.0
        return (y + 1.0) @ (y - 1.0)

    flat = flatten_jaxpr(jax.make_jaxpr(plain)(jnp.ones((4, 4))))
    assert not fenced_values(flat.steps, flat.outputs, flat.avals)


@pytest.mark.parametrize("block", sorted(BLOCKS))
def test_what_is_computed_stays_the_same(block: str):
    model = Model((block, "dense", block))
    parameters, batch = model.init(), make_batch(2)
    leaves, tree = jax.tree.flatten((parameters, batch))

    def loss_and_gradient(*leaves: Any) -> Any:
        parameters, batch = jax.tree.unflatten(tree, leaves)
        return jax.value_and_grad(model.mean_loss)(parameters, batch)

    flat = flatten_jaxpr(jax.make_jaxpr(loss_and_gradient)(*leaves))

    def run(*leaves: Any) -> list[Any]:
        environment = dict(zip(flat.inputs, leaves, strict=True))
        return evaluate(flat.steps, environment, flat.outputs, flat.avals)

    def run_fenced(true: jax.Array, *leaves: Any) -> list[Any]:
        with fenced(true):
            return run(*leaves)

    plain, behind = jax.jit(run)(*leaves), jax.jit(run_fenced)(jnp.bool_(True), *leaves)
    for expected, found in zip(plain, behind, strict=True):
        scale = float(jnp.max(jnp.abs(expected))) or 1.0
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * scale)
