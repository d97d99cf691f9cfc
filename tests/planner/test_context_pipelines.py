"""Pipelines whose stages share the context: faster where islands are far apart, or have sequences
of their own.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from baselines import one_device_losses
from hypothesis import given
from hypothesis import strategies as st

import hetjax
from hetjax.mesh import Cluster, Link, Subcluster
from hetjax.mesh.kinds import DeviceKind
from hetjax.models import GPTConfig, LanguageModel, language_model
from hetjax.planner import (
    HexiSeqPlanner,
    Plan,
    PlanningProblem,
    PlanOptions,
    make_problem,
    predict,
)
from hetjax.planner.hexiseq.context_choice import context_models
from hetjax.planner.hexiseq.context_layouts import layouts
from hetjax.planner.hexiseq.context_pipelines import ContextPipelines, context_pipelines
from hetjax.planner.hexiseq.stage_splits import StageSplits
from hetjax.planner.plan.plan import validate, validate_for
from hetjax.planner.predictions.context_moves import context_moves

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
    cluster: Cluster,
    microbatches: int = EXAMPLES,
    model: LanguageModel = MODEL,
    most_pipelines: int = 4,
) -> PlanningProblem:
    return make_problem(
        model.loss,
        lambda: model.init(jax.random.key(0)),
        BATCH,
        cluster=cluster,
        optimizer=OPTIMIZER,
        num_microbatches=microbatches,
        options=PlanOptions(max_pipelines=most_pipelines),
        divides_sequences=True,
    )


def best_pipelines(problem: PlanningProblem) -> tuple[ContextPipelines, Plan]:
    found = context_pipelines(problem, 4)
    planned = [(each, predict(each.plan(problem), problem)) for each in found]
    return min(planned, key=lambda pair: pair[1].predicted.step_time)


@pytest.mark.parametrize(("bandwidth", "wins"), [(2e6, True), (1e10, False)])
def test_a_pipeline_of_islands_wins_where_they_are_far_apart(bandwidth: float, wins: bool):
    problem = problem_on(islands(bandwidth), most_pipelines=1)
    pipelines, plan = best_pipelines(problem)
    validate(plan)
    validate_for(plan, problem.program)
    assert [len(stage.members) for stage in plan.stages] == [2, 2]
    (pipeline,) = pipelines.pipelines
    assert pipeline.layers[0] == 0
    assert pipeline.layers[-1] == problem.num_layers
    one = predict(HexiSeqPlanner().plan(problem), problem)
    assert (plan.predicted.step_time < one.predicted.step_time) == wins


def test_the_faster_island_has_more_blocks():
    (first, *_) = context_pipelines(problem_on(islands(2e6)), 4)
    (pipeline,) = first.pipelines
    counts = {c.schedule.split.devices: c.model.work.layers for c in pipeline.choices}
    assert counts == {(0, 1): 4, (2, 3): 2}


def test_islands_with_sequences_of_their_own_win_where_gradients_are_few():
    """The faster one has more of them; a pipeline would hand on every token, twice."""
    problem = problem_on(islands(2e7), model=SMALL)
    pipelines, plan = best_pipelines(problem)
    validate(plan)
    validate_for(plan, problem.program)
    assert [len(pipeline.stages) for pipeline in plan.pipelines] == [1, 1]
    assert [pipeline.num_microbatches for pipeline in plan.pipelines] == [5, 3]
    one = predict(HexiSeqPlanner().plan(problem), problem)
    assert plan.predicted.step_time < one.predicted.step_time
    assert sorted(context_moves(plan, problem)) == [0, 1]
    # What was estimated is near what is predicted, though that walks over the program.
    assert pipelines.seconds == pytest.approx(plan.predicted.step_time, rel=0.1)


def test_islands_that_are_much_slower_have_a_block_of_those_that_have_most():
    near, far = Link(1e10, 1e-6), Link(1e9, 1e-5)
    parts = tuple(
        Subcluster(
            f"part-{place}",
            DeviceKind(f"speed-{speed}", {"float32": speed * 1e9}, 10**9, speed * 1e9, "made up"),
            *(1, 1, near, near),
        )
        for place, speed in enumerate((20, 20, 1, 1))
    )
    links = tuple((a.name, b.name, far) for a, b in itertools.combinations(parts, 2))
    model = language_model(GPTConfig(64, 4, 64, 4, LENGTH))
    problem = problem_on(Cluster("four", parts, links), model=model, most_pipelines=1)
    found = context_pipelines(problem, 4)
    blocks = {
        tuple(choice.model.work.layers for choice in each.pipelines[0].choices) for each in found
    }
    assert (1, 1, 1, 1) in blocks
    assert all(sum(each) == 4 for each in blocks)


def test_layouts_on_devices_that_are_alike_are_told_once():
    near = Link(1e10, 1e-6)
    kind = DeviceKind("one", {"float32": 1e9}, 10**9, 1e9, "made up")
    cluster = Cluster("alike", (Subcluster("nodes", kind, 3, 1, near, near),))
    model = language_model(GPTConfig(64, 3, 64, 4, LENGTH))
    problem = problem_on(cluster, model=model, most_pipelines=1)
    # Stages of one node and of two, in both orders, and three of one.
    assert [len(each.pipelines[0].choices) for each in context_pipelines(problem, 4)].count(2) <= 2
    assert [len(each.pipelines[0].choices) for each in context_pipelines(problem, 4)].count(3) == 1


def test_stages_that_hold_more_microbatches_make_layers_again():
    """Where the activations of one fit and not those of several."""
    problem = problem_on(islands(2e6), most_pipelines=1)
    splits = StageSplits(context_models(problem))
    part = (0, 1)
    kept, again = (splits.best(part, 3, live, is_last=False) for live in (1, 10**4))
    assert kept is not None
    assert again is not None
    assert not kept.model.work.is_recomputed
    assert again.model.work.is_recomputed


def test_there_are_no_more_stages_or_pipelines_than_there_may_be():
    one_each = problem_on(islands(2e6), most_pipelines=1)
    assert not context_pipelines(one_each, 1)
    assert not context_pipelines(problem_on(islands(2e6), microbatches=1), 4)
    for stages, pipelines in itertools.product((1, 2), (1, 2)):
        problem = problem_on(islands(2e6), most_pipelines=pipelines)
        for found in context_pipelines(problem, stages):
            assert len(found.pipelines) <= pipelines
            assert all(len(each.choices) <= stages for each in found.pipelines)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    stages=st.integers(1, 4),
    pipelines=st.integers(1, 6),
)
def test_every_layout_has_every_device_once(sizes: list[int], stages: int, pipelines: int):
    edges = [0, *itertools.accumulate(sizes)]
    found = list(layouts([tuple(range(*e)) for e in itertools.pairwise(edges)], stages, pipelines))
    assert len({frozenset(each) for each in found}) == len(found)
    for layout in found:
        devices = [device for parts in layout for part in parts for device in part]
        assert sorted(devices) == list(range(sum(sizes)))
        assert len(layout) <= pipelines
        assert all(len(parts) <= stages for parts in layout)
        assert layout != ((tuple(range(sum(sizes))),),)


@pytest.mark.parametrize("bandwidth", [2e6, 2e7], ids=["one pipeline", "several"])
def test_they_train_as_one_device_does(bandwidth: float):
    count = 1 if bandwidth < 1e7 else 4
    _, plan = best_pipelines(problem_on(islands(bandwidth), model=SMALL, most_pipelines=count))
    assert len(plan.pipelines) == min(count, 2)
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
