"""Schedules that split backward passes and fill waits with weight gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hetjax.errors import InputError
from hetjax.pipeline.schedule_search.list_scheduler import Rules, list_schedule
from hetjax.pipeline.schedules.schedule import Schedule, Task
from hetjax.pipeline.schedules.warm_up import h_1f1b_counts, require_positive
from hetjax.pipeline.timeline.times import StepTimes


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H1: 1F1B whose last stages leave W for the end; no stage holds more than 1F1B's first.

    F and B are in 1F1B's order. On stage i, from 0, the W of a microbatch follows the B of the
    i-th microbatch after it while there are F to come, so that every stage holds S microbatches at
    most; then B and W in turn, and the W that are left.

    Args:
        num_stages: S, at least 1.
        num_microbatches: M, at least 1.

    Returns:
        The schedule.

    Raises:
        InputError: a count is below 1.

    Source: Qi et al., Zero bubble pipeline parallelism (arXiv:2401.10241), section 2.

    Example:
        >>> zb_h1(2, 4).to_json()["order"][1]
        ['F0', 'B0', 'F1', 'B1', 'W0', 'F2', 'B2', 'W1', 'F3', 'B3', 'W2', 'W3']
        >>> [zb_h1(4, 16).live_bound(stage) for stage in range(4)]
        [4, 4, 4, 4]
    """
    require_positive(num_stages, num_microbatches)
    counts = range(num_stages, 0, -1)
    return _with_late_weights("zb_h1", counts, range(num_stages), num_microbatches)


def zb_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H2: as many more warm-up forward tasks as fill the wait for the first gradient.

    F and B are in the order of warm-up counts 2 (S - i) - 1; on stage i, from 0, the W of a
    microbatch follows the B of the 2i-th microbatch after it while there are F to come. Every
    stage holds 2 S - 1 microbatches at most.

    Args:
        num_stages: S, at least 1.
        num_microbatches: M, at least 1.

    Returns:
        The schedule.

    Raises:
        InputError: a count is below 1.

    Source: Qi et al., Zero bubble pipeline parallelism (arXiv:2401.10241), section 2.

    Example:
        >>> [zb_h2(4, 16).live_bound(stage) for stage in range(4)]
        [7, 7, 7, 7]
    """
    require_positive(num_stages, num_microbatches)
    counts = range(2 * num_stages - 1, 0, -2)
    return _with_late_weights("zb_h2", counts, range(0, 2 * num_stages, 2), num_microbatches)


def h_1f1b_split(num_microbatches: int, times: StepTimes, tolerance: float = 0.1) -> Schedule:
    """H-1F1B's order and memory, with B and W split: W where it fills waits.

    F and B are in H-1F1B's order. A stage runs its next W where the F or B that comes next is not
    there yet, or where that F would make more microbatches live than H-1F1B's warm-up count; on
    stages that recompute, the next R before it. What is there when depends on the times, so W and
    R are placed by a run in the discrete-event model.

    Args:
        num_microbatches: M, at least 1.
        times: what the tasks take; it must tell the times of halves.
        tolerance: Harp's epsilon, see `h_1f1b_counts`.

    Returns:
        The schedule.

    Raises:
        InputError: `num_microbatches` is below 1, or the times of halves are not known.

    Example:
        >>> times = StepTimes([1.0] * 2, [2.0] * 2, [1.0], [1.0], (), [1.0] * 2, [1.0] * 2)
        >>> h_1f1b_split(5, times).to_json()["order"][0]  # doctest: +NORMALIZE_WHITESPACE
        ['F0', 'F1', 'F2', 'B0', 'W0', 'F3', 'B1', 'W1', 'F4', 'B2', 'W2', 'B3', 'W3', 'B4', 'W4']
    """
    require_positive(times.num_stages, num_microbatches)
    if not times.can_split:
        raise InputError("input_gradient and weight_gradient are empty; h_1f1b_split needs them")
    counts = h_1f1b_counts(times.compute, times.communication, tolerance)
    rules = [Rules(limit=count, wanted=count, in_turn=True) for count in counts]
    return list_schedule(rules, times, num_microbatches).schedule("h_1f1b_split")


def _with_late_weights(
    name: str, counts: Sequence[int], delays: Sequence[int], num_microbatches: int
) -> Schedule:
    """Warm-up counts' order, and each W as many B later while there are F to come."""
    pairs = zip(counts, delays, strict=True)
    return Schedule(name, tuple(_stage_order(n, late, num_microbatches) for n, late in pairs))


def _stage_order(count: int, delay: int, num_microbatches: int) -> tuple[Task, ...]:
    forwards = iter([Task("F", m) for m in range(num_microbatches)])
    weights = iter([Task("W", m) for m in range(num_microbatches)])
    tasks = list(itertools.islice(forwards, count))
    for backward in range(num_microbatches):
        tasks.append(Task("B", backward))
        forward = next(forwards, None)
        if forward is None or backward >= delay:
            tasks.append(next(weights))
        if forward is not None:
            tasks.append(forward)
    return (*tasks, *weights)
