"""Floats of few exponents: what plain JAX trains is trained, however many examples there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CLUSTER

from hetjax import Trainer
from hetjax.mesh import SubMesh
from hetjax.pipeline import trace
from hetjax.pipeline.program.loss_seed import loss_seed
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan

WIDTH, LARGE, SMALL, STEPS = 8, 64, 16, 2
SCALE = 2.0**15
"""Gradients are 2,300 then, and sums of them over 64 examples more than float16 has."""

RATE = 0.1 / SCALE


def parameters(dtype: Any = jnp.float16) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    return [jax.random.normal(key, (WIDTH, WIDTH), dtype) / 2 for key in keys]


def errors(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    values = x.astype(weights[0].dtype)
    for weight in weights:
        values = jnp.tanh(values @ weight)
    return SCALE * jnp.mean((values.astype(jnp.float32) - 1.0) ** 2, axis=1)


def of_mean(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean(errors(weights, x))


def of_total(weights: list[jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    found = errors(weights, x)
    return jnp.sum(found), jnp.asarray(found.size, jnp.float32)


def batch(seed: int) -> np.ndarray:
    size = 2 * LARGE + SMALL
    return np.random.default_rng(seed).normal(size=(size, WIDTH)).astype(np.float32)


def plan_of(loss: Callable[..., Any]) -> Plan:
    """Two pipelines of microbatches of unlike sizes, of which the first has two stages."""
    program = trace(loss, parameters(), batch(0)[:LARGE])
    layers = (0, 3, program.num_positions)
    stages = [
        StagePlan.on(span, SubMesh("first", first, (1, 1)), (1, 1))
        for first, span in enumerate(((0, 1), (1, 2), (0, 2)))
    ]
    pipelines = (
        PipelinePlan(tuple(stages[:2]), 2, LARGE, one_f_one_b(2, 2)),
        PipelinePlan(tuple(stages[2:]), 1, SMALL, one_f_one_b(1, 1)),
    )
    return Plan(program.fingerprint, layers, CLUSTER, pipelines)


@pytest.mark.parametrize("loss", [of_mean, of_total])
def test_float16_does_not_overflow_by_the_number_of_examples(loss: Callable[..., Any]):
    weights, expected = parameters(), []
    for step in range(STEPS):
        value, gradients = jax.value_and_grad(of_mean)(weights, batch(step))
        norm = optax.tree.norm([each.astype(jnp.float32) for each in gradients])
        expected.append((float(value), float(norm)))
        updated = zip(weights, gradients, strict=True)
        weights = [w - (RATE * g.astype(jnp.float32)).astype(w.dtype) for w, g in updated]
    with Trainer(plan_of(loss), loss, parameters(), optax.sgd(RATE), batch(0)) as trainer:
        found = [trainer.train_step(batch(step)) for step in range(STEPS)]
        ours = trainer.parameters()
    seen = [(each.loss, each.gradient_norm) for each in found]
    np.testing.assert_allclose(seen, expected, rtol=1e-2)
    for one, other in zip(ours, weights, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)


def test_losses_of_wider_floats_begin_with_one():
    for dtype in (jnp.float32, jnp.bfloat16):
        assert loss_seed([trace(of_mean, parameters(dtype), batch(0))], [1]) == 1.0


def test_floats_inside_of_a_loop_count():
    def loss(weight: jax.Array, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return (x.astype(jnp.float16) * weight.astype(jnp.float16)).astype(x.dtype), None

        return jnp.mean(jax.lax.scan(body, x, length=3)[0])

    assert loss_seed([trace(loss, jnp.ones(WIDTH), jnp.ones((5, WIDTH)))], [2]) == 1 / 8
