"""Schedules that follow from one warm-up count a stage, with whole backward passes.

A stage with count N_i runs N_i forward tasks, then a backward and a forward in turn, then the
backward tasks that are left. Stages and microbatches are counted from 0; Harp counts both from 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hetjax.errors import InputError
from hetjax.limits import MAX_TASKS
from hetjax.pipeline.schedules.schedule import EXPLICIT, Schedule, Task


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """GPipe: every stage runs all forward tasks, then all backward tasks; holds M microbatches.

    Args:
        num_stages: S, at least 1.
        num_microbatches: M, at least 1.

    Returns:
        The schedule.

    Raises:
        InputError: a count is below 1.
    """
    require_positive(num_stages, num_microbatches)
    return from_warm_up_counts([num_microbatches] * num_stages, num_microbatches, "gpipe")


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B: the least warm-up that fills the pipeline, N_i = S - i with i from 0.

    Args:
        num_stages: S, at least 1.
        num_microbatches: M, at least 1.

    Returns:
        The schedule.

    Raises:
        InputError: a count is below 1.
    """
    require_positive(num_stages, num_microbatches)
    counts = range(num_stages, 0, -1)
    return from_warm_up_counts(counts, num_microbatches, "1f1b")


def eager_1f1b(num_stages: int, num_microbatches: int) -> Schedule:
    """Eager-1F1B: two forward tasks more than the next stage, N_i = 2 (S - 1 - i) + 1, i from 0.

    It hides communication of up to half a stage's computation behind it, on fast links too, where
    there is nothing to hide.

    Args:
        num_stages: S, at least 1.
        num_microbatches: M, at least 1.

    Returns:
        The schedule.

    Raises:
        InputError: a count is below 1.

    Source: Harp section 2.3.1.
    """
    require_positive(num_stages, num_microbatches)
    counts = range(2 * num_stages - 1, 0, -2)
    return from_warm_up_counts(counts, num_microbatches, "eager_1f1b")


def h_1f1b(
    num_stages: int,
    num_microbatches: int,
    compute: Sequence[float],
    communication: Sequence[float],
    tolerance: float = 0.1,
) -> Schedule:
    """H-1F1B: as many extra warm-up forward tasks as each link's communication needs to hide.

    Args:
        num_stages: S, at least 1.
        num_microbatches: M, at least 1.
        compute: t_i, forward plus backward of one microbatch on every stage, in seconds; S long.
        communication: c_i, one transfer between stage i and i + 1, in seconds; S - 1 long.
        tolerance: Harp's epsilon, see `h_1f1b_counts`.

    Returns:
        The schedule.

    Raises:
        InputError: a count is below 1, a length does not fit, or a time is negative.

    Source: Harp section 4.1, equations 1 and 2.

    Example:
        The slow link takes three forward tasks more, the fast one only 1F1B's one: the counts
        that Harp's figure 3(d) sets by hand.

        >>> h_1f1b(3, 8, compute=[1.0, 1.0, 1.0], communication=[0.7, 0.01]).warm_up_counts
        (5, 2, 1)
    """
    require_positive(num_stages, num_microbatches)
    for field, times, expected in (
        ("compute", compute, num_stages),
        ("communication", communication, num_stages - 1),
    ):
        if len(times) != expected:
            raise InputError(f"{field} has {len(times)} times; {num_stages} stages need {expected}")
    counts = h_1f1b_counts(compute, communication, tolerance)
    return from_warm_up_counts(counts, num_microbatches, "h_1f1b")


def h_1f1b_counts(
    compute: Sequence[float], communication: Sequence[float], tolerance: float = 0.1
) -> tuple[int, ...]:
    """The warm-up counts of H-1F1B before they are clipped to the number of microbatches.

    With t_max = max_i t_i, stage i launches delta_i forward tasks more than stage i + 1:

    - 1 where c_i <= tolerance * t_max: too little to hide, no memory is spent on it;
    - 2 where c_i <= t_max / 2, and 3 where c_i <= t_max (equation 2);
    - ceil(1 + 2 c_i / t_max) beyond. Harp assumes c_i <= t_max, since a slower link is the
      bottleneck itself and cannot be hidden whole; equation 10 stays the least count that keeps
      that link busy while the stages compute, so we go on with it.

    Args:
        compute: t_i of every stage, in seconds; S long, the largest above 0.
        communication: c_i, in seconds, 0 or more; S - 1 long.
        tolerance: Harp's epsilon, from 0 to 0.5.

    Returns:
        N_i of every stage; the last is 1.

    Raises:
        InputError: a length does not fit, a time is negative or not finite, or the tolerance is
            out of range.

    Source: Harp equations 1, 2 and 10.

    Example:
        >>> h_1f1b_counts([1.0, 1.0], [2.2])
        (7, 1)
    """
    if not 0 <= tolerance <= 0.5:
        raise InputError(f"tolerance is {tolerance}; it must be from 0 to 0.5")
    for field, times in (("compute", compute), ("communication", communication)):
        if not all(math.isfinite(time) and time >= 0 for time in times):
            raise InputError(f"{field} is {list(times)}; times must be finite and not negative")
    if len(communication) != len(compute) - 1:
        raise InputError(
            f"communication has {len(communication)} times for {len(compute)} stages; "
            "it needs one between each two stages"
        )
    longest = max(compute)
    if longest == 0:
        raise InputError("compute is 0 on every stage; at least one time must be above 0")
    extra = (_extra_forwards(cost, longest, tolerance) for cost in reversed(communication))
    return tuple(itertools.accumulate(extra, initial=1))[::-1]


def from_warm_up_counts(
    counts: Sequence[int], num_microbatches: int, name: str = EXPLICIT
) -> Schedule:
    """The schedule that warm-up counts stand for: N_i forward tasks, then B and F in turn.

    Args:
        counts: N_i of every stage, at least 1 and never above the count of the stage before;
            counts above `num_microbatches` are clipped to it.
        num_microbatches: M, at least 1.
        name: the name of the schedule.

    Returns:
        The schedule; stage i holds the activations of min(N_i, M) microbatches at most.

    Raises:
        InputError: a count is below 1, or a stage has a larger count than the one before it: the
            two would wait for one another for ever.

    Example:
        >>> [str(task) for task in from_warm_up_counts([2], 3).order[0]]
        ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    require_positive(len(counts), num_microbatches)
    require_countable(len(counts), num_microbatches)
    for stage, count in enumerate(counts):
        if count < 1:
            raise InputError(f"warm-up count of stage {stage} is {count}; it must be 1 or more")
        if stage and count > counts[stage - 1]:
            raise InputError(
                f"warm-up count of stage {stage} is {count}, above the {counts[stage - 1]} of "
                f"stage {stage - 1}: the two would deadlock; counts may not rise along the pipeline"
            )
    forwards = [Task("F", microbatch) for microbatch in range(num_microbatches)]
    backwards = [Task("B", microbatch) for microbatch in range(num_microbatches)]
    order = (_stage_order(min(count, num_microbatches), forwards, backwards) for count in counts)
    return Schedule(name, tuple(order))


def _stage_order(
    count: int, forwards: Sequence[Task], backwards: Sequence[Task]
) -> tuple[Task, ...]:
    """`count` forwards, then backward and forward in turn, then the backwards that are left."""
    steady = len(forwards) - count
    pairs = zip(backwards[:steady], forwards[count:], strict=True)
    return (*forwards[:count], *itertools.chain.from_iterable(pairs), *backwards[steady:])


def _extra_forwards(cost: float, longest: float, tolerance: float) -> int:
    """delta_i for one link: Harp equation 2, and equation 10 where c_i is above t_max."""
    if cost <= tolerance * longest:
        return 1
    if cost <= longest / 2:
        return 2
    if cost <= longest:
        return 3
    return math.ceil(1 + 2 * cost / longest)


def require_countable(num_stages: int, num_microbatches: int) -> None:
    """Refuses a pipeline with more tasks than can be put into an order in a second.

    Args:
        num_stages: S.
        num_microbatches: M.

    Raises:
        InputError: there are too many tasks.
    """
    if not is_countable(num_stages, num_microbatches):
        raise InputError(
            f"num_microbatches is {num_microbatches} in a pipeline of {num_stages} stages; it must "
            f"be {MAX_TASKS // (2 * num_stages)} or less, so that a step has at most {MAX_TASKS} "
            f"forward and backward tasks"
        )


def is_countable(num_stages: int, num_microbatches: int) -> bool:
    """Whether a pipeline has no more tasks than can be put into an order in a second.

    Args:
        num_stages: S.
        num_microbatches: M.
    """
    return 2 * num_stages * num_microbatches <= MAX_TASKS


def require_positive(num_stages: int, num_microbatches: int) -> None:
    """Refuses a pipeline without stages or microbatches.

    Args:
        num_stages: S.
        num_microbatches: M.

    Raises:
        InputError: a count is below 1.
    """
    for field, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise InputError(f"{field} is {value}; it must be 1 or more")
