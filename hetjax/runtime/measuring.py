"""Training steps that measure what their tasks and transfers take."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from jaxtyping import PyTree

from hetjax.pipeline.timeline.measured_times import measured_times, measuring_schedules
from hetjax.pipeline.timeline.times import StepTimes

if TYPE_CHECKING:
    from hetjax.runtime.trainer import StepMetrics, Trainer


def measuring(
    trainer: Trainer,
    batch: PyTree | None = None,
    *,
    rounds: int = 2,
    known: StepTimes | None = None,
) -> Generator[StepMetrics, None, StepTimes]:
    """Do what `Trainer.measure` does, a step each time it is asked for the next.

    Between two steps the trainer has its own plan.

    Args:
        trainer: what trains.
        batch: the batch of these steps; None to take each from the source.
        rounds: measured steps of each sort; one before them warms up.
        known: times of an earlier measurement, to measure by the trainer's own schedule.

    Yields:
        What each step gave.

    Returns:
        The times.
    """
    plan = trainer.plan
    own = plan.pipeline.schedule
    steps = []
    for schedule in measuring_schedules(own) if known is None else (own,):
        for place in range(rounds + 1):
            trainer.use_schedule(schedule)
            metrics = trainer.train_step(batch, timed=True)
            trainer.use_plan(plan)
            if place:
                steps.append((trainer.timeline(), schedule))
            yield metrics
    return measured_times(steps, known)
