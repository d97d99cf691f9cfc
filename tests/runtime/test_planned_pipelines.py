"""Pipelines that the planner chose, of unlike speed and share, train with one device's losses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

import hetjax
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster

STEPS, BATCH, WIDTH = 5, 12, 8
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def loss(weights: list[jax.Array], batch: NDArray[np.float32]) -> jax.Array:
    x = batch
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean((x - batch) ** 2)


def unlike_cluster() -> Cluster:
    near, far = Link(10e9, 1e-9), Link(1e9, 1e-3)
    fast = DeviceKind("fast card", {"float32": 2e5}, 10**9, 1e9, source="made up", platform="cpu")
    slow = DeviceKind("slow card", {"float32": 8e4}, 10**9, 1e9, source="made up", platform="cpu")
    parts = (
        Subcluster("fast", fast, 1, 2, near, near),
        Subcluster("slow", slow, 1, 2, near, near),
    )
    return Cluster("unlike", parts, (("fast", "slow", far),))


def test_five_steps_have_the_losses_of_one_device():
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(3)]
    batches = [rng.normal(size=(BATCH, WIDTH)).astype(np.float32) for _ in range(STEPS)]
    plan = hetjax.plan(
        loss,
        weights,
        batches[0],
        cluster=unlike_cluster(),
        optimizer=OPTIMIZER,
        num_microbatches=6,
        options=hetjax.PlanOptions(max_stages=2, max_pipelines=3),
    )
    counts = [pipeline.num_microbatches for pipeline in plan.pipelines]
    assert len(counts) > 1
    assert len(set(counts)) > 1
    assert sum(counts) == 6
    with hetjax.Trainer(plan, loss, weights, OPTIMIZER, batches[0]) as trainer:
        losses = [trainer.train_step(batch).loss for batch in batches]
    with jax.numpy_dtype_promotion("standard"):  # Optax needs it.
        expected = one_device_losses(weights, batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def one_device_losses(weights, batches: list[NDArray[np.float32]]) -> list[float]:
    @jax.jit
    def step(weights, state, batch):
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        updates, state = OPTIMIZER.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value

    state, losses = OPTIMIZER.init(weights), []
    for batch in batches:
        weights, state, value = step(weights, state, batch)
        losses.append(float(value))
    return losses
