"""The figures of a training run that are written of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hetjax.configuration.make import Ingredients, learning_rates
from hetjax.loop import StepDone


class StepFigures:
    """What is written of each step, in order.

    A step that is not applied leaves the learning rate where it is, as it leaves all of the
    optimizer's state: such steps of the run before are known by their figures.

    Args:
        ingredients: what is trained.
        before: the figures of the steps before, where the run resumes.
    """

    def __init__(self, ingredients: Ingredients, before: Sequence[Mapping[str, Any]] = ()):
        configuration = ingredients.configuration
        rates = learning_rates(configuration.optimizer, configuration.train.steps)
        self._rate = rates if callable(rates) else lambda _: rates
        self._ingredients = ingredients
        self._skipped = sum(_was_skipped(each) for each in before)

    def of(self, done: StepDone) -> dict[str, float]:
        """The figures of the next step.

        Args:
            done: the step.
        """
        model, metrics = self._ingredients.model, done.metrics
        figures = {
            "loss": metrics.loss,
            "grad_norm": metrics.gradient_norm,
            "learning_rate": float(np.asarray(self._rate(metrics.step - 1 - self._skipped))),
            f"{model.unit}_per_second": self._ingredients.units_per_step / metrics.seconds,
            "step_time": metrics.seconds,
        }
        if done.evaluation_loss is not None:
            figures["evaluation_loss"] = done.evaluation_loss
        self._skipped += metrics.nonfinite is not None
        return figures


def _was_skipped(figures: Mapping[str, Any]) -> bool:
    """Whether the step of these figures was not applied: a loss that is not finite is null."""
    return figures.get("loss") is None or figures.get("grad_norm") is None
