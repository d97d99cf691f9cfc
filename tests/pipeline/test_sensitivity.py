"""Sensitivity: the same every time, between the extremes, and nothing without an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import random_schedules, step_times

from hetjax.errors import InputError
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.timeline.quick_clock import makespan
from hetjax.pipeline.timeline.sensitivity import Sensitivity, sensitivity
from hetjax.pipeline.timeline.times import StepTimes


@given(st.data(), st.floats(0, 0.5))
def test_a_misjudged_makespan_stays_within_the_error(data: st.DataObject, error: float):
    times = data.draw(step_times(max_stages=4))
    schedule = data.draw(random_schedules(times.num_stages))
    off = sensitivity(schedule, times, error, samples=5)
    assert off.expected == makespan(schedule, times)
    slightly_more = 1 + 1e-12
    assert off.mean <= off.worst * slightly_more
    assert off.worst <= off.expected * (1 + error) * slightly_more
    assert off.mean >= off.expected * (1 - error) * (1 - 1e-12)
    assert off == sensitivity(schedule, times, error, samples=5)


def test_without_an_error_nothing_changes():
    times = StepTimes([1.0] * 2, [2.0] * 2, [0.5], [0.5])
    assert sensitivity(one_f_one_b(2, 4), times, 0.0) == Sensitivity(17.0, 17.0, 17.0)


def test_bad_arguments_are_refused():
    times = StepTimes([1.0], [1.0], [], [])
    with pytest.raises(InputError, match=r"error is 1\.0"):
        sensitivity(one_f_one_b(1, 1), times, 1.0)
    with pytest.raises(InputError, match="samples is 0"):
        sensitivity(one_f_one_b(1, 1), times, samples=0)
