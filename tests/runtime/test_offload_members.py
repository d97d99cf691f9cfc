"""What members of a stage keep in their hosts' memory: the same bits, and each its own part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from cases import Case, examples
from context_jobs import JOB, context_plan, one_device_losses, problem_of, split_of
from execution import job_of, running, train
from hypothesis import given
from hypothesis import strategies as st
from offloading import CLIPPED, held, offloading, same
from one_device import TOLERANCE
from random_unions import Most, random_union_case
from small_models import make_batch

from hetjax import InputError, Trainer
from hetjax.pipeline.schedules.schedule import Schedule, Task
from hetjax.planner.plan.plan import Plan, validate
from hetjax.planner.plan.stage_plan import Offloaded as Kind
from hetjax.planner.predictions.predict import predict
from hetjax.runtime.compilation.host_memory import HOST
from hetjax.runtime.instructions.buffers import Offloaded, OptimizerState
from hetjax.runtime.instructions.instruction import Fetch, Store

RING = split_of(((13, (0, 6)),), ((7, (0, 6)),))
EXCHANGE = split_of(((17, (2, 6)), (3, (0, 2))))
BOTH: tuple[Kind, ...] = ("activations", "optimizer_state")


def steps(case: Case) -> tuple[Any, list[np.ndarray]]:
    batches = [make_batch(case.plan.batch_size, seed) for seed in range(2)]
    with running(job_of(case, CLIPPED)) as executor:
        return train(executor, batches), held(executor)


@examples(usual=2, full=60)
@given(number=st.integers(0, 2**32 - 1))
def test_members_that_share_examples_have_the_same_bits(number: int):
    case = random_union_case(Random(number), Most(stages=3, microbatches=4, members=5))
    losses, state = steps(case)
    found, offloaded = steps(replace(case, plan=offloading(case.plan, *BOTH)))
    assert found == losses
    assert same(offloaded, state)


def trained(plan: Plan) -> tuple[list[float], list[np.ndarray]]:
    with Trainer(**JOB, plan=plan) as trainer:
        losses = [trainer.train_step().loss for _ in range(2)]
        executor: Any = trainer._executor
        return losses, held(executor)


@pytest.mark.parametrize("splits", [(RING,), (RING, EXCHANGE)], ids=["one stage", "pipeline"])
def test_members_that_share_sequences_train_the_same(splits: Any):
    plan = context_plan(*splits)
    losses, state = trained(plan)
    found, offloaded = trained(offloading(plan, *BOTH))
    assert found == losses
    # Bit by bit as users compile; with few of XLA's optimizations a last bit depends on what is
    # updated together.
    for one, other in zip(offloaded, state, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-7)
    np.testing.assert_allclose(found, one_device_losses(2), rtol=TOLERANCE)


def test_each_keeps_its_part_of_the_state_as_predicted():
    plan = offloading(context_plan(RING), "optimizer_state")
    predicted = predict(plan, problem_of(plan)).predicted
    (stage,) = predicted.stages
    with Trainer(**JOB, plan=plan) as trainer:
        trainer.train_step()
        executor: Any = trainer._executor
        for worker, member in zip(executor.workers, stage.members, strict=True):
            away = [each for name, each in worker.buffers.items() if isinstance(name, Offloaded)]
            assert all(array.sharding.memory_kind == HOST for array in away)
            there = [name for name in worker.buffers if isinstance(name, OptimizerState)]
            assert all(not worker.buffers[name].shape for name in there)
            # Rows of a parameter are not cut.
            assert member.host_bytes == pytest.approx(sum(a.nbytes for a in away), rel=0.05)
    assert stage.host_bytes == max(member.host_bytes for member in stage.members)
    assert len(stage.update_groups) > 2
    kept = predict(context_plan(RING), problem_of(plan)).predicted.stages[0]
    assert all(
        a.state_bytes + a.host_bytes == pytest.approx(b.state_bytes, rel=1e-3)
        for a, b in zip(stage.members, kept.members, strict=True)
    )


def test_activations_travel_where_several_microbatches_wait():
    case = random_union_case(Random(0), Most(stages=1, microbatches=4, pipelines=1, members=2))
    (pipeline,) = case.plan.pipelines
    tasks = tuple(Task.parse(f"{kind}{m}") for kind in "FB" for m in range(4))
    waiting = replace(
        pipeline, num_microbatches=4, schedule=Schedule("all forward first", (tasks,))
    )
    plan = offloading(replace(case.plan, pipelines=(waiting,)), "activations")
    with running(job_of(replace(case, plan=plan), CLIPPED)) as executor:
        train(executor, [make_batch(plan.batch_size, 0)])
        for worker in executor.workers:
            assert {Fetch, Store} <= {type(each) for each in worker.training}
            assert not any(isinstance(name, Offloaded) for name in worker.buffers)


def test_a_checkpoint_of_it_goes_on_with_any_plan(tmp_path: Path):
    plan = context_plan(RING)
    away = offloading(plan, "optimizer_state")
    with Trainer(**JOB, plan=away, workdir=tmp_path) as trainer:
        trainer.train_step()
        trainer.save(wait=True)
        expected = trainer.train_step().loss
    with Trainer(**JOB, plan=replace(plan, cluster=away.cluster), workdir=tmp_path) as trainer:
        trainer.resume()
        trainer.switch(away)
        trainer.switch(replace(plan, cluster=away.cluster))
        assert trainer.train_step().loss == expected


def test_a_host_that_gives_no_memory_is_named():
    plan = offloading(context_plan(RING), "optimizer_state")
    (part,) = plan.cluster.subclusters
    cluster = replace(plan.cluster, subclusters=(replace(part, host_memory_bytes=None),))
    message = r"offload is \['optimizer_state'\], and subcluster 'host' gives no host_memory"
    with pytest.raises(InputError, match=message):
        validate(replace(plan, cluster=cluster))
