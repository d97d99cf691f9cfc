"""Narrow dtypes: what plain JAX trains is trained, however many examples there are, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CLUSTER
from unlike_pipelines import unlike_pipelines

from hetjax import InputError, Trainer
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
    return unlike_pipelines(trace(loss, parameters(), batch(0)[:LARGE]), 3, SMALL)


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


def with_signs(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """What the first product gives is needed at the end, too, as whole numbers of four bits."""
    first = jnp.tanh(x @ weights[0])
    signs = (jax.lax.stop_gradient(first) * 7).astype(jnp.int4)
    return jnp.mean((jnp.tanh(first @ weights[1]) * signs.astype(first.dtype)) ** 2)


def test_a_value_of_half_a_byte_that_crosses_is_refused_with_its_line():
    weights, optimizer = parameters(np.float32), optax.sgd(0.1)
    program = trace(with_signs, weights, batch(0)[:SMALL])
    names = [step.name for step in program.steps]
    crosses = names.index("dot_general", names.index("dot_general") + 1)
    end = program.num_positions

    def trainer(layers: tuple[int, ...]) -> Trainer:
        stages = tuple(
            StagePlan.on((stage, stage + 1), SubMesh("first", stage, (1, 1)), (1, 1))
            for stage in range(len(layers) - 1)
        )
        pipeline = PipelinePlan(stages, 1, SMALL, one_f_one_b(len(stages), 1))
        plan = Plan(program.fingerprint, layers, CLUSTER, (pipeline,))
        return Trainer(plan, with_signs, weights, optimizer, batch(0)[:SMALL])

    message = (
        rf"the value int4\[16, 8\] that 'convert_element_type' makes at {__file__}:\d+ crosses"
    )
    with pytest.raises(InputError, match=message):
        trainer((0, crosses, end))
    for layers in ((0, 1, end), (0, end)):
        with trainer(layers) as allowed:
            found = allowed.train_step(batch(0)[:SMALL]).loss
        expected = float(with_signs(weights, jnp.asarray(batch(0)[:SMALL])))
        assert found == pytest.approx(expected, rel=1e-6)
