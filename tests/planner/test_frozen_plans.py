"""Plans and predictions know what is frozen."""

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from hetjax.mesh import KINDS, Cluster, Link, Subcluster, SubMesh
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import DynamicProgram, PlanningProblem, complete, make_problem, predict
from hetjax.planner.costs.cost_model import estimate
from hetjax.planner.costs.union_cost import executions_of
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.planner.predictions.stage_prediction import pipeline_works
from hetjax.planner.problem.options import PlanOptions
from hetjax.planner.work.layer_runs import all_runs
from hetjax.planner.work.rates import TASK_SECONDS
from hetjax.planner.work.stage_work import measure

LAYERS, WIDTH, EXAMPLES, MICROBATCHES = 8, 2048, 8192, 8
LINK = Link(bandwidth=1e11, latency=1e-6)
CLUSTER = Cluster("two", (Subcluster("cards", KINDS["A100-40"], 1, 2, LINK, LINK),))
WEIGHTS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def problem(frozen: range) -> PlanningProblem:
    labels = ["frozen" if layer in frozen else "trained" for layer in range(LAYERS)]
    return make_problem(
        loss,
        WEIGHTS,
        jax.ShapeDtypeStruct((EXAMPLES, WIDTH), jnp.float32),
        cluster=CLUSTER,
        optimizer=optax.multi_transform(
            {"trained": optax.adam(1e-3), "frozen": optax.set_to_zero()}, labels
        ),
        num_microbatches=MICROBATCHES,
        options=PlanOptions(max_pipelines=1, allow_recompute=False),
    )


def even(of: PlanningProblem, **changes: Any) -> Plan:
    edges = (0, of.num_layers // 2, of.num_layers)
    stages = tuple(
        StagePlan.on((a, b), SubMesh("cards", s, (1, 1)), (1, 1), **changes)
        for s, (a, b) in enumerate(itertools.pairwise(edges))
    )
    schedule = one_f_one_b(2, MICROBATCHES)
    pipeline = PipelinePlan(stages, MICROBATCHES, of.microbatch_size, schedule)
    return Plan(of.program.fingerprint, of.layers, CLUSTER, (pipeline,))


LOWER, MIDDLE, NONE = problem(range(4)), problem(range(2, 4)), problem(range(0))


def test_layers_below_what_is_trained_have_no_backward_pass():
    assert [work.backward_passes for work in LOWER.works] == [0] * 4 + [2] * 4
    assert [work.residual_bytes for work in LOWER.works[:4]] == [0] * 4
    assert not LOWER.works[4].returned
    runs = all_runs(LOWER.program, LOWER.works)
    assert [bool(runs.has_backward[i, 4]) for i in range(4)] == [False] * 4
    assert runs.has_backward[3, 5]


def test_frozen_layers_above_what_is_trained_give_back_cotangents_alone():
    assert [work.backward_passes for work in MIDDLE.works] == [2, 2, 1, 1, 2, 2, 2, 2]
    frozen, trained = MIDDLE.works[2], MIDDLE.works[4]
    assert frozen.backward.matmul_flops == trained.backward.matmul_flops / 2
    assert frozen.returned_bytes == trained.returned_bytes


def test_a_stage_goes_back_through_what_its_layers_do():
    """Where some of its layers are frozen, they cost a tensor axis nothing on the way back."""
    stage = StagePlan.on((0, LAYERS), SubMesh("cards", 0, (1, 2)), (1, 2))
    for of, passes in ((LOWER, 4 * 2), (MIDDLE, 6 * 2 + 2 * 1), (NONE, 8 * 2)):
        pipeline = PipelinePlan((stage,), MICROBATCHES, of.microbatch_size, one_f_one_b(1, 8))
        plan = Plan(of.program.fingerprint, of.layers, CLUSTER, (pipeline,))
        (work,) = pipeline_works(plan, pipeline, of)
        assert work.backward_product_bytes == passes / LAYERS * work.product_bytes
        found = predict(plan, of).prediction
        assert found is not None
        (execution,) = executions_of(CLUSTER, stage)
        by_layers = estimate(of, of.runs.of((0, LAYERS)), execution)
        assert found.stages[0].backward_seconds == pytest.approx(float(by_layers.backward_seconds))


def test_what_is_frozen_beside_what_is_trained_is_gone_through_once():
    def adapted(blocks: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for each in blocks:
            x = jnp.tanh(x @ each["whole"].astype(jnp.float32) + x @ each["down"] @ each["up"])
        return jnp.mean(x**2)

    whole = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    down, up = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 2), (2, 64)))
    kept = {"whole": "frozen", "down": "trained", "up": "trained"}
    of = make_problem(
        adapted,
        [{"whole": whole, "down": down, "up": up}] * 2,
        jax.ShapeDtypeStruct((16, 64), jnp.float32),
        cluster=CLUSTER,
        optimizer=optax.multi_transform(
            {"trained": optax.sgd(1e-3), "frozen": optax.set_to_zero()}, [kept] * 2
        ),
        num_microbatches=1,
    )
    wide, narrow = (16 * width * 4 for width in (64, 2))
    (work,) = measure(of.program, (0, of.program.num_positions))
    # No cotangent of the batch is wanted, so the first block's frozen matrix is not gone through.
    assert work.backward_product_bytes == 2 * 2 * (narrow + wide) + wide
    assert work.backward_product_bytes == sum(each.backward_product_bytes for each in of.works)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_predicted_of_a_frozen_stage(recompute: bool):
    found = predict(even(LOWER, recompute=recompute), LOWER).prediction
    trained = predict(even(NONE, recompute=recompute), NONE).prediction
    assert found is not None
    assert trained is not None
    lower, upper = found.stages
    element = WIDTH * WIDTH * LAYERS // 2
    assert (lower.state_bytes, upper.state_bytes) == (4 * element, 16 * element)
    assert lower.activation_bytes == lower.backward_seconds == lower.recompute_seconds == 0
    assert (
        lower.input_gradient_seconds == lower.weight_gradient_seconds == lower.return_seconds == 0
    )
    assert upper.return_seconds == 0 < trained.stages[1].return_seconds
    assert lower.forward_seconds == pytest.approx(trained.stages[0].forward_seconds)
    assert lower.update_seconds == TASK_SECONDS < trained.stages[0].update_seconds
    assert found.step_time < trained.step_time


def test_a_search_gives_a_stage_more_of_what_is_frozen():
    def first_stage(of: PlanningProblem) -> int:
        found = DynamicProgram().plan(replace(of, options=replace(of.options, min_stages=2)))
        plan = complete(found, of)
        return plan.stages[0].layers[1]

    # A layer below has a third of the work of one that is trained.
    assert first_stage(NONE) == LAYERS // 2
    assert first_stage(LOWER) > LAYERS // 2
