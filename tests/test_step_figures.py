"""The figures of each step: the learning rate is that of the updates that were applied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import optax
import pytest

from hetjax.commands.step_figures import StepFigures
from hetjax.configuration import OptimizerSettings
from hetjax.configuration.make import Ingredients, learning_rates
from hetjax.loop import StepDone

STEPS = 8


def ingredients(settings: OptimizerSettings) -> Ingredients:
    configuration = SimpleNamespace(optimizer=settings, train=SimpleNamespace(steps=STEPS))
    model = SimpleNamespace(unit="tokens")
    return cast(
        Ingredients, SimpleNamespace(configuration=configuration, model=model, units_per_step=6)
    )


def done(step: int, *, is_applied: bool = True) -> StepDone:
    metrics: Any = SimpleNamespace(
        step=step,
        loss=1.0,
        gradient_norm=2.0 if is_applied else float("nan"),
        seconds=0.5,
        nonfinite=None if is_applied else "gradient",
    )
    return StepDone(metrics, evaluation_loss=3.0 if step == 2 else None)


def rates_used(settings: OptimizerSettings, applied: int) -> list[float]:
    """The rate of each update, as plain SGD shows it."""
    optimizer = optax.sgd(learning_rates(settings, STEPS))
    state, found = optimizer.init(np.zeros((), np.float32)), []
    for _ in range(applied):
        with jax.numpy_dtype_promotion("standard"):
            update, state = optimizer.update(np.ones((), np.float32), state)
        found.append(-float(np.asarray(update)))
    return found


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_the_learning_rate_is_that_of_the_update(schedule: Any):
    settings = OptimizerSettings(name="sgd", schedule=schedule, warmup_steps=2)
    figures = StepFigures(ingredients(settings))
    found = [figures.of(done(step))["learning_rate"] for step in range(1, STEPS + 1)]
    assert found == pytest.approx(rates_used(settings, STEPS))


def test_a_step_that_is_not_applied_leaves_it_also_for_a_run_that_resumes():
    settings = OptimizerSettings(name="sgd", schedule="cosine", warmup_steps=2)
    expected = rates_used(settings, 4)
    first = StepFigures(ingredients(settings))
    assert first.of(done(1, is_applied=False))["learning_rate"] == pytest.approx(expected[0])
    assert first.of(done(2))["learning_rate"] == pytest.approx(expected[0])
    assert first.of(done(3))["learning_rate"] == pytest.approx(expected[1])
    before = [
        {"step": 1, "loss": 1.0, "grad_norm": None},
        {"step": 2, "loss": 1.0, "grad_norm": 2.0},
        {"step": 3, "loss": 1.0, "grad_norm": 2.0},
    ]
    resumed = StepFigures(ingredients(settings), before)
    assert resumed.of(done(4))["learning_rate"] == pytest.approx(expected[2])


def test_all_figures_have_their_names():
    figures = StepFigures(ingredients(OptimizerSettings(name="sgd")))
    assert figures.of(done(1)) == {
        "loss": 1.0,
        "grad_norm": 2.0,
        "learning_rate": OptimizerSettings(name="sgd").learning_rate,
        "tokens_per_second": 12.0,
        "step_time": 0.5,
    }
    assert figures.of(done(2))["evaluation_loss"] == 3.0
