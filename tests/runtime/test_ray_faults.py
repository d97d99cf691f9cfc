"""A worker that dies or stops answering ends the run, is named, and leaves nothing behind.

That this takes 15 seconds at most follows from the watch's intervals: a silent worker is lost after
`SILENCE_SECONDS`, seen at most two `PING_SECONDS` later, and Ray gives a worker that it ends
`RAY_KILL_SECONDS`; a dead one is seen at once.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from ray_jobs import (
    BATCH,
    SHARES,
    Tokens,
    loss,
    make_plan,
    make_plan_of_two_pipelines,
    make_trainer,
    union_plan,
)

from hetjax import InputError, Trainer, WorkerLostError
from hetjax.runtime.moves.peers import Peer
from hetjax.runtime.ray.ray_executor import RayExecutor
from hetjax.runtime.ray.ray_workers import PING_SECONDS, SILENCE_SECONDS

pytestmark = pytest.mark.ray

RAY_KILL_SECONDS = 5.0


@pytest.fixture(autouse=True)
def nothing_is_left(ray_cluster: Callable[[], list[int]]) -> Iterator[None]:
    yield
    end = time.monotonic() + 30
    while ray_cluster():
        assert time.monotonic() < end, f"workers {ray_cluster()} are left behind"
        time.sleep(0.1)


def process_of(trainer: Trainer, peer: Peer) -> int:
    executor = trainer._executor
    assert isinstance(executor, RayExecutor)
    return executor.processes[peer]


def train_for_ever(trainer: Trainer) -> None:
    while True:
        trainer.train_step()


def test_silence_is_noticed_in_time():
    assert SILENCE_SECONDS + 2 * PING_SECONDS + RAY_KILL_SECONDS <= 15


@pytest.mark.parametrize(
    ("hosts", "peer", "what", "after"),
    [
        pytest.param(1, (0, 0), signal.SIGKILL, 0.3, id="killed in a step"),
        pytest.param(1, (1, 0), signal.SIGSTOP, 0.2, id="stopped in a step"),
        pytest.param(2, (0, 0), signal.SIGKILL, 0.5, id="first host of two killed"),
        pytest.param(2, (0, 1), signal.SIGKILL, 0.1, id="second host of two killed"),
    ],
)
def test_a_worker_that_is_lost_in_a_step_is_named(
    hosts: int, peer: Peer, what: signal.Signals, after: float
):
    with make_trainer("ray", make_plan(hosts)) as trainer:
        trainer.train_step()
        timer = threading.Timer(after, os.kill, (process_of(trainer, peer), what))
        timer.start()
        with pytest.raises(WorkerLostError) as caught:
            train_for_ever(trainer)
        assert caught.value.worker == f"stage {peer[0]}, host {peer[1]}"
        with pytest.raises(WorkerLostError) as again:
            trainer.evaluate()
        assert again.value is caught.value


def test_a_worker_that_dies_between_steps_is_named(tmp_path: Path):
    with make_trainer("ray", workdir=tmp_path) as trainer:
        trainer.train_step()
        os.kill(process_of(trainer, (1, 0)), signal.SIGKILL)
        with pytest.raises(WorkerLostError, match=r"stage 1, host 0 is lost: its process has died"):
            trainer.save(wait=True)
    assert not list((tmp_path / "checkpoints").glob("0*"))


def test_a_switch_of_lost_workers_names_the_first():
    with make_trainer("ray", make_plan(hosts=2)) as trainer:
        trainer.train_step()
        os.kill(process_of(trainer, (1, 0)), signal.SIGKILL)
        with pytest.raises(WorkerLostError, match=r"stage 1, host 0 is lost") as caught:
            trainer.switch(make_plan_of_two_pipelines())
        with pytest.raises(WorkerLostError) as again:
            trainer.switch(make_plan_of_two_pipelines())
        assert again.value is caught.value


def test_a_switch_that_is_interrupted_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    give = RayExecutor._give

    def interrupted_give(self: RayExecutor, *given: Any) -> Any:
        give(self, *given)
        raise KeyboardInterrupt

    def interrupted_set_up(*_: Any) -> None:
        raise KeyboardInterrupt

    with make_trainer("ray", make_plan(hosts=2), workdir=tmp_path) as trainer:
        trainer.train_step()
        trainer.save(wait=True)
        loss = trainer.train_step().loss
        monkeypatch.setattr(RayExecutor, "_give", interrupted_give)
        with pytest.raises(KeyboardInterrupt):
            trainer.switch(make_plan_of_two_pipelines())
        with pytest.raises(InputError, match=r"a switch was cut off, .* by resume\(\)"):
            trainer.train_step()
        trainer.resume()
        assert trainer.train_step().loss == loss
        monkeypatch.setattr(RayExecutor, "_give", give)
        monkeypatch.setattr(RayExecutor, "_set_up", interrupted_set_up)
        with pytest.raises(KeyboardInterrupt):
            trainer.switch(make_plan_of_two_pipelines())
        for use in (trainer.train_step, trainer.resume):
            with pytest.raises(RuntimeError, match="the switch was interrupted, and"):
                use()


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_lost_in_setup_is_named(what: signal.Signals):
    driver = os.getpid()

    def fatal(parameters: Any, batch: Any) -> Any:
        if os.getpid() != driver and jax.local_device_count() == 1:
            os.kill(os.getpid(), what)
        return loss(parameters, batch)

    with pytest.raises(WorkerLostError) as caught:
        make_trainer("ray", loss_function=fatal, source=None, batch=Tokens().batch(0, BATCH))
    assert caught.value.worker == "stage 1, host 0"


def test_a_member_that_is_killed_is_named_in_time():
    """Members wait for each other in the middle of tasks."""
    with make_trainer("ray", union_plan(SHARES["columns"])) as trainer:
        trainer.train_step()
        threading.Timer(0.3, os.kill, (process_of(trainer, (0, 1)), signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(WorkerLostError) as caught:
            train_for_ever(trainer)
        assert caught.value.worker == "stage 0, member 1"
        assert time.monotonic() - began < 15.0
