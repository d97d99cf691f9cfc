"""Whole backward passes again where the split of a schedule gains nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetjax.pipeline.schedules.schedule import Schedule, Task
from hetjax.pipeline.timeline.quick_clock import Row, makespan_of_rows, row
from hetjax.pipeline.timeline.times import StepTimes

_SMALLEST_SHARE = 8
"""A stage's candidates are tried all together, then by halves, down to this part of them."""

_TIE = 1 + 1e-9


def merge_halves(schedule: Schedule, times: StepTimes) -> Schedule:
    """Takes a W that follows its B at once back into B, where the makespan does not grow.

    One program for the whole backward pass is a little cheaper than two, but it sends the gradient
    only when all of it is done.

    Args:
        schedule: a schedule that can be executed.
        times: what its tasks take.

    Returns:
        The schedule with some W left out; as many microbatches are live as before.

    Example:
        >>> order = (tuple(map(Task.parse, "F0 F1 B0 W0 B1 W1".split())),)
        >>> times = StepTimes([1.0], [2.0], [], [], (), [1.0], [1.0])
        >>> [str(task) for task in merge_halves(Schedule("explicit", order), times).order[0]]
        ['F0', 'F1', 'B0', 'B1']
    """
    orders = [list(tasks) for tasks in schedule.order]
    rows = [row(tasks, times, stage) for stage, tasks in enumerate(orders)]
    longest = makespan_of_rows(rows, times) * _TIE
    for stage in range(len(orders)):
        pairs = zip(orders[stage], orders[stage][1:], strict=False)
        followed = [w for b, w in pairs if w.kind == "W" and b == Task("B", w.microbatch)]
        _merge(
            orders, rows, stage, followed, max(1, len(followed) // _SMALLEST_SHARE), times, longest
        )
    return replace(schedule, order=tuple(map(tuple, orders)))


def _merge(
    orders: list[list[Task]],
    rows: list[Row],
    stage: int,
    candidates: Sequence[Task],
    fewest: int,
    times: StepTimes,
    longest: float,
) -> None:
    """Leaves out the candidates of a stage, or of each half of them, where that costs nothing."""
    left_out = frozenset(candidates)
    order = [task for task in orders[stage] if task not in left_out]
    changed = row(order, times, stage)
    if makespan_of_rows([*rows[:stage], changed, *rows[stage + 1 :]], times) <= longest:
        orders[stage], rows[stage] = order, changed
        return
    middle = len(candidates) // 2
    if middle >= fewest:
        for part in (candidates[:middle], candidates[middle:]):
            _merge(orders, rows, stage, part, fewest, times, longest)
