"""What a training step tells its caller, of what the stages saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import jax
from jaxtyping import PyTree

from hetjax.pipeline.build import PipelinePrograms
from hetjax.runtime.checkpoints.nonfinite import Nonfinite, nonfinite
from hetjax.runtime.workers.step_report import StepReport, summed


@dataclass(frozen=True)
class StepMetrics:
    """What one training step gave.

    Args:
        step: the number of steps done, this one included.
        loss: the mean loss of the step's batch, before its update.
        gradient_norm: the global norm of the mean gradient, before clipping.
        seconds: the step's duration.
        nonfinite: what was not finite; None where all was. A step with a loss or gradient norm that
            is not finite is applied on no stage: parameters and optimizer state stay as they were.
        aux: with `has_aux`, the pytree of scalars that the loss function returned beside the loss:
            their means over the microbatches of the step, weighted as the loss is, as floats.
    """

    step: int
    loss: float
    gradient_norm: float
    seconds: float
    nonfinite: Nonfinite | None = None
    aux: PyTree[float] = None


def step_metrics(
    step: int, reports: Sequence[StepReport], pipelines: PipelinePrograms, seconds: float
) -> StepMetrics:
    """Put together what the stages saw of a step.

    Args:
        step: the number of steps done.
        reports: of all stages.
        pipelines: what they ran.
        seconds: the step's duration.

    Returns:
        The step's metrics.
    """
    last = reports[pipelines.loss_stages[0]]
    assert last.loss is not None
    assert last.gradient_norm is not None
    why = nonfinite(last, pipelines)
    aux = aux_means(pipelines, summed([reports[stage].aux for stage in pipelines.loss_stages]))
    return StepMetrics(step, last.loss, last.gradient_norm, seconds, why, aux)


def aux_means(pipelines: PipelinePrograms, sums: Sequence[float]) -> PyTree[float]:
    """The means of what the loss gives beside itself.

    Args:
        pipelines: the programs, which know their names.
        sums: the count, and the figures' sums.

    Returns:
        The means, as the loss function returns the figures; None where it returns none.
    """
    tree = pipelines.program.aux_tree
    if tree is None:
        return None
    count, *figures = sums
    return jax.tree.unflatten(tree, [figure / count if count else nan for figure in figures])
