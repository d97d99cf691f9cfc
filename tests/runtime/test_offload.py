"""Optimizer state in the hosts' memory: the same bits, and on the devices only what is updated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import jax
import numpy as np
import optax
import pytest
from cases import (
    CLUSTER,
    Case,
    examples,
    random_case,
    random_cuts,
    random_pipeline,
    trace_model,
)
from execution import job_of, running, train
from hypothesis import given
from hypothesis import strategies as st
from offloading import CLIPPED, held, offloading, same
from small_models import Model, make_batch

from hetjax import InputError
from hetjax.pipeline.update import alike_leaves
from hetjax.planner.plan.plan import Plan
from hetjax.runtime.compilation.host_memory import HOST, check_host_memory
from hetjax.runtime.compilation.piecewise_program import PiecewiseProgram
from hetjax.runtime.instructions.buffers import Offloaded, OptimizerState
from hetjax.runtime.instructions.instruction import Await, Fetch, Free, Run, Store
from hetjax.runtime.local.local_executor import LocalExecutor
from hetjax.runtime.workers.job import build


def steps(case: Case, optimizer: optax.GradientTransformation) -> tuple[Any, list[np.ndarray]]:
    batches = [make_batch(case.plan.batch_size, seed) for seed in range(3)]
    with running(job_of(case, optimizer)) as executor:
        return train(executor, batches), held(executor)


@examples(usual=2, full=100)
@given(number=st.integers(0, 2**32 - 1), pipelines=st.integers(1, 2))
def test_offloaded_state_gives_the_same_bits(number: int, pipelines: int):
    case = random_case(Random(number), 3, 3, pipelines)
    losses, state = steps(case, CLIPPED)
    found, offloaded = steps(replace(case, plan=offloading(case.plan, "optimizer_state")), CLIPPED)
    assert found == losses
    assert same(offloaded, state)


@pytest.mark.parametrize("freezes", [False, True])
def test_so_does_an_update_in_pieces_or_of_some_parameters(
    freezes: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(alike_leaves, "_FEWEST", 0)
    monkeypatch.setattr(alike_leaves, "_TOGETHER", 3)
    model, rng = Model(blocks=("attention",) * 4), Random(1)
    layers, (stages,) = random_cuts(rng, model, 1, 2)
    pipeline = random_pipeline(rng, stages, 2)
    program = trace_model(model, pipeline.microbatch_size)
    case = Case(model, program, Plan(program.fingerprint, layers, CLUSTER, (pipeline,)))
    labels = {"embedding": "trained", "blocks": ["trained", "frozen", "trained", "trained"]}
    ways: dict[Any, Any] = {"trained": CLIPPED, "frozen": optax.set_to_zero()}
    optimizer = optax.multi_transform(ways, labels) if freezes else CLIPPED
    with running(job_of(case, optimizer)) as executor:
        compiled = [worker.compiled.programs for worker in executor.workers]
        assert any(isinstance(each, PiecewiseProgram) for p in compiled for each in p.values())
    losses, state = steps(case, optimizer)
    found, offloaded = steps(
        replace(case, plan=offloading(case.plan, "optimizer_state")), optimizer
    )
    assert found == losses
    assert same(offloaded, state)


def one_case(max_stages: int = 2) -> Case:
    case = random_case(Random(2), max_stages, 2)
    return replace(case, plan=offloading(case.plan, "optimizer_state"))


def test_between_steps_arrays_of_the_state_are_in_host_memory():
    case = one_case()
    with running(job_of(case, CLIPPED)) as executor:
        train(executor, [make_batch(case.plan.batch_size, 0)])
        for worker in executor.workers:
            away = [name for name in worker.buffers if isinstance(name, Offloaded)]
            assert away
            assert all(worker.buffers[name].sharding.memory_kind == HOST for name in away)
            there = [name for name in worker.buffers if isinstance(name, OptimizerState)]
            assert all(not worker.buffers[name].shape for name in there)


def test_two_groups_of_the_state_are_on_the_devices_at_once():
    """By the list: what was fetched and is not freed yet, or has not been waited for."""
    case = one_case(1)
    with running(job_of(case, CLIPPED)) as executor:
        worker = executor.workers[0]
        groups = worker.pipelines.updates[0].groups
        assert len(groups) > 2
        there: set[Any] = set()
        leaving: set[Any] = set()
        most = 0
        for each in worker.training:
            if isinstance(each, Fetch):
                there |= set(each.buffers)
            elif isinstance(each, Store):
                leaving |= set(each.buffers)
            elif isinstance(each, Await):
                leaving -= {name.buffer for name in each.buffers}
            elif isinstance(each, Free):
                there -= {b for b in each.buffers if isinstance(b, OptimizerState)}
            elif isinstance(each, Run) and each.program.startswith("update_group"):
                assert len(there & set(each.inputs[3])) == len(each.inputs[3])
            most = max(most, len(there | leaving))
        assert most == 2 * max(len(group.state) for group in groups)
        assert not there
        assert not leaving


def test_a_checkpoint_has_it_and_gives_it_to_any_plan(tmp_path: Path):
    case = one_case()
    job = job_of(case, CLIPPED)
    plain = replace(job, plan=random_case(Random(2), 2, 2).plan)
    batch = make_batch(case.plan.batch_size, 0)
    with running(job) as executor, running(plain) as other:
        train(executor, [batch])
        executor.save(str(tmp_path))
        records = executor.wait_saved()
        assert all(records)
        expected = held(executor)
        switched = LocalExecutor(plain, build(plain))
        switched.take_over(executor)
        assert same(held(switched), expected)
        back = LocalExecutor(job, build(job))
        back.take_over(switched)
        assert same(held(back), expected)
        assert train(back, [batch]) == train_after(other, batch)
        switched.close()
        back.close()


def train_after(executor: LocalExecutor, batch: Any) -> Any:
    return train(executor, [batch, batch])[1:]


def test_a_norm_of_what_the_state_makes_is_refused():
    optimizer = optax.chain(optax.adamw(1e-3), optax.clip_by_global_norm(0.5))
    with pytest.raises(InputError, match="a stage whose plan offloads 'optimizer_state' has them"):
        build(job_of(one_case(), optimizer))


class Memory:
    kind = "device"


class Device:
    platform = "old"

    def addressable_memories(self) -> list[Memory]:
        return [Memory()]

    def __str__(self) -> str:
        return "OldDevice(id=0)"


def test_a_platform_without_host_memory_is_refused():
    message = (
        r"stage 1: offload \['optimizer_state'\] is given, and device OldDevice\(id=0\) of "
        "platform 'old' has no memory of kind 'pinned_host', but device; allowed there: nothing"
    )
    with pytest.raises(InputError, match=message):
        check_host_memory([Device()], "stage 1: offload ['optimizer_state']")
    check_host_memory(jax.local_devices(), "here")
