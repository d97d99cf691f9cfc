"""The local executor: memory, compilation, failures, evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from cases import CLUSTER, Case, trace_model
from execution import gathered_parameters, job_of, one_device_steps, running
from small_models import Batch, Model, make_batch

from hetjax.errors import WorkerLostError
from hetjax.mesh import SubMesh
from hetjax.pipeline.schedule import SCHEDULES, Schedule, from_warm_up_counts, make_schedule
from hetjax.planner.plan import PipelinePlan, Plan, StagePlan
from hetjax.runtime.worker import link_events

MODEL = Model(("dense", "dense", "dense"))
MICROBATCHES = 5
THREE_STAGES = (
    StagePlan((0, 1), SubMesh("first", 0, (1, 4)), (2, 2), "fully_sharded"),
    StagePlan((1, 2), SubMesh("second", 0, (1, 2)), (2, 1)),
    StagePlan((2, 3), SubMesh("second", 2, (1, 1)), (1, 1)),
)
"""The embedding is tied: the first and the last stage hold it, on unlike submeshes."""


def three_stages(schedule: Schedule, model: Model = MODEL) -> Case:
    program = trace_model(model, 2)
    end = program.num_positions
    layers = (0, end // 3, 2 * end // 3, end)
    pipeline = PipelinePlan(THREE_STAGES, schedule.num_microbatches, 2, schedule)
    return Case(model, program, Plan(program.fingerprint, layers, CLUSTER, (pipeline,)))


def some_case() -> Case:
    return three_stages(from_warm_up_counts((3, 2, 1), MICROBATCHES))


@pytest.mark.parametrize("name", SCHEDULES)
def test_as_many_microbatches_live_as_the_schedule_says(name: str):
    schedule = make_schedule(
        name, 3, MICROBATCHES, compute=[1.0, 0.7, 0.9], communication=[0.6, 0.05]
    )
    case = three_stages(schedule)
    with running(job_of(case, optax.sgd(0.1))) as executor:
        reports = executor.train_step(0, make_batch(case.plan.batch_size))
    live = [report.live_microbatches for report in reports]
    assert live == [schedule.live_bound(stage) for stage in range(3)]
    assert all(report.live_bytes > 0 for report in reports)


class Compilations:
    """Counts what JAX traces and compiles."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, event: str, duration: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile"):
            self.seen.append(event)


@contextmanager
def counted_compilations() -> Iterator[Compilations]:
    counter = Compilations()
    jax.monitoring.register_event_duration_secs_listener(counter)
    try:
        yield counter
    finally:
        jax.monitoring.unregister_event_duration_listener(counter)


def test_only_the_first_step_traces_and_compiles():
    case = some_case()
    batches = [make_batch(case.plan.batch_size, seed) for seed in range(3)]
    with counted_compilations() as counter:
        jax.jit(lambda x: x + len(counter.seen))(1.0)
        assert counter.seen, "the listener hears of compilations"
    with running(job_of(case, optax.adam(1e-3))) as executor:
        executor.train_step(0, batches[0])
        with counted_compilations() as counter:
            for step in (1, 2):
                executor.train_step(step, batches[step], timed=step == 2)
    assert counter.seen == []


def test_a_step_compiles_no_program_that_was_compiled_before_it():
    case = some_case()
    with (
        running(job_of(case, optax.adam(1e-3))) as executor,
        counted_compilations() as counter,
    ):
        executor.train_step(0, make_batch(case.plan.batch_size))
    assert not [event for event in counter.seen if "backend_compile" in event]


def test_a_step_reuses_the_memory_of_its_state_and_spares_the_users_parameters():
    case = some_case()
    job = job_of(case, optax.adam(1e-3))
    before = [np.array(leaf) for leaf in jax.tree.leaves(job.parameters)]
    with running(job) as executor:
        states = [worker.state() for worker in executor.workers]
        for step in range(2):
            executor.train_step(step, make_batch(case.plan.batch_size))
        for state in states:
            assert all(array.is_deleted() for array in (*state.parameters, *state.optimizer))
    for leaf, copy in zip(jax.tree.leaves(job.parameters), before, strict=True):
        np.testing.assert_array_equal(leaf, copy)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optax.contrib.schedule_free_adamw(1e-2), id="schedule free"),
        pytest.param(optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(), id="few"),
        pytest.param(optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(1e-2)), id="noise"),
    ],
)
def test_states_of_other_shapes(optimizer: optax.GradientTransformation):
    """A state that begins as a copy of the parameters, that counts steps, that holds a key."""
    case = some_case()
    batches = [make_batch(case.plan.batch_size, seed) for seed in range(3)]
    with jax.numpy_dtype_promotion("standard"):
        expected = one_device_steps(case.model, optimizer, batches)
        with running(job_of(case, optimizer)) as executor:
            reports = [executor.train_step(i, batch)[-1] for i, batch in enumerate(batches)]
    losses = [report.loss for report in reports]
    np.testing.assert_allclose(losses, [loss for loss, _ in expected], rtol=1e-5)


def test_tied_parameters_stay_bitwise_equal_on_unlike_submeshes():
    case = some_case()
    with running(job_of(case, optax.adamw(1e-2))) as executor:
        for step in range(5):
            executor.train_step(step, make_batch(case.plan.batch_size, step))
        gathered_parameters(executor)


def test_parameters_made_by_a_function_are_those_given_as_arrays():
    case = some_case()
    job = job_of(case, optax.sgd(0.1))
    arrays = jax.tree.leaves(job.parameters)
    with running(replace(job, parameters=lambda: jax.tree.map(lambda x: x, case.model.init()))) as e:
        for made, given in zip(gathered_parameters(e), arrays, strict=True):
            np.testing.assert_array_equal(made, given)


def test_a_timed_step_tells_when_each_task_and_transfer_ran():
    case = some_case()
    with running(job_of(case, optax.sgd(0.1))) as executor:
        reports = executor.train_step(0, make_batch(case.plan.batch_size), timed=True)
    for stage, report in enumerate(reports):
        names = [event.name for event in report.events if event.kind in "FB"]
        tasks = map(str, case.plan.pipeline.schedule.order[stage])
        assert names == [task for task in tasks if stage < 2 or task.startswith("B")]
        assert all(event.start <= event.end for event in report.events)
    transfers = link_events(reports)
    assert len(transfers) == 2 * 2 * MICROBATCHES
    assert all(event.num_bytes for event in transfers)


class Failure(Exception):
    """What the tests break a stage with."""


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_the_error_of_a_stage_ends_the_others_and_comes_out(broken: int):
    """Its peers would wait for the deadline of a minute and name a lost worker instead."""
    case = some_case()
    batch = make_batch(case.plan.batch_size)
    with running(job_of(case, optax.sgd(0.1))) as executor:

        def fail(*_: Any, **__: Any) -> None:
            raise Failure(f"stage {broken} broke")

        executor.workers[broken].train_step = fail  # type: ignore[method-assign]
        with pytest.raises(Failure, match=f"stage {broken} broke"):
            executor.train_step(0, batch)


def test_a_stage_that_never_sends_is_named_at_the_deadline():
    case = some_case()
    batch = make_batch(case.plan.batch_size)
    with running(job_of(case, optax.sgd(0.1), deadline=0.2)) as executor:
        executor.workers[0].train_step = lambda *_, **__: None  # type: ignore[method-assign]
        with pytest.raises(WorkerLostError, match="stage 0 is lost: its value did not come"):
            executor.train_step(0, batch)


class HeldOut:
    """A source of one batch to train on and two to evaluate on."""

    def __init__(self, batches: list[Batch]):
        self.batches = batches

    def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Batch:
        return jax.tree.map(lambda leaf: leaf[rows or slice(None)], self.batches[0])

    def held_out_batches(self, batch_size: int) -> Iterator[Batch]:
        return iter(self.batches[1:])


@pytest.mark.parametrize("counted", [True, False])
def test_evaluation_gives_the_loss_of_one_device(counted: bool):
    model = replace(MODEL, counted=counted)
    case = three_stages(from_warm_up_counts((3, 2, 1), MICROBATCHES), model)
    source = HeldOut([make_batch(case.plan.batch_size, seed) for seed in range(3)])
    with running(job_of(case, optax.sgd(0.0), source=source)) as executor:
        executor.train_step(0)
        found = [executor.evaluate(i) for i in range(executor.num_held_out())]
        held = [set(worker.buffers) for worker in executor.workers]
        executor.train_step(1)
        assert [set(worker.buffers) for worker in executor.workers] == held
    losses = [total / count for total, count in found]
    expected = [float(jax.jit(model.mean_loss)(model.init(), b)) for b in source.batches[1:]]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
