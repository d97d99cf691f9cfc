"""A step that is not finite is applied nowhere, on both runtimes, and says what was not finite."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from execution import gathered_state
from ray_jobs import BATCH, Tokens, make_plan, make_trainer

from hetjax import NonfiniteError, Trainer
from hetjax.configuration import TrainSettings
from hetjax.errors import SaveError
from hetjax.loop import train
from hetjax.runtime import CheckpointFolder, CheckpointOptions, StepMetrics
from hetjax.runtime.checkpoints.nonfinite import were_finite
from hetjax.runtime.local.local_executor import LocalExecutor


def batch_of(step: int, weight: float = 1.0, *, example: int = 5) -> Any:
    """A batch one of whose examples, of the second of three microbatches, has another weight."""
    weights = np.ones(BATCH, np.float32)
    weights[example] = weight
    return {**Tokens().batch(step, BATCH), "weight": weights}


def make(runtime: str = "local", **changes: Any) -> Trainer:
    plan = make_plan(weighted=True)
    return make_trainer(runtime, plan, batch=batch_of(0), source=None, **changes)


def state(trainer: Trainer) -> list[np.ndarray]:
    assert isinstance(trainer._executor, LocalExecutor)
    return gathered_state(trainer._executor)


def check_one_bad_batch(runtime: str) -> StepMetrics:
    """Losses after a bad batch are, to the bit, those of a run without that step."""
    with make(runtime) as trainer:
        expected = [trainer.train_step(batch_of(step)).loss for step in range(5)]
        parameters = trainer.parameters()
    with make(runtime) as trainer:
        losses = [trainer.train_step(batch_of(step)).loss for step in range(2)]
        bad = trainer.train_step(batch_of(7, np.nan))
        losses += [trainer.train_step(batch_of(step)).loss for step in range(2, 5)]
        found = trainer.parameters()
    assert losses == expected
    for name, array in parameters["blocks"].items():
        np.testing.assert_array_equal(found["blocks"][name], array)
    np.testing.assert_array_equal(found["embedding"], parameters["embedding"])
    return bad


def test_one_bad_batch_changes_nothing():
    bad = check_one_bad_batch("local")
    assert np.isnan(bad.loss)
    assert bad.step == 3
    assert bad.nonfinite is not None
    assert bad.nonfinite.num_leaves == 3
    assert 1 in bad.nonfinite.stages
    assert "loss nan, gradient norm nan: the gradient of " in str(bad.nonfinite)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_one_bad_batch_changes_nothing_on_ray():
    bad = check_one_bad_batch("ray")
    assert bad.nonfinite is not None
    assert bad.nonfinite.num_leaves == 3


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf])
def test_parameters_and_state_keep_every_bit(weight: float):
    with make() as trainer:
        assert trainer.train_step(batch_of(0)).nonfinite is None
        before = [array.tobytes() for array in state(trainer)]
        assert trainer.train_step(batch_of(1, weight, example=11)).nonfinite is not None
        assert [array.tobytes() for array in state(trainer)] == before


def test_a_finite_loss_with_a_gradient_that_is_not_is_not_applied():
    """What is too large to square, but not too large."""
    with make() as trainer:
        trainer.train_step(batch_of(0))
        before = [array.tobytes() for array in state(trainer)]
        metrics = trainer.train_step(batch_of(1, 1e30))
        assert np.isfinite(metrics.loss)
        assert metrics.gradient_norm == np.inf
        assert metrics.nonfinite is not None
        assert metrics.nonfinite.leaf == "embedding"
        assert metrics.nonfinite.stages == (0, 1)
        assert [array.tobytes() for array in state(trainer)] == before


class _Source(Tokens):
    """From some step on, batches are bad."""

    def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Any:
        whole = batch_of(step, np.nan if step >= 4 else 1.0)
        return {name: leaf[rows or slice(None)] for name, leaf in whole.items()}


def test_a_run_that_stays_bad_ends_and_keeps_its_last_checkpoints(tmp_path: Path):
    settings = TrainSettings(steps=30, checkpoint_every=2, max_nonfinite=5)
    plan, seen = make_plan(weighted=True), []
    arguments = {"batch": batch_of(0), "source": _Source(), "workdir": tmp_path}
    arguments["checkpoints"] = CheckpointOptions(keep_last=2)
    with make_trainer("local", plan, **arguments) as trainer:
        steps = train(trainer, settings, checkpoints=True)
        with pytest.raises(NonfiniteError, match=r"5 steps in a row up to step 9 .*loss nan"):
            seen.extend(done.metrics for done in steps)
    assert [metrics.nonfinite is None for metrics in seen] == [True] * 4 + [False] * 5
    with make_trainer("local", plan, **arguments) as trainer:
        trainer.resume()
        assert trainer.steps_done == 4


def test_a_state_that_is_not_finite_is_never_a_checkpoint(tmp_path: Path):
    """Loss and gradient are finite, and yet the step makes parameters infinite."""

    def to_infinity(updates: Any, parameters: Any = None) -> Any:
        return jax.tree.map(lambda update: jnp.inf + 0 * update, updates)

    with make(optimizer=optax.stateless(to_infinity), workdir=tmp_path) as trainer:
        trainer.save(wait=True)
        assert trainer.train_step(batch_of(0)).nonfinite is None
        with pytest.raises(SaveError, match=r"parameters leaf '.*' is not finite"):
            trainer.save(wait=True)
    assert CheckpointFolder(tmp_path / "checkpoints").steps() == (0,)


def test_what_was_not_finite_from_the_start_is_the_models_own():
    parameters = {"mask": np.array([0.0, -np.inf]), "weight": np.ones(2)}
    assert [were_finite(parameters, leaf) for leaf in range(2)] == [False, True]
    assert [were_finite(lambda: parameters, leaf) for leaf in range(2)] == [False, True]
