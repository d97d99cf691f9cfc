"""Random plans with stages of several members: unlike meshes, uneven shares."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from cases import CLUSTER, Case, random_boundaries, random_model, random_schedule, trace_model
from small_models import Model

from hetjax.mesh import SubMesh
from hetjax.pipeline.program.traced_program import Program
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import Member, PipelinePlan, Share, Shares, StagePlan
from hetjax.sharding.annotation.rules import RULES


def random_union_case(
    rng: Random, max_stages: int = 1, max_microbatches: int = 4, max_pipelines: int = 1
) -> Case:
    """A random model with a random plan in which stages have 1 to 4 members."""
    model = random_model(rng)
    plan = random_union_plan(rng, model, max_stages, max_microbatches, max_pipelines)
    return Case(model, trace_model(model, plan.pipelines[0].microbatch_size), plan)


def random_union_plan(
    rng: Random,
    model: Model,
    max_stages: int = 1,
    max_microbatches: int = 4,
    max_pipelines: int = 1,
) -> Plan:
    """A random plan in which stages have 1 to 4 members."""
    program = trace_model(model, 1)
    count = rng.randint(1, max_pipelines)
    cuts = [random_boundaries(rng, program, max(1, max_stages // count)) for _ in range(count)]
    layers = tuple(sorted({position for cut in cuts for position in cut}))
    num_stages = sum(len(cut) - 1 for cut in cuts)
    groups = iter(random_members(rng, num_stages))
    pipelines = []
    for cut in cuts:
        members = [next(groups) for _ in cut[1:]]
        needed = max(sum(each.mesh_shape[0] for each in stage) for stage in members)
        size = rng.choice([each for each in (4, 6, 8) if each >= needed])
        stages = [
            random_union_stage(
                rng,
                program,
                (layers.index(first), layers.index(end)),
                of_stage,
                size,
                divides_rows=num_stages == 1,
            )
            for of_stage, (first, end) in zip(members, itertools.pairwise(cut), strict=True)
        ]
        schedule = random_schedule(rng, stages, rng.randint(1, max_microbatches))
        pipelines.append(PipelinePlan(tuple(stages), schedule.num_microbatches, size, schedule))
    plan = Plan(program.fingerprint, layers, CLUSTER, tuple(pipelines))
    return replace(plan, shard_optimizer_state=count > 1 and rng.random() < 0.5)


def random_members(rng: Random, num_stages: int) -> list[list[Member]]:
    """Members of each stage: slices of the two subclusters, of 1 or 2 devices each."""
    free = {"first": [(0, 2), (2, 1), (3, 1)], "second": [(0, 1), (1, 1), (2, 2)]}
    slices = [(name, *each) for name, found in free.items() for each in found]
    rng.shuffle(slices)
    counts = [1] * num_stages
    for _ in range(rng.randint(1, len(slices) - num_stages)):
        place = rng.randrange(num_stages)
        counts[place] = min(4, counts[place] + 1)
    found = []
    for count in counts:
        members = []
        for _ in range(count):
            name, start, size = slices.pop()
            shape = rng.choice([(1, size), (size, 1)])
            members.append(Member(SubMesh(name, start, (1, size)), shape))
        found.append(members)
    return found


def random_union_stage(
    rng: Random,
    program: Program,
    layers: tuple[int, int],
    members: Sequence[Member],
    size: int,
    *,
    divides_rows: bool = True,
) -> StagePlan:
    """A stage with random shares of the batch, of parameters, or of both.

    Parameters are shared along their rows only where the stage has all of these.
    """
    fits = [member.mesh_shape[0] for member in members]
    batch = random_sizes(rng, size, fits)
    if len(members) == 1:
        shares = Shares()
        fitting = size % fits[0] == 0
        assert fitting, "sizes are even"
    else:
        kind = rng.choice(["batch", "parameters", "both"])
        first = 0 if divides_rows else 1
        shares = Shares(
            batch=batch if kind != "parameters" else (),
            parameters=(
                random_parameters(rng, program, len(members), first) if kind != "batch" else {}
            ),
        )
    return StagePlan(
        layers,
        tuple(members),
        sharding=rng.choice(sorted(RULES)),
        recompute=rng.random() < 0.3,
        shares=shares,
    )


def random_parameters(
    rng: Random, program: Program, members: int, first: int = 0
) -> dict[str, Share]:
    """Shares of some parameters, along any dimension from the first one on."""
    found = {}
    for name, value in zip(program.parameter_names, program.parameters, strict=True):
        shape = program.avals[value].shape
        wide = [i for i, n in enumerate(shape) if i >= first and n >= members]
        if wide and rng.random() < 0.5:
            dimension = rng.choice(wide)
            found[name] = Share(dimension, random_sizes(rng, shape[dimension], [1] * members))
    return found


def random_sizes(rng: Random, total: int, multiples: Sequence[int]) -> tuple[int, ...]:
    """Sizes that add up to a total, each a multiple of something; some may be 0."""
    least = 0 if rng.random() < 0.2 else 1
    while True:
        cuts = sorted(rng.randint(0, total) for _ in multiples[1:])
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
        if all(n % m == 0 and n >= least for n, m in zip(sizes, multiples, strict=True)):
            return tuple(sizes)


def without_shares(model: Model, case: Case) -> Case:
    """The same case with every stage on its first member."""
    (pipeline,) = case.plan.pipelines
    stages = tuple(replace(s, members=s.members[:1], shares=Shares()) for s in pipeline.stages)
    return replace(case, plan=replace(case.plan, pipelines=(replace(pipeline, stages=stages),)))
