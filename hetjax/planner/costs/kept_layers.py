"""Of the layers that a plan's stages make again, those that they need not: what fits is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetjax.planner.costs.predict import predict
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.prediction import Prediction
from hetjax.planner.plan.stage_plan import StagePlan
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.rates import USABLE_MEMORY


def keeping_what_fits(plan: Plan, problem: PlanningProblem) -> Plan:
    """A plan whose stages make as few of their layers again as their memory allows.

    A search weighs stages that make all of their modules again, or none. What is left of a device's
    memory then keeps what some of them made: of as many as fit, halving what is uncertain.

    Args:
        plan: a plan with its prediction.
        problem: the problem that it solves.

    Returns:
        The plan with its prediction; as it is where no stage makes layers again by themselves.
    """
    counts = [len(stage.recompute_layers) for stage in plan.stages]
    if not any(counts):
        return plan
    most, least = list(counts), [0] * len(counts)
    while most != least:
        tried = [(low + high) // 2 for low, high in zip(least, most, strict=True)]
        found = predict(_making(plan, tried), problem)
        for s, stage in enumerate(_prediction(found).stages):
            if least[s] == most[s]:
                continue
            if stage.memory_bytes <= USABLE_MEMORY * stage.memory_limit_bytes:
                most[s] = tried[s]
            else:
                least[s] = tried[s] + 1
    return predict(_making(plan, most), problem)


def _making(plan: Plan, counts: Sequence[int]) -> Plan:
    """The plan whose stages make so many of their layers' runs again, the last ones."""
    stages = iter(zip(plan.stages, counts, strict=True))
    return replace(
        plan,
        pipelines=tuple(
            replace(
                pipeline,
                stages=tuple(_making_last(*next(stages)) for _ in pipeline.stages),
            )
            for pipeline in plan.pipelines
        ),
    )


def _making_last(stage: StagePlan, count: int) -> StagePlan:
    runs = stage.recompute_layers
    return replace(stage, recompute_layers=runs[len(runs) - count :])


def _prediction(plan: Plan) -> Prediction:
    assert plan.prediction is not None, "it was predicted"
    return plan.prediction
