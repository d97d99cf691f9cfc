"""The trainer on the local runtime."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from execution import gathered_state
from ray_jobs import BATCH, MICROBATCHES, Tokens, loss, make_plan, make_trainer, parameters

from hetjax import CheckpointError, InputError, Trainer
from hetjax.planner.plan import Plan
from hetjax.runtime.local import LocalExecutor

PLAN = make_plan()


def make(**changes: Any) -> Trainer:
    return make_trainer("local", PLAN, **changes)


def state(trainer: Trainer) -> list[np.ndarray]:
    assert isinstance(trainer._executor, LocalExecutor)
    return gathered_state(trainer._executor)


def assert_equal(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


class NothingHeldOut(Tokens):
    def held_out_batches(self, batch_size: int) -> Iterator[Any]:
        return iter(())


def test_a_step_gives_its_number_loss_and_norm():
    with make() as trainer:
        metrics = [trainer.train_step() for _ in range(3)]
        assert trainer.steps_done == 3
        assert len(trainer.reports) == 2
    assert [m.step for m in metrics] == [1, 2, 3]
    assert all(m.gradient_norm > 0 and m.seconds > 0 for m in metrics)
    total, count = loss(parameters(), Tokens().batch(0, BATCH))
    assert metrics[0].loss == pytest.approx(float(total / count), rel=1e-5)


def test_given_batches_and_a_source_of_them_train_alike():
    with make() as trainer:
        expected = [trainer.train_step().loss for _ in range(3)]
    with make(source=None) as trainer:
        found = [trainer.train_step(Tokens().batch(step, BATCH)).loss for step in range(3)]
    assert found == expected


def test_parameters_are_those_given_until_a_step():
    with make(parameters=parameters()) as trainer:
        assert_equal(trainer.parameters(), parameters())
        trainer.train_step()
        assert not np.array_equal(trainer.parameters()["embedding"], parameters()["embedding"])


def test_evaluation_is_the_mean_over_held_out_batches_and_changes_nothing():
    with make() as trainer:
        trainer.train_step()
        before, held = trainer.parameters(), list(Tokens().held_out_batches(BATCH))
        expected = [float(loss(before, batch)[0] / loss(before, batch)[1]) for batch in held]
        assert trainer.evaluate() == pytest.approx(np.mean(expected), rel=1e-5)
        assert trainer.evaluate(max_batches=1) == pytest.approx(expected[0], rel=1e-5)
        assert_equal(trainer.parameters(), before)
        assert trainer.steps_done == 1


@pytest.mark.parametrize(
    ("source", "most"), [(None, None), (NothingHeldOut(), None), (Tokens(), 0)]
)
def test_evaluation_without_held_out_batches_is_refused(source: Any, most: int | None):
    with make(source=source) as trainer, pytest.raises(InputError, match="no held-out batches"):
        trainer.evaluate(max_batches=most)


def test_a_resumed_run_continues_bitwise(tmp_path: Path):
    with make(workdir=tmp_path) as trainer:
        trainer.train_step()
        trainer.train_step()
        trainer.save()
        expected = [trainer.train_step().loss for _ in range(3)]
        final = trainer.parameters(), state(trainer)
    with make(workdir=tmp_path) as trainer:
        messages = trainer.resume()
        assert messages is not None
        assert messages[-1].startswith("resumed from step 2 (")
        assert trainer.steps_done == 2
        assert [trainer.train_step().loss for _ in range(3)] == expected
        assert_equal(trainer.parameters(), final[0])
        assert_equal(state(trainer), final[1])


def test_there_is_nothing_to_resume_in_a_new_folder(tmp_path: Path):
    with make(workdir=tmp_path) as trainer:
        assert trainer.resume() is None
        assert trainer.train_step().step == 1


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path):
    import optax

    with make(workdir=tmp_path) as trainer:
        trainer.save(wait=True)
    with (
        make(workdir=tmp_path, optimizer=optax.sgd(0.1)) as trainer,
        pytest.raises(CheckpointError, match="optimizer leaf"),
    ):
        trainer.resume()


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ({}, [2, 3, 4]),
        ({"keep_last": 1}, [4]),
        ({"keep_last": 1, "keep_every": 2}, [2, 4]),
    ],
)
def test_old_checkpoints_are_removed(tmp_path: Path, keep: dict[str, int], kept: list[int]):
    with make(workdir=tmp_path, **keep) as trainer:
        for _ in range(4):
            trainer.train_step()
            trainer.save()
    found = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert found == kept


def test_a_timed_step_shows_every_stage_and_link():
    with make() as trainer:
        with pytest.raises(InputError, match="no step was timed"):
            trainer.timeline()
        trainer.train_step(timed=True)
        trainer.train_step()
        timeline = trainer.timeline()
    assert timeline.tracks == ("stage 0", "link 0->1", "link 1->0", "stage 1")
    for track in timeline.tracks:
        marks = [e.microbatch for e in timeline.events if e.track == track if e.kind != "update"]
        assert set(marks) == set(range(MICROBATCHES))
    assert min(event.start for event in timeline.events) == 0
    assert all(event.end >= event.start for event in timeline.events)


def test_an_unknown_runtime_is_refused():
    with pytest.raises(InputError, match=r"unknown runtime 'rai'; did you mean 'ray'\?"):
        make_trainer("rai", PLAN)


def test_a_step_wants_a_batch_of_the_planned_shape():
    with make(source=None) as trainer:
        with pytest.raises(InputError, match="was given no batch"):
            trainer.train_step()
        with pytest.raises(InputError, match="'tokens' has shape"):
            trainer.train_step(Tokens().batch(0, BATCH + 1))
        assert trainer.steps_done == 0
        assert trainer.train_step(Tokens().batch(0, BATCH)).step == 1


def test_a_plan_for_another_batch_or_model_is_refused():
    with pytest.raises(InputError, match=rf"computes {BATCH} examples a step"):
        make(batch=Tokens().batch(0, 2 * BATCH))
    other = Plan("another", PLAN.layers, PLAN.cluster, PLAN.pipelines)
    with pytest.raises(InputError, match="made for another model"):
        make_trainer("local", other)


def test_checkpoints_want_a_folder():
    with make() as trainer:
        with pytest.raises(InputError, match="no workdir to save"):
            trainer.save()
        with pytest.raises(InputError, match="no workdir to resume"):
            trainer.resume()


def test_an_error_closes_the_trainer_and_finishes_its_checkpoint(tmp_path: Path):
    trainer = make(workdir=tmp_path)
    with pytest.raises(KeyboardInterrupt), trainer:
        trainer.train_step()
        trainer.save()
        raise KeyboardInterrupt
    trainer.close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000001"]
    with pytest.raises(RuntimeError):
        trainer.train_step()
