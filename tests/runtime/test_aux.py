"""Keys in batches and figures beside the loss: several pipelines, held-out batches, Ray."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from noisy_job import BATCH, Examples, loss, make_noisy_plan, make_noisy_trainer, parameters

from hetjax.planner import Plan

EXACT = 1e-5


def microbatches(plan: Plan) -> list[slice]:
    """The rows of each microbatch of a step, of one pipeline after the other."""
    found, start = [], 0
    for pipeline in plan.pipelines:
        for _ in range(pipeline.num_microbatches):
            found.append(slice(start, start + pipeline.microbatch_size))
            start += pipeline.microbatch_size
    assert start == BATCH
    return found


def expected(weights: Any, batches: list[Any], plan: Plan) -> tuple[float, dict[str, float]]:
    """The loss and the figures as one device has them, microbatch by microbatch."""
    found = [
        loss(weights, {name: leaf[rows] for name, leaf in batch.items()})
        for batch in batches
        for rows in microbatches(plan)
    ]
    counts = [float(count) for (_, count), _ in found]
    total = sum(float(total) for (total, _), _ in found)
    figures = {
        name: float(np.average([float(each[name]) for _, each in found], weights=counts))
        for name in found[0][1]
    }
    return total / sum(counts), figures


@pytest.mark.parametrize("pipelines", [1, 2])
def test_figures_are_weighted_by_counts_in_steps_and_held_out_batches(pipelines: int):
    plan = make_noisy_plan(pipelines)
    with make_noisy_trainer("local", plan) as trainer:
        weights = parameters()
        for held_out in (None, 1):
            batches = list(Examples().held_out_batches(BATCH))[:held_out]
            found = trainer.evaluate_with_aux(held_out)
            assert found[0] == trainer.evaluate(held_out)
            wanted = expected(weights, batches, plan)
            assert found[0] == pytest.approx(wanted[0], rel=EXACT)
            assert found[1] == pytest.approx(wanted[1], rel=EXACT)
        for step in range(3):
            wanted = expected(trainer.parameters(), [Examples().batch(step, BATCH)], plan)
            metrics = trainer.train_step()
            assert metrics.loss == pytest.approx(wanted[0], rel=EXACT)
            assert metrics.aux == pytest.approx(wanted[1], rel=EXACT)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("pipelines", [1, 2])
def test_keys_and_figures_are_the_same_on_ray(pipelines: int):
    """Batches come from the source, which each worker reads, and from the driver."""
    plan, found = make_noisy_plan(pipelines), {}
    for runtime in ("local", "ray"):
        with make_noisy_trainer(runtime, plan) as trainer:
            steps = [trainer.train_step() for _ in range(2)]
            steps += [trainer.train_step(Examples().batch(step, BATCH)) for step in (7, 8)]
            held_out = trainer.evaluate_with_aux()
            found[runtime] = (steps, held_out, trainer.parameters())
    for ours, theirs in zip(found["ray"][0], found["local"][0], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert ours.aux == pytest.approx(theirs.aux, rel=1e-6)
    for ours, theirs in zip(found["ray"][1], found["local"][1], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-6),
        found["ray"][2],
        found["local"][2],
    )
