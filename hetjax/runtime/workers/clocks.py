"""The clocks of hosts: how far each is from ours, and what workers saw, told by ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hetjax.mesh.host_cpu import machine_name
from hetjax.runtime.workers.step_report import StepReport

ROUND_TRIPS = 8
"""How many times a clock is asked; the quickest answer counts."""


@dataclass(frozen=True)
class ClockReading:
    """A clock that was read.

    Args:
        machine: tells machines apart; processes on one share its clock.
        seconds: its `time.time`.
    """

    machine: str
    seconds: float


@dataclass(frozen=True)
class RoundTrip:
    """A question for the time and its answer; all in seconds.

    Args:
        asked: our clock when we asked.
        answered: the other clock when it answered.
        heard: our clock when the answer was here.
    """

    asked: float
    answered: float
    heard: float

    @property
    def duration(self) -> float:
        """How long the answer took."""
        return self.heard - self.asked

    @property
    def offset(self) -> float:
        """How far the other clock is ahead, if question and answer took equally long."""
        return self.answered - (self.asked + self.heard) / 2


def read_clock() -> ClockReading:
    """This process's clock.

    Example:
        >>> read_clock().machine == read_clock().machine
        True
    """
    return ClockReading(machine_name(), time.time())


def clock_offset(round_trips: Iterable[RoundTrip]) -> float:
    """How far another clock is ahead of ours, by the quickest of several round trips.

    It is wrong by half of that round trip at most, whichever way took longer.

    Args:
        round_trips: one or more.

    Returns:
        Seconds; negative where the other clock is behind.

    Source: RFC 5905 (NTP) sections 8 and 10: the offset, and the sample of least delay.

    Example:
        >>> clock_offset([RoundTrip(10.0, 15.5, 11.0), RoundTrip(20.0, 25.9, 24.0)])
        5.0
    """
    return min(round_trips, key=lambda each: each.duration).offset


def measure_offset(ask: Callable[[], ClockReading]) -> float:
    """How far another process's clock is ahead of ours.

    Args:
        ask: reads the other clock, and takes as little time as it can.

    Returns:
        Seconds; 0 where the other process is on this machine, which has one clock.

    Example:
        >>> measure_offset(read_clock)
        0.0
    """
    here, round_trips = machine_name(), []
    for _ in range(ROUND_TRIPS):
        asked = time.time()
        reading = ask()
        round_trips.append(RoundTrip(asked, reading.seconds, time.time()))
        if reading.machine == here:
            return 0.0
    return clock_offset(round_trips)


def by_our_clock(report: StepReport, offset: float) -> StepReport:
    """A worker's report with all moments told by our clock.

    Args:
        report: what the worker saw.
        offset: how far its clock is ahead, in seconds.

    Returns:
        The report; durations are what they were.

    Example:
        >>> from hetjax.pipeline.timeline.timeline import Event
        >>> report = StepReport(events=[Event("stage 0", "F0", "F", 0, start=7.0, end=8.0)])
        >>> by_our_clock(report, offset=5.0).events[0].start
        2.0
    """
    return replace(
        report,
        sends={tag: at - offset for tag, at in report.sends.items()},
        arrivals={
            tag: arrival._replace(at=arrival.at - offset)
            for tag, arrival in report.arrivals.items()
        },
        events=[
            replace(event, start=event.start - offset, end=event.end - offset)
            for event in report.events
        ],
    )
