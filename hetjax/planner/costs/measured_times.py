"""What was measured of layers that run so, in place of what the cost model has."""

from __future__ import annotations

from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.arrays import FloatArray
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.layer_runs import Runs
from hetjax.planner.work.profile import WayTimes
from hetjax.planner.work.rates import TASK_SECONDS


def measured_times(problem: PlanningProblem, runs: Runs, execution: Execution) -> WayTimes | None:
    """What was measured of layers that are run so; None where nothing was.

    Args:
        problem: the planning problem, with its profile.
        runs: the work.
        execution: where and how.
    """
    ways = problem.profile.ways
    if not ways or execution.parameters or not runs.known_layers:
        return None
    return ways.get(execution.way)


def share_of(seconds: FloatArray, execution: Execution) -> FloatArray:
    """Of what passes were measured to take, what a member's share of the examples does.

    Args:
        seconds: what they take with all examples.
        execution: where and how.
    """
    if execution.examples == 1:
        return seconds
    return TASK_SECONDS + execution.examples * (seconds - TASK_SECONDS)
