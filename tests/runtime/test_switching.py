"""A training state moves from any plan to any other, in memory, with every bit."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from cases import CLUSTER, examples, random_model, random_plan
from compilations import counted_compilations
from execution import one_device_steps
from hypothesis import given
from hypothesis import strategies as st
from small_models import Model, make_batch
from switched_states import OPTIMIZER, assert_same, state_of, two_pipelines

from hetjax import InputError, Trainer
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner.plan.plan import Plan
from hetjax.runtime.local.left_plans import KEPT_PLANS
from hetjax.runtime.local.local_executor import LocalExecutor
from hetjax.runtime.moves.state_move import StateMove

BATCHES = ([(6, 4)], [(4, 4), (1, 8)], [(2, 4), (1, 12), (1, 4)])
"""Microbatches and their sizes, for one to three pipelines: 24 examples in any case."""


@examples(usual=2, full=40)
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


class Noting:
    """Tells which threads read training batches."""

    def __init__(self):
        self.threads: set[int] = set()

    def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Any:
        self.threads.add(threading.get_ident())
        return jax.tree.map(lambda leaf: leaf[rows or slice(None)], make_batch(batch_size, step))

    def held_out_batches(self, batch_size: int) -> list[Any]:
        return []


def test_whatever_the_plan_a_source_is_read_in_one_thread():
    rng, model, source = Random(1), Model(("dense",)), Noting()
    plans = [random_plan(rng, model, batches) for batches in BATCHES[:2]]
    batch = make_batch(24)
    with Trainer(plans[0], model.loss, model.init(), OPTIMIZER, batch, source=source) as trainer:
        for plan in (*plans, plans[0]):
            trainer.switch(plan)
            trainer.train_step()
    assert len(source.threads) == 1


def test_only_the_last_plans_that_were_left_stay_compiled():
    rng, model, batch = Random(1), Model(("dense", "stacked_scan")), make_batch(24)
    plans = [random_plan(rng, model, batches) for batches in (*BATCHES, BATCHES[0])]
    closed = []
    with (
        mock.patch.object(LocalExecutor, "close", closing(closed)),
        Trainer(plans[0], model.loss, model.init(), OPTIMIZER, batch) as trainer,
    ):
        executors = []
        for plan in (*plans[1:], plans[2], plans[3]):
            executors.append(trainer._executor)
            trainer.train_step(batch)
            trainer.switch(plan)
            assert len(trainer._left) <= KEPT_PLANS
        # Of four plans the first was left longest ago; the last two come back as they were.
        assert closed == executors[:1]
        assert len({id(executor) for executor in executors}) == 4
        with counted_compilations() as counter:
            trainer.switch(plans[1])
        assert not counter.seen
        trainer.switch(plans[0])
        assert trainer._executor is not executors[0]
        trainer.train_step(batch)
    assert len(closed) == 5


def closing(closed: list[LocalExecutor]) -> Callable[[LocalExecutor], None]:
    """How executors close, each noted when it does."""
    close = LocalExecutor.close

    def noted(executor: LocalExecutor) -> None:
        closed.append(executor)
        close(executor)

    return noted


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


@pytest.mark.parametrize(
    ("failure", "raised"), [(MemoryError(), RuntimeError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_nothing_goes_on_from_a_switch_that_could_not_be_undone(
    tmp_path: Path, failure: BaseException, raised: type[BaseException]
):
    model, batch = Model(("dense",)), make_batch(24)
    plans = [random_plan(Random(2), model, batches) for batches in BATCHES[:2]]
    with Trainer(plans[0], model.loss, model.init(), OPTIMIZER, batch, workdir=tmp_path) as trainer:
        trainer.train_step(batch)
        trainer.save(wait=True)
        before = state_of(trainer)
        with (
            mock.patch.object(StateMove, "_move", failing_after(1, failure)),
            pytest.raises(raised) as caught,
        ):
            trainer.switch(plans[1])
        told = [str(caught.value), *getattr(caught.value, "__notes__", [])]
        assert any("go on from the last checkpoint" in each for each in told)
        acts = partial(trainer.train_step, batch), trainer.save, partial(trainer.switch, plans[1])
        for act in (*acts, trainer.parameters):
            with pytest.raises(InputError, match="a switch was cut off"):
                act()
        trainer.resume()
        assert_same(state_of(trainer), before)
        trainer.switch(plans[1])
        trainer.train_step(batch)


def test_a_switch_that_is_cut_off_is_undone():
    model, batch = Model(("dense",)), make_batch(24)
    plans = [random_plan(Random(2), model, batches) for batches in BATCHES[:2]]
    with Trainer(plans[0], model.loss, model.init(), OPTIMIZER, batch) as trainer:
        trainer.train_step(batch)
        before, move = state_of(trainer), StateMove._move
        moves = [move, failing_after(0, KeyboardInterrupt()), *[move] * 100]
        with (
            mock.patch.object(StateMove, "_move", lambda *given: moves.pop(0)(*given)),
            pytest.raises(KeyboardInterrupt),
        ):
            trainer.switch(plans[1])
        assert_same(state_of(trainer), before)
        trainer.train_step(batch)


def failing_after(count: int, failure: BaseException) -> Callable[..., None]:
    """How groups of leaves move, the first ones as they do."""
    move, left = StateMove._move, [None] * count

    def failing(*given: Any) -> None:
        if not left:
            raise failure
        left.pop()
        move(*given)

    return failing


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
        assert {piece.sender for phase in moved.phases for piece in phase}.isdisjoint(lost)
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
