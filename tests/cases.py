"""Random cases for the property tests: a model, a plan for it, and its program.

A case is drawn from one number. Drawn choice by choice, Hypothesis would spend half of its few and
expensive examples on near copies of the one before.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import jax
from hypothesis import Phase, settings
from hypothesis import strategies as st
from opened_loops import positions_in_loops
from random_schedules import random_schedule as random_order
from small_models import BLOCKS, Model, make_batch

from hetjax.mesh import KINDS, Cluster, Link, Subcluster, SubMesh
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedule_search.named_schedules import make_schedule
from hetjax.pipeline.schedules.schedule import WARM_UP_SCHEDULES, Schedule
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.sharding.annotation.rules import RULES

# So fast that it pays to divide even the tiny models of tests.
_LINK = Link(bandwidth=1e12, latency=1e-9)
CLUSTER = Cluster(
    "two by four",
    tuple(Subcluster(name, KINDS["T4"], 1, 4, _LINK, _LINK) for name in ("first", "second")),
    (("first", "second", _LINK),),
)
"""Two subclusters of four devices: the eight host devices of the tests."""


def examples(usual: int, full: int = 200) -> settings:
    """How many cases an expensive property test draws, by hypothesis profile.

    A case that fails is small as it is, and is shown without minutes of shrinking.
    """
    return settings(
        max_examples=full if settings.get_current_profile_name() == "full" else usual,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )


@dataclass(frozen=True, repr=False, eq=False)
class Case:
    """A model, the plan to run it with, and its program.

    Args:
        model: the model.
        program: the model's loss, traced at the size of a microbatch.
        plan: the plan.
    """

    model: Model
    program: Program
    plan: Plan

    def __repr__(self) -> str:
        pipelines = ", ".join(map(_shown, self.plan.pipelines))
        divided = ", optimizer state divided" * self.plan.shard_optimizer_state
        return f"Case({self.model}, layers {self.plan.layers}, {pipelines}{divided})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


def _shown(pipeline: PipelinePlan) -> str:
    stages = "; ".join(
        f"{stage.layers} {stage.members} {stage.shares} {stage.sharding}"
        + " recompute" * stage.recompute
        + f" recompute {stage.recompute_layers}" * bool(stage.recompute_layers)
        for stage in pipeline.stages
    )
    counts = f"{pipeline.num_microbatches} x {pipeline.microbatch_size}"
    orders = (" ".join(map(str, tasks)) for tasks in pipeline.schedule.order)
    return f"[{stages}, {counts}, {pipeline.schedule.name} {' | '.join(orders)}]"


def cases(
    max_stages: int = 5, max_microbatches: int = 6, max_pipelines: int = 1
) -> st.SearchStrategy[Case]:
    """Random models, each with a random plan; of several pipelines, where that is asked for."""
    numbers = st.integers(0, 2**32 - 1)
    return numbers.map(
        lambda number: random_case(Random(number), max_stages, max_microbatches, max_pipelines)
    )


def random_case(
    rng: Random,
    max_stages: int,
    max_microbatches: int,
    max_pipelines: int = 1,
    *,
    double: bool = False,
) -> Case:
    """A random model, of float64 where that is asked for, with a random plan."""
    model = replace(random_model(rng), double=double)
    count = rng.randint(min(max_pipelines, 2), max_pipelines)
    layers, held = random_cuts(rng, model, count, max_stages)
    pipelines = tuple(random_pipeline(rng, stages, max_microbatches) for stages in held)
    program = trace_model(model, pipelines[0].microbatch_size)
    plan = Plan(program.fingerprint, layers, CLUSTER, pipelines)
    if count > 1:
        plan = replace(plan, shard_optimizer_state=rng.random() < 0.5)
    return Case(model, program, plan)


def random_plan(rng: Random, model: Model, batches: Sequence[tuple[int, int]]) -> Plan:
    """A random plan with given numbers and sizes of microbatches, one pair a pipeline."""
    layers, held = random_cuts(rng, model, len(batches), 5)
    pipelines = tuple(
        PipelinePlan(tuple(stages), count, size, random_schedule(rng, stages, count))
        for stages, (count, size) in zip(held, batches, strict=True)
    )
    plan = Plan(trace_model(model, 1).fingerprint, layers, CLUSTER, pipelines)
    return replace(plan, shard_optimizer_state=len(batches) > 1 and rng.random() < 0.5)


def random_cuts(
    rng: Random, model: Model, count: int, max_stages: int
) -> tuple[tuple[int, ...], list[list[StagePlan]]]:
    """Where layers begin, and the stages of some pipelines, on submeshes of their own."""
    # Positions do not depend on the size of the microbatch.
    program = trace_model(model, 1)
    cuts = [random_boundaries(rng, program, max(1, max_stages // count)) for _ in range(count)]
    layers = tuple(sorted({position for cut in cuts for position in cut}))
    ranges = [
        (layers.index(first), layers.index(end))
        for cut in cuts
        for first, end in itertools.pairwise(cut)
    ]
    stages = iter(random_stages(rng, ranges))
    return layers, [[next(stages) for _ in cut[1:]] for cut in cuts]


def random_pipeline(
    rng: Random, stages: Sequence[StagePlan], max_microbatches: int
) -> PipelinePlan:
    """A pipeline of given stages, with a random batch and schedule."""
    most = max(stage.mesh_shape[0] for stage in stages)
    size = most * rng.randint(1, 4 // most)
    schedule = random_schedule(rng, stages, rng.randint(1, max_microbatches))
    return PipelinePlan(tuple(stages), schedule.num_microbatches, size, schedule)


def trace_model(model: Model, num_examples: int) -> Program:
    """A model's loss, traced for a number of examples."""
    return trace(model.loss, jax.eval_shape(model.init), make_batch(num_examples))


def random_model(rng: Random, max_blocks: int = 2) -> Model:
    """One or a few random blocks, in a random order, with repetitions."""
    return Model(
        blocks=tuple(rng.choices(sorted(BLOCKS), k=rng.randint(1, max_blocks))),
        tied=rng.random() < 0.5,
        counted=rng.random() < 0.5,
        half_parameters=rng.random() < 0.1,
        chunk=2 if rng.random() < 0.25 else 0,
    )


def random_schedule(rng: Random, stages: Sequence[StagePlan], num_microbatches: int) -> Schedule:
    """Any of the named schedules, with random costs; or any order, with split backward passes."""
    num_stages = len(stages)
    if rng.random() < 0.5:
        drawn = random_order(rng, num_stages, num_microbatches)
        order = tuple(
            tuple(task for task in tasks if task.kind != "R" or stage.recompute)
            for stage, tasks in zip(stages, drawn.order, strict=True)
        )
        return replace(drawn, order=order)
    name = rng.choice(WARM_UP_SCHEDULES)
    forward, backward, sends, returns = (
        [rng.uniform(0.1, 5.0) for _ in range(length)]
        for length in (num_stages, num_stages, num_stages - 1, num_stages - 1)
    )
    times = StepTimes(forward, backward, sends, returns)
    return make_schedule(name, num_stages, num_microbatches, times)


def random_boundaries(rng: Random, program: Program, max_stages: int) -> tuple[int, ...]:
    """The positions where one to a few stages begin, and the end; often inside a scan."""
    end = program.num_positions
    inside = positions_in_loops(program)
    wanted = rng.randint(1, max_stages) - 1
    cuts: set[int] = set()
    for _ in range(wanted):
        pool = inside if inside and rng.random() < 0.5 else range(1, end)
        cuts.add(rng.choice(pool))
    return (0, *sorted(cuts), end)


def random_submeshes(rng: Random, num_stages: int) -> tuple[SubMesh, ...]:
    """Disjoint submeshes of one, two or four devices."""
    sizes: list[int] = []
    for stages_left in range(num_stages, 0, -1):
        room = CLUSTER.num_devices - sum(sizes) - (stages_left - 1)
        sizes.append(rng.choice([size for size in (1, 2, 4) if size <= room]))
    rng.shuffle(sizes)
    starts: dict[int, int] = {}
    first_free = 0
    # Sizes are powers of two: in falling order none lies astride the two subclusters.
    for stage in sorted(range(num_stages), key=lambda stage: -sizes[stage]):
        starts[stage], first_free = first_free, first_free + sizes[stage]
    return tuple(
        SubMesh(("first", "second")[starts[stage] // 4], starts[stage] % 4, (1, sizes[stage]))
        for stage in range(num_stages)
    )


def random_stages(rng: Random, layers: Sequence[tuple[int, int]]) -> tuple[StagePlan, ...]:
    """Stages of given layers, on random submeshes, with random mesh shapes and rules."""
    stages = []
    for held, submesh in zip(layers, random_submeshes(rng, len(layers)), strict=True):
        size = submesh.num_devices
        data = rng.choice([d for d in (1, 2, 4) if size % d == 0])
        stages.append(
            StagePlan.on(
                layers=held,
                submesh=submesh,
                mesh_shape=(data, size // data),
                sharding=rng.choice(sorted(RULES)),
                recompute=rng.random() < 0.3,
            )
        )
    # From numbers of their own, so that all else is drawn as it was.
    again = Random(repr(stages))
    return tuple(replace(stage, recompute_layers=_random_runs(again, stage)) for stage in stages)


def _random_runs(rng: Random, stage: StagePlan) -> tuple[tuple[int, int], ...]:
    """Of a stage that keeps all, some runs of its layers that are made again."""
    if stage.recompute or rng.random() < 0.5:
        return ()
    runs, position = [], stage.layers[0]
    while position < stage.layers[1]:
        end = min(stage.layers[1], position + rng.randint(1, 3))
        if rng.random() < 0.6:
            runs.append((position, end))
        position = end
    return tuple(runs)
