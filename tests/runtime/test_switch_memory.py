"""A switch holds hardly more than one state, and where it fails the old plan has every bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from operator import eq
from random import Random
from typing import Any
from unittest import mock

import jax
import pytest
from cases import random_plan
from hspmd_switch import SwitchCase, memory_row, switch_cases
from small_models import Model, make_batch
from switched_states import OPTIMIZER, assert_same, state_of, two_pipelines

from hetjax import Trainer
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner.plan.plan import Plan
from hetjax.runtime.moves.stage_leaves import StageLeaves
from hetjax.runtime.workers.worker import StageWorker


@pytest.mark.parametrize("case", switch_cases(), ids=lambda case: case.name)
def test_a_switch_holds_hardly_more_than_a_state(case: SwitchCase):
    row = memory_row(case)
    assert row["bytes"] <= row["bound"]
    assert row["fullest_device"] <= 1.3


class FaultError(Exception):
    """What the tests make happen."""


@contextmanager
def failing(owner: Any, name: str, when: Callable[[Any], bool]) -> Iterator[list[int]]:
    """Let a method fail the first time that a condition on its last argument holds."""
    method, failed = getattr(owner, name), []

    def might_fail(*arguments: Any, **options: Any) -> Any:
        if not failed and when(arguments[-1]):
            failed.append(1)
            raise FaultError(name)
        return method(*arguments, **options)

    with mock.patch.object(owner, name, might_fail):
        yield failed


def plans_with_unlike_stages(lost: frozenset[int]) -> tuple[Model, Plan, Plan]:
    """A model, and plans of two pipelines and of one stage, whose optimizer states round apart."""
    model = Model(("dense", "stacked_scan"))
    both = random_plan(Random(5), model, [(4, 4), (1, 8)])
    if lost:
        both = two_pipelines(model)
    alone = replace(
        two_pipelines(model),
        pipelines=(replace(two_pipelines(model).pipelines[1], num_microbatches=6),),
    )
    return model, both, replace(alone.with_schedule(one_f_one_b(1, 6)), lost_devices=tuple(lost))


@pytest.mark.parametrize("lost", [frozenset(), frozenset({0, 1, 2, 3})], ids=["all", "lost"])
def test_a_failure_at_any_leaf_leaves_the_old_plan_training(lost: frozenset[int]):
    model, plan, other = plans_with_unlike_stages(lost)
    batch = make_batch(24)
    with Trainer(plan, model.loss, model.init(), OPTIMIZER, batch) as undisturbed:
        expected = [undisturbed.train_step(batch).loss]
        with Trainer(plan, model.loss, model.init(), OPTIMIZER, batch) as trainer:
            found = [trainer.train_step(batch).loss]
            pipelines = trainer._placement.pipelines
            for leaf in range(len(pipelines.parameter_shapes) + len(pipelines.state_shapes)):
                before = state_of(trainer)
                with failing(StageLeaves, "finish", partial(eq, leaf)), pytest.raises(FaultError):
                    trainer.switch(other)
                assert trainer.plan == plan
                assert_same(state_of(trainer), before)
                found.append(trainer.train_step(batch).loss)
                expected.append(undisturbed.train_step(batch).loss)
            assert found == expected
            trainer.switch(other)
            trainer.train_step(batch)


@pytest.mark.parametrize(
    ("owner", "name", "every"),
    [
        (jax, "device_put", 17),
        (jax, "block_until_ready", 1),
        (StageLeaves, "drop", 3),
        (StageWorker, "restore", 1),
    ],
    ids=["put", "ready", "drop", "restore"],
)
def test_a_failure_at_any_moment_leaves_the_old_plan_training(owner: Any, name: str, every: int):
    model, plan, other = plans_with_unlike_stages(frozenset())
    batch = make_batch(24)
    with Trainer(plan, model.loss, model.init(), OPTIMIZER, batch) as trainer:
        trainer.train_step(batch)
        before = state_of(trainer)
        nth = 0
        while trainer.plan == plan:
            calls = count()
            with failing(owner, name, lambda _, calls=calls, nth=nth: next(calls) == nth):
                try:
                    trainer.switch(other)
                except FaultError:
                    nth += every
                    assert_same(state_of(trainer), before)
        assert nth > 0
        assert trainer.plan == other
        assert_same(state_of(trainer, fresh=True), before)
        trainer.train_step(batch)


def test_where_moving_back_fails_too_it_is_said():
    model, plan, other = plans_with_unlike_stages(frozenset())
    batch = make_batch(24)
    with Trainer(plan, model.loss, model.init(), OPTIMIZER, batch) as trainer:
        trainer.train_step(batch)

        def restore(*_: Any) -> None:
            raise FaultError("no memory")

        with (
            mock.patch.object(StageWorker, "restore", restore),
            pytest.raises(
                RuntimeError, match=r"go on from the last checkpoint: FaultError: no memory"
            ),
        ):
            trainer.switch(other)
