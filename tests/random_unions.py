"""Random plans with stages of several members: unlike kinds and meshes, uneven shares."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from cases import CLUSTER, Case, random_boundaries, random_model, random_schedule, trace_model
from small_models import Model

from hetjax.mesh import KINDS, Cluster, SubMesh
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.stages.cutting import Stage, cut, made_between
from hetjax.planner.plan.module_shares import Share
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import Member, PipelinePlan, Shares, StagePlan
from hetjax.sharding.annotation.rules import RULES

_FIRST, _SECOND = CLUSTER.subclusters
UNLIKE = replace(CLUSTER, subclusters=(_FIRST, replace(_SECOND, kind=KINDS["V100"])))
"""Two subclusters of four devices, of unlike kinds."""

HOSTS = replace(
    UNLIKE,
    subclusters=tuple(
        replace(each, kind=replace(each.kind, name=f"{each.name} host", platform="cpu"))
        for each in UNLIKE.subclusters
    ),
)
"""The same, on hosts' cores: for plans that Ray runs."""

_SLICES = [(4,), (3, 1), (2, 2), (1, 2, 1), (2, 1, 1), (1, 1, 1, 1)]
"""How many devices each slice of a subcluster has."""

_BATCHES = (4, 6, 8, 12)
"""Sizes of microbatches: one of them fits whatever meshes there are."""


@dataclass(frozen=True)
class Most:
    """How large a random plan may be.

    Args:
        stages: over all pipelines.
        microbatches: in each pipeline.
        pipelines: how many.
        members: over all stages.
        cluster: whose devices they are: subclusters of four.
    """

    stages: int = 4
    microbatches: int = 4
    pipelines: int = 2
    members: int = 8
    cluster: Cluster = UNLIKE


ANY, ONE_STAGE = Most(), Most(stages=1, pipelines=1)
THREE_WORKERS = Most(stages=2, members=3, cluster=HOSTS)


def random_union_case(rng: Random, most: Most = ANY, *, double: bool = False) -> Case:
    """A random model with a random plan in which a stage has several members.

    Args:
        rng: what draws.
        most: how large.
        double: whether the model is one of float64.
    """
    model = replace(random_model(rng), double=double)
    plan = random_union_plan(rng, model, most)
    return Case(model, trace_model(model, plan.pipelines[0].microbatch_size), plan)


def random_union_plan(rng: Random, model: Model, most: Most = ANY) -> Plan:
    """A random plan in which a stage has several members, mostly 2 to 4."""
    program = trace_model(model, 1)
    count = rng.randint(1, most.pipelines)
    cuts = [random_boundaries(rng, program, max(1, most.stages // count)) for _ in range(count)]
    layers = tuple(sorted({position for each in cuts for position in each}))
    groups = iter(random_members(rng, most, sum(len(each) - 1 for each in cuts)))
    pipelines = []
    for positions in cuts:
        members = [next(groups) for _ in positions[1:]]
        size = rng.choice([each for each in _BATCHES if _fits(each, members)])
        held = zip(members, cut(program, positions), itertools.pairwise(positions), strict=True)
        stages = [
            StagePlan(
                (layers.index(first), layers.index(end)),
                tuple(of_stage),
                sharding=rng.choice(sorted(RULES)),
                recompute=rng.random() < 0.3,
                shares=random_shares(rng, trace_model(model, size), stage, (first, end), of_stage),
            )
            for of_stage, stage, (first, end) in held
        ]
        schedule = random_schedule(rng, stages, rng.randint(1, most.microbatches))
        pipelines.append(PipelinePlan(tuple(stages), schedule.num_microbatches, size, schedule))
    plan = Plan(program.fingerprint, layers, most.cluster, tuple(pipelines))
    return replace(plan, shard_optimizer_state=count > 1 and rng.random() < 0.5)


def _fits(size: int, stages: Sequence[Sequence[Member]]) -> bool:
    """Whether the members of each stage can divide a microbatch, each alone or all together."""
    data = [[member.mesh_shape[0] for member in members] for members in stages]
    return all(size % n == 0 for each in data for n in each) and size >= max(map(sum, data))


def random_members(rng: Random, most: Most, num_stages: int) -> list[list[Member]]:
    """Members of each stage: slices of the subclusters, of 1 to 4 devices each."""
    slices: list[SubMesh] = []
    while len(slices) <= num_stages:
        slices = [each for of in most.cluster.subclusters for each in _slices(rng, of.name)]
    rng.shuffle(slices)
    counts = [1] * num_stages
    unions = rng.sample(range(num_stages), rng.randint(1, min(2, num_stages)))
    for _ in range(rng.randint(1, min(len(slices), most.members) - num_stages)):
        place = rng.choice(unions)
        counts[place] = min(4, counts[place] + 1)
    return [[_random_member(rng, slices.pop()) for _ in range(count)] for count in counts]


def _slices(rng: Random, subcluster: str) -> Iterator[SubMesh]:
    start = 0
    for size in rng.choice(_SLICES):
        yield SubMesh(subcluster, start, (1, size))
        start += size


def _random_member(rng: Random, submesh: SubMesh) -> Member:
    size = submesh.num_devices
    data = rng.choice([n for n in range(1, size + 1) if size % n == 0])
    return Member(submesh, (data, size // data))


def random_shares(
    rng: Random,
    program: Program,
    stage: Stage,
    positions: tuple[int, int],
    members: Sequence[Member],
) -> Shares:
    """Random shares of the batch, of parameters, or of both; sometimes also of values.

    Args:
        rng: what draws.
        program: the program at the size of a microbatch.
        stage: the stage as it is cut from it.
        positions: where it begins and ends.
        members: its members.
    """
    if len(members) == 1:
        return Shares()
    size = program.avals[program.batch[0]].shape[0]
    kind = rng.choice(["batch", "parameters", "both"])
    data = [member.mesh_shape[0] for member in members]
    return Shares(
        batch=random_sizes(rng, size, data) if kind != "parameters" else (),
        parameters=random_parameters(rng, program, stage, len(members)) if kind != "batch" else {},
        values=random_values(rng, program, positions, len(members)) if rng.random() < 0.2 else {},
    )


def random_parameters(
    rng: Random, program: Program, stage: Stage, members: int
) -> dict[str, Share]:
    """Shares of some of a stage's parameters; of rows, also where it has some of these alone."""
    found = {}
    for part in stage.parameters:
        shape = program.avals[program.parameters[part.leaf]].shape
        wide = [i for i, n in enumerate(shape) if n >= members]
        if wide and rng.random() < 0.5:
            found[program.parameter_names[part.leaf]] = _share(rng, shape, wide, members)
    return found


def random_values(
    rng: Random, program: Program, positions: tuple[int, int], members: int
) -> dict[int, Share]:
    """A share of one of the values that a stage makes."""
    made = sorted(made_between(program, *positions))
    shapes = {value: program.avals[value].shape for value in made}
    wide = [value for value, shape in shapes.items() if max(shape, default=0) >= members]
    if not wide:
        return {}
    value = rng.choice(wide)
    dimensions = [i for i, n in enumerate(shapes[value]) if n >= members]
    return {value: _share(rng, shapes[value], dimensions, members)}


def _share(rng: Random, shape: Sequence[int], dimensions: Sequence[int], members: int) -> Share:
    dimension = rng.choice(dimensions)
    return Share(dimension, random_sizes(rng, shape[dimension], [1] * members))


def random_sizes(rng: Random, total: int, multiples: Sequence[int]) -> tuple[int, ...]:
    """Sizes that add up to a total, each a multiple of something; often some are 0."""
    *others, last = multiples
    drawn = itertools.product(*(range(0, total + 1, multiple) for multiple in others))
    found = [(*sizes, total - sum(sizes)) for sizes in drawn]
    found = [sizes for sizes in found if sizes[-1] >= 0 and sizes[-1] % last == 0]
    full = [sizes for sizes in found if 0 not in sizes]
    idle = [sizes for sizes in found if 0 in sizes]
    return rng.choice(idle if not full or rng.random() < 0.3 else full)
