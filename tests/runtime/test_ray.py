"""The Ray runtime computes, saves and restores what the local one does."""

import os
import shutil
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import ray
from execution import gathered_state
from ray_jobs import (
    BATCH,
    Tokens,
    TokensOfFile,
    loss,
    make_cluster,
    make_plan,
    make_plan_of_two_pipelines,
    make_trainer,
)

from hetjax import InputError, RayOptions, Trainer, WorkerLostError
from hetjax.mesh import KINDS
from hetjax.runtime.local.local_executor import LocalExecutor
from hetjax.runtime.ray.ray_errors import telling
from hetjax.runtime.ray.ray_executor import RayExecutor
from hetjax.runtime.ray.ray_worker import computation_settings
from hetjax.runtime.workers.job import transfers

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def assert_equal(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def optimizer_state(trainer: Trainer) -> list[np.ndarray]:
    executor = trainer._executor
    assert isinstance(executor, LocalExecutor)
    return gathered_state(executor)


def processes(trainer: Trainer) -> list[int]:
    executor = trainer._executor
    assert isinstance(executor, RayExecutor)
    return list(executor.processes.values())


def wait_until_gone(process: int) -> None:
    end = time.monotonic() + 30
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < end, f"process {process} is left behind"
        time.sleep(0.05)


def test_a_run_goes_from_local_to_ray_and_back(tmp_path: Path):
    with make_trainer("local", workdir=tmp_path / "local") as trainer:
        for _ in range(3):
            trainer.train_step()
        trainer.save(wait=True)
        saved = trainer.parameters(), optimizer_state(trainer)
        losses = [trainer.train_step().loss for _ in range(10)]
        held_out = trainer.evaluate()
        final = trainer.parameters()
    shutil.copytree(tmp_path / "local", tmp_path / "ray")

    trainer = make_trainer("ray", workdir=tmp_path / "ray")
    assert trainer.resume()
    assert trainer.steps_done == 3
    assert_equal(trainer.parameters(), saved[0])
    trainer.save()
    found = [trainer.train_step(timed=step == 9).loss for step in range(10)]
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    assert trainer.evaluate() == pytest.approx(held_out, rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), trainer.parameters(), final
    )
    tracks = trainer.timeline().tracks
    assert tracks == ("stage 0", "link 0->1", "link 1->0", "stage 1")
    workers = processes(trainer)
    trainer.close()
    trainer.close()
    for process in workers:
        wait_until_gone(process)
    assert ray.is_initialized()
    with pytest.raises(InputError, match="the trainer is closed"):
        trainer.train_step()

    with make_trainer("local", workdir=tmp_path / "ray") as trainer:
        assert trainer.resume()
        assert trainer.steps_done == 3
        assert_equal(trainer.parameters(), saved[0])
        assert_equal(optimizer_state(trainer), saved[1])


def test_a_submesh_of_two_hosts_is_one_world(tmp_path: Path):
    batches = [Tokens().batch(step, BATCH) for step in range(10)]
    plan, settings = make_plan(hosts=2), computation_settings()

    def closure(parameters: Any, batch: Any) -> Any:
        assert computation_settings() == settings
        return loss(parameters, batch)

    changes = {"source": None, "loss_function": closure}
    with make_trainer("local", plan, **changes) as trainer:
        losses = [trainer.train_step(batch).loss for batch in batches]
        final = trainer.parameters()
    with make_trainer("ray", plan, workdir=tmp_path, **changes) as trainer:
        assert len(set(processes(trainer))) == 3
        found = [trainer.train_step(batch).loss for batch in batches[:5]]
        with pytest.raises(InputError, match="'tokens' has shape"):
            trainer.train_step({"tokens": batches[0]["tokens"][1:]})
        found += [trainer.train_step(batch).loss for batch in batches[5:]]
        trainer.save(wait=True)
        saved = trainer.parameters()
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), saved, final)
    with make_trainer("local", workdir=tmp_path) as trainer:
        assert trainer.resume()
        assert_equal(trainer.parameters(), saved)


def test_pipelines_of_unlike_depth_and_width(tmp_path: Path):
    plan = make_plan_of_two_pipelines()
    with make_trainer("local") as trainer:
        expected = [trainer.train_step().loss for _ in range(6)]
        held_out = trainer.evaluate()
    with make_trainer("local", plan) as trainer:
        losses = [trainer.train_step().loss for _ in range(6)]
        final = trainer.parameters()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    source = TokensOfFile(tmp_path / "held_out")
    with make_trainer("ray", plan, workdir=tmp_path / "run", source=source) as trainer:
        assert len(set(processes(trainer))) == 3
        found = [trainer.train_step(timed=step == 5).loss for step in range(6)]
        with pytest.raises(FileNotFoundError, match="held_out"):
            trainer.evaluate()
        source.path.touch()
        assert trainer.evaluate() == pytest.approx(held_out, rel=1e-5)
        assert trainer.timeline().stage_tracks == ("stage 0", "stage 1", "stage 2")
        trainer.save(wait=True)
        saved = trainer.parameters()
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), saved, final)
    with make_trainer("local", workdir=tmp_path / "run") as trainer:
        assert trainer.resume()
        assert_equal(trainer.parameters(), saved)


def test_a_switch_moves_the_state_to_other_workers(tmp_path: Path):
    """From a stage on two hosts to two pipelines that divide the optimizer's state, and back.

    On one process the losses are the same.
    """
    first = make_plan(hosts=2)
    second = replace(make_plan_of_two_pipelines(), shard_optimizer_state=True)
    assert first.cluster == second.cluster
    with make_trainer("local", first) as trainer:
        losses = [trainer.train_step().loss for _ in range(6)]
        final = trainer.parameters()
    with make_trainer("ray", first, workdir=tmp_path) as trainer:
        found = [trainer.train_step().loss for _ in range(2)]
        before, old = trainer.parameters(), set(processes(trainer))
        curves = trainer.carrier_curves
        moved = trainer.switch(second)
        assert moved.bytes_sent()
        assert old.isdisjoint(processes(trainer))
        assert_equal(trainer.parameters(), before)
        found += [trainer.train_step().loss for _ in range(2)]
        before = trainer.parameters()
        with pytest.raises(InputError, match="the plan is for cluster"):
            trainer.switch(make_plan())
        trainer.switch(first)
        known = [trainer.carrier_curves.of(*link.between) for link in curves.links]
        assert known == [link.carriers for link in curves.links], "nothing is measured again"
        assert_equal(trainer.parameters(), before)
        found += [trainer.train_step().loss for _ in range(2)]
        saved = trainer.parameters()
        trainer.save(wait=True)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), saved, final)
    with make_trainer("local", workdir=tmp_path) as trainer:
        assert trainer.resume()
        assert_equal(trainer.parameters(), saved)


def payloads(trainer: Trainer) -> dict[tuple[int, int], int]:
    """For each direction between stages the bytes of all arrays that a training step moves."""
    placement, sizes = trainer._placement, Counter[tuple[int, int]]()
    for tag in transfers(placement):
        shapes = placement.ends(tag)[1].shapes
        sizes[tag.route.source, tag.route.target] += sum(
            shape.size * shape.dtype.itemsize for shape in shapes
        )
    return dict(sizes)


def live_arrays(trainer: Trainer) -> dict[Any, tuple[int, int]]:
    """How many arrays every worker holds, and their bytes."""
    executor = trainer._executor
    assert isinstance(executor, RayExecutor)

    def count(_: Any) -> tuple[int, int]:
        arrays = jax.live_arrays()
        return len(arrays), sum(array.nbytes for array in arrays)

    return executor._workers.call(lambda actor: actor.__ray_call__.remote(count))


def test_what_two_hosts_want_crosses_once():
    """The hosts of the first stage divide no activation, and gather those that come back."""
    plan = make_plan(hosts=2, mesh_shape=(1, 4))
    with make_trainer("local", plan) as trainer:
        losses = [trainer.train_step().loss for _ in range(6)]
    with make_trainer("ray", plan) as trainer:
        found = [trainer.train_step().loss for _ in range(3)]
        held = live_arrays(trainer)
        found += [trainer.train_step(timed=step == 1).loss for step in range(3)]
        assert live_arrays(trainer) == held, "workers keep arrays of steps that are over"
        uses = {(use.source, use.target): use for use in trainer.link_uses()}
        assert {link: use.num_bytes for link, use in uses.items()} == payloads(trainer)
    np.testing.assert_allclose(found, losses, rtol=1e-6)


def test_an_error_in_a_worker_comes_as_itself():
    driver = os.getpid()

    def faulty(parameters: Any, batch: Any) -> Any:
        if os.getpid() != driver:
            raise ZeroDivisionError("only in a worker")
        return loss(parameters, batch)

    with pytest.raises(ZeroDivisionError, match="only in a worker") as caught:
        make_trainer("ray", loss_function=faulty)
    assert type(caught.value) is ZeroDivisionError
    assert str(caught.value) == "only in a worker"
    assert "in faulty" in caught.value.__notes__[-1]


class LockedError(Exception):
    """Which cannot be pickled."""

    def __init__(self, text: str):
        super().__init__(text)
        self.lock = threading.Lock()


class KeyedError(Exception):
    """Which cannot be made again of its arguments."""

    def __init__(self, text: str, *, key: int):
        super().__init__(f"{text} {key}")


class Told:
    """A worker that raises what it is told to raise."""

    name = "stage 0"

    @telling
    def do(self, error: BaseException) -> None:
        raise error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (LockedError("no key"), "LockedError: no key"),
        (KeyedError("odd", key=2), "KeyedError: odd 2"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_an_error_that_would_not_arrive_is_told(error: BaseException, text: str):
    with pytest.raises(RuntimeError, match=rf"^stage 0 has raised {text} \({__file__}:\d+\)$"):
        Told().do(error)
    for other in (InputError("a"), WorkerLostError("b", "c"), FileNotFoundError(2, "d", "e")):
        with pytest.raises(type(other)):
            Told().do(other)


def test_a_loss_that_exits_in_a_worker_is_told():
    driver = os.getpid()

    def exiting(parameters: Any, batch: Any) -> Any:
        if os.getpid() != driver:
            raise SystemExit(3)
        return loss(parameters, batch)

    with pytest.raises(RuntimeError, match=r"^stage \d, host 0 has raised SystemExit: 3") as caught:
        make_trainer("ray", loss_function=exiting)
    assert "in exiting" in caught.value.__notes__[-1]


def test_cores_are_checked():
    with pytest.raises(InputError, match="for each of the 2 stages"):
        make_trainer(RayOptions(cores=(0,)))
    with pytest.raises(InputError, match="has no core 9999") as caught:
        make_trainer(RayOptions(cores=(9999, 9999)))
    assert type(caught.value) is InputError


def test_what_cannot_be_pickled_is_named():
    lock = threading.Lock()

    def locked(parameters: Any, batch: Any) -> Any:
        with lock:
            return loss(parameters, batch)

    with pytest.raises(InputError, match=r"loss_function cannot be sent .*cannot pickle.*lock"):
        make_trainer("ray", loss_function=locked)


def test_what_cannot_be_made_again_of_its_pickle_is_named():
    class Broken:
        def __call__(self, parameters: Any, batch: Any) -> Any:
            return loss(parameters, batch)

        def __reduce__(self) -> Any:
            return int, ("nothing",)

    message = r"loss_function cannot be sent .*invalid literal .*'nothing'; functions .* by"
    with pytest.raises(InputError, match=message):
        make_trainer("ray", loss_function=Broken())


def test_devices_that_the_ray_cluster_lacks_are_named():
    plan = make_plan(cluster=make_cluster(1, KINDS["T4"]))
    with pytest.raises(InputError, match=r"'first'.* wants 2 .*'GPU', .* has 0"):
        make_trainer("ray", plan)
