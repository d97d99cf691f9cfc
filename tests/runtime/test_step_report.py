"""What the ends of a link saw, put together."""

import pytest

from hetjax.runtime.instructions.instruction import Route, RouteKind, Tag
from hetjax.runtime.moves.transport import Arrival
from hetjax.runtime.workers.step_report import (
    LinkUse,
    StepReport,
    link_events,
    link_uses,
    member_report,
)

FIRST, SECOND = (Tag(Route(RouteKind.VALUE, 0, 1), microbatch) for microbatch in range(2))
BACK = Tag(Route(RouteKind.COTANGENT, 1, 0), 0)
MESSAGE = Tag(Route(RouteKind.MESSAGE, 1, 0), phase=0)


def reports() -> list[StepReport]:
    """Two stages; the second transfer waits for the first one on the link."""
    return [
        StepReport(
            seconds=9.0,
            sends={FIRST: 1.0, SECOND: 2.0},
            arrivals={BACK: Arrival(7.0, 50), MESSAGE: Arrival(8.5, 4)},
            waits={BACK: 0.5, MESSAGE: 0.0},
        ),
        StepReport(
            seconds=10.0,
            sends={BACK: 5.0, MESSAGE: 8.0},
            arrivals={FIRST: Arrival(3.0, 100), SECOND: Arrival(5.0, 100)},
            waits={FIRST: 2.0, SECOND: 1.0},
        ),
    ]


def test_a_link_is_in_use_while_anything_is_under_way():
    assert link_uses(reports()) == [
        LinkUse(0, 1, 200, 2, wait_seconds=3.0, busy_seconds=4.0, step_seconds=10.0),
        LinkUse(1, 0, 54, 2, wait_seconds=0.5, busy_seconds=2.5, step_seconds=10.0),
    ]
    there, _ = link_uses(reports())
    assert (there.rate, there.busy) == (50.0, 0.4)


def test_only_transfers_of_microbatches_are_drawn():
    assert [(event.track, event.name) for event in link_events(reports())] == [
        ("link 0->1", "F0"),
        ("link 0->1", "F1"),
        ("link 1->0", "B0"),
    ]


def test_a_transfer_that_takes_no_time_has_no_rate():
    assert LinkUse(0, 1, 4, 1, 0.0, busy_seconds=0.0, step_seconds=0.0).rate == 0.0


def test_a_stage_receives_when_its_last_host_does():
    hosts = [
        StepReport(
            loss=1.5,
            sends={BACK: 2.0 + host},
            arrivals={FIRST: Arrival(5.0 + host, 64)},
            waits={FIRST: 0.25 * host},
        )
        for host in range(2)
    ]
    stage = member_report(hosts)
    assert stage.loss == 1.5
    assert stage.sends == {BACK: 2.0}
    assert stage.arrivals == {FIRST: Arrival(6.0, 128)}
    assert stage.wait_seconds == pytest.approx(0.25)
