"""Pipelines whose stages share the context: faster where islands are far apart."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from baselines import one_device_losses

import hetjax
from hetjax.mesh import Cluster, Link, Subcluster
from hetjax.mesh.kinds import DeviceKind
from hetjax.models import GPTConfig, LanguageModel, language_model
from hetjax.planner import HexiSeqPlanner, Plan, PlanningProblem, make_problem, predict
from hetjax.planner.hexiseq.context_pipelines import ContextPipeline, context_pipelines
from hetjax.planner.plan.plan import validate, validate_for

BLOCKS, LENGTH, EXAMPLES = 6, 128, 8
MODEL = language_model(GPTConfig(64, BLOCKS, 64, 4, LENGTH))
SMALL = language_model(GPTConfig(64, 2, 32, 4, LENGTH))
BATCH = {"tokens": np.random.default_rng(0).integers(0, 64, (EXAMPLES, LENGTH + 1), np.int32)}
OPTIMIZER = optax.adam(1e-3)


def islands(bandwidth: float) -> Cluster:
    """Two islands of two devices, one twice as fast as the other, with a link of some bytes/s."""
    near, far = Link(1e10, 1e-6), Link(bandwidth, 1e-5)
    parts = tuple(
        Subcluster(
            f"speed-{speed}",
            DeviceKind(f"speed-{speed}", {"float32": speed * 1e9}, 10**9, speed * 1e9, "made up"),
            1,
            2,
            near,
            near,
        )
        for speed in (2, 1)
    )
    return Cluster("two islands", parts, ((parts[0].name, parts[1].name, far),))


def problem_on(
    cluster: Cluster, microbatches: int = EXAMPLES, model: LanguageModel = MODEL
) -> PlanningProblem:
    return make_problem(
        model.loss,
        lambda: model.init(jax.random.key(0)),
        BATCH,
        cluster=cluster,
        optimizer=OPTIMIZER,
        num_microbatches=microbatches,
        divides_sequences=True,
    )


def best_pipeline(problem: PlanningProblem) -> tuple[ContextPipeline, Plan]:
    found = context_pipelines(problem, 4)
    planned = [(each, predict(each.plan(problem), problem)) for each in found]
    return min(planned, key=lambda pair: pair[1].predicted.step_time)


@pytest.mark.parametrize(("bandwidth", "wins"), [(2e6, True), (1e10, False)])
def test_a_pipeline_of_islands_wins_where_they_are_far_apart(bandwidth: float, wins: bool):
    problem = problem_on(islands(bandwidth))
    pipeline, plan = best_pipeline(problem)
    validate(plan)
    validate_for(plan, problem.program)
    assert [len(stage.members) for stage in plan.stages] == [2, 2]
    assert pipeline.layers[0] == 0
    assert pipeline.layers[-1] == problem.num_layers
    one = predict(HexiSeqPlanner().plan(problem), problem)
    assert (plan.predicted.step_time < one.predicted.step_time) == wins


def test_the_faster_island_has_more_blocks():
    (first, *_) = context_pipelines(problem_on(islands(2e6)), 4)
    counts = {choice.schedule.split.devices: choice.model.work.layers for choice in first.choices}
    assert counts == {(0, 1): 4, (2, 3): 2}


def test_it_has_no_more_stages_than_it_may():
    assert not context_pipelines(problem_on(islands(2e6)), 1)
    assert not context_pipelines(problem_on(islands(2e6), microbatches=1), 4)


def test_it_trains_as_one_device_does():
    _, plan = best_pipeline(problem_on(islands(2e6), model=SMALL))
    parameters = SMALL.init(jax.random.key(0))

    def loss(parameters: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        total, count, *_ = SMALL.loss(parameters, batch)
        return total, jnp.float32(count)

    with jax.numpy_dtype_promotion("standard"):
        expected = one_device_losses(loss, OPTIMIZER, parameters, [BATCH] * 2, EXAMPLES)
    runtime = hetjax.LocalOptions(jax.devices("cpu")[:4])
    with hetjax.Trainer(plan, SMALL.loss, parameters, OPTIMIZER, BATCH, runtime=runtime) as trainer:
        found = [trainer.train_step(BATCH).loss for _ in range(2)]
    np.testing.assert_allclose(found, expected, rtol=2e-5)
