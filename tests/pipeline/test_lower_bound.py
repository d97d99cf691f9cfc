"""The lower bound: nothing beats it, and small cases reach it."""

import itertools
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import random_schedules, step_times

from hetjax.errors import InputError
from hetjax.pipeline.schedules.schedule import EXPLICIT, Schedule, Task, dependency_order
from hetjax.pipeline.timeline.lower_bound import lower_bound
from hetjax.pipeline.timeline.simulate import simulate_schedule
from hetjax.pipeline.timeline.times import StepTimes


@given(st.data())
def test_no_schedule_beats_the_lower_bound(data: st.DataObject):
    times = data.draw(step_times(max_stages=6))
    schedule = data.draw(random_schedules(times.num_stages))
    makespan = simulate_schedule(schedule, times).makespan
    held = [schedule.live_bound(stage) for stage in range(schedule.num_stages)]
    bound = lower_bound(schedule.num_microbatches, times, held)
    assert lower_bound(schedule.num_microbatches, times) <= bound * (1 + 1e-12)
    assert bound <= makespan * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 2), (3, 1), (1, 2)])
def test_the_best_of_all_orders_is_near_the_lower_bound(
    num_stages: int, num_microbatches: int, seed: int
):
    rng = Random(seed)

    def draw(length: int = num_stages) -> list[float]:
        return [rng.uniform(0.5, 1.0) for _ in range(length)]

    forward, b, w = draw(), draw(), draw()
    whole = [0.95 * (x + y) for x, y in zip(b, w, strict=True)]
    times = StepTimes(forward, whole, draw(num_stages - 1), draw(num_stages - 1), draw(), b, w)
    limits = [rng.randint(1, num_microbatches) for _ in range(num_stages)]
    best = min(
        simulate_schedule(schedule, times).makespan
        for schedule in all_schedules(num_stages, num_microbatches, limits)
    )
    bound = lower_bound(num_microbatches, times, limits)
    assert bound <= best * (1 + 1e-12)
    assert best <= 1.15 * bound


def all_schedules(num_stages: int, num_microbatches: int, limits: list[int]) -> Iterator[Schedule]:
    """Every executable order, microbatches in turn, backward passes split or not."""
    rows = [stage_orders(num_microbatches, limit) for limit in limits]
    for order in itertools.product(*rows):
        schedule = Schedule(EXPLICIT, order)
        try:
            list(dependency_order(schedule))
        except InputError:
            continue
        yield schedule


def stage_orders(num_microbatches: int, limit: int) -> list[tuple[Task, ...]]:
    orders = []
    for split in itertools.product([False, True], repeat=num_microbatches):
        tasks = [Task(kind, m) for m in range(num_microbatches) for kind in ("F", "B")]
        tasks += [Task("W", m) for m in range(num_microbatches) if split[m]]
        for order in itertools.permutations(tasks):
            place = {task: i for i, task in enumerate(order)}
            in_turn = all(
                place[a] < place[b]
                for a, b in itertools.permutations(tasks, 2)
                if (a.kind == b.kind and a.microbatch < b.microbatch)
                or (a.microbatch == b.microbatch and "FBW".index(a.kind) < "FBW".index(b.kind))
            )
            if in_turn and Schedule(EXPLICIT, (order,)).live_bound(0) <= limit:
                orders.append(order)
    return orders


def test_one_stage_is_never_idle():
    times = StepTimes([1.0], [2.0], [], [], update=[0.5], recompute=[0.25])
    assert lower_bound(4, times) == 4 * 3.25 + 0.5


def test_a_cap_of_one_microbatch_serialises_the_step():
    times = StepTimes([1.0, 1.0], [2.0, 2.0], [0.5], [0.5])
    # The first stage is done with a microbatch 7 s after it began.
    assert lower_bound(3, times, [1, 1]) == 3 * 7.0


def test_a_slow_stage_cannot_work_ahead_of_what_reaches_it():
    times = StepTimes([1.0, 0.1, 0.1], [0.1, 2.0, 0.1], [0.0, 1.0], [0.0, 1.0])
    # Three F reach the second stage before its first gradient comes back, after 3.3 s.
    assert lower_bound(8, times) == pytest.approx(3.3 + 8 * 2.0 + 5 * 0.1 + 0.1)


def test_bad_arguments_are_refused():
    times = StepTimes([1.0], [1.0], [], [])
    with pytest.raises(InputError, match="num_microbatches is 0"):
        lower_bound(0, times)
    with pytest.raises(InputError, match="live_limits has 2 caps; 1 stages need one"):
        lower_bound(1, times, [1, 1])
    with pytest.raises(InputError, match="live_limits of stage 0 is 0"):
        lower_bound(1, times, [0])
