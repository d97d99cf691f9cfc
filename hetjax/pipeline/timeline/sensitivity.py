"""What a schedule costs where its times were misjudged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from random import Random

from hetjax.errors import InputError
from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.pipeline.timeline.quick_clock import makespan
from hetjax.pipeline.timeline.times import StepTimes


@dataclass(frozen=True)
class Sensitivity:
    """Makespans of one order under times that are off.

    Args:
        expected: seconds with the times as they were told.
        mean: seconds, the mean of the samples.
        worst: seconds, the longest of the samples.
    """

    expected: float
    mean: float
    worst: float


def sensitivity(
    schedule: Schedule,
    times: StepTimes,
    error: float = 0.1,
    *,
    samples: int = 20,
    seed: int = 0,
) -> Sensitivity:
    """The makespan when costs are misjudged and the order stays as it is.

    In every sample each time of `times` is wrong by its own factor, drawn evenly from
    ``1 - error`` to ``1 + error``; all microbatches have the same.

    Args:
        schedule: the order.
        times: the times as they were told.
        error: the largest relative error, from 0 to below 1.
        samples: how many times are drawn, at least 1.
        seed: of the draws; the same arguments give the same result.

    Returns:
        The makespans.

    Raises:
        InputError: `error` or `samples` is out of range, or the schedule and the times do not fit.

    Example:
        >>> from hetjax.pipeline.schedules.warm_up import one_f_one_b
        >>> off = sensitivity(one_f_one_b(2, 8), StepTimes([1.0] * 2, [2.0] * 2, [0.5], [0.5]))
        >>> off.expected < off.worst <= 1.1 * off.expected
        True
    """
    if not 0 <= error < 1:
        raise InputError(f"error is {error}; it must be from 0 to below 1")
    if samples < 1:
        raise InputError(f"samples is {samples}; it must be 1 or more")
    rng = Random(seed)
    makespans = [makespan(schedule, _misjudged(times, error, rng)) for _ in range(samples)]
    return Sensitivity(
        expected=makespan(schedule, times),
        mean=sum(makespans) / samples,
        worst=max(makespans),
    )


def _misjudged(times: StepTimes, error: float, rng: Random) -> StepTimes:
    def wrong(values: Sequence[float]) -> list[float]:
        return [value * rng.uniform(1 - error, 1 + error) for value in values]

    return StepTimes(**{field.name: wrong(getattr(times, field.name)) for field in fields(times)})
