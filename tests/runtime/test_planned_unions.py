"""Unlike cards of one box train in the one stage that the planner put them into."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import hetjax
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster
from hetjax.models import ResNetConfig, model_of

STEPS, BATCH = 3, 16
OPTIMIZER = optax.sgd(0.05, momentum=0.9)
MODEL = model_of(ResNetConfig(classes=4, image_size=8, groups=(1,), width=4))
NEAR = Link(2e10, 1e-9)


def card(name: str, flops: float, memory: float = 1e9) -> DeviceKind:
    figures = {"float32": flops}, int(memory), 1e12
    return DeviceKind(name, *figures, source="made up", platform="cpu")


def box(*parts: tuple[DeviceKind, int]) -> Cluster:
    """Cards of several kinds, joined by one bus."""
    subclusters = tuple(
        Subcluster(f"cards{place}", kind, 1, count, NEAR, NEAR)
        for place, (kind, count) in enumerate(parts)
    )
    return Cluster("box", subclusters, (("cards0", "cards1", NEAR),))


def batches() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "images": rng.integers(0, 256, (BATCH, 8, 8, 3), dtype=np.uint8),
            "labels": rng.integers(0, 4, BATCH, dtype=np.int32),
        }
        for _ in range(STEPS)
    ]


def one_device_losses() -> list[float]:
    def mean(parameters: Any, batch: Any) -> jax.Array:
        total, count = MODEL.loss(parameters, batch)
        return total / count

    @jax.jit
    def step(parameters: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(mean)(parameters, batch)
        updates, state = OPTIMIZER.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    parameters, found = MODEL.init(jax.random.key(0)), []
    state = OPTIMIZER.init(parameters)
    for batch in batches():
        parameters, state, value = step(parameters, state, batch)
        found.append(float(value))
    return found


BY_SPEED = box((card("fast", 1e7), 2), (card("slow", 4e6), 2))
BY_MEMORY = box((card("60 kB", 1e7, 6e4), 1), (card("30 kB", 1e7, 3e4), 1))


@pytest.mark.parametrize(
    ("cluster", "sizes"), [(BY_SPEED, (2, 2)), (BY_MEMORY, (1, 1))], ids=["speed", "memory"]
)
def test_shares_by_speed_or_memory_have_the_losses_of_one_device(
    cluster: Cluster, sizes: tuple[int, int]
):
    plan = hetjax.plan(
        MODEL.loss,
        MODEL.parameter_shapes,
        MODEL.batch_shapes(BATCH),
        cluster=cluster,
        optimizer=OPTIMIZER,
        num_microbatches=1,
        options=hetjax.PlanOptions(allow_recompute=False),
    )
    (stage,) = plan.stages
    assert tuple(submesh.num_devices for submesh in stage.submeshes) == sizes
    first, second = stage.shares.batch
    assert first > second > 0
    given = MODEL.init(jax.random.key(0))
    with hetjax.Trainer(plan, MODEL.loss, given, OPTIMIZER, batches()[0]) as trainer:
        losses = [trainer.train_step(batch).loss for batch in batches()]
    np.testing.assert_allclose(losses, one_device_losses(), rtol=1e-5)
