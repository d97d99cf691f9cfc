"""Random cases in which a pipeline passes its submeshes more than once."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

from cases import CLUSTER, Case, random_boundaries, random_model, random_stages, trace_model
from random_schedules import random_schedule

from hetjax.pipeline.schedules.schedule import Task
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan


def random_shared_case(rng: Random, *, exact: bool = False) -> Case:
    """A random model with a plan of two or three submeshes, of which some have several stages."""
    submeshes = rng.randint(2, 3)
    model, cuts = random_model(rng), ()
    while len(cuts) <= submeshes + 1 or (exact and not model.exact):
        model = random_model(rng)
        cuts = random_boundaries(rng, trace_model(model, 1), 5)
    count = len(cuts) - 1
    layers = [(s, s + 1) for s in range(count)]
    own = random_stages(rng, layers[:submeshes])
    stages = tuple(
        replace(own[s % submeshes], layers=held, recompute_layers=(), recompute=rng.random() < 0.3)
        for s, held in enumerate(layers)
    )
    pipeline = shared_pipeline(rng, stages, submeshes)
    program = trace_model(model, pipeline.microbatch_size)
    return Case(model, program, Plan(program.fingerprint, cuts, CLUSTER, (pipeline,)))


def shared_pipeline(rng: Random, stages: tuple[StagePlan, ...], submeshes: int) -> PipelinePlan:
    """A pipeline of given stages, of which every so many are on the same devices."""
    most = max(stage.mesh_shape[0] for stage in stages)
    size, count = most * rng.randint(1, 4 // most), rng.randint(1, 4)
    groups = [range(first, len(stages), submeshes) for first in range(submeshes)]
    several = [group for group in groups if len(group) > 1]
    drawn = random_schedule(rng, len(stages), count, several)
    kept = {
        (s, task)
        for (s, stage), tasks in zip(enumerate(stages), drawn.order, strict=True)
        for task in tasks
        if task.kind != "R" or stage.recompute
    }
    rows = [[each for each in row if each in kept] for row in drawn.rows]
    tasks: dict[int, list[Task]] = {}
    for stage, task in itertools.chain.from_iterable(rows):
        tasks.setdefault(stage, []).append(task)
    schedule = replace(
        drawn,
        order=tuple(tuple(tasks[stage]) for stage in range(len(stages))),
        turns=tuple(tuple(stage for stage, _ in row) for row in rows if _shares(row)),
    )
    return PipelinePlan(stages, count, size, schedule)


def _shares(row: list[tuple[int, Task]]) -> bool:
    return len({stage for stage, _ in row}) > 1
