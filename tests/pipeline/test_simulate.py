"""The discrete-event model: causality, exclusive resources, and Harp's closed form."""

import itertools
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import random_schedule, step_times

from hetjax.errors import InputError
from hetjax.pipeline.schedule_search.named_schedules import make_schedule
from hetjax.pipeline.schedules.schedule import WARM_UP_SCHEDULES, Schedule, Task
from hetjax.pipeline.schedules.warm_up import from_warm_up_counts, gpipe, h_1f1b, one_f_one_b
from hetjax.pipeline.timeline.lower_bound import harp_latency, lower_bound
from hetjax.pipeline.timeline.simulate import (
    simulate_schedule,
    stage_clocks,
    task_seconds,
    warm_up_makespan,
)
from hetjax.pipeline.timeline.timeline import link_track, live_over_time, stage_track
from hetjax.pipeline.timeline.times import StepTimes

Case = tuple[Schedule, StepTimes]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Times and a schedule: one of warm-up counts, or any that can be executed."""
    times = draw(step_times())
    num_microbatches = draw(st.integers(1, 32))
    name = draw(st.sampled_from((*WARM_UP_SCHEDULES, "random")))
    if name == "random":
        rng = Random(draw(st.integers(0, 2**32)))
        return random_schedule(rng, times.num_stages, num_microbatches), times
    return make_schedule(name, times.num_stages, num_microbatches, times), times


@given(cases())
def test_events_respect_every_dependency(case: Case):
    schedule, times = case
    events = {(e.track, e.name): e for e in simulate_schedule(schedule, times).events}
    for stage, tasks in enumerate(schedule.order):
        for task in tasks:
            event = events[stage_track(stage), str(task)]
            neighbour = stage - 1 if task.kind == "F" else stage + 1
            if task.kind in ("F", "B") and 0 <= neighbour < schedule.num_stages:
                produced = events[stage_track(neighbour), str(task)]
                sent = events.get((link_track(neighbour, stage), str(task)), produced)
                assert produced.end <= max(sent.start, produced.end) <= sent.end <= event.start
            if task.kind in ("B", "R"):
                assert events[stage_track(stage), f"F{task.microbatch}"].end <= event.start
            if task.kind == "W":
                assert events[stage_track(stage), f"B{task.microbatch}"].end <= event.start


@given(cases())
def test_the_makespan_alone_is_the_timelines(case: Case):
    schedule, times = case
    if schedule.name in WARM_UP_SCHEDULES:
        counts, times = schedule.warm_up_counts, replace(times, recompute=())
        found = warm_up_makespan(counts, schedule.num_microbatches, times)
        whole = from_warm_up_counts(counts, schedule.num_microbatches)
        assert found == simulate_schedule(whole, times).makespan


@given(cases())
def test_the_clocks_of_stages_are_the_timelines_to_the_bit(case: Case):
    schedule, times = case
    timeline = simulate_schedule(schedule, replace(times, update=()))
    for stage, clock in enumerate(stage_clocks(schedule, times)):
        events = timeline.on(stage_track(stage))
        assert clock.durations == tuple(event.duration for event in events)
        assert clock.end == events[-1].end


def test_clocks_of_stages_that_deadlock_are_refused():
    rows = ("F0 B0 F1 B1", "F0 F1 B0 B1")
    order = tuple(tuple(map(Task.parse, row.split())) for row in rows)
    times = StepTimes([1.0, 1.0], [1.0, 1.0], [1.0], [1.0])
    with pytest.raises(InputError, match=r"stage 0 waits at B0 .* stage 1 waits at F1"):
        stage_clocks(Schedule("explicit", order), times)


@given(cases())
def test_a_track_does_one_thing_at_a_time(case: Case):
    schedule, times = case
    timeline = simulate_schedule(schedule, times)
    for track in timeline.tracks:
        for one, other in itertools.pairwise(timeline.on(track)):
            assert one.end <= other.start
    for stage, tasks in enumerate(schedule.order):
        ran = [e.name for e in timeline.events if e.track == stage_track(stage)]
        assert ran[: len(tasks)] == [str(task) for task in tasks]


@given(cases())
def test_live_microbatches_stay_within_the_bound(case: Case):
    schedule, times = case
    timeline = simulate_schedule(schedule, times)
    for stage in range(schedule.num_stages):
        held = [number for _, number in live_over_time(timeline, stage_track(stage))]
        assert max(held) <= schedule.live_bound(stage)
        assert held[-1] == 0


@given(cases())
def test_bubbles_account_for_the_whole_makespan(case: Case):
    schedule, times = case
    timeline = simulate_schedule(schedule, times)
    for stage, track in enumerate(timeline.stage_tracks):
        seconds = task_seconds(schedule.order[stage], times, stage)
        work = sum(seconds) + times.update[stage]
        assert timeline.busy(track) == pytest.approx(work)
        idle = timeline.makespan - timeline.busy(track)
        assert timeline.bubble(track) * timeline.makespan == pytest.approx(idle, abs=1e-9)
        assert 0 <= timeline.bubble(track) < 1


@given(
    num_stages=st.integers(2, 8),
    forward=st.floats(0.1, 5),
    backward=st.floats(0.1, 5),
    ratios=st.lists(st.floats(0.001, 1), min_size=7, max_size=7),
    more=st.integers(1, 20),
)
def test_balanced_h_1f1b_has_no_bubbles_in_its_steady_phase(
    num_stages: int, forward: float, backward: float, ratios: list[float], more: int
):
    compute = [forward + backward] * num_stages
    links = [ratio * compute[0] for ratio in ratios[: num_stages - 1]]
    times = StepTimes([forward] * num_stages, [backward] * num_stages, links, links)

    def makespan(num_microbatches: int) -> float:
        schedule = h_1f1b(num_stages, num_microbatches, compute, links, tolerance=0.0)
        return simulate_schedule(schedule, times).makespan

    enough = 4 * 3 * num_stages
    latency = harp_latency(compute, links, enough)
    assert makespan(enough + more) - makespan(enough) == pytest.approx(more * compute[0])
    assert latency * (1 - 1e-9) <= makespan(enough) <= latency + num_stages * compute[0]


@given(
    num_stages=st.integers(1, 10),
    num_microbatches=st.integers(1, 64),
    forward=st.floats(0.1, 5),
    backward=st.floats(0.1, 5),
    ratio=st.sampled_from([0.2, 0.5, 0.65, 1.0]),
)
def test_equal_stages_and_links_meet_harp_equation_12_and_the_lower_bound(
    num_stages: int, num_microbatches: int, forward: float, backward: float, ratio: float
):
    compute = [forward + backward] * num_stages
    links = [ratio * compute[0]] * (num_stages - 1)
    schedule = h_1f1b(num_stages, num_microbatches, compute, links)
    times = StepTimes([forward] * num_stages, [backward] * num_stages, links, links)
    makespan = simulate_schedule(schedule, times).makespan
    assert makespan == pytest.approx(harp_latency(compute, links, num_microbatches))
    assert makespan == pytest.approx(lower_bound(num_microbatches, times))


@pytest.mark.parametrize(
    ("name", "over_h_1f1b"),
    [("gpipe", 1.459 / 1.208), ("1f1b", 1.963 / 1.208), ("eager_1f1b", 1.303 / 1.208)],
)
def test_four_equal_stages_over_slow_links_rank_as_measured_before(name: str, over_h_1f1b: float):
    times = StepTimes([1 / 3] * 4, [2 / 3] * 4, [0.65] * 3, [0.65] * 3)

    def makespan(name: str) -> float:
        return simulate_schedule(make_schedule(name, 4, 16, times), times).makespan

    assert makespan(name) / makespan("h_1f1b") == pytest.approx(over_h_1f1b, abs=2e-3)


def test_gpipe_on_equal_stages_has_the_textbooks_bubble():
    num_stages, num_microbatches = 4, 12
    times = StepTimes([1.0] * 4, [2.0] * 4, [0.0] * 3, [0.0] * 3)
    timeline = simulate_schedule(gpipe(num_stages, num_microbatches), times)
    assert timeline.makespan == 3 * (num_microbatches + num_stages - 1)
    assert timeline.bubble_fraction == pytest.approx(3 / (num_microbatches + 3))
    assert timeline.tracks == tuple(stage_track(stage) for stage in range(4))


def test_update_comes_last_on_its_stage_and_does_not_wait_for_others():
    times = StepTimes([1.0, 1.0], [1.0, 1.0], [0.5], [0.5], [0.25, 0.75])
    timeline = simulate_schedule(gpipe(2, 1), times)
    updates = {e.track: (e.start, e.end) for e in timeline.events if e.kind == "update"}
    assert updates == {"stage 0": (5.0, 5.25), "stage 1": (3.5, 4.25)}


def test_split_backward_sends_the_gradient_before_the_weight_gradient():
    order = tuple(tuple(map(Task.parse, row.split())) for row in ("F0 R0 B0 W0", "F0 B0 W0"))
    times = StepTimes(
        forward=[1.0, 1.0],
        backward=[9.0, 9.0],
        sends=[0.5],
        returns=[0.5],
        input_gradient=[1.0, 2.0],
        weight_gradient=[4.0, 3.0],
        recompute=[0.25, 0.125],
    )
    timeline = simulate_schedule(Schedule("explicit", order), times)
    ran = {(e.track, e.name): (e.start, e.end) for e in timeline.events if e.kind != "send"}
    assert ran == {
        ("stage 0", "F0"): (0.0, 1.0),
        ("stage 0", "R0"): (1.0, 1.25),
        ("stage 1", "F0"): (1.5, 2.5),
        ("stage 1", "B0"): (2.5, 4.625),
        ("stage 1", "W0"): (4.625, 7.625),
        ("stage 0", "B0"): (5.125, 6.125),
        ("stage 0", "W0"): (6.125, 10.125),
    }


def test_times_of_other_stages_are_refused():
    with pytest.raises(InputError, match="times are of 1 stages; the schedule has 2"):
        simulate_schedule(one_f_one_b(2, 2), StepTimes([1.0], [1.0], [], []))
