"""What the candidates of a search are: plans, and what their stages take."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.pipeline.schedules.warm_up import from_warm_up_counts
from hetjax.planner.costs.cost_model import Estimate, estimate
from hetjax.planner.costs.crossing_ends import End
from hetjax.planner.costs.union_cost import UnionExecution
from hetjax.planner.harp.fixed_pace import Place
from hetjax.planner.harp.lost_devices import around_lost
from hetjax.planner.harp.search import Candidate
from hetjax.planner.harp.stage_table import Slice, StageTable
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import Member, PipelinePlan, Shares, StagePlan
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.layer_runs import Runs
from hetjax.planner.work.repeating_layers import LayerRun, repeated_by, runs_by_repetition


def candidate_plan(
    problem: PlanningProblem, table: StageTable, candidate: Candidate, planner: str
) -> Plan:
    """The plan that a candidate stands for.

    Args:
        problem: what was planned.
        table: what it was chosen from.
        candidate: the candidate.
        planner: what chose it.

    Returns:
        The plan, without a prediction.
    """
    ends = candidate_ends(table, problem.cluster, problem.lost, candidate)
    stages, schedule = candidate_stages(
        table, candidate, ends, problem.repeatable_layers, problem.microbatch_size
    )
    return pipeline_plan(problem, stages, schedule, planner)


def candidate_stages(
    table: StageTable,
    candidate: Candidate,
    ends: Sequence[End],
    pieces: Sequence[LayerRun],
    microbatch_size: int,
) -> tuple[list[StagePlan], Schedule]:
    """The stages that a candidate stands for, and their schedule.

    Args:
        table: what it was chosen from.
        candidate: the candidate.
        ends: where its stages are.
        pieces: the layers that are made again together.
        microbatch_size: examples in a microbatch.
    """
    stages = []
    for place, chosen, end in zip(candidate.places, candidate.options, ends, strict=True):
        option = slice_of(table, place).options[chosen]
        ways = option.members if isinstance(option, UnionExecution) else (option,)
        members = (
            Member(submesh, way.mesh_shape) for (submesh, _), way in zip(end, ways, strict=True)
        )
        again = repeated_by(option.repeats, pieces, place.layers)
        sizes = (round(way.examples * microbatch_size) for way in ways)
        stages.append(
            StagePlan(
                layers=place.layers,
                members=tuple(members),
                sharding=ways[0].sharding,
                recompute=option.repeats == "stage",
                recompute_layers=again,
                offload=ways[0].offloads,
                shares=Shares(batch=tuple(sizes)) if len(ways) > 1 else Shares(),
            )
        )
    counts = candidate.warm_up_counts
    return stages, from_warm_up_counts(counts, table.num_microbatches, table.schedule)


def pipeline_plan(
    problem: PlanningProblem, stages: Sequence[StagePlan], schedule: Schedule, planner: str
) -> Plan:
    """The plan of one pipeline.

    Args:
        problem: what was planned.
        stages: its stages.
        schedule: its schedule.
        planner: what chose it.

    Returns:
        The plan, without a prediction.
    """
    count, size = problem.num_microbatches, problem.microbatch_size
    pipeline = PipelinePlan(tuple(stages), count, size, schedule)
    return Plan(
        model=problem.program.fingerprint,
        layers=problem.layers,
        cluster=problem.cluster,
        pipelines=(pipeline,),
        planner=planner,
        lost_devices=tuple(sorted(problem.lost)),
    )


def candidate_ends(
    table: StageTable, cluster: Cluster, lost: Collection[int], candidate: Candidate
) -> tuple[End, ...]:
    """Where a candidate's stages are, around devices that are lost.

    Args:
        table: what it was chosen from.
        cluster: the devices.
        lost: of these, those that cannot be used.
        candidate: the candidate.

    Returns:
        For each stage its submeshes, and the shares of a microbatch that they compute.
    """
    if not table.joined:
        alone = _submeshes(table, cluster, lost, candidate)
        return tuple(((submesh, 1.0),) for submesh in alone)
    ends: list[End] = []
    for place, chosen in zip(candidate.places, candidate.options, strict=True):
        cut = slice_of(table, place)
        option = cut.options[chosen]
        shares = option.examples if isinstance(option, UnionExecution) else (1.0,)
        parts = table.joined[place.subcluster]
        submeshes = (part.submesh(cut.shape, place.start) for part in parts)
        ends.append(tuple(zip(submeshes, shares, strict=True)))
    return tuple(ends)


def _submeshes(
    table: StageTable, cluster: Cluster, lost: Collection[int], candidate: Candidate
) -> tuple[SubMesh, ...]:
    names = [subcluster.name for subcluster in cluster.subclusters]
    found = (
        SubMesh(names[place.subcluster], place.start, slice_of(table, place).shape)
        for place in candidate.places
    )
    return around_lost(cluster, tuple(found), lost)


def slice_of(table: StageTable, place: Place) -> Slice:
    """The slice that a stage is on."""
    return table.slices[place.subcluster][place.slice]


def candidate_estimates(
    problem: PlanningProblem, runs: Runs, table: StageTable, candidate: Candidate
) -> list[Estimate]:
    """What a candidate's stages take, as its table was made of it."""
    estimates = []
    by_repetition = runs_by_repetition(runs, problem.repeatable_layers)
    for place, chosen in zip(candidate.places, candidate.options, strict=True):
        option = slice_of(table, place).options[chosen]
        assert not isinstance(option, UnionExecution), "subclusters are not joined"
        run = by_repetition[option.repeats].of(place.layers)
        estimates.append(estimate(problem, run, option))
    return estimates
