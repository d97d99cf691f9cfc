"""Activations in the hosts' memory: the same bits, and few microbatches on the devices at once."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from cases import Case, examples, random_case
from execution import job_of, running, train
from hypothesis import given
from hypothesis import strategies as st
from offloading import CLIPPED, held, offloading, same
from small_models import make_batch

from hetjax.pipeline.schedules.activation_copies import PLACES, travelling
from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.pipeline.schedules.warm_up import from_warm_up_counts, gpipe
from hetjax.planner.plan.stage_plan import Offloaded as Kind
from hetjax.runtime.compilation.host_memory import HOST
from hetjax.runtime.instructions.buffers import Offloaded, Residual
from hetjax.runtime.instructions.instruction import Await, Fetch, Free, Run, Store
from hetjax.runtime.workers.worker import StageWorker


def steps(case: Case) -> tuple[Any, list[np.ndarray]]:
    batches = [make_batch(case.plan.batch_size, seed) for seed in range(2)]
    with running(job_of(case, CLIPPED)) as executor:
        return train(executor, batches), held(executor)


@examples(usual=2, full=100)
@given(number=st.integers(0, 2**32 - 1), state=st.booleans())
def test_offloaded_activations_give_the_same_bits(number: int, state: bool):
    case = random_case(Random(number), 2, 6)
    losses, expected = steps(case)
    kinds: tuple[Kind, ...] = ("activations", *(("optimizer_state",) if state else ()))
    found, offloaded = steps(replace(case, plan=offloading(case.plan, *kinds)))
    assert found == losses
    assert same(offloaded, expected)


def case_of(schedule: Schedule, number: int = 3) -> Case:
    """A plan of one pipeline in a schedule, whose stages offload activations."""
    stages, count = schedule.num_stages, schedule.num_microbatches
    cases = (random_case(Random(each), stages, count) for each in range(number, 1000))
    case = next(each for each in cases if len(each.plan.stages) == stages)
    pipeline = replace(
        case.plan.pipeline,
        num_microbatches=count,
        schedule=schedule,
        stages=tuple(replace(each, recompute=False) for each in case.plan.stages),
    )
    plan = replace(case.plan, pipelines=(pipeline,))
    return replace(case, plan=offloading(plan, "activations"))


@pytest.mark.parametrize("schedule", [gpipe(2, 6), from_warm_up_counts([4, 3], 6, "h_1f1b")])
def test_what_travels_is_on_the_devices_for_two_microbatches(schedule: Schedule):
    with running(job_of(case_of(schedule), CLIPPED)) as executor:
        for worker, tasks in zip(executor.workers, schedule.order, strict=True):
            read = travelling(tasks)
            stores = [each for each in worker.training if isinstance(each, Store)]
            assert [each.microbatch for each in stores] == list(read)
            check_places(worker)


def check_places(worker: StageWorker) -> None:
    """By the list: what was made or fetched and is not freed, and where it is when it is read."""
    sent = {b for each in worker.training if isinstance(each, Store) for b in each.buffers}
    there: set[Any] = set()
    away: set[Any] = set()
    for each in worker.training:
        match each:
            case Run():
                reads = {b for group in each.inputs for b in group}
                assert reads & sent <= there | {b for b in reads if not isinstance(b, Residual)}
                there |= {b for b in each.outputs if b in sent}
            case Store():
                away |= set(each.targets)
            case Await():
                assert set(each.buffers) <= away
            case Fetch():
                assert set(each.sources) <= away
                there |= {b for b in each.buffers if isinstance(b, Residual)}
            case Free():
                there -= set(each.buffers)
                away -= set(each.buffers)
            case _:
                pass
        assert len({b.microbatch for b in there}) <= PLACES
    assert not there
    assert not away


def test_they_are_in_pinned_memory_and_gone_after_the_step():
    case = case_of(gpipe(1, 6))
    kinds: list[str] = []
    with running(job_of(case, CLIPPED)) as executor:
        (worker,) = executor.workers
        batch = make_batch(case.plan.batch_size, 0)
        step = worker.begin_step(0, lambda a, b: [leaf[a:b] for leaf in batch.values()], timed=True)
        for each in worker.training:
            step.do(each)
            if isinstance(each, Await):
                kinds += [step.buffers[b].sharding.memory_kind for b in each.buffers]
        report = worker.end_step(step)
        assert set(kinds) == {HOST}
        assert not any(isinstance(name, Offloaded | Residual) for name in worker.buffers)
        names = [event.name for event in report.events if event.kind in ("store", "fetch")]
        assert sorted(names) == sorted(f"{k} F{m}" for k in ("store", "fetch") for m in range(6))
        kept = replace(case, plan=offloading(case.plan))
    with running(job_of(kept, CLIPPED)) as executor:
        (worker,) = executor.workers
        step = worker.begin_step(0, lambda a, b: [leaf[a:b] for leaf in batch.values()], timed=True)
        step.execute(worker.training)
        assert report.live_bytes < 0.6 * worker.end_step(step).live_bytes
