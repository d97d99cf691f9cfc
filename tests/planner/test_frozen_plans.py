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
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.planner.problem.options import PlanOptions
from hetjax.planner.work.layer_runs import all_runs
from hetjax.planner.work.rates import TASK_SECONDS

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
