"""Steps, loads and saves that are cut off: nothing goes on from what they leave half done."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ray_jobs import (
    BATCH,
    LENGTH,
    MICROBATCHES,
    VOCABULARY,
    make_plan,
    make_plan_of_two_passes,
    make_trainer,
)

from hetjax import CheckpointError, InputError, Trainer
from hetjax.configuration import TrainSettings
from hetjax.data import synthetic
from hetjax.loop import train
from hetjax.pipeline.schedules.warm_up import gpipe
from hetjax.planner.plan.plan import Plan
from hetjax.runtime.checkpoints.checkpoint import StageSaver
from hetjax.runtime.local import local_executor
from hetjax.runtime.local.local_executor import LocalExecutor
from hetjax.runtime.ray.ray_worker import HostWorker
from hetjax.runtime.workers.device_workers import DeviceWorkers
from hetjax.runtime.workers.feed import BatchReader
from hetjax.runtime.workers.instruction_run import InstructionRun
from hetjax.runtime.workers.worker import StageWorker

DATA = synthetic(VOCABULARY, LENGTH, size=2000)


class Changed:
    """The data, which a test may change as they are read."""

    def __init__(self, change: Callable[[Any], Any] = lambda batch: batch) -> None:
        self.change = change

    def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Any:
        return self.change(DATA.batch(step, batch_size, rows))

    def held_out_batches(self, batch_size: int) -> list[Any]:
        return [self.change(each) for each in DATA.held_out_batches(batch_size)][:2]


def make(source: Any, workdir: Path | None = None, plan: Plan | None = None) -> Trainer:
    return make_trainer(
        "local", plan or make_plan(), source=source, batch=DATA.batch(0, BATCH), workdir=workdir
    )


def interrupted(call: Callable[[], Any]) -> None:
    """Ctrl-C while something is done."""
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        call()


def test_nothing_goes_on_from_a_step_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compute = InstructionRun.compute

    def late(self: Any, instruction: Any) -> None:
        time.sleep(0.2)
        compute(self, instruction)

    with make(DATA, tmp_path) as trainer:
        trainer.train_step()
        trainer.save(wait=True)
        expected = [trainer.train_step().loss for _ in range(2)]
        monkeypatch.setattr(InstructionRun, "compute", late)
        interrupted(trainer.train_step)
        monkeypatch.undo()
        acts = trainer.train_step, trainer.rehearse, trainer.save, trainer.measure
        for act in (*acts, trainer.evaluate, trainer.parameters):
            with pytest.raises(InputError, match="was cut off, and the state is between two steps"):
                act()
        trainer.resume()
        assert trainer.steps_done == 1
        assert [trainer.train_step().loss for _ in range(2)] == expected


def test_another_thread_waits_until_a_step_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compute, running, release = InstructionRun.compute, threading.Event(), threading.Event()

    def late(self: Any, instruction: Any) -> None:
        running.set()
        assert release.wait(30)
        compute(self, instruction)

    with make(DATA, tmp_path) as trainer, ThreadPoolExecutor(3) as threads:
        trainer.parameters()
        monkeypatch.setattr(InstructionRun, "compute", late)
        step = threads.submit(trainer.train_step)
        assert running.wait(30)
        others = threads.submit(trainer.parameters), threads.submit(trainer.save, wait=True)
        threading.Timer(0.1, release.set).start()
        assert step.result().step == 1
        for other in others:
            other.result()
    assert (tmp_path / "checkpoints" / "00000001").exists()


def test_who_begins_at_step_0_has_the_state_of_step_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def failing(*_: Any) -> None:
        raise OSError("of this step alone")

    with make(DATA, tmp_path) as trainer:
        expected = [trainer.train_step().loss for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(InstructionRun, "compute", failing)
            with pytest.raises(OSError, match="of this step alone"):
                trainer.train_step()
        assert trainer.resume(or_start=True)[-1].endswith("starting at step 0")
        assert (trainer.steps_done, trainer.examples_done) == (0, 0)
        assert [trainer.train_step().loss for _ in range(2)] == expected


def test_a_batch_that_is_refused_cuts_nothing_off():
    with make(Changed()) as trainer:
        with pytest.raises(InputError, match="has leaves"):
            trainer.train_step({"other": np.zeros((BATCH, 1), np.float32)})
        trainer.train_step()


def test_a_failed_resumption_leaves_the_checkpoints_of_the_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with make(DATA, tmp_path) as trainer:
        trainer.train_step()
        trainer.save(wait=True)
    load = StageSaver.load

    def failing(self: Any, *arguments: Any) -> Any:
        if self.stage:
            raise CheckpointError("the disk is gone")
        return load(self, *arguments)

    monkeypatch.setattr(StageSaver, "load", failing)
    with make(DATA, tmp_path) as trainer:
        with pytest.raises(CheckpointError, match="the disk is gone"):
            trainer.resume()
        with pytest.raises(InputError, match="holds checkpoints of an earlier run"):
            trainer.train_step()
        monkeypatch.undo()
        trainer.resume()
        trainer.train_step()


def test_who_does_not_see_a_checkpoint_names_the_folder_and_the_worker(tmp_path: Path):
    with make(DATA) as trainer:
        executor = trainer._executor
        assert isinstance(executor, LocalExecutor)
        host = HostWorker((1, 0), "stage 1")
        host.savers, host.workers = executor._savers[1:], DeviceWorkers(executor.workers[1:])
        unseen = f"stage 1: checkpoint {tmp_path} cannot be read: manifest.json is missing"
        with pytest.raises(CheckpointError, match=f"^{unseen}$"):
            host.load(str(tmp_path))


def test_one_goes_on_from_what_was_saved_last(tmp_path: Path):
    with make(DATA, tmp_path) as trainer:
        trainer.train_step()
        trainer.save(wait=True)
        trainer.train_step()
        trainer.save()
        trainer.train_step()
        trainer.resume()
        assert trainer.steps_done == 2


def test_who_is_interrupted_while_a_checkpoint_is_written_has_it_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wait = StageSaver.wait

    def slow(self: Any) -> Any:
        time.sleep(0.5)
        return wait(self)

    monkeypatch.setattr(StageSaver, "wait", slow)
    with make(DATA, tmp_path) as trainer:
        trainer.train_step()
        trainer.save()
        interrupted(trainer.finish_saving)
        expected = trainer.train_step().loss
        trainer.save()
    names = sorted(each.name for each in (tmp_path / "checkpoints").iterdir())
    assert names == ["00000001", "00000002"]
    with make(DATA, tmp_path) as trainer:
        trainer.resume()
        assert trainer.steps_done == 2
        trainer.train_step()
    assert expected > 0


def test_what_could_not_be_read_ahead_is_read_again():
    failures, is_asked = iter([None, OSError("the network is gone")]), threading.Event()

    def failing(batch: Any) -> Any:
        if (failure := next(failures, None)) is not None:
            # What has failed before it is asked for is read again then.
            is_asked.wait()
            raise failure
        return batch

    batch = DATA.batch(0, BATCH)
    reader = BatchReader(Changed(failing), BATCH, batch, 300.0)
    reader.training(0)(0, BATCH)
    threading.Timer(0.3, is_asked.set).start()
    with pytest.raises(OSError, match="the network is gone"):
        reader.training(BATCH)(0, BATCH)
    (found,) = reader.training(BATCH)(0, BATCH)
    (expected,) = DATA.batch(1, BATCH).values()
    assert np.array_equal(found, expected)
    reader.close()


def plan_of_one_stage() -> Plan:
    plan = make_plan()
    stage = replace(plan.stages[0], layers=(0, 1))
    pipeline = replace(plan.pipeline, stages=(stage,), schedule=gpipe(1, MICROBATCHES))
    return replace(plan, layers=(0, plan.layers[-1]), pipelines=(pipeline,))


@pytest.mark.parametrize("plan", [plan_of_one_stage(), make_plan()], ids=["one stage", "two"])
def test_who_closes_a_trainer_ends_what_other_threads_do(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
):
    compute, running, release = InstructionRun.compute, threading.Event(), threading.Event()

    def late(self: Any, instruction: Any) -> None:
        running.set()
        assert release.wait(30)
        compute(self, instruction)

    def trained(trainer: Trainer) -> None:
        while True:
            trainer.train_step()

    with make(DATA, plan=plan) as trainer, ThreadPoolExecutor(2) as threads:
        monkeypatch.setattr(InstructionRun, "compute", late)
        steps = threads.submit(trained, trainer)
        assert running.wait(30)
        closing = threads.submit(trainer.close)
        assert not wait([closing], 0.1).done
        release.set()
        closing.result()
        with pytest.raises(InputError, match="the trainer is closed; make another one"):
            steps.result()


@pytest.mark.parametrize("plan", [plan_of_one_stage(), make_plan()], ids=["one stage", "two"])
def test_who_waits_for_the_source_is_told_that_the_trainer_is_closed(plan: Plan):
    reading, release = threading.Event(), threading.Event()

    def late(batch: Any) -> Any:
        reading.set()
        assert release.wait(30)
        return batch

    with make(Changed(late), plan=plan) as trainer, ThreadPoolExecutor(1) as threads:
        step = threads.submit(trainer.train_step)
        assert reading.wait(30)
        trainer.close()
        release.set()
        with pytest.raises(InputError, match="the trainer is closed; make another one"):
            step.result()


@pytest.mark.parametrize("readings", [0, 1], ids=["at once", "in its midst"])
def test_data_that_end_leave_what_was_trained(tmp_path: Path, readings: int):
    class Ending(Changed):
        def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Any:
            if step == 2 and (rows or slice(0)).start >= readings:
                raise IndexError("no more data")
            return super().batch(step, batch_size, rows)

    settings = TrainSettings(steps=9, batch_size=BATCH)
    with make(Ending(), tmp_path) as trainer:
        with pytest.raises(IndexError, match="no more data"):
            list(train(trainer, settings, checkpoints=True))
        assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["00000002"]
        trained = trainer.parameters()
        trainer.evaluate()
        trainer.train_step(DATA.batch(2, BATCH))
        with make(DATA) as another:
            for _ in range(2):
                another.train_step()
            expected = another.parameters()
    jax.tree.map(np.testing.assert_array_equal, trained, expected)


def only(**leaves: Any) -> Callable[[Any], Any]:
    return lambda batch: {**batch, **leaves}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (only(other=np.zeros(3)), r"the source's batch has leaves .*'other'"),
        (
            lambda batch: {name: leaf[:1] for name, leaf in batch.items()},
            r"the source's batch leaf '\w+' has shape \(1, \d+\); \(\d+, \d+\) is wanted",
        ),
    ],
    ids=["another leaf", "one example"],
)
def test_batches_of_a_source_are_what_was_planned(change: Any, message: str):
    with make(Changed(change)) as trainer, pytest.raises(InputError, match=message):
        trainer.train_step()


def test_who_has_failed_once_trains_on_when_resumed(tmp_path: Path):
    def unreadable(batch: Any) -> Any:
        raise OSError("the disk is away")

    source = Changed()
    with make(source, tmp_path) as trainer:
        losses = [trainer.train_step().loss]
        trainer.save(wait=True)
        losses.append(trainer.train_step().loss)
        trainer.train_step()
        source.change = unreadable
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is away"):
                trainer.evaluate()
        with pytest.raises(OSError, match="the disk is away"):
            trainer.measure()
        source.change = lambda batch: batch
        trainer.resume()
        assert trainer.train_step().loss == losses[1]
        trainer.evaluate()


def test_an_evaluation_that_is_interrupted_ends_before_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
):
    evaluate, step, running = StageWorker.evaluate, StageWorker.train_step, []
    release = threading.Event()

    def late(self: Any, *arguments: Any) -> Any:
        running.append(self)
        if len(running) == 1:
            # Python loses a signal that comes just as its main thread begins to wait.
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        release.wait(60)
        found = evaluate(self, *arguments)
        running.remove(self)
        return found

    def alone(self: Any, *arguments: Any, **options: Any) -> Any:
        assert not running
        return step(self, *arguments, **options)

    with make(DATA) as trainer, make(DATA) as another:
        monkeypatch.setattr(StageWorker, "evaluate", late)
        monkeypatch.setattr(StageWorker, "train_step", alone)
        with pytest.raises(KeyboardInterrupt):
            trainer.evaluate()
        assert running
        threading.Timer(0.3, release.set).start()
        assert trainer.train_step().loss == another.train_step().loss


def test_a_schedule_that_was_interrupted_is_not_used(monkeypatch: pytest.MonkeyPatch):
    wait, cut_off = local_executor.wait, [True]

    def interrupting(futures: Any, **options: Any) -> Any:
        found = wait(futures, **options)
        if options and cut_off:
            raise KeyboardInterrupt(cut_off.pop())
        return found

    with make(DATA) as trainer, make(DATA) as another:
        executor, plan = trainer._executor, trainer.plan
        assert isinstance(executor, LocalExecutor)
        monkeypatch.setattr(local_executor, "wait", interrupting)
        with pytest.raises(KeyboardInterrupt):
            trainer.use_schedule(gpipe(2, plan.pipeline.num_microbatches))
        assert trainer.plan == plan
        used = {each.placement.plan.pipeline.schedule for each in executor.workers}
        assert used == {plan.pipeline.schedule}
        assert trainer.train_step().loss == another.train_step().loss


def test_a_stage_that_fails_ends_an_evaluation_of_stages_that_share_devices(
    monkeypatch: pytest.MonkeyPatch,
):
    """The others of its devices do not wait for what never comes."""
    compute = InstructionRun.compute

    def failing(self: Any, instruction: Any) -> None:
        if self.worker.stage == 2:
            raise OSError("of this stage alone")
        compute(self, instruction)

    with make(DATA, plan=make_plan_of_two_passes()) as trainer:
        expected = trainer.evaluate()
        with monkeypatch.context() as patch:
            patch.setattr(InstructionRun, "compute", failing)
            with pytest.raises(OSError, match="of this stage alone"):
                trainer.evaluate()
        assert trainer.evaluate() == expected


def test_a_trainer_that_is_closed_twice_leaves_the_folder_to_the_next(tmp_path: Path):
    with make(DATA, tmp_path) as trainer:
        trainer.train_step()
        trainer.close()
        with make(DATA, tmp_path) as other:
            other.train_step()
            begun = tmp_path / "checkpoints" / ".tmp-3"
            begun.mkdir(parents=True)
            trainer.close()
            assert begun.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            only(other=np.zeros(3)),
            r"held-out batch has leaves \['other', 'tokens'\], .* \['tokens'\]",
        ),
        (
            lambda batch: {name: np.concatenate([leaf] * 2) for name, leaf in batch.items()},
            r"held-out batch leaf '\w+' has shape",
        ),
    ],
    ids=["another leaf", "twice as many"],
)
def test_held_out_batches_are_too(change: Any, message: str):
    with make(Changed(change)) as trainer, pytest.raises(InputError, match=message):
        trainer.evaluate()
