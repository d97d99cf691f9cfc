"""Comparisons with a maximum or a threshold are made once, beside what was selected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_pipeline import one_pipeline

import hetjax
from hetjax.mesh import Cluster, SubMesh
from hetjax.pipeline import trace
from hetjax.pipeline.program.selections import selected_comparisons
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import Member, PipelinePlan, Plan, StagePlan

INPUTS, WIDTH, LAYERS, STAGES, SIZE = 6, 40, 6, 4, 4

Loss = Callable[[Any, Any], jax.Array]


def scaled(x: jax.Array) -> jax.Array:
    """By the largest."""
    return x / (1 + jnp.max(jnp.abs(x), 1, keepdims=True))


def thinned(x: jax.Array) -> jax.Array:
    """Only the largest are left."""
    threshold = jax.lax.top_k(x, WIDTH // 2)[0][:, -1:]
    return jnp.where(x >= threshold, x, 0.0)


def middle(x: jax.Array) -> jax.Array:
    """What lies beyond one of the middle."""
    return jnp.where(x >= jnp.sort(x, 1)[:, WIDTH // 2, None], x, 0.1 * x)


def loss_of(select: Callable[[jax.Array], jax.Array]) -> Loss:
    def loss(parameters: Any, batch: Any) -> jax.Array:
        x = batch["x"] @ parameters["in"]
        for weight in parameters["layers"]:
            x = select(x + jnp.tanh(x @ weight))
        return jnp.mean((x @ parameters["out"] - batch["y"]) ** 2)

    return loss


def parameters() -> Any:
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> np.ndarray:
        return (0.2 * rng.normal(size=shape)).astype(np.float32)

    layers = [draw(WIDTH, WIDTH) for _ in range(LAYERS)]
    return {"in": draw(INPUTS, WIDTH), "layers": layers, "out": draw(WIDTH, 2)}


def batch(seed: int, size: int) -> Any:
    rng = np.random.default_rng(seed)
    shapes = {"x": (size, INPUTS), "y": (size, 2)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def boundaries_within(loss: Loss, size: int) -> tuple[int, ...]:
    """Cuts right before what is selected."""
    program = trace(loss, parameters(), batch(0, size))
    added = [place for place, step in enumerate(program.steps) if step.name == "tanh"]
    return 0, added[0], added[2] + 1, added[3] + 4, program.num_positions


@pytest.mark.parametrize("select", [scaled, thinned, middle])
@pytest.mark.parametrize("recompute", [False, True])
def test_no_backward_pass_compares_again(select: Callable[..., Any], recompute: bool):
    loss = loss_of(select)
    cuts = boundaries_within(loss, SIZE)
    pipeline = one_pipeline(
        trace(loss, parameters(), batch(0, SIZE)),
        parameters(),
        optax.identity(),
        boundaries=cuts,
        recompute=[recompute] * STAGES,
        num_microbatches=2,
    )
    compared = 0
    for programs in pipeline.programs:
        before = programs.recompute_steps if recompute else programs.forward_steps
        found = selected_comparisons([*before, *programs.backward_steps])
        assert found.isdisjoint(programs.backward_steps)
        compared += len(found)
    assert compared


@pytest.mark.parametrize("select", [scaled, thinned])
def test_gradients_pass_through_what_was_selected(select: Callable[..., Any]):
    # Programs round unlike where they are optimized, as in the full profile.
    loss, size = loss_of(select), 2 * SIZE
    cluster = Cluster.local(jax.devices()[:STAGES])
    name = cluster.subclusters[0].name
    stages = tuple(
        StagePlan((s, s + 1), (Member(SubMesh(name, s, (1, 1)), (1, 1)),), recompute=True)
        for s in range(STAGES)
    )
    plan = Plan(
        trace(loss, parameters(), batch(0, SIZE)).fingerprint,
        boundaries_within(loss, SIZE),
        cluster,
        (PipelinePlan(stages, 2, SIZE, one_f_one_b(STAGES, 2)),),
    )
    given = parameters()
    norm = jax.jit(lambda batch: optax.tree.norm(jax.grad(loss)(given, batch)))
    found: Sequence[float]
    with hetjax.Trainer(plan, loss, given, optax.sgd(1e-12), batch(0, size)) as trainer:
        found = [trainer.train_step(batch(seed, size)).gradient_norm for seed in range(8)]
    expected = [float(norm(batch(seed, size))) for seed in range(8)]
    np.testing.assert_allclose(found, expected, rtol=2e-5)
