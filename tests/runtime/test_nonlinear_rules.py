"""Derivative rules that are not linear: what clips a gradient on its way is given plain JAX's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from unlike_pipelines import unlike_pipelines

from hetjax import Trainer
from hetjax.pipeline import trace
from hetjax.pipeline.program.loss_seed import loss_seed
from hetjax.planner.plan.plan import Plan

WIDTH, LARGE, SMALL, STEPS = 4, 8, 2, 2
RATE, LIMIT = 2.0, 1e-3
OPTIMIZER = optax.sgd(RATE)


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    """The same, but that no gradient passes which is larger than the limit."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -LIMIT, LIMIT),))


def parameters() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    return [jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]


def errors(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    values = x
    for weight in weights:
        values = clipped(jnp.tanh(values @ weight))
    return jnp.mean((values - 1.0) ** 2, axis=1)


def of_mean(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean(errors(weights, x))


def of_total(weights: list[jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    found = errors(weights, x)
    return jnp.sum(found), jnp.asarray(found.size, jnp.float32)


def of_weighted(weights: list[jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(errors(weights, x)), jnp.sum(jnp.abs(x))


def batch(seed: int) -> np.ndarray:
    size = 2 * LARGE + SMALL
    return np.random.default_rng(seed).normal(size=(size, WIDTH)).astype(np.float32)


def plan_of(loss: Callable[..., Any]) -> Plan:
    return unlike_pipelines(trace(loss, parameters(), batch(0)[:LARGE]), 3, SMALL)


@pytest.mark.parametrize("loss", [of_mean, of_total])
def test_what_is_clipped_is_the_gradient_of_the_mean(loss: Callable[..., Any]):
    weights, expected = parameters(), []
    for step in range(STEPS):
        value, gradients = jax.value_and_grad(of_mean)(weights, batch(step))
        expected.append(float(value))
        weights = [w - RATE * g for w, g in zip(weights, gradients, strict=True)]
    with Trainer(plan_of(loss), loss, parameters(), OPTIMIZER, batch(0)) as trainer:
        found = [trainer.train_step(batch(step)).loss for step in range(STEPS)]
        ours = trainer.parameters()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for one, other in zip(ours, weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_what_divides_the_loss_is_known_or_not():
    sizes = [trace(of_total, parameters(), batch(0)[:size]) for size in (LARGE, SMALL)]
    assert loss_seed(sizes, [2, 1]) == 1 / (2 * LARGE + SMALL)
    assert loss_seed([trace(of_weighted, parameters(), batch(0))], [1]) == 1.0
