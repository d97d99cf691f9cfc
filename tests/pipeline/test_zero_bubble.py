"""Schedules with split backward passes: executable at every size, in the papers' memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import step_times

from hetjax.errors import InputError
from hetjax.pipeline.schedule_search.zero_bubble import h_1f1b_split, zb_h1, zb_h2
from hetjax.pipeline.schedules.schedule import Schedule, check
from hetjax.pipeline.schedules.warm_up import h_1f1b, one_f_one_b
from hetjax.pipeline.timeline.quick_clock import makespan
from hetjax.pipeline.timeline.times import StepTimes

sizes = (st.integers(1, 16), st.integers(1, 64))


def without(schedule: Schedule, kinds: str) -> list[list[str]]:
    return [[str(t) for t in tasks if t.kind not in kinds] for tasks in schedule.order]


@given(*sizes)
def test_zb_h1_is_1f1b_in_the_memory_of_its_first_stage(num_stages: int, num_microbatches: int):
    schedule, plain = zb_h1(num_stages, num_microbatches), one_f_one_b(num_stages, num_microbatches)
    check(schedule)
    assert without(schedule, "W") == without(plain, "")
    assert all(schedule.live_bound(stage) == plain.live_bound(0) for stage in range(num_stages))
    assert all(sum(t.kind == "W" for t in tasks) == num_microbatches for tasks in schedule.order)


@given(*sizes)
def test_zb_h2_holds_up_to_2s_minus_1_on_every_stage(num_stages: int, num_microbatches: int):
    schedule = zb_h2(num_stages, num_microbatches)
    check(schedule)
    most = min(2 * num_stages - 1, num_microbatches)
    assert all(schedule.live_bound(stage) == most for stage in range(num_stages))


@given(step_times(), st.integers(1, 64))
def test_h_1f1b_split_keeps_the_order_and_memory_of_h_1f1b(times: StepTimes, microbatches: int):
    schedule = h_1f1b_split(microbatches, times)
    plain = h_1f1b(times.num_stages, microbatches, times.compute, times.communication)
    check(schedule)
    assert without(schedule, "RW") == without(plain, "")
    for stage in range(times.num_stages):
        assert schedule.live_bound(stage) == plain.live_bound(stage)


def test_zero_bubble_without_communication_has_none_but_at_the_ends():
    third = [1.0] * 4
    times = StepTimes(third, [2.0] * 4, [0.0] * 3, [0.0] * 3, (), third, third)
    # Qi et al., table 1: (S - 1)(F + B - 2W), plus what the last B have to go back.
    assert makespan(one_f_one_b(4, 16), times) == 16 * 3 + 3 * 3
    assert makespan(zb_h1(4, 16), times) == 16 * 3 + 3
    assert makespan(h_1f1b_split(16, times), times) < makespan(one_f_one_b(4, 16), times)


def test_split_h_1f1b_needs_the_times_of_halves():
    with pytest.raises(InputError, match="h_1f1b_split needs them"):
        h_1f1b_split(4, StepTimes([1.0], [1.0], [], []))
    with pytest.raises(InputError, match="num_microbatches is 0"):
        zb_h1(2, 0)
