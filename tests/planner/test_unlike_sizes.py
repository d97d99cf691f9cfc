"""Pipelines with microbatches of unlike sizes: searched for, predicted, taken where they win."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

from hetjax import planner
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster
from hetjax.planner import DynamicProgram, PlanningProblem
from hetjax.planner.harp.microbatches import choose_microbatches

NEAR, FAR = Link(2.5e10, 5e-6), Link(5e9, 5e-5)
BATCH = 48


def island(name: str, speed: float, memory: int, devices: int) -> Subcluster:
    kind = DeviceKind(
        f"{name} card", {"float32": speed * 1e13}, memory, speed * 3e11, source="made up"
    )
    return Subcluster(name, kind, 1, devices, NEAR, FAR)


CLUSTER = Cluster(
    "two islands",
    (island("fast", 1.5, 1_500_000_000, 4), island("slow", 1.0, 150_000_000, 2)),
    (("fast", "slow", FAR),),
)
"""Four cards that are 1.5 times as fast, and two of little memory: these have room for two examples
each, while those want four for their data axis."""


def problem_of(count: int) -> PlanningProblem:
    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    return planner.make_problem(
        loss,
        [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 12,
        jax.ShapeDtypeStruct((BATCH, 2048, 512), jnp.float32),
        cluster=CLUSTER,
        optimizer=optax.adam(1e-3),
        num_microbatches=count,
        options=planner.PlanOptions(union_stages=False),
    )


def test_unlike_sizes_are_taken_where_they_are_faster():
    problems = {count: problem_of(count) for count in (24, 4)}
    alike = [planner.solve(problem).predicted.step_time for problem in problems.values()]
    choice = choose_microbatches(problems.__getitem__, BATCH, DynamicProgram(), (24, 4))
    (other,) = choice.beside
    plan = planner.complete(choice.found.plan, choice.problem, other)
    planner.validate(plan)
    fast, slow = plan.pipelines
    assert (fast.microbatch_size, slow.microbatch_size) == (12, 2)
    assert plan.batch_size == BATCH
    assert plan.predicted.fits
    assert plan.predicted.step_time < 0.95 * min(alike)
    assert planner.simulate(plan).makespan == pytest.approx(plan.predicted.step_time)
    assert planner.Plan.from_json_dict(plan.to_json_dict()) == plan


def test_one_pipeline_has_one_size():
    asked = planner.PlanOptions(union_stages=False, max_pipelines=1)
    problems = {count: replace(problem_of(count), options=asked) for count in (24, 4)}
    choice = choose_microbatches(problems.__getitem__, BATCH, DynamicProgram(), (24, 4))
    assert choice.beside == ()
    assert len(choice.found.plan.pipelines) == 1
