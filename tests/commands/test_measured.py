"""Predicted beside measured, from timelines that are made here."""

from dataclasses import replace

import pytest

from hetjax.commands.measured import TimedStep, carrier_rows, link_rows, prediction_rows
from hetjax.mesh import Cluster, Link, Subcluster, SubMesh, kind
from hetjax.pipeline.schedules.warm_up import from_warm_up_counts
from hetjax.pipeline.timeline.timeline import Event, Timeline
from hetjax.planner import (
    Member,
    PipelinePlan,
    Plan,
    Prediction,
    Shares,
    StagePlan,
    StagePrediction,
)
from hetjax.report import LinkRow, PredictionRow
from hetjax.runtime import CarrierCurves, LinkUse
from hetjax.runtime.moves.carrier_curves import LinkEnd, MeasuredLink
from hetjax.runtime.moves.carriers import CarrierName, Curve

FAST = Link(1e9, 1e-6)


def two_stages() -> Plan:
    cards = Subcluster("cards", kind("T4"), 1, 2, FAST, FAST)
    first, second = (
        StagePrediction(1.0, 2.0, 0.0, 1.0, 1.0, 0.5, send, back, 1, 1, 1, 0, 1, 1, 1, 0.1)
        for send, back in ((0.25, 0.0), (0.0, 0.125))
    )
    stages = tuple(StagePlan.on((s, s + 1), SubMesh("cards", s, (1, 1)), (1, 1)) for s in range(2))
    pipeline = PipelinePlan(stages, 2, 1, from_warm_up_counts([2, 1], 2, "1f1b"))
    prediction = Prediction(9.0, 8.0, (first, second))
    return Plan("m", (0, 1, 2), Cluster("c", (cards,)), (pipeline,), prediction=prediction)


def test_every_figure_stands_beside_its_prediction() -> None:
    events = (
        Event("stage 0", "F0", "F", 0, 0.0, 1.0),
        Event("stage 0", "F1", "F", 1, 1.0, 4.0),
        Event("link 0->1", "F0", "send", 0, 1.0, 2.0),
        Event("stage 1", "F0", "F", 0, 2.0, 3.5),
        Event("stage 1", "B0", "B", 0, 3.5, 6.0),
        Event("link 1->0", "B0", "send", 0, 6.0, 6.5),
        Event("stage 1", "update", "update", None, 8.0, 8.5),
        Event("stage 1", "update", "update", None, 9.0, 9.5),
    )
    rows = prediction_rows(two_stages(), [TimedStep(Timeline(events))], step_time=10.0)
    assert [(row.name, row.predicted, row.measured) for row in rows] == [
        ("step time", 9.0, 10.0),
        ("stage 0 forward", 1.0, 2.0),
        ("activations 0 to 1", 0.25, 1.0),
        ("stage 1 forward", 1.0, 1.5),
        ("stage 1 backward", 2.0, 2.5),
        ("stage 1 update", 0.5, 1.0),
        ("gradients 1 to 0", 0.125, 0.5),
    ]


def test_a_split_backward_pass_is_the_sum_of_its_parts() -> None:
    events = (
        Event("stage 0", "R0", "R", 0, 0.0, 0.5),
        Event("stage 0", "B0", "B", 0, 1.0, 2.0),
        Event("stage 0", "B1", "B", 1, 2.0, 4.0),
        Event("stage 0", "W0", "W", 0, 4.0, 4.5),
    )
    rows = prediction_rows(two_stages(), [TimedStep(Timeline(events))], step_time=5.0)
    assert {row.name: row.measured for row in rows}["stage 0 backward"] == 2.0


def test_a_stage_takes_what_its_slowest_member_computes_in_all_segments() -> None:
    events = (
        Event("stage 0", "F0", "F", 0, 0.0, 1.0),
        Event("stage 0", "F0", "F", 0, 2.0, 2.5),
        Event("stage 0, member 1", "F0", "F", 0, 0.0, 1.5),
        Event("stage 0, member 1", "F0", "F", 0, 2.0, 2.25),
        Event("link 0->0", "forward/1", "move", 0, 1.5, 2.0),
        Event("stage 0", "B0", "B", 0, 3.0, 3.5),
        Event("stage 0", "B0", "B", 0, 4.0, 4.5),
        Event("stage 0, member 1", "update", "update", None, 5.0, 5.75),
    )
    rows = prediction_rows(two_stages(), [TimedStep(Timeline(events))], step_time=6.0)
    assert {row.name: row.measured for row in rows[1:]} == {
        "stage 0 forward": 1.75,
        "stage 0 backward": 1.0,
        "stage 0 update": 0.75,
    }


def test_figures_are_medians_over_timed_steps_and_waits_for_a_link_are_not_its_own() -> None:
    def step(seconds: float, exchange: float) -> TimedStep:
        sends = (
            Event("link 0->1", "F0", "send", 0, 0.0, seconds),
            Event("link 0->1", "F1", "send", 1, 0.0, 2 * seconds),
        )
        return TimedStep(Timeline(sends), exchange)

    plan = two_stages()
    assert plan.prediction is not None
    first, *others = plan.prediction.stages
    stages = (replace(first, sharing_seconds=0.5), *others)
    plan = replace(plan, prediction=replace(plan.prediction, stages=stages))
    steps = [step(0.25, 0.5), step(0.3, 0.6), step(9.0, 9.0)]
    rows = {row.name: row for row in prediction_rows(plan, steps, step_time=5.0)}
    assert rows["activations 0 to 1"].measured == pytest.approx(0.3)
    assert rows["exchange between stages"] == PredictionRow("exchange between stages", 0.5, 0.6)


def test_a_link_stands_beside_what_the_cluster_says_of_it() -> None:
    use = LinkUse(0, 1, 8_000_000, 16, 0.25, 0.5, 2.0, (CarrierName.WIRE,))
    (row,) = link_rows(two_stages(), [use])
    assert row == LinkRow("stage 0 to 1", 8_000_000, 16, 16e6, FAST.bandwidth, 0.25, 0.25, "wire")


def test_links_among_members_are_those_of_their_submeshes() -> None:
    slow = Link(1e6, 1e-6)
    near, far = (Subcluster(name, kind("T4"), 1, 2, FAST, FAST) for name in ("near", "far"))
    cluster = Cluster("c", (near, far), (("near", "far", slow),))
    members = (
        Member(SubMesh("near", 0, (1, 1)), (1, 1)),
        Member(SubMesh("far", 0, (1, 1)), (1, 1)),
    )
    union = StagePlan((0, 1), members, shares=Shares(batch=(1, 1)))
    last = StagePlan.on((1, 2), SubMesh("far", 1, (1, 1)), (1, 1))
    pipeline = PipelinePlan((union, last), 2, 2, from_warm_up_counts([2, 1], 2, "1f1b"))
    plan = Plan("m", (0, 1, 2), cluster, (pipeline,))
    uses = [LinkUse(0, to, 8, 1, wait_seconds=0, busy_seconds=1, step_seconds=2) for to in (0, 1)]
    rows = link_rows(plan, uses)
    assert [row.bandwidth for row in rows] == [slow.bandwidth] * 2
    assert [row.name for row in rows] == ["within stage 0", "stage 0 to 1"]
    both = (CarrierName.HOST, CarrierName.WIRE)
    mixed = link_rows(plan, [replace(uses[0], carriers=both), replace(uses[1], carriers=())])
    assert [row.carrier for row in mixed] == ["host and wire", ""]
    assert prediction_rows(plan, [], 5.0) == [PredictionRow("step time", 0.0, 5.0)]


def test_carriers_stand_with_the_messages_that_they_take() -> None:
    wire, host = Curve((1, 1000), (1e-6, 1e-3)), Curve((1, 1000), (4e-4, 5e-4))
    near, far = LinkEnd("near", "10.0.0.1"), LinkEnd("far", "10.0.0.1")
    slow = Curve((1, 1000), (1e-2, 1e-1))
    faster = {CarrierName.WIRE: wire, CarrierName.HOST: slow}
    links = (
        MeasuredLink((near, far), {CarrierName.WIRE: wire, CarrierName.HOST: host}),
        MeasuredLink((near, near), faster),
    )
    found = carrier_rows(CarrierCurves(links))
    assert [(row.link, row.carrier) for row in found] == [
        ("near and far", "wire"),
        ("near and far", "host"),
        ("near", "wire"),
        ("near", "host"),
    ]
    assert found[0].seconds == {1: 1e-6, 1000: 1e-3}
    ((first, end),), ((start, last),) = (row.sizes for row in found[:2])
    assert (first, last) == (0, None)
    assert end == start
    assert end is not None
    assert wire.at(end) == pytest.approx(host.at(end))
    assert [row.sizes for row in found[2:]] == [[(0, None)], []]
    elsewhere = MeasuredLink((near, LinkEnd("far", "10.0.0.2")), faster)
    assert (
        carrier_rows(CarrierCurves((elsewhere,)))[0].link == "near at 10.0.0.1 and far at 10.0.0.2"
    )
