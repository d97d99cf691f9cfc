"""Offsets are as good as the quickest round trip, and reports are told by one clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.pipeline.timeline.timeline import Event
from hetjax.runtime.instructions.instruction import Route, RouteKind, Tag
from hetjax.runtime.moves.transport import Arrival
from hetjax.runtime.workers.clocks import (
    ROUND_TRIPS,
    ClockReading,
    RoundTrip,
    by_our_clock,
    clock_offset,
    measure_offset,
    read_clock,
)
from hetjax.runtime.workers.step_report import StepReport, link_events

delays = st.floats(1e-4, 0.1)


@given(st.floats(-100, 100), st.lists(st.tuples(delays, delays), min_size=1, max_size=9))
def test_the_error_is_half_the_quickest_round_trip_at_most(
    offset: float, ways: list[tuple[float, float]]
):
    round_trips = [
        RoundTrip(asked=i, answered=i + there + offset, heard=i + there + back)
        for i, (there, back) in enumerate(ways)
    ]
    quickest = min(there + back for there, back in ways)
    assert abs(clock_offset(round_trips) - offset) <= quickest / 2 + 1e-9


def test_processes_of_one_machine_share_its_clock():
    asked = []
    assert measure_offset(lambda: asked.append(1) or read_clock()) == 0.0
    assert len(asked) == 1


def test_another_machine_is_asked_several_times():
    asked = []

    def ask() -> ClockReading:
        asked.append(1)
        return ClockReading("another", read_clock().seconds + 50.0)

    assert measure_offset(ask) == pytest.approx(50.0, abs=1.0)
    assert len(asked) == ROUND_TRIPS


def test_transfers_between_hosts_take_what_they_took():
    tag = Tag(Route(RouteKind.VALUE, 0, 1), 3)
    here = StepReport(sends={tag: 10.0}, events=[Event("stage 0", "F3", "F", 3, 9.0, 10.0)])
    there = StepReport(arrivals={tag: Arrival(15.5, 64)}, seconds=2.0)
    (event,) = link_events([here, by_our_clock(there, offset=5.0)])
    assert (event.start, event.end, event.num_bytes) == (10.0, 10.5, 64)
    moved = by_our_clock(here, offset=-1.0)
    assert (moved.events[0].start, moved.events[0].end) == (10.0, 11.0)
    assert moved.sends == {tag: 11.0}
    assert by_our_clock(there, 5.0).seconds == 2.0
