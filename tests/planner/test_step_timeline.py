"""The timeline of a plan ends when its predicted step does, to the bit."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from planner.test_plan import prediction_of_a_stage

from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh
from hetjax.pipeline.schedules.interleaved import interleaved
from hetjax.pipeline.schedules.warm_up import from_warm_up_counts
from hetjax.pipeline.timeline.streamed_update import GroupTimes, stream_seconds
from hetjax.planner import simulate
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.prediction import Prediction, StagePrediction
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.planner.predictions.step_prediction import with_schedules

CARD = DeviceKind("card", {"float32": 1e12}, 10**9, 1e11, source="made up")


def random_pipeline(rng: Random, free: list[SubMesh]) -> PipelinePlan:
    """A pipeline whose stages may be on the devices of others before them."""
    count = rng.randint(1, 3)
    devices = [free.pop() for _ in range(count)]
    if count > 1 and rng.random() < 0.4:
        microbatches = count * rng.randint(1, 2)
        schedule = interleaved(count, 2, microbatches)
    else:
        microbatches, steps = rng.randint(1, 4), [rng.randint(0, 2) for _ in devices]
        counts = [1 + sum(steps[stage:]) for stage in range(count)]
        schedule = from_warm_up_counts(counts, microbatches)
    stages = tuple(
        StagePlan.on((s, s + 1), devices[s % count], (1, 1)) for s in range(schedule.num_stages)
    )
    return PipelinePlan(stages, microbatches, 4, schedule)


def random_stage(rng: Random, shares_devices: bool) -> StagePrediction:
    """Times of a stage that may be frozen, offload its state or exchange what others hold."""
    update = rng.choice([0.0, rng.random(), 5 * rng.random()])
    exchange = rng.choice([0.0, update * rng.random()])
    overlaps, groups = rng.random() < 0.5, ()
    if update and not shares_devices and rng.random() < 0.4:
        each = [[rng.random() for _ in range(3)] for _ in range(rng.randint(1, 4))]
        groups = tuple(GroupTimes(*times) for times in each)
        update = stream_seconds(groups, overlaps) + exchange
    return replace(
        prediction_of_a_stage(1),
        forward_seconds=rng.random(),
        backward_seconds=rng.random(),
        update_seconds=update,
        exchange_seconds=exchange,
        sharing_seconds=rng.choice([0.0, rng.random()]),
        update_groups=groups,
        copies_overlap=overlaps,
    )


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_a_timeline_ends_with_the_step(first: int):
    for seed in range(first, first + 100):
        rng = Random(seed)
        links = [Link(1e9, rng.choice([1e-6, 1e-3, 0.5])) for _ in range(3)]
        parts = tuple(Subcluster(name, CARD, 2, 4, links[0], links[1]) for name in "ab")
        cluster = Cluster("two", parts, (("a", "b", links[2]),))
        free = [SubMesh(name, place, (1, 1)) for name in "ab" for place in range(8)]
        rng.shuffle(free)
        pipelines = tuple(random_pipeline(rng, free) for _ in range(rng.randint(1, 3)))
        stages = tuple(
            random_stage(rng, len(pipeline.stages) > len(pipeline.schedule.sharing))
            for pipeline in pipelines
            for _ in pipeline.stages
        )
        plan = Plan("abc", tuple(range(8)), cluster, pipelines)
        found = with_schedules(replace(plan, prediction=Prediction(1.0, 1.0, stages)))
        timeline = simulate(found)
        assert timeline.makespan == found.predicted.step_time, seed
        assert all(event.start <= event.end for event in timeline.events), seed
