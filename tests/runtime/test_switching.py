"""A training state moves from any plan to any other, in memory, with every bit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import jax
import numpy as np
import optax
import pytest
from cases import CLUSTER, examples, random_model, random_plan, trace_model
from compilations import counted_compilations
from execution import gather, one_device_steps
from hypothesis import given
from hypothesis import strategies as st
from small_models import Model, make_batch

from hetjax import InputError, Trainer
from hetjax.mesh import SubMesh
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner.plan.plan import PipelinePlan, Plan, StagePlan
from hetjax.runtime.local.local_executor import LocalExecutor

OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3))


BATCHES = ([(6, 4)], [(4, 4), (1, 8)], [(2, 4), (1, 12), (1, 4)])
"""Microbatches and their sizes, for one to three pipelines: 24 examples in any case."""


def state_of(trainer: Trainer, *, fresh: bool = False) -> list[np.ndarray]:
    """Every leaf of the training state, whole, of the first stages that hold it.

    Copies of parameters are compared on the way. Those of optimizer state are once a switch has
    made them alike; in training each holder rounds for itself.
    """
    executor = trainer._executor
    assert isinstance(executor, LocalExecutor)
    pipelines = trainer._placement.pipelines
    parameters = [
        (stage.parameters, executor.workers[stage.index].state().parameters)
        for stage in pipelines.stages
    ]
    optimizer = [
        (update.state, worker.state().optimizer)
        for update, worker in zip(pipelines.updates, executor.workers, strict=True)
    ]
    return [
        *gather(parameters, pipelines.parameter_shapes),
        *(gather if fresh else first_copies)(optimizer, pipelines.state_shapes),
    ]


def first_copies(
    held: Sequence[tuple[Any, Any]], shapes: Sequence[jax.ShapeDtypeStruct]
) -> list[np.ndarray]:
    """Whole leaves, of which every row is that of the first stage that holds it."""
    leaves = [np.zeros(shape.shape, shape.dtype) for shape in shapes]
    for parts, arrays in reversed(held):
        for part, array in zip(parts, arrays, strict=True):
            rows = (slice(part.start, part.stop),) if part.stop is not None else ...
            leaves[part.leaf][rows] = np.asarray(array)
    return leaves


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@examples(usual=5, full=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_bit_arrives_and_the_curve_goes_on(seed: int):
    rng = Random(seed)
    model = random_model(rng)
    while not model.exact:
        model = random_model(rng)
    plans = [random_plan(rng, model, rng.choice(BATCHES)) for _ in range(3)]
    batches = [make_batch(24, seed) for seed in range(6)]
    with jax.numpy_dtype_promotion("standard"):
        expected = one_device_steps(model, OPTIMIZER, batches)
    with Trainer(plans[0], model.loss, model.init(), OPTIMIZER, batches[0]) as trainer:
        found = []
        for plan, pair in zip(plans, zip(batches[::2], batches[1::2], strict=True), strict=True):
            if plan is not plans[0]:
                before = state_of(trainer)
                trainer.switch(plan)
                assert_same(state_of(trainer, fresh=True), before)
            found += [trainer.train_step(batch) for batch in pair]
    curve = [(metrics.loss, metrics.gradient_norm) for metrics in found]
    np.testing.assert_allclose(curve, expected, rtol=1e-5)


def test_coming_back_to_a_plan_compiles_nothing():
    rng = Random(1)
    model = Model(("dense", "stacked_scan"))
    plans = [random_plan(rng, model, batches) for batches in BATCHES[:2]]
    batch = make_batch(24)
    with Trainer(plans[0], model.loss, model.init(), OPTIMIZER, batch) as trainer:
        for plan in (plans[1], plans[0], plans[1]):
            trainer.train_step(batch)
            trainer.switch(plan)
        trainer.train_step(batch)
        with counted_compilations() as counter:
            trainer.switch(plans[0])
            trainer.train_step(batch)
        assert not counter.seen


def test_a_trainer_stays_as_it_was_where_it_cannot_switch():
    model = Model(("dense",))
    plan = random_plan(Random(0), model, [(6, 4)])
    batch = make_batch(24)
    with Trainer(plan, model.loss, model.init(), OPTIMIZER, batch) as trainer:
        trainer.train_step(batch)
        before = state_of(trainer)
        with pytest.raises(InputError, match="computes 20 examples"):
            trainer.switch(random_plan(Random(0), model, [(5, 4)]))
        other = replace(CLUSTER, name="another")
        with pytest.raises(InputError, match="switch: the plan is for cluster 'another'"):
            trainer.switch(replace(plan, cluster=other))
        assert trainer.plan == plan
        assert_same(state_of(trainer), before)
        trainer.train_step(batch)


def test_checkpoints_and_switches_go_together(tmp_path: Path):
    model, batch = Model(("dense", "stacked_scan")), make_batch(24)
    plans = [random_plan(Random(2), model, batches) for batches in BATCHES]

    def made(plan: Plan) -> Trainer:
        return Trainer(plan, model.loss, model.init(), OPTIMIZER, batch, workdir=tmp_path)

    with made(plans[0]) as trainer:
        trainer.train_step(batch)
        trainer.save()
        trainer.switch(plans[2])
        trainer.train_step(batch)
        trainer.save(wait=True)
        saved = state_of(trainer)
    with made(plans[1]) as trainer:
        assert trainer.resume()
        assert trainer.steps_done == 2
        assert_same(state_of(trainer), saved)


def two_pipelines(model: Model) -> Plan:
    """Two pipelines of one stage each, of four devices."""
    program = trace_model(model, 1)
    pipelines = tuple(
        PipelinePlan(
            (StagePlan((0, 1), SubMesh(name, 0, (1, 4)), (4, 1)),), 3, 4, one_f_one_b(1, 3)
        )
        for name in ("first", "second")
    )
    return Plan(program.fingerprint, (0, program.num_positions), CLUSTER, pipelines)


def test_lost_devices_give_nothing():
    model, batch = Model(("dense",)), make_batch(24)
    plan = two_pipelines(model)
    alone = replace(plan, pipelines=(replace(plan.pipelines[1], num_microbatches=6),))
    alone = alone.with_schedule(one_f_one_b(1, 6))
    lost = frozenset({0, 1, 2, 3})
    with Trainer(plan, model.loss, model.init(), OPTIMIZER, batch) as trainer:
        trainer.train_step(batch)
        before = state_of(trainer)
        with pytest.raises(InputError, match=r"lost: the plan to switch to uses devices \[4\]"):
            trainer.switch(alone, lost={4})
        with pytest.raises(InputError, match=r"lost: \[9\] are no devices of the cluster"):
            trainer.switch(alone, lost={9})
        with pytest.raises(InputError, match=r"lost: the plan to switch to uses devices \[4\]"):
            trainer.switch(replace(alone, lost_devices=(4,)))
        # Some are named by the plan, the others here.
        moved = trainer.switch(replace(alone, lost_devices=(0, 1)), lost={2, 3})
        assert {sender for phase in moved.phases for sender, _ in phase}.isdisjoint(lost)
        found = state_of(trainer)
        for ours, theirs in zip(found, before, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        trainer.train_step(batch)


def test_what_only_lost_devices_hold_cannot_be_switched():
    model, batch = Model(("dense",)), make_batch(24)
    plan = replace(two_pipelines(model), shard_optimizer_state=True)
    alone = replace(plan, pipelines=(replace(plan.pipelines[1], num_microbatches=6),))
    alone = alone.with_schedule(one_f_one_b(1, 6))
    with Trainer(plan, model.loss, model.init(), OPTIMIZER, batch) as trainer:
        trainer.train_step(batch)
        with pytest.raises(InputError, match=r"optimizer/.*: source: no device holds"):
            trainer.switch(alone, lost={0, 1, 2, 3})
        trainer.train_step(batch)
