"""Schedules of warm-up counts: the papers' counts, within their memory, at every size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import step_times

from hetjax.errors import InputError
from hetjax.pipeline.schedule_search.named_schedules import make_schedule
from hetjax.pipeline.schedules.schedule import WARM_UP_SCHEDULES, Schedule, check, live_microbatches
from hetjax.pipeline.schedules.warm_up import (
    eager_1f1b,
    from_warm_up_counts,
    gpipe,
    h_1f1b,
    h_1f1b_counts,
    one_f_one_b,
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    times = draw(step_times())
    name = draw(st.sampled_from(WARM_UP_SCHEDULES))
    return make_schedule(name, times.num_stages, draw(st.integers(1, 64)), times)


@given(schedules())
def test_every_named_schedule_can_be_executed(schedule: Schedule):
    check(schedule)


@given(schedules())
def test_a_stage_holds_as_many_microbatches_as_its_warm_up_count(schedule: Schedule):
    for stage, count in enumerate(schedule.warm_up_counts):
        assert schedule.live_bound(stage) == count
        assert live_microbatches(schedule)[stage][-1] == 1


@pytest.mark.parametrize(
    ("schedule", "counts"),
    [
        (gpipe(3, 6), (6, 6, 6)),
        (one_f_one_b(3, 6), (3, 2, 1)),
        (eager_1f1b(3, 6), (5, 3, 1)),
        (eager_1f1b(3, 4), (4, 3, 1)),
        (h_1f1b(3, 6, [1.0, 1.0, 1.0], [0.7, 0.01]), (5, 2, 1)),
        (h_1f1b(1, 6, [1.0], []), (1,)),
    ],
    ids=["gpipe", "1f1b", "eager_1f1b", "clipped", "h_1f1b", "one stage"],
)
def test_warm_up_counts(schedule: Schedule, counts: tuple[int, ...]):
    assert schedule.warm_up_counts == counts


def test_the_order_of_1f1b_is_the_textbooks():
    order = one_f_one_b(2, 3).to_json()["order"]
    assert order == [["F0", "F1", "B0", "F2", "B1", "B2"], ["F0", "B0", "F1", "B1", "F2", "B2"]]


@pytest.mark.parametrize(
    ("cost", "extra"),
    [(0.0, 1), (0.1, 1), (0.11, 2), (0.5, 2), (0.51, 3), (1.0, 3), (1.1, 4), (1.6, 5)],
)
def test_extra_forwards_follow_harp_equation_2_and_go_on_with_10(cost: float, extra: int):
    assert h_1f1b_counts([1.0, 0.5], [cost]) == (1 + extra, 1)


@given(st.floats(1e-6, 5), st.integers(2, 6))
def test_without_tolerance_the_rule_is_equation_10(cost: float, num_stages: int):
    counts = h_1f1b_counts([1.0] * num_stages, [cost] * (num_stages - 1), tolerance=0.0)
    extra = counts[0] - counts[1]
    assert extra - 1 < 1 + 2 * cost <= extra


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8).map(lambda n: sorted(n, reverse=True)),
    st.integers(1, 12),
)
def test_counts_that_do_not_rise_are_enough(counts: list[int], num_microbatches: int):
    schedule = from_warm_up_counts(counts, num_microbatches)
    check(schedule)
    assert schedule.warm_up_counts == tuple(min(n, num_microbatches) for n in counts)


def test_builders_refuse_bad_arguments():
    with pytest.raises(InputError, match="unknown schedule 'gpip'; did you mean 'gpipe'"):
        make_schedule("gpip", 2, 2)
    with pytest.raises(InputError, match="num_stages is 0"):
        gpipe(0, 2)
    with pytest.raises(InputError, match="num_microbatches is 0"):
        eager_1f1b(2, 0)
    with pytest.raises(InputError, match="'h_1f1b' follows from the times"):
        make_schedule("h_1f1b", 2, 2)
    with pytest.raises(InputError, match="compute has 1 times; 2 stages need 2"):
        h_1f1b(2, 2, [1.0], [1.0])
    with pytest.raises(InputError, match="communication has 0 times; 2 stages need 1"):
        h_1f1b(2, 2, [1.0, 1.0], [])
    with pytest.raises(InputError, match=r"tolerance is 0\.6"):
        h_1f1b(2, 2, [1.0, 1.0], [1.0], tolerance=0.6)
    with pytest.raises(InputError, match="communication is"):
        h_1f1b(2, 2, [1.0, 1.0], [-1.0])
    with pytest.raises(InputError, match="compute is 0 on every stage"):
        h_1f1b(2, 2, [0.0, 0.0], [1.0])
    with pytest.raises(InputError, match="stage 1 is 2, above the 1 of stage 0"):
        from_warm_up_counts([1, 2], 4)
    with pytest.raises(InputError, match="stage 0 is 0"):
        from_warm_up_counts([0], 4)
