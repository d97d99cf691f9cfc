"""Of the layers that a plan's stages make again, those that they need not: what fits is kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.prediction import StagePrediction
from hetjax.planner.plan.stage_plan import StagePlan
from hetjax.planner.predictions.predict import predict
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.rates import USABLE_MEMORY


def keeping_what_fits(plan: Plan, problem: PlanningProblem, *others: PlanningProblem) -> Plan:
    """A plan whose stages make as few of their layers again as their memory allows.

    A search weighs stages that make all of their modules again, half of them, or none. What is left
    of a device's memory then keeps what some of them made, by the work of the layers; what is
    predicted of it has the last word.

    Args:
        plan: a plan with its prediction.
        problem: the problem that it solves.
        others: the same problem for microbatches of other sizes, where pipelines have them.

    Returns:
        The plan with its prediction; as it is where no stage makes layers again by themselves.
    """
    most = [len(stage.recompute_layers) for stage in plan.stages]
    problems = {each.microbatch_size: each for each in (*others, problem)}
    of_stages = [problems[each.microbatch_size] for each in plan.pipelines for _ in each.stages]
    known = zip(plan.stages, of_stages, strict=True)
    if not any(most) or not all(_has_runs(plan, stage, problem) for stage, problem in known):
        return plan
    counts = [
        _fewest(stage, predicted, _kept_bytes(plan, stage, of_stage))
        for stage, predicted, of_stage in zip(
            plan.stages, plan.predicted.stages, of_stages, strict=True
        )
    ]
    while counts != most:
        found = predict(_making(plan, counts), problem, *others)
        told = zip(counts, most, found.predicted.stages, strict=True)
        more = [count + (count < all_ and not _has_room(each)) for count, all_, each in told]
        if more == counts:
            return found
        counts = more
    return plan


def _has_runs(plan: Plan, stage: StagePlan, problem: PlanningProblem) -> bool:
    """Whether the runs of layers that a stage makes again are runs of the problem's layers."""
    made = {position for run in plan.recompute_positions(stage) for position in run}
    return made <= set(problem.layers)


def _kept_bytes(plan: Plan, stage: StagePlan, problem: PlanningProblem) -> list[float]:
    """What each run of layers that a stage makes again would keep beyond what goes into it."""
    place = {position: layer for layer, position in enumerate(problem.layers)}
    runs = problem.runs
    made = [(place[a], place[b]) for a, b in plan.recompute_positions(stage)]
    return [float(runs.residual_bytes[run] - runs.input_bytes[run]) for run in made]


def _fewest(stage: StagePlan, predicted: StagePrediction, kept_bytes: Sequence[float]) -> int:
    """How many runs of layers a stage makes again at least, by what each of them keeps."""
    if not stage.recompute_layers:
        return 0
    held = predicted.memory_bytes - predicted.state_bytes - predicted.working_bytes
    live = held / predicted.activation_bytes if predicted.activation_bytes else 0.0
    saved = (live * each * _largest_part(stage) for each in kept_bytes)
    room = USABLE_MEMORY * predicted.memory_limit_bytes - predicted.memory_bytes
    kept = sum(total <= room for total in itertools.accumulate(saved))
    return len(stage.recompute_layers) - kept


def _largest_part(stage: StagePlan) -> float:
    """What part of a microbatch's values a device has at most."""
    split = stage.shares.context
    return max(split.tokens) / split.length if split else 1 / stage.mesh_shape[0]


def _has_room(stage: StagePrediction) -> bool:
    return stage.memory_bytes <= USABLE_MEMORY * stage.memory_limit_bytes


def _making(plan: Plan, counts: Sequence[int]) -> Plan:
    """The plan whose stages make so many of their layers' runs again, the last ones."""
    pairs = zip(plan.stages, counts, strict=True)
    return plan.with_stages([_making_last(stage, count) for stage, count in pairs])


def _making_last(stage: StagePlan, count: int) -> StagePlan:
    runs = stage.recompute_layers
    return replace(stage, recompute_layers=runs[len(runs) - count :])
