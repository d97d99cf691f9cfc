"""Schedules by their names."""

from __future__ import annotations

from collections.abc import Sequence

from hetjax.errors import InputError, unknown_name
from hetjax.pipeline.schedule_search.schedule_search import search_schedule
from hetjax.pipeline.schedule_search.zero_bubble import h_1f1b_split, zb_h1, zb_h2
from hetjax.pipeline.schedules.schedule import SCHEDULES, Schedule
from hetjax.pipeline.schedules.warm_up import eager_1f1b, gpipe, h_1f1b, one_f_one_b
from hetjax.pipeline.timeline.times import StepTimes


def make_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    times: StepTimes | None = None,
    *,
    tolerance: float = 0.1,
    live_limits: Sequence[int] | None = None,
) -> Schedule:
    """Builds a schedule by its name.

    Args:
        name: one of `SCHEDULES`.
        num_stages: S, at least 1.
        num_microbatches: M, at least 1.
        times: what the tasks take; ``"h_1f1b"``, ``"h_1f1b_split"`` and ``"search"`` need it.
        tolerance: Harp's epsilon of H-1F1B.
        live_limits: how many microbatches may be live on every stage in ``"search"``; as many as
            in H-1F1B where it is None.

    Returns:
        The schedule.

    Raises:
        InputError: the name is unknown, times are missing or of another number of stages, or the
            schedule's own function refuses its arguments.

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
        case "zb_h1":
            return zb_h1(num_stages, num_microbatches)
        case "zb_h2":
            return zb_h2(num_stages, num_microbatches)
    if name not in SCHEDULES:
        raise InputError(unknown_name("schedule", name, SCHEDULES))
    if times is None:
        raise InputError(f"schedule {name!r} follows from the times of its tasks; times is None")
    if times.num_stages != num_stages:
        raise InputError(f"times are of {times.num_stages} stages; num_stages is {num_stages}")
    if name == "h_1f1b_split":
        return h_1f1b_split(num_microbatches, times, tolerance)
    compute, communication = times.compute, times.communication
    harp = h_1f1b(num_stages, num_microbatches, compute, communication, tolerance)
    if name == "h_1f1b":
        return harp
    limits = [harp.live_bound(s) for s in range(num_stages)] if live_limits is None else live_limits
    return search_schedule(times, num_microbatches, limits)
