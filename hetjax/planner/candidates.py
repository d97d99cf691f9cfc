"""What the candidates of a search are: plans, and what their stages take."""

from __future__ import annotations

import itertools

import numpy as np

from hetjax.mesh.cluster import SubMesh
from hetjax.pipeline.holders import Holders
from hetjax.pipeline.program import num_bytes
from hetjax.pipeline.simulate import warm_up_ends
from hetjax.pipeline.times import StepTimes
from hetjax.pipeline.warm_up import from_warm_up_counts
from hetjax.planner.cost_model import Estimate, estimate
from hetjax.planner.fixed_pace import Place
from hetjax.planner.lost_devices import around_lost
from hetjax.planner.network_cards import with_shared_cards
from hetjax.planner.plan import PipelinePlan, Plan, StagePlan
from hetjax.planner.problem import PlanningProblem
from hetjax.planner.runs import Runs
from hetjax.planner.search import Candidate, transfers_between
from hetjax.planner.sharing_cost import exchange_seconds
from hetjax.planner.stage_table import Slice, StageTable


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
    submeshes = _submeshes(problem, table, candidate)
    stages = []
    for place, chosen, submesh in zip(candidate.places, candidate.options, submeshes, strict=True):
        option = slice_of(table, place).options[chosen]
        stages.append(
            StagePlan(
                layers=place.layers,
                submesh=submesh,
                mesh_shape=option.mesh_shape,
                sharding=option.sharding,
                recompute=option.recompute,
            )
        )
    pipeline = PipelinePlan(
        stages=tuple(stages),
        num_microbatches=problem.num_microbatches,
        microbatch_size=problem.microbatch_size,
        schedule=from_warm_up_counts(
            candidate.warm_up_counts, table.num_microbatches, table.schedule
        ),
    )
    return Plan(
        model=problem.program.fingerprint,
        layers=problem.layers,
        cluster=problem.cluster,
        pipelines=(pipeline,),
        planner=planner,
    )


def _submeshes(
    problem: PlanningProblem, table: StageTable, candidate: Candidate
) -> tuple[SubMesh, ...]:
    names = [subcluster.name for subcluster in problem.cluster.subclusters]
    found = (
        SubMesh(names[place.subcluster], place.start, slice_of(table, place).shape)
        for place in candidate.places
    )
    return around_lost(problem.cluster, tuple(found), problem.lost)


def slice_of(table: StageTable, place: Place) -> Slice:
    """The slice that a stage is on."""
    return table.slices[place.subcluster][place.slice]


def candidate_estimates(
    problem: PlanningProblem, runs: Runs, table: StageTable, candidate: Candidate
) -> list[Estimate]:
    """What a candidate's stages take, as its table was made of it."""
    estimates = []
    for place, chosen in zip(candidate.places, candidate.options, strict=True):
        run, option = runs.of(place.layers), slice_of(table, place).options[chosen]
        run = run.repeating_forward() if option.recompute else run
        estimates.append(estimate(problem, run, option))
    return estimates


def candidate_seconds(
    problem: PlanningProblem, runs: Runs, table: StageTable, candidate: Candidate
) -> float:
    """Seconds of a candidate's step: its timeline, with the exchange of what stages share."""
    times = candidate_times(problem, runs, table, candidate)
    ends = warm_up_ends(candidate.warm_up_counts, table.num_microbatches, times)
    sharing = _sharing(problem, runs, table, candidate)
    together = max((end for end, own in zip(ends, sharing, strict=True) if own), default=0.0)
    return max(
        (together + own if own else end) + update
        for end, own, update in zip(ends, sharing, times.update, strict=True)
    )


def _sharing(
    problem: PlanningProblem, runs: Runs, table: StageTable, candidate: Candidate
) -> tuple[float, ...]:
    """How long each stage exchanges parameters that layers of several stages use."""
    assert runs.used is not None, "a search looks at all runs"
    pieces: list[tuple[Holders, int]] = []
    for place in np.flatnonzero(runs.used.sum(axis=1) > 1):
        holders = tuple(
            s
            for s, each in enumerate(candidate.places)
            if runs.used[place, each.layers[0] : each.layers[1]].any()
        )
        if len(holders) > 1:
            pieces.append((Holders(holders, holders), num_bytes(runs.shapes[place])))
    return exchange_seconds(problem.cluster, _submeshes(problem, table, candidate), pieces)


def candidate_times(
    problem: PlanningProblem, runs: Runs, table: StageTable, candidate: Candidate
) -> StepTimes:
    """The times of a candidate's tasks."""
    estimates = candidate_estimates(problem, runs, table, candidate)
    crossings = [
        (transfers_between(table, a, b), b.layers[0])
        for a, b in itertools.pairwise(candidate.places)
    ]
    times = StepTimes(
        forward=[float(each.forward_seconds) for each in estimates],
        backward=[float(each.backward_seconds) for each in estimates],
        sends=[float(transfers.forward[layer]) for transfers, layer in crossings],
        returns=[float(transfers.backward[layer]) for transfers, layer in crossings],
        update=[float(each.update_seconds) for each in estimates],
    )
    return with_shared_cards(times, problem.cluster, _submeshes(problem, table, candidate))
