"""Of a plan's stages, those whose activations wait in the hosts' memory: where nothing is faster.

A stage whose devices have no room for its microbatches makes layers again, or sends what they keep
to its hosts. A search weighs both, as if each stage stood alone; what is predicted of the whole
plan has the last word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.prediction import StagePrediction
from hetjax.planner.plan.stage_plan import StagePlan
from hetjax.planner.predictions.predict import predict_stages, with_stages
from hetjax.planner.predictions.scheduled_memory import has_room
from hetjax.planner.problem.problem import PlanningProblem

_GAIN = 1e-3
"""By what share a step must be shorter to be worth copies."""

_Way = tuple[StagePlan, StagePrediction]
"""How a stage runs, and what is predicted of it whatever its schedule."""


def keeping_or_offloading(plan: Plan, problem: PlanningProblem, *others: PlanningProblem) -> Plan:
    """A plan whose stages keep, make again, or offload what their microbatches need, if that helps.

    Stages that offload activations keep them on their devices where there is room by the schedule
    that was chosen. Stages that make layers again offload instead where the step is then shorter.

    Args:
        plan: a plan with its prediction.
        problem: the problem that it solves.
        others: the same problem for microbatches of other sizes, where pipelines have them.

    Returns:
        The plan with its prediction; as it is where no subcluster has memory of its hosts.
    """
    if all(part.host_memory_bytes is None for part in plan.cluster.subclusters):
        return plan
    known = list(zip(plan.stages, predict_stages(plan, problem, *others), strict=True))
    away = _changed(plan, (problem, *others), known, _offloading(plan))
    best, ways = _with_shortest(plan, known, away)
    kept = _changed(plan, (problem, *others), ways, [_keeping(stage) for stage, _ in ways])
    for s, other in enumerate(kept):
        if other is not None:
            tried = [*ways[:s], other, *ways[s + 1 :]]
            found = _predicted(plan, tried)
            if has_room(found.predicted.stages[s]):
                best, ways = found, tried
    return best


def _with_shortest(
    plan: Plan, known: list[_Way], away: Sequence[_Way | None]
) -> tuple[Plan, list[_Way]]:
    """The plan in which stages run in other ways, as far as that makes its step shorter.

    Several may be as slow as each other: all are changed first, then one by one changed back.
    """
    ways = [other or way for other, way in zip(away, known, strict=True)]
    if ways == known:
        return plan, known
    found = _predicted(plan, ways)
    for s, way in enumerate(known):
        tried = [*ways[:s], way, *ways[s + 1 :]]
        other = _predicted(plan, tried)
        is_slower = _step_time(other) > _step_time(found) * (1 + _GAIN / len(ways))
        if not has_room(found.predicted.stages[s]) or not is_slower:
            ways, found = tried, other
    if _step_time(found) < _step_time(plan) * (1 - _GAIN):
        return found, ways
    return plan, known


def _keeping(stage: StagePlan) -> StagePlan:
    """The stage with its activations on its devices."""
    return replace(stage, offload=tuple(each for each in stage.offload if each != "activations"))


def _offloading(plan: Plan) -> Iterator[StagePlan]:
    """The stages, of which those that make layers again and can do so offload instead."""
    for _, pipeline in plan.numbered_pipelines():
        in_turns = {stage for group in pipeline.schedule.groups for stage in group}
        for s, stage in enumerate(pipeline.stages):
            ahead = any(task.kind == "R" for task in pipeline.schedule.order[s])
            if stage.repeats == "nothing" or s in in_turns or ahead or not _may(stage, plan):
                yield stage
                continue
            offload = (*_keeping(stage).offload, "activations")
            yield replace(stage, recompute=False, recompute_layers=(), offload=offload)


def _may(stage: StagePlan, plan: Plan) -> bool:
    """Whether the hosts of all members of a stage give memory, for what may be sent there."""
    if stage.shares.modules:
        return False
    parts = (plan.cluster.subcluster(each.submesh.subcluster) for each in stage.members)
    return all(part.host_memory_bytes is not None for part in parts)


def _changed(
    plan: Plan,
    problems: Sequence[PlanningProblem],
    known: Sequence[_Way],
    changed: Iterable[StagePlan],
) -> list[_Way | None]:
    """What is predicted of stages that were changed; None of the others."""
    stages = list(changed)
    if all(new == old for new, (old, _) in zip(stages, known, strict=True)):
        return [None] * len(stages)
    told = predict_stages(plan.with_stages(stages), *problems)
    return [
        (new, predicted) if new != old else None
        for new, predicted, (old, _) in zip(stages, told, known, strict=True)
    ]


def _predicted(plan: Plan, ways: Sequence[_Way]) -> Plan:
    stages = [stage for stage, _ in ways]
    return with_stages(plan.with_stages(stages), [predicted for _, predicted in ways])


def _step_time(plan: Plan) -> float:
    return plan.predicted.step_time
