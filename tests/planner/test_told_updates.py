"""An update ends no sooner than all stages have told what they know of the gradients' norm."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from planner.test_plan import plan_of_two_stages, prediction_of_a_stage

from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh
from hetjax.planner import simulate
from hetjax.planner.costs.told_updates import told_latency
from hetjax.planner.plan.prediction import Prediction
from hetjax.planner.predictions.step_prediction import with_schedules


@pytest.mark.parametrize("shared", [0.0, 0.7])
@pytest.mark.parametrize(
    ("updates", "exchanges"),
    [
        ((0.1, 5.0), (0.0, 0.0)),
        ((0.1, 5.0), (0.0, 2.0)),
        ((5.0, 0.1), (3.0, 0.1)),
        ((0, 1), (0, 0)),
    ],
)
def test_the_last_phases_of_updates_begin_when_all_have_told(
    updates: tuple[float, float], exchanges: tuple[float, float], shared: float
):
    plan = plan_of_two_stages()
    stages = tuple(
        replace(
            prediction_of_a_stage(1),
            update_seconds=update,
            exchange_seconds=exchange,
            sharing_seconds=shared,
        )
        for update, exchange in zip(updates, exchanges, strict=True)
    )
    found = with_schedules(replace(plan, prediction=Prediction(1.0, 1.0, stages)))
    timeline = simulate(found)
    assert timeline.makespan == found.predicted.step_time
    ends = [
        max(e.end for e in timeline.events if e.track == f"stage {s}" and e.kind != "update")
        for s in range(2)
    ]
    latency = told_latency(plan.cluster, [stage.submeshes for stage in plan.stages])
    assert latency == plan.cluster.link("sub0", "sub1").latency
    moments = {e.track: (e.start, e.end) for e in timeline.events if e.kind == "update"}
    for s, other in ((0, 1), (1, 0)):
        if not updates[s]:
            continue
        start, end = moments[f"stage {s}"]
        known = ends[other] + exchanges[other] + latency - exchanges[s]
        assert start == pytest.approx(max(ends[s], known))
        assert end - start == pytest.approx(updates[s])


def test_the_latency_is_the_longest_between_two_stages():
    card = DeviceKind("card", {"float32": 1e12}, 10**9, 1e9, source="made up")
    links = [Link(1e9, latency) for latency in (1e-6, 1e-5, 1e-4)]
    parts = tuple(Subcluster(name, card, 2, 2, links[0], links[1]) for name in "ab")
    cluster = Cluster("two", parts, (("a", "b", links[2]),))
    cards = [SubMesh(name, place, (1, 1)) for name in "ab" for place in range(4)]
    for one, other in itertools.combinations(cards, 2):
        expected = cluster.link_between(one, other).latency
        assert told_latency(cluster, [[one], [other]]) == expected
    assert told_latency(cluster, [cards]) == links[2].latency
    assert told_latency(cluster, [[cards[0]]]) == 0.0
