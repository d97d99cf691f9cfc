"""The search: within its caps, no worse than any fixed schedule, the same every time."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import random_schedules, step_times

from hetjax.errors import InputError
from hetjax.pipeline.schedule_search.list_scheduler import NEVER, Rules, list_schedule
from hetjax.pipeline.schedule_search.merge_halves import merge_halves
from hetjax.pipeline.schedule_search.named_schedules import make_schedule
from hetjax.pipeline.schedule_search.schedule_search import (
    affordable_trials,
    fixed_schedules,
    search_schedule,
    warm_up_rule,
)
from hetjax.pipeline.schedules.schedule import SCHEDULES, Schedule, check
from hetjax.pipeline.schedules.warm_up import h_1f1b, one_f_one_b
from hetjax.pipeline.timeline.lower_bound import lower_bound
from hetjax.pipeline.timeline.quick_clock import makespan
from hetjax.pipeline.timeline.simulate import simulate_schedule
from hetjax.pipeline.timeline.times import StepTimes


@given(st.data())
def test_the_quick_clock_agrees_with_the_simulation(data: st.DataObject):
    times = data.draw(step_times(max_stages=6))
    schedule = data.draw(random_schedules(times.num_stages))
    assert makespan(schedule, times) == simulate_schedule(schedule, times).makespan


def test_the_quick_clock_finds_deadlocks():
    order = (one_f_one_b(2, 2).order[0], one_f_one_b(2, 2).order[1][::-1])
    with pytest.raises(InputError, match="deadlock"):
        makespan(Schedule("explicit", order), StepTimes([1.0] * 2, [1.0] * 2, [0.0], [0.0]))


@st.composite
def any_rules(draw: st.DrawFn, num_stages: int) -> list[Rules]:
    counts = st.integers(1, 10)
    # In turn, a stage waits for as many F as it wants: no more than it may hold, none than before.
    in_turn = draw(st.booleans())
    wanted = sorted(draw(st.lists(counts, min_size=num_stages, max_size=num_stages)), reverse=True)
    return [
        Rules(
            limit=draw(st.integers(want, 12) if in_turn else counts),
            wanted=want,
            most=NEVER if in_turn else draw(counts),
            backlog=draw(st.sampled_from([0, 1, 2, NEVER])),
            patience=draw(st.sampled_from([0.0, 0.5, 2.0])),
            whole_before=draw(st.integers(0, 10)),
            in_turn=in_turn,
        )
        for want in wanted
    ]


@given(st.data(), st.booleans())
def test_any_rules_give_an_executable_schedule_within_their_limits(data, split: bool):
    times = data.draw(step_times(max_stages=6, split=split))
    rules = data.draw(any_rules(times.num_stages))
    outcome = list_schedule(rules, times, data.draw(st.integers(1, 12)))
    schedule = outcome.schedule("explicit")
    check(schedule)
    assert schedule.splits_backward <= split
    assert outcome.makespan == pytest.approx(simulate_schedule(schedule, times).makespan)
    for stage, each in enumerate(rules):
        assert schedule.live_bound(stage) <= each.limit


@settings(max_examples=30)
@given(st.data(), st.booleans())
def test_search_keeps_its_caps_and_is_never_worse_than_fixed_schedules(data, split: bool):
    times = data.draw(step_times(max_stages=5, split=split))
    num_microbatches = data.draw(st.integers(1, 10))
    stages = range(times.num_stages)
    limits = [data.draw(st.integers(1, 12)) for _ in stages]
    found = search_schedule(times, num_microbatches, limits, trials=20)
    check(found)
    assert found.name == "search"
    assert all(found.live_bound(stage) <= limits[stage] for stage in stages)
    seconds = makespan(found, times)
    assert seconds >= lower_bound(num_microbatches, times, limits) * (1 - 1e-12)
    for fixed in fixed_schedules(times, num_microbatches):
        if all(fixed.live_bound(stage) <= limits[stage] for stage in stages):
            assert seconds <= makespan(fixed, times) * (1 + 1e-8)


def slow_links(seed: int = 0) -> StepTimes:
    rng = Random(seed)
    t = [rng.uniform(0.5, 1.0) for _ in range(6)]
    third = [each / 3 for each in t]
    links = [rng.uniform(0.0, 1.0) for _ in range(5)]
    whole = [2 * each / 3 for each in t]
    return StepTimes(third, whole, links, links, (), third, third)


def test_search_is_deterministic_and_seeds_differ():
    times = slow_links()
    limits = [8] * 6
    found = search_schedule(times, 16, limits, trials=80)
    assert found == search_schedule(times, 16, limits, trials=80)
    others = [search_schedule(times, 16, limits, trials=80, seed=seed) for seed in range(1, 5)]
    assert any(other != found for other in others)


def test_more_trials_are_no_worse_and_a_time_limit_ends_them():
    times = slow_links(3)
    few, many = (makespan(search_schedule(times, 24, [9] * 6, trials=n), times) for n in (1, 200))
    assert many <= few * (1 + 1e-8)
    assert search_schedule(times, 24, [9] * 6, time_limit=0.0) == search_schedule(
        times, 24, [9] * 6, trials=1
    )


@pytest.mark.parametrize("seed", range(3))
def test_search_is_near_the_bound_at_the_memory_of_h_1f1b(seed: int):
    times = slow_links(seed)
    peak = h_1f1b(6, 24, times.compute, times.communication).live_bound(0)
    found = search_schedule(times, 24, [peak] * 6, trials=100)
    assert makespan(found, times) <= 1.05 * lower_bound(24, times, [peak] * 6)


def test_expensive_halves_are_not_split_where_that_gains_nothing():
    costly = StepTimes([1.0] * 2, [2.0] * 2, [0.1], [0.1], (), [1.4] * 2, [1.4] * 2)
    found = search_schedule(costly, 32, [8, 8], trials=100)
    weights = sum(task.kind == "W" for tasks in found.order for task in tasks)
    assert weights < 16
    assert makespan(found, costly) <= makespan(one_f_one_b(2, 32), costly)


@given(st.data())
def test_merging_halves_costs_nothing(data: st.DataObject):
    times = data.draw(step_times(max_stages=5))
    schedule = data.draw(random_schedules(times.num_stages))
    merged = merge_halves(schedule, times)
    check(merged)
    assert makespan(merged, times) <= makespan(schedule, times) * (1 + 1e-8)
    for stage, tasks in enumerate(merged.order):
        assert merged.live_bound(stage) <= schedule.live_bound(stage)
        left = [task for task in schedule.order[stage] if task in set(tasks)]
        assert left == list(tasks)


def test_the_warm_up_rule_rounds_up_once():
    # 3 and 2 forward tasks more than the stage behind, by Harp's equation 2; 4.2 together here.
    times = StepTimes([1 / 3] * 3, [2 / 3] * 3, [0.6, 0.5], [0.6, 0.5])
    assert h_1f1b(3, 9, times.compute, times.communication).warm_up_counts == (6, 3, 1)
    assert warm_up_rule(times) == pytest.approx((5.2, 3.0, 1.0))


def test_large_schedules_get_fewer_trials():
    assert affordable_trials(slow_links(), 8) == 2000
    assert 60 < affordable_trials(slow_links(), 400) < 200
    assert affordable_trials(slow_links(), 100_000) == 60


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_by_its_name(name: str):
    schedule = make_schedule(name, 6, 8, slow_links())
    check(schedule)
    assert schedule.name == name
    assert schedule.num_microbatches == 8


def test_bad_arguments_are_refused():
    times = StepTimes([1.0], [1.0], [], [])
    with pytest.raises(InputError, match="trials is 0"):
        search_schedule(times, 2, [1], trials=0)
    with pytest.raises(InputError, match="live_limits has 2 caps"):
        search_schedule(times, 2, [1, 1])
    with pytest.raises(InputError, match="num_microbatches is 0"):
        search_schedule(times, 0, [1])
    with pytest.raises(InputError, match="times are of 1 stages; num_stages is 2"):
        make_schedule("search", 2, 2, times)
