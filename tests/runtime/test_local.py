"""The local executor: memory, compilation, failures, evaluation."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from cases import CLUSTER, Case, trace_model
from compilations import counted_compilations
from execution import gathered_parameters, job_of, one_device_steps, running, train
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from small_models import Batch, Model, make_batch

from hetjax.errors import WorkerLostError
from hetjax.mesh import SubMesh
from hetjax.pipeline.program.stacked_leaves import whole_leaves
from hetjax.pipeline.schedule_search.named_schedules import make_schedule
from hetjax.pipeline.schedule_search.zero_bubble import zb_h1
from hetjax.pipeline.schedules.schedule import WARM_UP_SCHEDULES, Schedule
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.pipeline.timeline.timeline import link_track
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.runtime.compilation.compiled_stage import StageCompiler
from hetjax.runtime.compilation.state import initial_parameters
from hetjax.runtime.local.local_executor import LocalExecutor
from hetjax.runtime.workers.early_runs import EarlyRuns
from hetjax.runtime.workers.job import Job
from hetjax.runtime.workers.step_report import link_events, link_uses
from hetjax.runtime.workers.worker import StageWorker

SMALL, SHARED = Model(("scalar",)), Model(("dense", "dense"))
UNLIKE = (
    StagePlan.on((0, 1), SubMesh("first", 0, (1, 4)), (2, 2), "fully_sharded"),
    StagePlan.on((1, 2), SubMesh("second", 0, (1, 2)), (2, 1)),
    StagePlan.on((2, 3), SubMesh("second", 2, (1, 1)), (1, 1)),
)
"""The embedding is tied: the first and the last stage hold it, on unlike submeshes."""
ALIKE = tuple(
    StagePlan.on((stage, stage + 1), SubMesh("first", stage, (1, 1)), (1, 1)) for stage in range(3)
)


def case_of(model: Model, stages: tuple[StagePlan, ...], schedule: Schedule) -> Case:
    program = trace_model(model, 2)
    count = len(stages)
    layers = tuple(i * program.num_positions // count for i in range(count + 1))
    pipeline = PipelinePlan(stages, schedule.num_microbatches, 2, schedule)
    return Case(model, program, Plan(program.fingerprint, layers, CLUSTER, (pipeline,)))


def small_case() -> Case:
    return case_of(SMALL, ALIKE, one_f_one_b(3, 3))


@pytest.mark.parametrize("name", WARM_UP_SCHEDULES)
def test_as_many_microbatches_live_as_the_schedule_says(name: str):
    times = StepTimes([0.4, 0.3, 0.3], [0.6, 0.4, 0.6], [0.6, 0.05], [0.6, 0.05])
    schedule = make_schedule(name, 3, 6, times)
    case = case_of(SMALL, ALIKE, schedule)
    with running(job_of(case, optax.sgd(0.1))) as executor:
        reports = executor.train_step(0, make_batch(case.plan.batch_size))
    live = [report.live_microbatches for report in reports]
    assert live == [schedule.live_bound(stage) for stage in range(3)]
    assert all(report.live_bytes > 0 for report in reports)


class Source:
    """A source of one batch to train on and two to evaluate on."""

    def __init__(self, batch_size: int):
        self.batches = [make_batch(batch_size, seed) for seed in range(3)]

    def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Batch:
        return jax.tree.map(lambda leaf: leaf[rows or slice(None)], self.batches[0])

    def held_out_batches(self, batch_size: int) -> Iterator[Batch]:
        return iter(self.batches[1:])


@pytest.fixture(scope="module")
def job() -> Job:
    case = case_of(SHARED, UNLIKE, one_f_one_b(3, 4))
    return job_of(case, optax.adamw(1e-2), source=Source(case.plan.batch_size))


@pytest.fixture(scope="module")
def executor(job: Job) -> Iterator[LocalExecutor]:
    """An executor that has run a step, shared by the tests that leave it able to run others."""
    with running(job) as executor:
        executor.train_step(0)
        yield executor


def test_the_listener_hears_of_compilations():
    with counted_compilations() as counter:
        jax.jit(lambda x: x + 1.25)(1.0)
    assert any("trace" in event for event in counter.seen)
    assert any("backend_compile" in event for event in counter.seen)


def test_only_the_first_step_traces_and_compiles(executor: LocalExecutor):
    with counted_compilations() as counter:
        executor.train_step(1)
        executor.train_step(2, timed=True)
    assert counter.seen == []


def test_a_step_reuses_the_memory_of_its_state(executor: LocalExecutor):
    states = [worker.state() for worker in executor.workers]
    executor.train_step(0)
    for state in states:
        assert all(array.is_deleted() for array in (*state.parameters, *state.optimizer))


@pytest.mark.usefixtures("executor")
def test_training_spares_the_parameters_that_were_given(job: Job):
    leaves, fresh = jax.tree.leaves(job.parameters), jax.tree.leaves(SHARED.init())
    for leaf, same in zip(leaves, fresh, strict=True):
        np.testing.assert_array_equal(leaf, same)


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("d")])
def test_parameters_given_in_numpys_memory_may_be_changed(spec: PartitionSpec):
    room = np.zeros(320, np.uint8)
    # Memory that begins so is what JAX takes over.
    given = room[-room.ctypes.data % 64 :][:256].view(np.float32).reshape(8, 8)
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("d",)), spec)
    (found,) = initial_parameters([ParameterPart(0)], [sharding], [given], whole_leaves(1))
    given[:] = 1
    np.testing.assert_array_equal(found, np.zeros((8, 8)))


def test_tied_parameters_stay_bitwise_equal_on_unlike_submeshes(executor: LocalExecutor):
    for step in range(5):
        executor.train_step(step)
    gathered_parameters(executor)


def test_a_timed_step_tells_when_each_task_and_transfer_ran(executor: LocalExecutor):
    reports = executor.train_step(0, timed=True)
    for report in reports:
        tasks = [event for event in report.events if event.microbatch is not None]
        assert len(tasks) == 8
        assert all(event.start <= event.end for event in report.events)
    transfers = link_events(reports)
    assert len(transfers) == 2 * 2 * 4
    assert all(event.num_bytes for event in transfers)
    uses = {(use.source, use.target): use for use in link_uses(reports)}
    for (source, target), use in uses.items():
        activations = [e for e in transfers if e.track == link_track(source, target)]
        assert use.num_bytes >= sum(event.num_bytes for event in activations)
        assert use.transfers > len(activations)
        assert 0 < use.busy <= 1
    assert sum(report.wait_seconds for report in reports) == pytest.approx(
        sum(use.wait_seconds for use in uses.values())
    )


def test_hosts_of_one_stage_fill_no_waits(monkeypatch: pytest.MonkeyPatch):
    """What fits into a wait differs from host to host, and all must run the same collectives."""
    asked = []

    def next_after(*_: Any) -> None:
        asked.append(1)

    monkeypatch.setattr(EarlyRuns, "next_after", next_after)
    case = case_of(SMALL, ALIKE, zb_h1(3, 3))
    batch = make_batch(case.plan.batch_size)
    with running(job_of(case, optax.sgd(0.1))) as executor:
        for spans_hosts in (True, False):
            for worker in executor.workers:
                worker.waits_for_others = spans_hosts
            executor.train_step(0, batch)
            assert bool(asked) != spans_hosts


def test_evaluation_gives_the_loss_of_one_device(executor: LocalExecutor, job: Job):
    parameters = jax.tree.unflatten(
        jax.tree.structure(job.parameters), gathered_parameters(executor)
    )
    held = [set(worker.buffers) for worker in executor.workers]
    source = job.source
    assert isinstance(source, Source)
    assert executor.num_held_out() == 2
    for index, batch in enumerate(source.batches[1:]):
        total, count = executor.evaluate(index)
        expected = jax.jit(SHARED.mean_loss)(parameters, batch)
        np.testing.assert_allclose(total / count, expected, rtol=1e-5)
    assert [set(worker.buffers) for worker in executor.workers] == held


def test_evaluation_is_compiled_before_any_stage_waits_for_another(
    monkeypatch: pytest.MonkeyPatch,
):
    seen = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: seen.append(name) or call(*arguments)

    compiled, evaluate = StageCompiler.with_evaluation, StageWorker.evaluate
    monkeypatch.setattr(StageCompiler, "with_evaluation", noted("compile", compiled))
    monkeypatch.setattr(StageWorker, "evaluate", noted("evaluate", evaluate))
    case = small_case()
    job = job_of(case, optax.sgd(0.1), source=Source(case.plan.batch_size))
    with running(job) as executor:
        for _ in range(2):
            executor.evaluate(0)
    assert seen == ["compile"] * 3 + ["evaluate"] * 6


def test_a_state_that_begins_as_the_parameters_is_a_copy_of_them():
    """Both are donated to the update, which one buffer cannot be twice."""
    case, optimizer = small_case(), optax.contrib.schedule_free_adamw(1e-2)
    batches = [make_batch(case.plan.batch_size, seed) for seed in range(3)]
    with jax.numpy_dtype_promotion("standard"):
        expected = one_device_steps(case.model, optimizer, batches)
    with running(job_of(case, optimizer)) as executor:
        found = train(executor, batches)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_parameters_made_by_a_function_are_those_given_as_arrays():
    case = small_case()
    job = job_of(case, optax.sgd(0.1))
    arrays = jax.tree.leaves(job.parameters)
    with running(replace(job, parameters=case.model.init)) as executor:
        for made, given in zip(gathered_parameters(executor), arrays, strict=True):
            np.testing.assert_array_equal(made, given)


class BrokenError(Exception):
    """What the tests break a stage with."""


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_the_error_of_a_stage_ends_the_others_and_comes_out(broken: int):
    """Its peers would wait for the deadline of a minute and name a lost worker instead."""
    case = small_case()
    batch = make_batch(case.plan.batch_size)
    with running(job_of(case, optax.sgd(0.1))) as executor:

        def fail(*_: Any, **__: Any) -> None:
            raise BrokenError(f"stage {broken} broke")

        executor.workers[broken].train_step = fail  # type: ignore[method-assign]
        with pytest.raises(BrokenError, match=f"stage {broken} broke"):
            executor.train_step(0, batch)


def test_a_stage_that_never_sends_is_named_at_the_deadline():
    case = case_of(SMALL, ALIKE[:2], one_f_one_b(2, 3))
    batch = make_batch(case.plan.batch_size)
    with running(job_of(case, optax.sgd(0.1), deadline=0.2)) as executor:
        executor.workers[0].train_step = lambda *_, **__: None  # type: ignore[method-assign]
        with pytest.raises(WorkerLostError, match="stage 0 is lost: its value did not come"):
            executor.train_step(0, batch)
