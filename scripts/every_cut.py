"""Every plan of two devices: each alone, and each cut in each order, its stages run in each way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from hetjax.mesh import SubMesh
from hetjax.pipeline import make_schedule
from hetjax.planner import PipelinePlan, Plan, PlanningProblem, StagePlan, choose_schedule, predict


def best_of_every_cut(problem: PlanningProblem) -> tuple[float, int]:
    """The least predicted step time of any plan on two devices, and how many plans there are.

    Nothing of the search is used: every plan is written down, predicted and simulated.

    Args:
        problem: of two subclusters of one device each.

    Returns:
        Seconds, and the number of plans, those that do not fit among them.
    """
    times = [_seconds(stages, problem) for stages in _all_stages(problem)]
    return min(time for time in times if time is not None), len(times)


def _all_stages(problem: PlanningProblem) -> Iterator[tuple[StagePlan, ...]]:
    first, second = (SubMesh(each.name, 0, (1, 1)) for each in problem.cluster.subclusters)
    total, again = problem.num_layers, (False, True)
    for submesh, recompute in itertools.product((first, second), again):
        yield (StagePlan.on((0, total), submesh, (1, 1), recompute=recompute),)
    for (a, b), cut, before, after in itertools.product(
        ((first, second), (second, first)), range(1, total), again, again
    ):
        yield (
            StagePlan.on((0, cut), a, (1, 1), recompute=before),
            StagePlan.on((cut, total), b, (1, 1), recompute=after),
        )


def _seconds(stages: tuple[StagePlan, ...], problem: PlanningProblem) -> float | None:
    """The step of a plan; None where it does not fit."""
    counts = (problem.num_microbatches, problem.microbatch_size)
    schedule = make_schedule("1f1b", len(stages), problem.num_microbatches)
    plan = Plan(
        problem.program.fingerprint,
        problem.layers,
        problem.cluster,
        (PipelinePlan(stages, *counts, replace(schedule, name=problem.options.schedule)),),
        planner="every cut",
    )
    made = choose_schedule(predict(plan, problem), problem.options.schedule)
    fits = all(stage.fits for stage in made.predicted.stages)
    return made.predicted.step_time if fits else None
