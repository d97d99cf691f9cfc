"""What the ends of a link saw, put together."""

import pytest

from hetjax.runtime.instructions.instruction import Route, RouteKind, Tag
from hetjax.runtime.moves.carriers import CarrierName
from hetjax.runtime.moves.transport import Arrival
from hetjax.runtime.workers.step_report import (
    LinkUse,
    StepReport,
    link_events,
    link_uses,
    member_report,
    stage_report,
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


WIRE, HOST = (CarrierName.WIRE,), (CarrierName.HOST,)


def test_what_carriers_took_is_told_apart():
    first, second = reports()
    first.arrivals = {BACK: Arrival(7.0, 50, WIRE), MESSAGE: Arrival(8.5, 4, WIRE)}
    second.arrivals = {FIRST: Arrival(3.0, 100, HOST), SECOND: Arrival(5.0, 100, WIRE)}
    found = [
        (u.source, u.carriers, u.num_bytes, u.wait_seconds) for u in link_uses([first, second])
    ]
    assert found == [(0, HOST, 100, 2.0), (0, WIRE, 100, 1.0), (1, WIRE, 54, 0.5)]


MOVE = Tag(Route(RouteKind.MOVE, 0, 0), 2, move="forward/1")
SUMS = Tag(Route(RouteKind.MOVE, 0, 0), move="reduce_gradients_0/1")


def members() -> list[StepReport]:
    """The second member computes longer, and the first one waits for it."""
    return [
        StepReport(
            sends={MOVE: 1.0, SUMS: 6.0},
            arrivals={MOVE: Arrival(4.5, 8, WIRE), SUMS: Arrival(7.0, 40, WIRE)},
            waits={MOVE: 3.5, SUMS: 1.0},
        ),
        StepReport(
            sends={MOVE: 4.0, SUMS: 6.5},
            arrivals={MOVE: Arrival(4.25, 16, HOST), SUMS: Arrival(6.75, 0, ())},
            waits={MOVE: 0.25, SUMS: 0.25},
        ),
    ]


def test_a_move_is_under_way_when_the_last_member_has_sent():
    stage = stage_report(members())
    assert stage.sends == {MOVE: 4.0, SUMS: 6.5}
    assert stage.arrivals == {MOVE: Arrival(4.5, 24, HOST + WIRE), SUMS: Arrival(7.0, 40, WIRE)}
    assert [
        (event.track, event.name, event.kind, event.microbatch, event.start, event.end)
        for event in link_events([stage])
    ] == [
        ("link 0->0", "forward/1", "move", 2, 4.0, 4.5),
        ("link 0->0", "reduce_gradients_0/1", "move", None, 6.5, 7.0),
    ]


def test_moves_are_among_the_uses_of_links():
    used = [
        (u.source, u.target, u.carriers, u.num_bytes) for u in link_uses([stage_report(members())])
    ]
    assert used == [(0, 0, HOST + WIRE, 24), (0, 0, WIRE, 40)]


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
