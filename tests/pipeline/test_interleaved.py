"""Interleaved schedules can be executed, simulated, and found."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
from cases import examples
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import random_schedule

from hetjax import InputError
from hetjax.pipeline.schedule_search.interleaved_search import (
    InterleavedRules,
    listed_rows,
    search_interleaved,
)
from hetjax.pipeline.schedules.interleaved import from_rows, interleaved
from hetjax.pipeline.schedules.memory import MicrobatchBytes, row_peak_bytes
from hetjax.pipeline.schedules.schedule import Schedule, Task, check
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.timeline.lower_bound import lower_bound
from hetjax.pipeline.timeline.simulate import simulate_schedule, stage_clocks
from hetjax.pipeline.timeline.times import StepTimes


def drawn_times(rng: Random, stages: int) -> StepTimes:
    """Unequal times of everything."""

    def seconds(count: int) -> list[float]:
        return [rng.uniform(0.1, 2.0) for _ in range(count)]

    return StepTimes(
        seconds(stages),
        seconds(stages),
        seconds(stages - 1),
        seconds(stages - 1),
        seconds(stages),
        seconds(stages),
        seconds(stages),
    )


@examples(usual=15)
@given(
    st.integers(2, 5), st.integers(2, 4), st.integers(1, 11), st.integers(1, 2), st.integers(0, 999)
)
def test_they_can_be_executed(submeshes: int, passes: int, count: int, ahead: int, seed: int):
    """With any number of microbatches, and not faster than what no schedule beats."""
    schedule = interleaved(submeshes, passes, count, 1 if count % submeshes else ahead)
    check(schedule)
    assert Schedule.from_json(schedule.to_json()) == schedule
    times = drawn_times(Random(seed), submeshes * passes)
    makespan = simulate_schedule(schedule, times).makespan
    assert lower_bound(count, times, sharing=schedule.groups) <= makespan * (1 + 1e-12)


@examples(usual=15)
@given(st.integers(0, 2**32 - 1))
def test_shared_devices_do_one_thing_at_a_time(seed: int):
    """In any order and turns: tasks of a set of devices, and transfers of a lane."""
    rng = Random(seed)
    submeshes, passes = rng.randint(2, 3), rng.randint(2, 3)
    count = submeshes * passes
    groups = [range(row, count, submeshes) for row in range(submeshes)]
    schedule = random_schedule(rng, count, rng.randint(1, 4), groups)
    times = drawn_times(rng, count)
    timeline = simulate_schedule(schedule, times)
    for group in groups:
        spans = sorted(
            (event.start, event.end) for stage in group for event in timeline.on(f"stage {stage}")
        )
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    for row, next_row in [(0, 1), (1, 0)]:
        spans = sorted(
            (event.start, event.end)
            for a in range(row, count, submeshes)
            for b in (a - 1, a + 1)
            if b % submeshes == next_row
            for event in timeline.on(f"link {a}->{b}")
        )
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    ends = [clock.end for clock in stage_clocks(schedule, times)]
    assert [ends[stage] for stage in range(submeshes, count)] == ends[: count - submeshes]


@examples(usual=8)
@given(st.integers(0, 2**32 - 1))
def test_what_rules_list_is_what_is_simulated(seed: int):
    rng = Random(seed)
    submeshes, passes, count = rng.randint(2, 3), rng.randint(2, 3), rng.randint(1, 6)
    times = replace(drawn_times(rng, submeshes * passes), update=())
    rules = InterleavedRules(submeshes, rng.randint(1, 2), False, rng.choice([None, 0, 1, 99]))
    rows = listed_rows(rules, times, submeshes, count)
    assert rows is not None
    schedule = from_rows("interleaved", rows)
    check(schedule)
    found = search_interleaved(times, submeshes, count)
    assert found is not None
    least = simulate_schedule(found, times).makespan
    assert least <= simulate_schedule(schedule, times).makespan
    assert least <= simulate_schedule(interleaved(submeshes, passes, count), times).makespan


def test_equal_stages_wait_for_a_half_of_the_time():
    """Two passes over four submeshes, four microbatches: Megatron's formula."""
    whole = StepTimes([2.0] * 4, [4.0] * 4, [0.0] * 3, [0.0] * 3)
    halves = StepTimes([1.0] * 8, [2.0] * 8, [0.0] * 7, [0.0] * 7)
    assert simulate_schedule(one_f_one_b(4, 4), whole).makespan == (4 + 3) * 6.0
    assert simulate_schedule(interleaved(4, 2, 4), halves).makespan == (4 + 3 / 2) * 6.0


def test_what_does_not_fit_is_not_taken():
    times = StepTimes([1.0] * 4, [2.0] * 4, [0.0] * 3, [0.0] * 3)
    held = dict.fromkeys(range(4), MicrobatchBytes(activation=1.0))

    def peak(schedule: Schedule) -> float:
        return max(row_peak_bytes(row, held) for row in schedule.rows)

    free = search_interleaved(times, 2, 6)
    least = search_interleaved(times, 2, 6, lambda schedule: peak(schedule) <= 4)
    assert free is not None
    assert least is not None
    assert peak(least) <= 4
    assert search_interleaved(times, 2, 6, lambda _: False) is None


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (((0, 5),), "turns\\[0\\] has 5; allowed: stages 0 to 2"),
        (((0, 0),), "turns\\[0\\] has 1 stages; stages that take turns are several"),
        (((0, 2, 0),), "turns\\[0\\] has stage 2 1 times; it has 2 tasks"),
        (((0, 0, 2, 2), (1, 2, 1, 2)), "turns\\[1\\] has stage 2, which has turns in another"),
        (((0, 2, 0, 2),), "deadlocks"),
    ],
)
def test_turns_that_make_no_sense_are_told(turns: tuple[tuple[int, ...], ...], message: str):
    tasks = (Task("F", 0), Task("B", 0))
    with pytest.raises(InputError, match=message):
        check(Schedule("explicit", (tasks,) * 3, turns))


def test_counts_that_make_no_sense_are_told():
    with pytest.raises(InputError, match="num_passes is 1; it must be 2 or more"):
        interleaved(2, 1, 4)
    with pytest.raises(InputError, match="ahead is 0"):
        interleaved(2, 2, 4, ahead=0)
    with pytest.raises(InputError, match="num_submeshes is 3; it must divide the 4 stages"):
        search_interleaved(StepTimes([1.0] * 4, [1.0] * 4, [0.0] * 3, [0.0] * 3), 3, 2)
