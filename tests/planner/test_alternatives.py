"""The next best plans: valid, in order, none of them the chosen one; and what they do in words."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

from hetjax import planner
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh
from hetjax.planner import DynamicProgram, Found, Member, Plan, PlanningProblem, differences
from hetjax.planner.harp.restriction import with_nodes, without_recomputation

NEAR, FAR = Link(10e9, 1e-5), Link(1e9, 1e-4)


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


@pytest.fixture(scope="module")
def problem() -> PlanningProblem:
    fast = DeviceKind("fast card", {"float32": 1e12}, 10**9, 1e11, source="made up")
    slow = replace(fast, name="slow card", peak_flops={"float32": 5e11})
    cluster = Cluster(
        "test",
        (
            Subcluster("fast", fast, 2, 2, NEAR, FAR),
            Subcluster("slow", slow, 1, 2, NEAR, NEAR),
        ),
        (("fast", "slow", FAR),),
    )
    return planner.make_problem(
        loss,
        [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 8,
        jax.ShapeDtypeStruct((64, 512), jnp.float32),
        cluster=cluster,
        optimizer=optax.adam(1e-3),
        num_microbatches=8,
    )


@pytest.fixture(scope="module")
def found(problem: PlanningProblem) -> Found:
    found = DynamicProgram().find(problem)
    assert found is not None
    return found


def test_they_are_valid_slower_and_unlike(problem: PlanningProblem, found: Found):
    others = planner.next_best(problem, found, DynamicProgram())
    assert 0 < len(others) <= 5
    times = [each.step_time for each in others]
    assert times == sorted(times)
    assert times[0] >= found.step_time
    for each in others:
        planner.validate(each.plan)
        assert each.plan.stages != found.plan.stages
        assert differences(found.plan, each.plan) != "layers cut elsewhere"


def test_a_restriction_is_kept(problem: PlanningProblem, found: Found):
    fewer, none, kept = DynamicProgram().find_within(
        problem,
        [
            lambda table: with_nodes(table, (1, 1)),
            lambda table: with_nodes(table, (0, 0)),
            without_recomputation,
        ],
    )
    assert none is None
    assert fewer is not None
    assert kept is not None
    assert fewer.step_time >= found.step_time
    used = {
        device
        for stage in fewer.plan.stages
        for device in fewer.plan.cluster.device_ids(stage.submesh)
    }
    assert not used & {2, 3}, "the second fast node is left out"
    assert not any(stage.recompute for stage in kept.plan.stages)


def changed(plan: Plan, **stage: object) -> Plan:
    first, *rest = plan.pipeline.stages
    stages = (replace(first, **stage), *rest)  # pyright: ignore[reportArgumentType]
    return replace(plan, pipelines=(replace(plan.pipeline, stages=stages),))


def test_differences_in_words(found: Found):
    plan = found.plan
    first = plan.pipeline.stages[0]
    assert differences(plan, plan) == ""
    assert differences(plan, changed(plan, recompute=True)) == "stage 0 recomputing"
    assert differences(changed(plan, recompute=True), plan) == "stage 0 not recomputing"
    other = changed(plan, sharding="state_sharded")
    assert differences(plan, other) == "stage 0 sharded otherwise"
    halves = replace(plan.pipeline, num_microbatches=4, microbatch_size=16)
    assert differences(plan, replace(plan, pipelines=(halves,))) == (
        "4 microbatches of 16 instead of 8 microbatches of 8"
    )
    alone = Member(SubMesh("fast", 0, (1, 1)), first.mesh_shape)
    one = replace(plan.pipeline, stages=(replace(first, members=(alone,)),))
    said = differences(replace(plan, pipelines=(replace(one, stages=one.stages * 2),)), plan)
    assert "more of" in said or "stages instead of 2" in said
