from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import step_times

from hetjax.errors import InputError
from hetjax.pipeline.schedules.warm_up import gpipe, one_f_one_b
from hetjax.pipeline.timeline.measured_times import (
    measured_times,
    measuring_schedules,
    with_split_backward,
)
from hetjax.pipeline.timeline.simulate import simulate_schedule
from hetjax.pipeline.timeline.timeline import Timeline
from hetjax.pipeline.timeline.times import StepTimes


def close(found: Sequence[float], expected: Sequence[float]) -> None:
    assert list(found) == pytest.approx(list(expected), abs=1e-6)


@given(data=st.data(), times=step_times(min_stages=2, max_stages=5))
def test_what_a_timeline_was_made_of_is_read_off_it(data: st.DataObject, times: StepTimes):
    count = data.draw(st.integers(1, 8))
    schedules = measuring_schedules(gpipe(times.num_stages, count))
    steps = [(simulate_schedule(schedule, times), schedule) for schedule in schedules]
    found = measured_times(steps)
    close(found.forward, times.forward)
    close(found.sends, times.sends)
    close(found.returns, times.returns)
    close(found.update, times.update)
    close(found.weight_gradient, times.weight_gradient)
    # The model has a stage that recomputes do so inside B; workers time it by itself.
    again = [times.recompute_seconds(stage) for stage in range(times.num_stages)]
    for halves, expected in (
        (found.backward, times.backward),
        (found.input_gradient, times.input_gradient),
    ):
        close(halves, [a + b for a, b in zip(expected, again, strict=True)])


def test_whole_passes_alone_tell_nothing_of_split_ones():
    times = StepTimes([1.0] * 2, [2.0] * 2, [0.5], [0.5], [0.1] * 2)
    schedule = one_f_one_b(2, 4)
    found = measured_times([(simulate_schedule(schedule, times), schedule)])
    assert not found.can_split


def test_a_stage_that_was_not_measured_whole_is_named():
    times = StepTimes([1.0], [2.0], [], [], [0.1], [1.0], [1.0])
    schedule = with_split_backward(gpipe(1, 2))
    with pytest.raises(InputError, match="no backward pass of stage 0"):
        measured_times([(simulate_schedule(schedule, times), schedule)])


def test_a_stage_without_backward_passes_takes_no_time_for_them():
    times = StepTimes([1.0, 1.0], [0.0, 2.0], [0.5], [0.0], [0.1] * 2)
    schedule = gpipe(2, 4)
    events = simulate_schedule(schedule, times).events
    ran = [each for each in events if (each.track, each.kind) != ("stage 0", "B")]
    found = measured_times([(Timeline(tuple(ran)), schedule)])
    close(found.backward, [0.0, 2.0])
    close(found.forward, [1.0, 1.0])


def test_what_no_step_has_is_taken_from_what_was_known():
    known = StepTimes([1.0], [2.0], [], [], [0.1], [1.5], [0.5])
    now = StepTimes([1.25], [9.0], [], [], [0.2], [1.75], [0.75])
    schedule = with_split_backward(gpipe(1, 2))
    found = measured_times([(simulate_schedule(schedule, now), schedule)], known)
    close([*found.forward, *found.backward, *found.update], [1.25, 2.0, 0.2])
    close([*found.input_gradient, *found.weight_gradient], [1.75, 0.75])
