"""The widest tensor parallelism of a subcluster, which every planner and every plan keeps to."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

from hetjax.errors import InputError
from hetjax.mesh import Cluster, Link, Subcluster, SubMesh, kind
from hetjax.planner import DynamicProgram, HapPlanner, HeteroAuto, Plan, make_problem, validate
from hetjax.planner.hap.hap_planner import members_of
from hetjax.planner.harp.table_making import execution_options
from hetjax.planner.problem.problem import PlanningProblem

LINK = Link(300e9, 1e-6)
WIDTH, BLOCKS = 2048, 8


def cluster(limit: int | None, devices: int = 4) -> Cluster:
    # So little memory that a block needs several devices.
    small = replace(kind("V100"), name="small", memory_bytes=int(1.2e8))
    part = Subcluster("old", small, 2, devices, LINK, LINK, max_tensor_parallelism=limit)
    return Cluster("rack", (part,))


def loss(parameters, batch):
    x = batch
    for up, down in parameters:
        x = x + jnp.tanh(x @ up) @ down
    return jnp.mean(x**2)


def problem_of(limit: int | None, devices: int = 4, batch: int = 4) -> PlanningProblem:
    pair = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 2
    return make_problem(
        loss,
        [pair] * BLOCKS,
        jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32),
        cluster=cluster(limit, devices),
        optimizer=optax.sgd(1e-3),
        num_microbatches=batch,
    )


def widths(plan: Plan) -> set[int]:
    return {member.mesh_shape[1] for stage in plan.stages for member in stage.members}


@pytest.mark.parametrize("planner", [DynamicProgram(), HeteroAuto()])
def test_no_plan_has_a_wider_tensor_axis(planner: DynamicProgram | HeteroAuto):
    free = planner.plan(problem_of(None))
    assert max(widths(free)) > 2
    limited = planner.plan(problem_of(2))
    assert max(widths(limited)) <= 2


def test_the_ways_to_run_a_stage_keep_to_it():
    problem = problem_of(2)
    (part,) = problem.cluster.subclusters
    found = {each.mesh_shape for each in execution_options(problem, part, (2, 4))}
    assert found == set()
    found = {each.mesh_shape for each in execution_options(problem, part, (1, 2))}
    assert found == {(1, 2)}


def test_members_of_one_stage_are_as_small_as_they_must_be():
    where = cluster(2).subclusters[0]
    rack = Cluster("rack", (where,))
    found = members_of(rack, [SubMesh("old", 0, (2, 4))], 6)
    assert [each.mesh_shape for each in found] == [(2, 2)] * 2
    found = members_of(rack, [SubMesh("old", 0, (1, 4))], 1)
    assert [str(each.submesh) for each in found] == ["old[0:2] 1x2", "old[2:4] 1x2"]
    assert [each.mesh_shape for each in found] == [(1, 2)] * 2


def test_a_synthesised_plan_keeps_to_it():
    problem = problem_of(1, devices=2, batch=3)
    roomy = replace(problem.cluster.subclusters[0], kind=kind("V100"))
    plan = HapPlanner().plan(replace(problem, cluster=Cluster("rack", (roomy,))))
    validate(plan)
    assert widths(plan) == {1}


def test_a_plan_by_hand_over_the_limit_is_refused():
    plan = DynamicProgram().plan(problem_of(None))
    (part,) = plan.cluster.subclusters
    limited = replace(plan.cluster, subclusters=(replace(part, max_tensor_parallelism=2),))
    content = replace(plan, cluster=limited).to_json_dict()
    message = (
        r"plan: pipelines\[0\]\.stages\[0\]\.members\[0\]\.mesh_shape is \[1, 8\]; the tensor axis "
        r"must have at most 2 devices, the max_tensor_parallelism of subcluster 'old'"
    )
    with pytest.raises(InputError, match=message):
        Plan.from_json_dict(content)
