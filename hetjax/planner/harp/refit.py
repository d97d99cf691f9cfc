"""A plan's stages where they are, run in other ways: what is fair to a plan that others made.

A plan that someone publishes says where its layers run, and seldom what is recomputed or how the
optimizer's state is divided. What our memory model forces it to recompute is then charged to it, so
what it would take without is worth knowing, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hetjax.errors import InputError
from hetjax.pipeline.schedules.schedule import WARM_UP_SCHEDULES
from hetjax.pipeline.schedules.warm_up import from_warm_up_counts
from hetjax.planner.harp.search import warm_up_counts_of
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.prediction import StagePrediction
from hetjax.planner.plan.stage_plan import StagePlan
from hetjax.planner.predictions.predict import predict, predict_stages
from hetjax.planner.predictions.scheduled_memory import leaves_room
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.rates import USABLE_MEMORY
from hetjax.planner.work.repeating_layers import (
    REPETITIONS,
    LayerRun,
    Repetition,
    repeatable_layers,
    repeated_by,
)
from hetjax.sharding.annotation.rules import RULES

_FINALISTS = 8
"""How many choices are predicted whole and simulated, the best by Harp's closed form first."""

RuleChoice = tuple[str, Repetition]
"""A sharding rule, and what the stage makes again."""

ChoicePredictions = Sequence[Mapping[RuleChoice, StagePrediction]]
"""What each stage of a plan takes in each way, but for what depends on the schedule."""


def ways_of(
    plan: Plan, problem: PlanningProblem, repetitions: Sequence[Repetition] = REPETITIONS
) -> ChoicePredictions:
    """What the stages of a plan take in all ways that may be the best: others choose among them.

    Args:
        plan: a plan that `can_be_refitted`.
        problem: the problem that it solves.
        repetitions: what stages may make again; anything unless given.

    Returns:
        The ways of each stage.

    Raises:
        InputError: the plan cannot be refitted, or was made for another model.
    """
    _check(plan)
    return _predicted_ways(plan, problem, repetitions)


def refitted(
    plan: Plan, problem: PlanningProblem, known: ChoicePredictions | None = None
) -> Plan | None:
    """A plan with the fastest ways to run its stages that fit: sharding rules and recomputation.

    Layers, submeshes, logical meshes and microbatches stay as they are. As in the planner's search,
    each pace between microbatches allows the ways that are no slower and that hold the microbatches
    which the schedule's warm-up counts at that pace ask for; the fastest of them is taken for each
    stage. The best paces are simulated, and the least makespan decides.

    Args:
        plan: a plan that `can_be_refitted`.
        problem: the problem that it solves.
        known: what `ways_of` found of it; None to find it now.

    Returns:
        The plan with its prediction; None where it fits in no way.

    Raises:
        InputError: the plan cannot be refitted, or was made for another model.
    """
    _check(plan)
    choices = sorted(_choices(plan, known or ways_of(plan, problem)), key=lambda each: each[0])
    best: Plan | None = None
    for _, ways, counts in choices[:_FINALISTS]:
        found = _predicted_so(plan, problem, ways, counts)
        if not leaves_room(found.predicted):
            continue
        if best is None or _step_time(found) < _step_time(best):
            best = found
    return best


def keeping_all(
    plan: Plan, problem: PlanningProblem, known: ChoicePredictions | None = None
) -> Plan:
    """A plan whose stages recompute nothing and run as fast as they then can, fit or not.

    Args:
        plan: a plan that `can_be_refitted`.
        problem: the problem that it solves.
        known: what `ways_of` found of it; None to find what is asked of it now.

    Returns:
        The plan with its prediction, which says of each stage whether it fits.

    Raises:
        InputError: the plan cannot be refitted, or was made for another model.
    """
    _check(plan)
    if known is None:
        known = _predicted_ways(plan, problem, REPETITIONS[:1])
    kept = [{way: stage for way, stage in ways.items() if way[1] == "nothing"} for ways in known]
    ways = [_fastest(each) for each in kept]
    taken = [of[way] for of, way in zip(kept, ways, strict=True)]
    return _predicted_so(plan, problem, ways, counts_at_pace(plan, taken, slowest_of(taken)))


def slowest_of(stages: Sequence[StagePrediction]) -> float:
    """The longest that a stage, or a transfer beside it, takes for a microbatch.

    Args:
        stages: what the stages of a pipeline take.
    """
    return max(
        max(_seconds(each), each.communication_seconds, each.return_seconds) for each in stages
    )


def counts_at_pace(plan: Plan, stages: Sequence[StagePrediction], pace: float) -> tuple[int, ...]:
    """The warm-up count of each stage at a pace, as the search counts them.

    Args:
        plan: a plan that `can_be_refitted`.
        stages: what its stages take.
        pace: seconds from one microbatch to the next.
    """
    pipeline = plan.pipeline
    crossed = [
        (before.communication_seconds, after.return_seconds)
        for before, after in itertools.pairwise(stages)
    ]
    name, most = pipeline.schedule.name, pipeline.num_microbatches
    return tuple(warm_up_counts_of(name, most, crossed, pace))


def can_be_refitted(plan: Plan) -> bool:
    """Whether a plan has one pipeline, and a schedule that is made of warm-up counts.

    Args:
        plan: the plan.
    """
    return len(plan.pipelines) == 1 and plan.pipeline.schedule.name in WARM_UP_SCHEDULES


def _check(plan: Plan) -> None:
    if not can_be_refitted(plan):
        raise InputError(
            f"only a plan of one pipeline with one of the schedules "
            f"{', '.join(WARM_UP_SCHEDULES)} can be run in other ways; this one has "
            f"{len(plan.pipelines)}, the first with {plan.pipelines[0].schedule.name}"
        )


def _predicted_so(
    plan: Plan, problem: PlanningProblem, ways: Sequence[RuleChoice], counts: Sequence[int]
) -> Plan:
    """The plan with its stages run so, and its prediction."""
    pipeline = plan.pipeline
    schedule = from_warm_up_counts(counts, pipeline.num_microbatches, pipeline.schedule.name)
    pieces = repeatable_layers(plan.layers, problem.sections)
    stages = tuple(
        _run_so(stage, way, pieces) for stage, way in zip(pipeline.stages, ways, strict=True)
    )
    return predict(_with_stages(plan, stages).with_schedule(schedule), problem)


def _predicted_ways(
    plan: Plan, problem: PlanningProblem, repetitions: Sequence[Repetition]
) -> ChoicePredictions:
    """What each stage takes in each way that may be taken.

    To trace a stage that makes layers again takes long, so this is done of those alone that cannot
    keep all of them: whatever the pace, the others are the fastest as they are.
    """
    found: list[dict[RuleChoice, StagePrediction]] = [{} for _ in plan.stages]
    pieces = repeatable_layers(plan.layers, problem.sections)
    looked_at = range(len(plan.stages))
    for again in repetitions:
        if not looked_at:
            break
        for rule in RULES:
            stages = tuple(
                _run_so(stage, (rule, again if s in looked_at else "nothing"), pieces)
                for s, stage in enumerate(plan.pipeline.stages)
            )
            predicted = predict_stages(_with_stages(plan, stages), problem)
            # Rules differ along the data axis alone.
            for s in looked_at:
                if rule == "data" or stages[s].mesh_shape[0] > 1:
                    found[s][rule, again] = predicted[s]
        if again == "nothing":
            looked_at = _without_room(plan, found)
    return found


def _without_room(plan: Plan, keeping: ChoicePredictions) -> list[int]:
    """The stages that cannot keep all in every way, at the least pace that they may run at."""
    pace = max(min(map(_seconds, ways.values())) for ways in keeping)
    counts = counts_at_pace(plan, [next(iter(ways.values())) for ways in keeping], pace)
    return [
        s
        for s, (ways, count) in enumerate(zip(keeping, counts, strict=True))
        if len(_allowed(ways, count, math.inf)) < len(ways)
    ]


def _run_so(stage: StagePlan, way: RuleChoice, pieces: Sequence[LayerRun]) -> StagePlan:
    rule, repeats = way
    again = repeated_by(repeats, pieces, stage.layers)
    recompute = repeats == "stage"
    return replace(stage, sharding=rule, recompute=recompute, recompute_layers=again)


def _choices(
    plan: Plan, known: ChoicePredictions
) -> Iterator[tuple[float, tuple[RuleChoice, ...], tuple[int, ...]]]:
    """For each pace the seconds of a step, the ways, and the warm-up counts."""
    paces = np.unique([_seconds(each) for ways in known for each in ways.values()])
    seen: set[tuple[tuple[RuleChoice, ...], tuple[int, ...]]] = set()
    for pace in paces:
        counts = counts_at_pace(plan, [next(iter(each.values())) for each in known], float(pace))
        allowed = [_allowed(*each, float(pace)) for each in zip(known, counts, strict=True)]
        if not all(allowed):
            continue
        told = tuple(map(_fastest, allowed))
        if (told, counts) in seen:
            continue
        seen.add((told, counts))
        taken = [of[way] for of, way in zip(known, told, strict=True)]
        total = sum(
            _seconds(each) + each.communication_seconds + each.return_seconds for each in taken
        )
        closing = max(each.update_seconds for each in taken)
        yield (
            total + (plan.pipeline.num_microbatches - 1) * slowest_of(taken) + closing,
            told,
            counts,
        )


def _seconds(stage: StagePrediction) -> float:
    """What a stage computes for a microbatch, to the nanosecond."""
    return round(stage.compute_seconds, 9)


def _allowed(
    ways: Mapping[RuleChoice, StagePrediction], count: int, pace: float
) -> dict[RuleChoice, StagePrediction]:
    """The ways that are no slower than the pace and hold so many microbatches."""
    return {
        way: each
        for way, each in ways.items()
        if _seconds(each) <= pace and _held(each, count) <= USABLE_MEMORY * each.memory_limit_bytes
    }


def _fastest(ways: Mapping[RuleChoice, StagePrediction]) -> RuleChoice:
    return min(ways, key=lambda way: (_seconds(ways[way]), ways[way].update_seconds))


def _held(stage: StagePrediction, count: int) -> float:
    once = stage.state_bytes + stage.working_bytes + stage.recomputed_bytes
    return once + count * stage.activation_bytes


def _with_stages(plan: Plan, stages: tuple[StagePlan, ...]) -> Plan:
    return replace(plan, pipelines=(replace(plan.pipeline, stages=stages),))


def _step_time(plan: Plan) -> float:
    return plan.predicted.step_time
