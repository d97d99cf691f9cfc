"""A plan whose pipeline passes its submeshes more than once, where that is faster.

With v passes a submesh has v stages of a v-th of its work each. The pipeline fills and drains in a
v-th of the time, for v times the transfers and more that is kept; so it pays where microbatches are
few and links are fast. What is predicted of both, each with the best schedule that is found for it,
decides.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetjax.pipeline.schedules.interleaved import interleaved
from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.pipeline.schedules.warm_up import is_countable
from hetjax.planner.plan.plan import Plan
from hetjax.planner.predictions.predict import predict
from hetjax.planner.predictions.schedule_choice import choose_schedule
from hetjax.planner.predictions.scheduled_memory import leaves_room
from hetjax.planner.problem.problem import PlanningProblem

_FAR = 0.25
"""By what share an even division may take longer, before no other one is looked at."""

_GAIN = 1e-3
"""By what share a step must be shorter to be worth more stages and messages."""


def with_more_passes(plan: Plan, problem: PlanningProblem) -> Plan:
    """The plan, or one that passes its submeshes more than once, where that is predicted faster.

    Args:
        plan: a plan with its prediction, whose schedule was searched for.
        problem: the problem that it solves.

    Returns:
        The fastest one of those that fit and have no more stages than the problem allows, with its
        prediction.
    """
    if not _may_repeat(plan, problem):
        return plan
    best = plan
    most = problem.options.max_passes
    if problem.options.max_stages is not None:
        most = min(most, problem.options.max_stages // len(plan.stages))
    for passes in range(2, most + 1):
        found = with_passes(plan, problem, passes, _step_time(best))
        if found is None:
            break
        is_faster = _step_time(found) < _step_time(best) * (1 - _GAIN)
        if is_faster and leaves_room(found.predicted):
            best = found
    return best


def _may_repeat(plan: Plan, problem: PlanningProblem) -> bool:
    """Whether a plan has one pipeline of several plain stages, of which others can be made."""
    if len(plan.pipelines) != 1 or plan.layers != problem.layers or len(plan.stages) < 2:
        return False
    if plan.pipeline.schedule.groups:
        return False
    return not any(
        len(stage.members) > 1
        or stage.parameters
        or stage.values
        or stage.offload
        or stage.recompute_layers
        for stage in plan.stages
    )


def with_passes(
    plan: Plan, problem: PlanningProblem, passes: int, wanted: float = math.inf
) -> Plan | None:
    """A plan of the same submeshes, each passed so many times.

    Args:
        plan: a plan with its prediction, of one pipeline whose submeshes are passed once.
        problem: the problem that it solves.
        passes: how many times, 2 or more.
        wanted: a step time that is wanted; one that is far from it is not made better.

    Returns:
        The best of some divisions of the layers, with its prediction; None where there are fewer
        layers than stages, or more tasks than a schedule may have.
    """
    stages, count = len(plan.stages) * passes, plan.pipeline.num_microbatches
    ends = _even_ends(plan, problem, passes)
    if ends is None or not is_countable(stages, count):
        return None
    schedule = interleaved(len(plan.stages), passes, count, ahead=1)
    best = _searched(_repeated(plan, problem, ends, schedule))
    if _step_time(best) > wanted * (1 + _FAR):
        return best
    # The layers beside a boundary are unlike: which side of it is better shows in the prediction.
    for place in range(len(ends) - 1):
        for moved in _moved(ends, place):
            changed = _repeated(plan, problem, moved, best.pipeline.schedule)
            if _rank(changed) < _rank(best):
                best, ends = changed, moved
    again = _searched(best)
    return min((best, again), key=_rank)


def _searched(plan: Plan) -> Plan:
    return choose_schedule(plan, "search")


def _moved(ends: Sequence[int], place: int) -> Iterator[list[int]]:
    """The ends of stages with one of them a layer earlier or later; each stage keeps a layer."""
    for step in (-1, 1):
        moved = [*ends]
        moved[place] += step
        if all(a < b for a, b in itertools.pairwise([0, *moved])):
            yield moved


def _even_ends(plan: Plan, problem: PlanningProblem, passes: int) -> list[int] | None:
    """Where stages end so that each submesh has a like part of its work in every pass."""
    works = [work.forward.flops + work.backward.flops for work in problem.works]
    layers = len(works)
    stages = [stage for _ in range(passes) for stage in plan.stages]
    if len(stages) > layers:
        return None
    shares = [sum(works[slice(*stage.layers)]) / passes for stage in stages]
    done = [*itertools.accumulate(works, initial=0.0)]
    ends: list[int] = []
    for place, target in enumerate(itertools.accumulate(shares)):
        after = bisect_left(done, target)
        near = min((max(0, after - 1), after), key=lambda end: abs(done[min(end, layers)] - target))
        least = (ends[-1] if ends else 0) + 1
        most = layers - (len(stages) - 1 - place)
        ends.append(min(max(near, least), most))
    ends[-1] = layers
    return ends


def _repeated(
    plan: Plan, problem: PlanningProblem, ends: Sequence[int], schedule: Schedule
) -> Plan:
    """The plan whose submeshes have the layers up to given ends in turn, with its prediction."""
    own, pipeline = plan.stages, plan.pipeline
    stages = tuple(
        replace(own[place % len(own)], layers=layers)
        for place, layers in enumerate(itertools.pairwise([0, *ends]))
    )
    made = replace(pipeline, stages=stages, schedule=schedule)
    return predict(replace(plan, pipelines=(made,), prediction=None), problem)


def _step_time(plan: Plan) -> float:
    return plan.predicted.step_time


def _rank(plan: Plan) -> tuple[bool, float]:
    """What fits comes first, however fast others are."""
    return not leaves_room(plan.predicted), _step_time(plan)
