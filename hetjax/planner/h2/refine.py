"""What hetjax's own timeline and schedules make of a plan of HeteroAuto's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetjax.planner.harp.refit import keeping_all, refitted, ways_of
from hetjax.planner.plan.plan import Plan
from hetjax.planner.predictions.kept_layers import keeping_what_fits
from hetjax.planner.predictions.kept_state import keeping_state_that_fits
from hetjax.planner.predictions.predict import predict
from hetjax.planner.predictions.scheduled_memory import memory_rank
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.repeating_layers import repetitions


@dataclass(frozen=True)
class Refined:
    """A plan, as it was found and as it is better run.

    Args:
        found: with the schedule that it was found for, and its prediction.
        refined: with the schedule and the ways to run its stages that are predicted to be the
            fastest; layers, submeshes and logical meshes are the same.
    """

    found: Plan
    refined: Plan


def refine(plan: Plan, problem: PlanningProblem) -> Refined:
    """Run a plan's stages in the fastest ways, by a schedule that knows their times.

    Args:
        plan: a plan of one pipeline.
        problem: the problem that it solves.

    Returns:
        The plan as it is, and refined: with the schedule that the problem asks for, or as it is
        where that is 1F1B or H-1F1B and nothing is faster.

    Example:
        >>> refine(plan, problem).refined.prediction.step_time  # doctest: +SKIP
        2.5
    """
    found = predict(plan, problem)
    schedule = replace(plan.pipeline.schedule, name=problem.warm_up_schedule)
    free = plan.with_schedule(schedule)
    again = repetitions(allow_recompute=problem.options.allow_recompute)
    ways = ways_of(free, problem, again)
    others = [found] if schedule.name in ("1f1b", "h_1f1b") else []
    fastest = refitted(free, problem, ways)
    if fastest is not None or not others:
        others.append(fastest or keeping_all(free, problem, ways))
    kept = [keeping_what_fits(keeping_state_that_fits(each, problem), problem) for each in others]

    def rank(each: Plan) -> tuple[int, float]:
        return memory_rank(each.predicted), each.predicted.step_time

    return Refined(found, min(kept, key=rank))
