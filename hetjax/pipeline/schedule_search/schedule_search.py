"""The search for the schedule of least makespan under a cap of live microbatches."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from hetjax.errors import InputError
from hetjax.pipeline.schedule_search.list_scheduler import NEVER, Rules, list_schedule
from hetjax.pipeline.schedule_search.merge_halves import merge_halves
from hetjax.pipeline.schedule_search.zero_bubble import h_1f1b_split, zb_h1, zb_h2
from hetjax.pipeline.schedules.live_limits import check_live_limits
from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.pipeline.schedules.warm_up import (
    eager_1f1b,
    gpipe,
    h_1f1b,
    one_f_one_b,
    require_positive,
)
from hetjax.pipeline.timeline.lower_bound import lower_bound
from hetjax.pipeline.timeline.quick_clock import makespan
from hetjax.pipeline.timeline.times import StepTimes

TASKS_TO_TRY = 700_000
"""How many tasks the schedules that a search tries hold together, where nothing else is said: some
two seconds of one core."""

FEWEST_TRIALS, MOST_TRIALS = 60, 2000
"""Between these the default number of trials stays, whatever the size."""

TIE = 1 + 1e-9
"""Makespans within this ratio are equal but for rounding."""


def search_schedule(
    times: StepTimes,
    num_microbatches: int,
    live_limits: Sequence[int],
    *,
    seed: int = 0,
    trials: int | None = None,
    time_limit: float | None = None,
) -> Schedule:
    """The schedule of least makespan that is found under a cap of live microbatches a stage.

    Stages that decide by simple rules what to run next
    (`hetjax.pipeline.schedule_search.list_scheduler`) make a schedule. The rules start from how
    many microbatches a stage must have in flight to hide its links, and go on by random changes
    that are kept where the makespan does not grow. The search ends early where it meets
    `lower_bound`. It is never worse than the best fixed schedule that keeps within the caps. At
    last, every W that stands right after its B and whose split gains nothing becomes one whole
    backward pass with it again.

    Args:
        times: what the tasks take; backward passes are split where it tells the times of halves.
        num_microbatches: M, at least 1.
        live_limits: how many microbatches may be live on every stage; S long, each at least 1.
        seed: of the random changes; the same arguments give the same schedule.
        trials: how many rules are tried; by default as many as take about two seconds.
        time_limit: seconds after which no others are tried; the result then depends on the
            machine.

    Returns:
        A schedule named ``"search"``.

    Raises:
        InputError: a count is below 1, there is not one cap for every stage, or no stage computes.

    Example:
        >>> times = StepTimes([1.0] * 2, [2.0] * 2, [1.9], [1.9], (), [1.0] * 2, [1.0] * 2)
        >>> found = search_schedule(times, 8, live_limits=[4, 4])
        >>> makespan(found, times) == lower_bound(8, times)
        True
    """
    require_positive(times.num_stages, num_microbatches)
    limits = check_live_limits(live_limits, times.num_stages, num_microbatches)
    if trials is None:
        trials = affordable_trials(times, num_microbatches)
    elif trials < 1:
        raise InputError(f"trials is {trials}; it must be 1 or more")
    deadline = math.inf if time_limit is None else time.monotonic() + time_limit
    enough = lower_bound(num_microbatches, times, limits) * TIE

    found, shortest = _best_fixed(times, num_microbatches, limits)
    rng = Random(seed)
    rules, best = (), math.inf
    starts = starting_rules(times, num_microbatches, limits)
    for _ in range(trials):
        candidate = next(starts, None) or _changed(rules, rng, times, num_microbatches)
        outcome = list_schedule(candidate, times, num_microbatches)
        if outcome.makespan <= best:
            rules, best = candidate, outcome.makespan
        if best * TIE < shortest:
            found, shortest = outcome.schedule("search"), best
        if shortest <= enough or time.monotonic() >= deadline:
            break
    assert found is not None, "the first trial gives a schedule"
    return merge_halves(replace(found, name="search"), times)


def _best_fixed(
    times: StepTimes, num_microbatches: int, limits: Sequence[int]
) -> tuple[Schedule | None, float]:
    """The best fixed schedule within the caps and its makespan; None and infinity without any."""
    found, shortest = None, math.inf
    for schedule in fixed_schedules(times, num_microbatches):
        if all(schedule.live_bound(s) <= limit for s, limit in enumerate(limits)):
            seconds = makespan(schedule, times)
            if seconds < shortest:
                found, shortest = schedule, seconds
    return found, shortest


def fixed_schedules(times: StepTimes, num_microbatches: int) -> list[Schedule]:
    """All schedules that are not searched for, as they come out for these times.

    Args:
        times: what the tasks take.
        num_microbatches: M, at least 1.

    Returns:
        The schedules; those with split backward passes only where the times tell those of halves.

    Raises:
        InputError: `num_microbatches` is below 1, or no stage computes.
    """
    size = (times.num_stages, num_microbatches)
    whole = [
        gpipe(*size),
        one_f_one_b(*size),
        eager_1f1b(*size),
        h_1f1b(*size, times.compute, times.communication),
    ]
    if not times.can_split:
        return whole
    return [*whole, h_1f1b_split(num_microbatches, times), zb_h1(*size), zb_h2(*size)]


def warm_up_rule(times: StepTimes) -> tuple[float, ...]:
    """How many microbatches a stage must hold so that links and stages behind it stay hidden.

    A microbatch is live on stage i for as long as it takes to go from there to the last stage and
    back, ``t_i + sum_{k>i} (f_k + b_k) + 2 sum_{k>=i} c_k``, and the next one follows after
    ``P = max(t_max, c_max)``; by Little's law their ratio is the number in between. Unlike Harp's
    equation 2, which rounds up at every link, it rounds up once, and b is the input gradient alone
    where backward passes are split.

    Args:
        times: what the tasks take.

    Returns:
        N_i of every stage, not rounded.

    Example:
        >>> warm_up_rule(StepTimes([1.0] * 3, [2.0] * 3, [0.5] * 2, [0.5] * 2))
        (3.6666666666666665, 2.3333333333333335, 1.0)
    """
    pace = max((*times.compute, *times.sends, *times.returns))
    b = times.input_gradient if times.can_split else times.backward
    needed, trip = [], 0.0
    for stage in reversed(range(times.num_stages)):
        needed.append((times.compute[stage] + trip) / pace)
        if stage:
            links = times.sends[stage - 1] + times.returns[stage - 1]
            trip += times.forward[stage] + b[stage] + links
    return tuple(reversed(needed))


def affordable_trials(times: StepTimes, num_microbatches: int) -> int:
    """The default number of trials of a search: fewer for larger schedules.

    Args:
        times: what the tasks take.
        num_microbatches: M.

    Returns:
        The number.
    """
    tasks = times.num_stages * num_microbatches * (3 if times.can_split else 2)
    return min(max(TASKS_TO_TRY // tasks, FEWEST_TRIALS), MOST_TRIALS)


def starting_rules(
    times: StepTimes, num_microbatches: int, limits: Sequence[int]
) -> Iterator[tuple[Rules, ...]]:
    """Rules that are the same on all stages, but for how many microbatches each must hold.

    Args:
        times: what the tasks take.
        num_microbatches: M.
        limits: how many microbatches may be live on every stage.

    Yields:
        The rules of all stages.
    """
    needed = warm_up_rule(times)
    wholes = [0, num_microbatches] if _splitting_costs(times) else [0]
    for whole, share, backlog, patience in itertools.product(
        wholes, (1.0, 0.8, 1.25, math.inf), (NEVER, 0, 1), (0.0, 0.5, 1.0)
    ):
        yield tuple(
            Rules(
                limit=limit,
                wanted=limit if share == math.inf else min(math.ceil(share * count), limit),
                most=limit,
                backlog=backlog,
                patience=patience,
                whole_before=whole,
            )
            for limit, count in zip(limits, needed, strict=True)
        )


def _changed(
    rules: Sequence[Rules], rng: Random, times: StepTimes, num_microbatches: int
) -> tuple[Rules, ...]:
    """The same rules but for a few, changed on one stage or on neighbouring ones."""
    changed = list(rules)
    fields = ["wanted", "most", "backlog", "patience"]
    if _splitting_costs(times):
        fields.append("whole_before")
    for _ in range(rng.choice((1, 1, 2, 3))):
        first = rng.randrange(len(changed))
        length = 1 if rng.random() < 0.5 else rng.randint(1, len(changed))
        field = rng.choice(fields)
        step = rng.choice((-3, -2, -1, 1, 2, 3))
        value: Any = {
            "backlog": rng.choice((0, 1, 2, 3, 5, NEVER)),
            "patience": rng.choice((0.0, 0.25, 0.5, 1.0, 1.5)),
            "whole_before": rng.randint(0, num_microbatches),
        }.get(field)
        for stage in range(first, min(first + length, len(changed))):
            old = changed[stage]
            if field in ("wanted", "most"):
                value = min(max(getattr(old, field) + step, 1), old.limit)
            changed[stage] = replace(old, **{field: value})
    return tuple(changed)


def _splitting_costs(times: StepTimes) -> bool:
    """Whether on any stage the two halves take longer than the whole backward pass."""
    if not times.can_split:
        return False
    halves = zip(times.backward, times.input_gradient, times.weight_gradient, strict=True)
    return any(whole < b + w for whole, b, w in halves)
