"""Overlap: what a receiver computes through, in the steady phase alone."""

import pytest

from hetjax.pipeline.schedules.warm_up import gpipe, h_1f1b, one_f_one_b
from hetjax.pipeline.timeline.overlap import overlap, steady_phase
from hetjax.pipeline.timeline.simulate import simulate_schedule
from hetjax.pipeline.timeline.timeline import Event, Timeline
from hetjax.pipeline.timeline.times import StepTimes

TIMES = StepTimes([1.0] * 3, [1.0] * 3, [1.8, 0.1], [1.8, 0.1])


def test_h_1f1b_hides_the_links_that_1f1b_does_not():
    timeline = simulate_schedule(h_1f1b(3, 24, TIMES.compute, TIMES.communication), TIMES)
    shares = overlap(timeline)
    assert set(shares) == {"link 0->1", "link 1->0", "link 1->2", "link 2->1"}
    assert shares["link 0->1"] > 0.9
    assert shares["link 1->0"] > 0.9
    assert overlap(simulate_schedule(one_f_one_b(3, 24), TIMES))["link 0->1"] < 0.7


def test_gpipe_has_no_steady_phase():
    timeline = simulate_schedule(gpipe(3, 24), TIMES)
    assert overlap(timeline) == {}
    assert steady_phase(timeline, "link 0->1") is None
    assert steady_phase(timeline, "stage 0") is None


def test_waits_for_the_link_count_and_overlapping_events_once():
    events = [
        Event("stage 0", "F0", "F", 0, 0.0, 1.0),
        Event("stage 0", "B0", "B", 0, 2.0, 3.0),
        Event("stage 0", "F1", "F", 1, 12.0, 13.0),
        Event("stage 1", "F0", "F", 0, 1.0, 1.5),
        Event("stage 1", "B0", "B", 0, 1.5, 2.0),
        Event("stage 1", "wait", "wait", None, 3.0, 5.0),
        Event("stage 1", "W0", "W", 0, 5.0, 7.0),
        Event("stage 1", "F1", "F", 1, 8.5, 9.0),
        Event("stage 1", "B1", "B", 1, 14.5, 15.0),
        Event("stage 1", "F2", "F", 2, 15.0, 15.5),
        Event("link 0->1", "F1", "send", 1, 1.0, 8.0),
        Event("link 0->1", "F2", "send", 2, 4.0, 10.0),
    ]
    # Busy from 2 to 10; F1 could have begun at 7 and did not arrive before 8. Before 5 no task
    # waited for the link, nor from 8 to 8.5.
    assert overlap(Timeline(tuple(events))) == {"link 0->1": pytest.approx(7 / 8)}
