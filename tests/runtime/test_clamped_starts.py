"""Slices that would start outside of a divided dimension start where JAX says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CLUSTER
from execution import one_device_training

from hetjax import Trainer
from hetjax.mesh import SubMesh
from hetjax.pipeline import trace
from hetjax.pipeline.schedules.warm_up import gpipe
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan

ROWS = 8


def start_of(x: jax.Array, start: int) -> jax.Array:
    """A start that no compiler knows."""
    return (jnp.argmax(x[0]) * 0).astype(jnp.int32) + start


def one_row(x: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, start_of(x, ROWS + 3), 0)


def before_all(x: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start_of(x, -3), 3)


def put(x: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, 2 * x[:3], start_of(x, ROWS - 1), 0)


def in_a_loop(x: jax.Array) -> jax.Array:
    def body(kept: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        return kept + jax.lax.dynamic_slice_in_dim(x, start, 3), None

    return jax.lax.scan(body, jnp.zeros((3, x.shape[1])), jnp.arange(4, 10))[0]


def in_a_checkpointed_loop(x: jax.Array) -> jax.Array:
    return jax.checkpoint(in_a_loop)(x)


def in_a_branch(x: jax.Array) -> jax.Array:
    def last(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, start_of(x, ROWS - 1), 3)

    return jax.lax.cond(jnp.sum(x) > -1e9, last, lambda x: x[:3], x)


@pytest.mark.parametrize("sharding", ["data", "fully_sharded"])
@pytest.mark.parametrize(
    "sliced", [one_row, before_all, put, in_a_loop, in_a_checkpointed_loop, in_a_branch]
)
def test_starts_are_clamped_on_divided_examples(
    sliced: Callable[[jax.Array], jax.Array], sharding: str
):
    """XLA's partitioner forgets it: losses and gradients were others."""

    def loss(parameters: Any, batch: Any) -> jax.Array:
        x = jnp.tanh(batch @ parameters["a"])
        return jnp.mean((sliced(x) @ parameters["b"]) ** 2)

    draw = np.random.default_rng(0).normal
    parameters = {name: draw(size=(6, 6)).astype(np.float32) for name in "ab"}
    batch = draw(size=(ROWS, 6)).astype(np.float32)
    program = trace(loss, parameters, batch)
    stage = StagePlan.on((0, 1), SubMesh("first", 0, (1, 2)), (2, 1), sharding)
    pipeline = PipelinePlan((stage,), 1, ROWS, gpipe(1, 1))
    plan = Plan(program.fingerprint, (0, program.num_positions), CLUSTER, (pipeline,))
    optimizer = optax.sgd(0.1)
    with Trainer(plan, loss, parameters, optimizer, batch) as trainer:
        losses = [trainer.train_step(batch).loss for _ in range(2)]
        after = trainer.parameters()
    arrays = jax.tree.map(jnp.asarray, parameters)
    wanted, expected, _ = one_device_training(loss, arrays, optimizer, [batch] * 2)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for name, leaf in expected.items():
        np.testing.assert_allclose(after[name], leaf, rtol=1e-4, atol=1e-6)
