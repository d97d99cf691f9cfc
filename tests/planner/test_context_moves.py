"""What goes on inside stages whose members share the context: all of it, as long as predicted."""

from typing import Any

import pytest
from context_jobs import context_plan, problem_of, split_of

from hetjax.pipeline.timeline.timeline import is_link
from hetjax.planner import predict
from hetjax.planner.predictions.context_moves import context_moves

RINGS = split_of(((9, (0, 6)),), ((4, (0, 6)),), ((7, (0, 6)),))
EXCHANGE = split_of(((17, (2, 6)), (3, (0, 2))))


@pytest.mark.parametrize("again", [{}, {"recompute": True}], ids=["kept", "recomputed"])
def test_each_member_computes_and_sends_as_long_as_a_microbatch_takes(again: dict[str, Any]):
    plan = context_plan(RINGS, EXCHANGE, **again)
    problem = problem_of(plan)
    predicted = predict(plan, problem).predicted.stages
    found = context_moves(plan, problem)
    assert sorted(found) == [0, 1]
    for stage, timeline in found.items():
        members = predicted[stage].members
        tracks = [track for track in timeline.tracks if not is_link(track)]
        assert len(tracks) == len(members)
        for track, member in zip(tracks, members, strict=True):
            busy = sum(each.duration for each in timeline.events if each.track == track)
            assert busy == pytest.approx(
                member.forward_seconds + member.backward_seconds, rel=1e-3, abs=1e-4
            )
        senders = {each.track for each in timeline.events if is_link(each.track)}
        assert len(senders) == len(members)
        passes = predicted[stage].forward_seconds + predicted[stage].backward_seconds
        assert timeline.makespan == pytest.approx(
            passes + predicted[stage].recompute_seconds, rel=1e-2, abs=2e-4
        )


def test_of_other_plans_there_is_nothing_to_see():
    plan = context_plan(split_of(((20, (0, 6)),)))
    assert context_moves(plan, None) == {}  # pyright: ignore[reportArgumentType]
