"""Of the optimizer state that a plan offloads, that which fits on the devices after all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import StagePlan
from hetjax.planner.predictions.predict import predict
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.rates import USABLE_MEMORY


def keeping_state_that_fits(plan: Plan, problem: PlanningProblem, *others: PlanningProblem) -> Plan:
    """A plan whose stages offload optimizer state only where their devices have no memory for it.

    A search offloads where nothing else fits the microbatches that it has in mind. By the schedule
    that was chosen there may be fewer.

    Args:
        plan: a plan with its prediction.
        problem: the problem that it solves.
        others: the same problem for microbatches of other sizes, where pipelines have them.

    Returns:
        The plan with its prediction; as it is where no stage offloads.
    """
    away = ["optimizer_state" in stage.offload for stage in plan.stages]
    if not any(away):
        return plan
    kept = predict(_offloading(plan, [False] * len(away)), problem, *others).prediction
    assert kept is not None, "it was predicted"
    needed = [
        is_away and stage.memory_bytes > USABLE_MEMORY * stage.memory_limit_bytes
        for is_away, stage in zip(away, kept.stages, strict=True)
    ]
    return plan if needed == away else predict(_offloading(plan, needed), problem, *others)


def _offloading(plan: Plan, needed: Sequence[bool]) -> Plan:
    """The plan, of whose stages only some offload optimizer state."""
    pairs = zip(plan.stages, needed, strict=True)
    return plan.with_stages([stage if need else _keeping(stage) for stage, need in pairs])


def _keeping(stage: StagePlan) -> StagePlan:
    return replace(stage, offload=tuple(o for o in stage.offload if o != "optimizer_state"))
