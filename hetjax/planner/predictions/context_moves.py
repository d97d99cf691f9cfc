"""What members that share the context do for one microbatch: who computes, who sends to whom."""

from __future__ import annotations

from collections.abc import Iterator

from hetjax.pipeline.timeline.timeline import Event, Timeline, link_track, stage_track
from hetjax.planner.costs.context_cost import TaskCosts, task_costs
from hetjax.planner.plan.plan import Plan
from hetjax.planner.predictions.stage_prediction import pipeline_works, stage_run
from hetjax.planner.problem.problem import PlanningProblem

TASKS = ("F", "R", "B")
"""The tasks of a microbatch: its forward pass, what is made again, its backward pass."""


def context_moves(plan: Plan, problem: PlanningProblem) -> dict[int, Timeline]:
    """Inside the stages whose members share the context, one microbatch by itself, as predicted.

    Args:
        plan: the plan; all microbatches are of one size.
        problem: the problem that it solves.

    Returns:
        By the stage's number: the forward pass and, when all are done, the backward one. Members
        have their usual tracks, and one each for what they send, to several at a time where links
        bear it.
    """
    found: dict[int, Timeline] = {}
    for first, pipeline in plan.numbered_pipelines():
        shared = [i for i, stage in enumerate(pipeline.stages) if stage.members_share_context]
        works = pipeline_works(plan, pipeline, problem) if shared else ()
        for index in shared:
            after = works[index + 1] if index + 1 < len(works) else None
            run = stage_run(plan, pipeline.stages[index], problem, works[index], after)
            costs = task_costs(plan, pipeline, index, problem, after, run)
            found[first + index] = Timeline(tuple(_events(costs, first + index)))
    return found


def _events(costs: TaskCosts, stage: int) -> Iterator[Event]:
    start = 0.0
    for kind in TASKS:
        if kind not in costs.found.tasks:
            continue
        played = costs.played(kind)
        for member, spans in enumerate(played.spans):
            for first, end in spans:
                track = stage_track(stage, member)
                yield Event(track, kind, kind, None, start + first, start + end)
        for each in played.sent:
            track, name = link_track(stage, stage, each.sender), f"to member {each.receiver}"
            yield Event(track, name, "move", None, start + each.start, start + each.end)
        start += played.seconds
