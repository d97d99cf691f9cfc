"""The discrete-event model: causality, exclusive resources, bounds, and Harp's closed form."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.errors import InputError
from hetjax.pipeline.schedule import SCHEDULES, Schedule, gpipe, h_1f1b, make_schedule, one_f_one_b
from hetjax.pipeline.timeline import (
    Event,
    Timeline,
    harp_latency,
    is_link,
    link_track,
    live_over_time,
    lower_bound,
    simulate_schedule,
    stage_track,
)

seconds = st.floats(0.01, 10.0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, dict[str, list[float]]]:
    """A schedule and the times to run it with, lengths fitting."""
    num_stages = draw(st.integers(1, 16))

    def times(length: int, values: st.SearchStrategy[float] = seconds) -> list[float]:
        return draw(st.lists(values, min_size=length, max_size=length))

    forward, backward = times(num_stages), times(num_stages)
    there, back = times(num_stages - 1), times(num_stages - 1)
    schedule = make_schedule(
        draw(st.sampled_from(SCHEDULES)),
        num_stages,
        draw(st.integers(1, 64)),
        compute=[f + b for f, b in zip(forward, backward, strict=True)],
        communication=[max(pair) for pair in zip(there, back, strict=True)],
    )
    return schedule, {
        "forward": forward,
        "backward": backward,
        "communication_forward": there,
        "communication_backward": back,
        "update": times(num_stages, st.just(0.0) | seconds),
    }


@given(cases())
def test_events_respect_every_dependency(case: tuple[Schedule, dict[str, list[float]]]):
    schedule, times = case
    events = {(e.track, e.name): e for e in simulate_schedule(schedule, **times).events}
    for stage, tasks in enumerate(schedule.order):
        for task in tasks:
            event = events[stage_track(stage), str(task)]
            neighbour = stage - 1 if task.kind == "F" else stage + 1
            if 0 <= neighbour < schedule.num_stages:
                sent = events[link_track(neighbour, stage), str(task)]
                produced = events[stage_track(neighbour), str(task)]
                assert produced.end <= sent.start < sent.end <= event.start
            if task.kind == "B":
                assert events[stage_track(stage), f"F{task.microbatch}"].end <= event.start


@given(cases())
def test_a_track_does_one_thing_at_a_time(case: tuple[Schedule, dict[str, list[float]]]):
    schedule, times = case
    timeline = simulate_schedule(schedule, **times)
    for track in timeline.tracks:
        for one, other in itertools.pairwise(timeline.on(track)):
            assert one.end <= other.start
    for stage, tasks in enumerate(schedule.order):
        ran = [e.name for e in timeline.on(stage_track(stage)) if e.kind != "update"]
        assert ran == [str(task) for task in tasks]


@given(cases())
def test_no_schedule_beats_the_lower_bound(case: tuple[Schedule, dict[str, list[float]]]):
    schedule, times = case
    bound = lower_bound(schedule.num_microbatches, **times)
    assert simulate_schedule(schedule, **times).makespan >= bound * (1 - 1e-12)


@given(cases())
def test_live_microbatches_stay_within_the_bound(case: tuple[Schedule, dict[str, list[float]]]):
    schedule, times = case
    timeline = simulate_schedule(schedule, **times)
    for stage in range(schedule.num_stages):
        held = [number for _, number in live_over_time(timeline, stage_track(stage))]
        assert max(held) <= schedule.live_bound(stage)
        assert held[-1] == 0


@given(cases())
def test_bubbles_account_for_the_whole_makespan(case: tuple[Schedule, dict[str, list[float]]]):
    schedule, times = case
    timeline = simulate_schedule(schedule, **times)
    for stage, track in enumerate(timeline.stage_tracks):
        work = schedule.num_microbatches * (times["forward"][stage] + times["backward"][stage])
        assert timeline.busy(track) == pytest.approx(work + times["update"][stage])
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
    communication = [ratio * compute[0] for ratio in ratios[: num_stages - 1]]
    times = ([forward] * num_stages, [backward] * num_stages, communication, communication)

    def makespan(num_microbatches: int) -> float:
        schedule = h_1f1b(num_stages, num_microbatches, compute, communication, tolerance=0.0)
        return simulate_schedule(schedule, *times).makespan

    enough = 4 * 3 * num_stages
    latency = harp_latency(compute, communication, enough)
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
    communication = [ratio * compute[0]] * (num_stages - 1)
    schedule = h_1f1b(num_stages, num_microbatches, compute, communication)
    times = ([forward] * num_stages, [backward] * num_stages, communication, communication)
    makespan = simulate_schedule(schedule, *times).makespan
    assert makespan == pytest.approx(harp_latency(compute, communication, num_microbatches))
    assert makespan == pytest.approx(lower_bound(num_microbatches, *times))


@pytest.mark.parametrize(
    ("name", "over_h_1f1b"),
    [("gpipe", 1.459 / 1.208), ("1f1b", 1.963 / 1.208), ("eager_1f1b", 1.303 / 1.208)],
)
def test_four_equal_stages_over_slow_links_rank_as_measured_before(name: str, over_h_1f1b: float):
    communication = [0.65] * 3

    def makespan(name: str) -> float:
        schedule = make_schedule(name, 4, 16, compute=[1.0] * 4, communication=communication)
        times = [1 / 3] * 4, [2 / 3] * 4, communication, communication
        return simulate_schedule(schedule, *times).makespan

    assert makespan(name) / makespan("h_1f1b") == pytest.approx(over_h_1f1b, abs=2e-3)


def test_gpipe_on_equal_stages_has_the_textbooks_bubble():
    num_stages, num_microbatches = 4, 12
    timeline = simulate_schedule(
        gpipe(num_stages, num_microbatches), [1.0] * 4, [2.0] * 4, [0.0] * 3, [0.0] * 3
    )
    assert timeline.makespan == 3 * (num_microbatches + num_stages - 1)
    assert timeline.bubble_fraction == pytest.approx(3 / (num_microbatches + 3))
    assert timeline.tracks == tuple(stage_track(stage) for stage in range(4))


def test_update_comes_last_on_its_stage_and_does_not_wait_for_others():
    timeline = simulate_schedule(gpipe(2, 1), [1.0, 1.0], [1.0, 1.0], [0.5], [0.5], [0.25, 0.75])
    updates = {e.track: (e.start, e.end) for e in timeline.events if e.kind == "update"}
    assert updates == {"stage 0": (5.0, 5.25), "stage 1": (3.5, 4.25)}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("forward", [1.0], "forward has 1 times; 2 stages need 2"),
        ("communication_backward", [], "communication_backward has 0 times; 2 stages need 1"),
        ("update", [1.0], "update has 1 times; 2 stages need 2"),
        ("backward", [1.0, -1.0], "times must be finite and not negative"),
        ("backward", [1.0, float("nan")], "times must be finite and not negative"),
    ],
)
def test_times_that_do_not_fit_are_refused(field: str, value: list[float], message: str):
    times = {
        "forward": [1.0] * 2,
        "backward": [1.0] * 2,
        "communication_forward": [1.0],
        "communication_backward": [1.0],
    }
    with pytest.raises(InputError, match=message):
        simulate_schedule(one_f_one_b(2, 2), **(times | {field: value}))


def test_lower_bound_needs_a_microbatch():
    with pytest.raises(InputError, match="num_microbatches is 0"):
        lower_bound(0, [1.0], [1.0], [], [])


def test_measured_events_may_overlap_and_start_anywhere():
    timeline = Timeline(
        (
            Event("stage 0", "F1", "F", 1, 101.0, 103.0),
            Event("stage 0", "F0", "F", 0, 100.0, 102.0),
            Event("stage 0", "B0", "B", 0, 104.0, 105.0),
        )
    )
    assert timeline.makespan == 5.0
    assert timeline.busy("stage 0") == 4.0
    assert timeline.from_zero().on("stage 0")[0].start == 0.0
    assert live_over_time(timeline, "stage 0") == ((100.0, 1), (101.0, 2), (105.0, 1))


def test_a_timeline_without_events_is_harmless():
    empty = Timeline(())
    assert (empty.makespan, empty.bubble_fraction, empty.tracks) == (0.0, 0.0, ())


def test_tracks_are_in_the_order_of_the_pipeline():
    names = ["stage 10", "link 1->0", "stage 2", "link 0->1", "stage 0", "stage 1"]
    timeline = Timeline(tuple(Event(name, "F0", "F", 0, 0.0, 1.0) for name in names))
    expected = ("stage 0", "link 0->1", "link 1->0", "stage 1", "stage 2", "stage 10")
    assert timeline.tracks == expected
    assert [is_link(track) for track in expected] == [False, True, True, False, False, False]


def test_chrome_trace_names_processes_and_sorts_boxes():
    timeline = simulate_schedule(one_f_one_b(2, 2), [0.001] * 2, [0.002] * 2, [0.001], [0.001])
    trace = json.loads(json.dumps(timeline.to_chrome_trace()))
    entries = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in entries if e["name"] == "process_name"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"
    }
    boxes = [e for e in entries if e["ph"] == "X"]
    assert processes == {0: "stage 0", 1: "stage 1"}
    assert set(threads.items()) == {
        ((0, 0), "compute"),
        ((0, 1), "link 0->1"),
        ((1, 2), "link 1->0"),
        ((1, 3), "compute"),
    }
    assert len(boxes) == len(timeline.events)
    assert [b["ts"] for b in boxes] == sorted(b["ts"] for b in boxes)
    assert boxes[0]["ts"] == 0
    assert sum(b["dur"] for b in boxes if b["tid"] == 0) == pytest.approx(6000)


def test_chrome_trace_keeps_a_link_whose_stage_is_not_there():
    trace = Timeline((Event("link 0->1", "F0", "send", 0, 1.0, 2.0, num_bytes=8),))
    box = trace.to_chrome_trace()["traceEvents"][-1]
    assert (box["ts"], box["dur"]) == (0.0, 1e6)
    assert box["args"] == {"microbatch": 0, "num_bytes": 8}
