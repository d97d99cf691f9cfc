"""Workers give a state up, and take one over, group by group; here without Ray between them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from operator import attrgetter
from random import Random
from typing import Any

import jax
import numpy as np
import optax
import pytest
from cases import random_plan
from hspmd_switch import live_bytes
from small_models import Model, make_batch
from switched_states import NOISY, OPTIMIZER, assert_same, state_of

from hetjax import Trainer
from hetjax.planner.plan.plan import Plan
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.local.local_executor import LocalExecutor
from hetjax.runtime.moves.stage_leaves import StageLeaves
from hetjax.runtime.moves.state_switch import moved_arrays
from hetjax.runtime.ray.ray_switching import Parcels, StateExchange, owners_of, parcels_of
from hetjax.sharding.annotation.bounds import volume
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.switch_groups import groups_of, messages_of_groups
from hetjax.sharding.resolution.switch_transfers import plan_switch

Given = dict[Any, list[np.ndarray]]


def executor_of(trainer: Trainer) -> LocalExecutor:
    assert isinstance(trainer._executor, LocalExecutor)
    return trainer._executor


def exchanges_of(trainer: Trainer, *, filled: bool) -> list[tuple[StageLeaves, StateExchange]]:
    """The exchange of each stage, which on Ray is that of a worker."""
    found = []
    for leaves, worker in zip(
        executor_of(trainer)._leaves(), executor_of(trainer).workers, strict=True
    ):
        if filled:
            leaves.fill(worker.state())
            worker.buffers.clear()
        found.append((leaves, StateExchange(leaves)))
    return found


def given_by(
    exchanges: Sequence[tuple[StageLeaves, StateExchange]],
    parcels: Parcels,
    group: Sequence[int] | None,
) -> Given:
    """What workers give, copied as it is on its way to Ray's memory."""
    given: Given = {}
    for stage, (_, exchange) in enumerate(exchanges):
        pairs = [pair for pair in parcels if pair[0][0] == stage]
        wanted = [parcels[pair] for pair in pairs]
        arrays = exchange.give_up(wanted, group) if group else exchange.pass_on(wanted)
        for pair, each in zip(pairs, arrays, strict=True):
            given[pair] = [np.array(array) for array in each]
    return given


def taken_by(
    exchanges: Sequence[tuple[StageLeaves, StateExchange]], parcels: Parcels, given: Given
) -> None:
    for (giver, taker), each in parcels.items():
        exchanges[taker[0]][1].take([each], [given[giver, taker]])


def num_bytes(given: Sequence[Given]) -> int:
    return sum(array.nbytes for each in given for arrays in each.values() for array in arrays)


@pytest.mark.parametrize(("seed", "optimizer"), [(2, OPTIMIZER), (5, OPTIMIZER), (9, NOISY)])
def test_groups_are_given_up_and_taken(seed: int, optimizer: optax.GradientTransformation):
    rng, model, batch = Random(seed), Model(("dense", "stacked_scan")), make_batch(24)
    plans: list[Plan] = [random_plan(rng, model, each) for each in ([(4, 4), (1, 8)], [(6, 4)])]
    with (
        Trainer(plans[0], model.loss, model.init(), optimizer, batch) as old,
        Trainer(plans[1], model.loss, model.init(), optimizer, batch) as new,
    ):
        old.train_step(batch)
        before = state_of(old)
        sides: list[Placement] = [old._placement, new._placement]
        arrays = moved_arrays(*sides)
        plan = plan_switch(arrays, Network.of(plans[0].cluster))
        groups = groups_of(arrays)
        messages = messages_of_groups(plan, groups)
        owners = owners_of(plans[0]), owners_of(plans[1])
        givers = exchanges_of(old, filled=True)
        gc.collect()
        held, wanted = (
            sum(array.itemsize * volume(shard.bounds) for array in arrays for shard in side(array))
            for side in (attrgetter("before"), attrgetter("after"))
        )
        others = live_bytes().total() - held
        first = [parcels_of(phases[0], *owners) for phases in messages]
        given = []
        for group, parcels in zip(groups, first, strict=True):
            given.append(given_by(givers, parcels, group))
            # What has been given is there no more.
            assert live_bytes().total() - others + num_bytes(given) <= 1.2 * max(held, wanted)
        takers = exchanges_of(new, filled=False)
        for group, phases, parcels, each in zip(groups, messages, first, given, strict=True):
            taken_by(takers, parcels, each)
            for later in phases[1:]:
                passed = parcels_of(later, owners[1], owners[1])
                taken_by(takers, passed, given_by(takers, passed, None))
            for _, exchange in takers:
                exchange.finish(group)
            each.clear()
        new._start()
        for worker, (_, exchange) in zip(executor_of(new).workers, takers, strict=True):
            worker.restore(exchange.state())
        assert_same(state_of(new, fresh=True), before)
        assert jax.numpy.isfinite(new.train_step(batch).loss)
