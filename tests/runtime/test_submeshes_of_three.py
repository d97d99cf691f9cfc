"""Stages on 3 and 6 devices: in the search, and trained with the numbers of one device."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import Case, examples, random_boundaries, random_model, random_schedule, trace_model
from hypothesis import given
from hypothesis import strategies as st
from one_device import check_gradients

import hetjax
from hetjax.mesh import KINDS, Cluster, DeviceKind, Link, Subcluster, SubMesh
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.sharding.annotation.rules import RULES

LINK = Link(1e12, 1e-9)
NODE = Cluster("node", (Subcluster("all", KINDS["T4"], 1, 8, LINK, LINK),))
"""One node of the eight host devices of the tests."""

SLICES = (
    ((0, 3), (3, 3), (6, 1)),
    ((0, 6), (6, 2)),
    ((0, 2), (2, 3), (5, 3)),
    ((1, 3), (4, 4)),
    ((2, 6),),
)
"""First devices of submeshes, and how many these have."""


def random_case(rng: Random) -> Case:
    """A random model on a few submeshes, one of 3 or 6 devices."""
    # Copies of the state of tied parameters differ in their last bits on any devices where a step
    # has 18 examples: XLA multiplies by reciprocals in some programs.
    model = replace(random_model(rng), tied=False)
    slices = rng.choice(SLICES)
    # Numbers do not depend on the size of the microbatch.
    positions = random_boundaries(rng, trace_model(model, 1), len(slices))
    stages = []
    for place, (start, count) in enumerate(slices[: len(positions) - 1]):
        data = rng.choice([each for each in (1, 2, 3, 6) if count % each == 0])
        submesh = SubMesh("all", start, (1, count))
        rule, recompute = rng.choice(sorted(RULES)), rng.random() < 0.3
        mesh = (data, count // data)
        stages.append(StagePlan.on((place, place + 1), submesh, mesh, rule, recompute=recompute))
    schedule = random_schedule(rng, stages, rng.randint(1, 3))
    pipeline = PipelinePlan(tuple(stages), schedule.num_microbatches, 6, schedule)
    program = trace_model(model, 6)
    return Case(model, program, Plan(program.fingerprint, positions, NODE, (pipeline,)))


@examples(usual=2, full=30)
@given(st.integers(0, 2**32 - 1))
def test_stages_on_three_and_six_devices_have_the_gradients_of_one(number: int):
    check_gradients(random_case(Random(number)))


def loss(weights: list[jax.Array], batch: jax.Array) -> jax.Array:
    x = batch
    for weight in weights:
        x = jnp.tanh(x @ weight @ weight.T)
    return jnp.mean((x - batch) ** 2)


@pytest.mark.parametrize(("devices", "widths"), [(4, (96, 32)), (6, (32, 32, 32, 32))])
def test_the_search_takes_them_where_they_balance(devices: int, widths: tuple[int, ...]):
    """Three quarters of the work on 3 of 4 devices, half of it on 3 of 6."""
    card = DeviceKind("card", {"float32": 1e6}, 10**9, 1e9, source="made up", platform="cpu")
    near = Link(1e7, 1e-4)
    rng = np.random.default_rng(0)
    weights, *batches = [
        [rng.normal(size=(8, width)).astype(np.float32) / width for width in widths],
        *(rng.normal(size=(24, 8)).astype(np.float32) for _ in range(3)),
    ]
    optimizer = optax.adam(1e-2)
    plan = hetjax.plan(
        loss,
        weights,
        batches[0],
        cluster=Cluster("one", (Subcluster("node", card, 1, devices, near, near),)),
        optimizer=optimizer,
        num_microbatches=8,
        options=hetjax.PlanOptions(min_stages=2, max_stages=2, max_pipelines=1),
    )
    assert (1, 3) in {stage.submesh.shape for stage in plan.stages}
    assert sum(stage.num_devices for stage in plan.stages) == devices
    if devices == 4:
        return
    with hetjax.Trainer(plan, loss, weights, optimizer, batches[0]) as trainer:
        losses = [trainer.train_step(batch).loss for batch in batches]
    with jax.numpy_dtype_promotion("standard"):  # Optax needs it.
        expected = one_device_losses(weights, optimizer, batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def one_device_losses(weights: Any, optimizer: Any, batches: list[Any]) -> list[float]:
    state, losses = optimizer.init(weights), []
    for batch in batches:
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        updates, state = optimizer.update(gradients, state, weights)
        weights = optax.apply_updates(weights, updates)
        losses.append(float(value))
    return losses
