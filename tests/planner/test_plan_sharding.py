"""Plans with a tensor axis carry the annotations that the integer program finds."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh
from hetjax.models.gpt import GPTConfig
from hetjax.models.language_model import LanguageModel, language_model
from hetjax.pipeline.schedules.warm_up import gpipe, one_f_one_b
from hetjax.planner import DynamicProgram, PlanOptions, complete, make_problem, predict
from hetjax.planner.plan.plan import Plan, validate_for
from hetjax.planner.plan.stage_plan import Offloaded, PipelinePlan, StagePlan
from hetjax.planner.predictions.plan_sharding import shard_stages
from hetjax.planner.problem.problem import PlanningProblem

MODEL = language_model(GPTConfig(vocabulary=64, blocks=2, width=128, heads=4, sequence=32))
LINK = Link(5e9, 1e-6)


def problem_with(
    memory_bytes: int, microbatch_size: int = 1, model: LanguageModel = MODEL
) -> PlanningProblem:
    """A small GPT in one stage, on a node of four devices of so much memory."""
    kind = DeviceKind("test", {"float32": 1e12}, memory_bytes, 1e11, source="made up")
    return make_problem(
        model.loss,
        jax.eval_shape(model.init, jax.random.key(0)),
        {"tokens": jax.ShapeDtypeStruct((4 * microbatch_size, 33), jnp.int32)},
        cluster=Cluster("test", (Subcluster("only", kind, 1, 4, LINK, LINK),)),
        optimizer=optax.adam(1e-3),
        num_microbatches=4,
        options=PlanOptions(max_stages=1, max_pipelines=1),
    )


def test_a_stage_with_a_tensor_axis_is_annotated():
    problem = problem_with(5_000_000)
    found = DynamicProgram().plan(problem)
    (before,) = found.stages
    assert before.mesh_shape[1] > 1
    plan = complete(found, problem)
    (stage,) = plan.stages
    assert stage.parameters["blocks/0/mlp/up/kernel"] == (None, "tensor")
    assert stage.parameters["blocks/0/mlp/down/kernel"] == ("tensor", None)
    assert set(stage.parameters) == set(problem.program.parameter_names)
    assert any("tensor" in spec for spec in stage.values.values())
    validate_for(plan, problem.program)
    assert plan.prediction is not None
    assert plan.prediction.stages[0].fits
    assert Plan.from_json_dict(plan.to_json_dict()) == plan


def test_a_scan_that_is_cut_between_stages_is_annotated():
    config = GPTConfig(vocabulary=64, blocks=4, width=128, heads=4, sequence=32, scan_blocks=True)
    problem = problem_with(50_000_000, model=language_model(config))
    layers = problem.num_layers
    stages = tuple(
        StagePlan.on(layers=part, submesh=SubMesh("only", start, (1, 2)), mesh_shape=(1, 2))
        for part, start in (((0, layers // 2), 0), ((layers // 2, layers), 2))
    )
    pipeline = PipelinePlan(stages, 4, 1, one_f_one_b(2, 4))
    plan = Plan(problem.program.fingerprint, problem.layers, problem.cluster, (pipeline,))
    sharded = shard_stages(predict(plan, problem), problem)
    for stage in sharded.stages:
        assert stage.parameters
    validate_for(sharded, problem.program)
    held = sharded.stages[1].parameters
    assert held.keys() <= set(problem.program.parameter_names)


@pytest.mark.parametrize("offload", ["optimizer_state", "activations"])
def test_what_hosts_hold_is_not_counted_on_devices(offload: Offloaded):
    problem = problem_with(2_500_000)
    (only,) = problem.cluster.subclusters
    cluster = Cluster("test", (replace(only, host_memory_bytes=10**9),))
    problem = replace(problem, cluster=cluster)
    submesh = SubMesh("only", 0, (1, 4))
    plain = StagePlan.on((0, problem.num_layers), submesh, (1, 4))
    stage = replace(plain, offload=(offload,))
    pipeline = PipelinePlan((stage,), 4, 1, gpipe(1, 4))
    plan = Plan(problem.program.fingerprint, problem.layers, cluster, (pipeline,))

    def annotated(stage: StagePlan) -> bool:
        told = predict(plan.with_stages([stage]), problem)
        return bool(shard_stages(told, problem).stages[0].parameters)

    assert annotated(stage)
    assert not annotated(plain)


def test_what_is_said_already_stays():
    problem = problem_with(5_000_000)
    found = DynamicProgram().plan(problem)
    name = problem.program.parameter_names[0]
    (stage,) = found.stages
    said = replace(stage, parameters={name: ()})
    plan = replace(found, pipelines=(replace(found.pipeline, stages=(said,)),))
    assert shard_stages(predict(plan, problem), problem).stages == (said,)


def test_plans_without_a_tensor_axis_stay_as_they_are():
    problem = problem_with(50_000_000, microbatch_size=4)
    plan = predict(DynamicProgram().plan(problem), problem)
    assert plan.stages[0].mesh_shape[1] == 1
    assert shard_stages(plan, problem) is plan
