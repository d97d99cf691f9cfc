"""Schedules by their names."""

from __future__ import annotations

from hetjax.errors import InputError, unknown_name
from hetjax.pipeline.schedule import WARM_UP_SCHEDULES, Schedule
from hetjax.pipeline.times import StepTimes
from hetjax.pipeline.warm_up import eager_1f1b, gpipe, h_1f1b, one_f_one_b


def make_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    times: StepTimes | None = None,
    *,
    tolerance: float = 0.1,
) -> Schedule:
    """Builds a schedule by its name.

    Args:
        name: one of `SCHEDULES`.
        num_stages: S, at least 1.
        num_microbatches: M, at least 1.
        times: what the tasks take; GPipe, 1F1B and Eager-1F1B do not look at it.
        tolerance: Harp's epsilon; only H-1F1B looks at it.

    Returns:
        The schedule.

    Raises:
        InputError: the name is unknown, times are missing, or the schedule's own function refuses
            its arguments.

    Example:
        >>> make_schedule("1f1b", num_stages=4, num_microbatches=8).warm_up_counts
        (4, 3, 2, 1)
    """
    match name:
        case "gpipe":
            return gpipe(num_stages, num_microbatches)
        case "1f1b":
            return one_f_one_b(num_stages, num_microbatches)
        case "eager_1f1b":
            return eager_1f1b(num_stages, num_microbatches)
    if name not in WARM_UP_SCHEDULES:
        raise InputError(unknown_name("schedule", name, WARM_UP_SCHEDULES))
    if times is None:
        raise InputError(f"schedule {name!r} follows from the times of its tasks; times is None")
    return h_1f1b(num_stages, num_microbatches, times.compute, times.communication, tolerance)
