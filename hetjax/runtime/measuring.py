"""Training steps that measure what their tasks and transfers take."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol, TypeVar

from jaxtyping import PyTree

from hetjax.errors import InputError, check_count, shown
from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.pipeline.timeline.measured_times import measured_times, measuring_schedules
from hetjax.pipeline.timeline.timeline import Timeline
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.planner.plan.plan import Plan

Metrics = TypeVar("Metrics", covariant=True)


class Trains(Protocol[Metrics]):
    """What can be measured: `hetjax.Trainer`, as far as measuring asks it."""

    @property
    def plan(self) -> Plan:
        """What it trains by."""
        ...

    def use_schedule(self, schedule: Schedule) -> None:
        """Train by another schedule."""
        ...

    def use_plan(self, plan: Plan) -> None:
        """Train by another plan of the same stages."""
        ...

    def train_step(self, batch: PyTree | None = None, *, timed: bool = False) -> Metrics:
        """Train a step."""
        ...

    def timeline(self) -> Timeline:
        """What was timed of the last step."""
        ...


def measuring(
    trainer: Trains[Metrics],
    batch: PyTree | None = None,
    *,
    rounds: int = 2,
    known: StepTimes | None = None,
) -> Generator[Metrics, None, StepTimes]:
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

    Raises:
        InputError: `rounds` is no whole number of 1 or more, or `known` are no times.
    """
    check_count("rounds", rounds)
    if known is not None and not isinstance(known, StepTimes):
        raise InputError(f"known is {shown(known)}; give what measure() has returned, or None")
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
