"""A predicted timeline with a track for each member of a stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetjax.pipeline.timeline.timeline import Event, Timeline, stage_track
from hetjax.planner.plan.prediction import MemberPrediction, StagePrediction

_BACKWARD = ("R", "B", "W")


def by_members(timeline: Timeline, stages: Sequence[StagePrediction]) -> Timeline:
    """A timeline in which the members of stages have tracks of their own.

    Members begin a task together; each computes what it has of it, and then waits for the others.

    Args:
        timeline: of stages, each of which takes what its slowest member takes.
        stages: what is predicted of each, and of its members.

    Returns:
        The timeline, as long as before.
    """
    members = {stage_track(s): (s, stage) for s, stage in enumerate(stages) if stage.members}
    return Timeline(
        tuple(
            each
            for event in timeline.events
            for each in (
                _of_members(event, *members[event.track]) if event.track in members else (event,)
            )
        )
    )


def _of_members(event: Event, stage: int, predicted: StagePrediction) -> Iterator[Event]:
    for place, member in enumerate(predicted.members):
        end = event.start + event.duration * _part(event.kind, member, predicted)
        yield replace(event, track=stage_track(stage, place), end=end)


def _part(kind: str, member: MemberPrediction, stage: StagePrediction) -> float:
    """How much of a task's time a member computes."""
    if kind == "F":
        mine, all_of_it = member.forward_seconds, stage.forward_seconds
    elif kind in _BACKWARD:
        mine = member.backward_seconds
        all_of_it = stage.backward_seconds + stage.recompute_seconds
    else:
        return 1.0
    return min(mine / all_of_it, 1.0) if all_of_it else 1.0
