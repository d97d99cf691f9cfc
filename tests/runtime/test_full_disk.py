"""A save that fails is no failure of a worker: it is told, training goes on, the next one works."""

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from full_disk import fill, small_disk
from ray_jobs import make_plan, make_trainer

from hetjax import SaveError, Trainer
from hetjax.configuration import TrainSettings
from hetjax.loop import train
from hetjax.runtime.checkpoints.orbax_words import quieten


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """This process's files cannot grow beyond a size; it is what a quota looks like."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def assert_equal(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def checkpoints(workdir: Path) -> list[str]:
    """The committed ones, and what is left of others when no trainer has the folder any more."""
    return sorted(entry.name for entry in (workdir / "checkpoints").iterdir())


def committed(workdir: Path) -> list[str]:
    return [name for name in checkpoints(workdir) if name.isdigit()]


def test_a_failed_save_is_told_and_the_next_one_is_whole(tmp_path: Path):
    with make_trainer("local", workdir=tmp_path) as trainer:
        trainer.train_step()
        with small_files(500):
            trainer.save()
            with pytest.raises(SaveError, match=r"checkpoint 1 was not saved: stage \d: File too"):
                trainer.finish_saving()
        assert isinstance(trainer.failed_save, SaveError)
        assert not committed(tmp_path)
        trainer.finish_saving()  # each failure is raised once
        trainer.train_step()
        trainer.save(wait=True)
        assert trainer.failed_save is None
        assert committed(tmp_path) == ["00000002"]
        expected = trainer.parameters()
    with make_trainer("local", workdir=tmp_path) as trainer:
        assert trainer.resume()[-1].startswith("resumed from step 2")
        assert_equal(trainer.parameters(), expected)


def test_a_trainer_that_could_not_save_last_says_so_when_it_is_closed(tmp_path: Path):
    trainer = make_trainer("local", workdir=tmp_path)
    trainer.train_step()
    with small_files(500):
        trainer.save()
        with pytest.raises(SaveError, match="checkpoint 1 was not saved"):
            trainer.close()
    trainer.close()
    make_trainer("local", workdir=tmp_path).close()  # the folder is free again


def test_an_error_is_not_hidden_by_a_failed_save(tmp_path: Path):
    def interrupted() -> None:
        with make_trainer("local", workdir=tmp_path) as trainer:
            trainer.train_step()
            trainer.save()
            raise KeyboardInterrupt

    with small_files(500), pytest.raises(KeyboardInterrupt) as caught:
        interrupted()
    assert "checkpoint 1 was not saved" in caught.value.__notes__[0]


def test_a_loop_trains_on_and_raises_where_the_last_save_failed(tmp_path: Path):
    settings = TrainSettings(steps=4, checkpoint_every=2)
    with make_trainer("local", workdir=tmp_path) as trainer:
        steps = []
        with small_files(500), pytest.raises(SaveError, match="checkpoint 4 was not saved"):
            steps += train(trainer, settings, checkpoints=True)
        assert trainer.steps_done == 4
        trainer.save(wait=True)
    assert checkpoints(tmp_path) == ["00000004"]


@pytest.mark.parametrize(("folder", "is_told"), [("orbax/checkpoint", False), ("mine", True)])
def test_a_write_of_orbax_that_nobody_waits_for_is_not_logged(
    folder: str, is_told: bool, caplog: pytest.LogCaptureFixture
):
    quieten()
    code = compile("raise OSError(28, 'No space left on device')", f"/{folder}/path.py", "exec")
    try:
        exec(code)
    except OSError as error:
        logging.getLogger("asyncio").error("Future exception was never retrieved", exc_info=error)
    assert bool(caplog.records) == is_told


def on_a_full_disk(trainer: Trainer, disk: Path) -> None:
    """Save once where there is no room, and once where there is."""
    trainer.train_step()
    trainer.save(wait=True)
    ballast = fill(disk)
    trainer.train_step()
    with pytest.raises(SaveError, match="No space left on device"):
        trainer.save(wait=True)
    trainer.train_step()
    ballast.unlink()
    trainer.save(wait=True)
    assert committed(disk / "run") == ["00000001", "00000003"]


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_no_worker_is_lost_to_a_full_disk(runtime: str, tmp_path: Path, request: Any):
    if runtime == "ray":
        request.getfixturevalue("ray_cluster")
    plan = make_plan()
    with small_disk(tmp_path / "disk") as disk:
        with make_trainer(runtime, plan, workdir=disk / "run") as trainer:
            on_a_full_disk(trainer, disk)
            expected = trainer.train_step().loss
            parameters = trainer.parameters()
        with make_trainer("local", plan, workdir=disk / "run") as trainer:
            assert trainer.resume()[-1].startswith("resumed from step 3")
            assert trainer.examples_done == 3 * plan.batch_size
            assert trainer.train_step().loss == expected
            assert_equal(trainer.parameters(), parameters)
