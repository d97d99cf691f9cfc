"""Timelines as data: predicted or measured, counted, and written as a trace."""

import json

import pytest

from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.timeline.overlap import overlap
from hetjax.pipeline.timeline.simulate import simulate_schedule
from hetjax.pipeline.timeline.timeline import Event, Timeline, is_link, live_over_time
from hetjax.pipeline.timeline.times import StepTimes


def test_a_split_microbatch_is_live_until_its_weight_gradient():
    events = [
        Event("stage 0", "F0", "F", 0, 0.0, 1.0),
        Event("stage 0", "B0", "B", 0, 1.0, 2.0),
        Event("stage 0", "W0", "W", 0, 3.0, 4.0),
        Event("stage 0", "F1", "F", 1, 4.0, 5.0),
        Event("stage 0", "R1", "R", 1, 5.0, 6.0),
        Event("stage 0", "B1", "B", 1, 6.0, 7.0),
    ]
    held = live_over_time(Timeline(tuple(events)), "stage 0")
    # W0 ends as F1 starts: one microbatch all the while.
    assert held == ((0.0, 1), (7.0, 0))


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


def test_members_have_tracks_of_their_own_above_the_links_of_their_stage():
    names = ["stage 1", "link 0->0", "stage 0, member 10", "stage 0, member 2", "stage 0", "x 3"]
    timeline = Timeline(tuple(Event(name, "F0", "F", 0, 0.0, 1.0) for name in names))
    members = ("stage 0", "stage 0, member 2", "stage 0, member 10")
    assert timeline.tracks == (*members, "link 0->0", "stage 1", "x 3")
    assert timeline.member_tracks(0) == members
    assert timeline.member_tracks(1) == ("stage 1",)
    shifted = timeline.on("stage 0, member 2") + timeline.on("link 0->0")
    assert Timeline(shifted).from_stage(2).tracks == ("stage 2, member 2", "link 2->2")


def test_chrome_trace_has_a_process_for_each_member():
    names = ["stage 0", "stage 0, member 1", "link 0->0"]
    trace = Timeline(tuple(Event(name, "F0", "F", 0, 0.0, 1.0) for name in names))
    entries = trace.to_chrome_trace()["traceEvents"]
    processes = [e["args"]["name"] for e in entries if e["name"] == "process_name"]
    threads = [(e["pid"], e["args"]["name"]) for e in entries if e["name"] == "thread_name"]
    assert processes == ["stage 0", "stage 0, member 1"]
    assert threads == [(0, "compute"), (1, "compute"), (0, "link 0->0")]


def test_what_members_give_each_other_is_no_link_that_computation_hides():
    schedule = one_f_one_b(2, 4)
    times = StepTimes([1.0] * 2, [1.0] * 2, [0.5], [0.5])
    timeline = simulate_schedule(schedule, times)
    moves = tuple(Event("link 0->0", "forward/1", "move", m, m, m + 0.5) for m in range(6))
    assert overlap(Timeline((*timeline.events, *moves))) == overlap(timeline)


def test_chrome_trace_names_processes_and_sorts_boxes():
    timeline = simulate_schedule(
        one_f_one_b(2, 2), StepTimes([0.001] * 2, [0.002] * 2, [0.001], [0.001])
    )
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
