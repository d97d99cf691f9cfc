"""Plans with stages over unions: unlike devices that share the examples of one stage.

Where a link between them is fast, unlike devices need not wait for each other along a pipeline:
each computes its examples, as many as it has time for. One such stage over whole subclusters is
looked at by itself, which takes next to nothing. Pipelines that have such stages are found by the
search for all pipelines, with subclusters joined in every way; see
`hetjax.planner.harp.union_slices`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetjax.pipeline.schedules.warm_up import from_warm_up_counts
from hetjax.planner.costs.pass_cost import least_seconds
from hetjax.planner.costs.union_cost import estimate_union, union_execution
from hetjax.planner.harp.candidate_plans import candidate_plan, pipeline_plan
from hetjax.planner.harp.many_subclusters import fastest_first
from hetjax.planner.harp.member_shares import best_shares
from hetjax.planner.harp.replicas import Timed
from hetjax.planner.harp.simulated_search import CLOSED_FORM_EXCESS, first_look, simulated_search
from hetjax.planner.harp.stage_table import StageTable
from hetjax.planner.harp.table_making import ALL_ORDERS_UP_TO
from hetjax.planner.harp.union_slices import (
    JoinedSubcluster,
    UnionSlices,
    joined,
    joined_table,
    joinings,
    member_rates,
    with_memory,
)
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import Member, Shares, StagePlan
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.layer_runs import Runs

_WORTH = 0.99
"""What can save less than 1% of a step is not searched for."""

_IMPROVABLE = 0.02
"""By what share a first look at joined subclusters may be slower than the best to be improved."""

_EFFORT = 0.25
"""Pipelines of joined subclusters are searched with this share of the usual effort."""


def may_have_unions(problem: PlanningProblem) -> bool:
    """Whether stages over unions are to be considered.

    Args:
        problem: what to plan.
    """
    several = len(problem.cluster.subclusters) > 1
    return problem.options.union_stages and several and not problem.lost


def one_union_stage(problem: PlanningProblem, runs: Runs, planner: str) -> Timed | None:
    """The fastest plan of one stage over several whole subclusters.

    The shares of its members are the best there are, by their speed and their memory.

    Args:
        problem: what to plan.
        runs: the work of every run of its layers.
        planner: what the plan says that it was made by.

    Returns:
        Seconds of a step, and the plan; None where no such stage fits.
    """
    if not may_have_unions(problem) or problem.options.min_stages > 1:
        return None
    run = runs.of((0, problem.num_layers))
    found: list[Timed] = []
    for stage in _whole_stages(problem):
        of_stage = run.repeating_forward() if stage.recompute else run
        rates = member_rates(problem, of_stage, stage)
        batch = best_shares(problem.microbatch_size, with_memory(problem, of_stage, stage, rates))
        if batch is not None:
            shared = replace(stage, shares=Shares(batch=batch))
            takes = estimate_union(problem, of_stage, union_execution(problem.cluster, shared))
            each = float(takes.forward_seconds + takes.backward_seconds)
            seconds = problem.num_microbatches * each + float(takes.update_seconds)
            found.append((seconds, _plan_of(problem, shared, planner)))
    return min(found, key=lambda timed: timed[0], default=None)


def _whole_stages(problem: PlanningProblem) -> Iterator[StagePlan]:
    """Stages of all layers on all devices of several subclusters, without their shares."""
    again = (False, True) if problem.options.allow_recompute else (False,)
    for chosen in _several_of(problem):
        members = _whole_members(joined(problem.cluster, chosen))
        for recompute in again:
            yield StagePlan((0, problem.num_layers), members, recompute=recompute)


def _several_of(problem: PlanningProblem) -> Iterator[Sequence[str]]:
    """Names of several subclusters: all choices, or where there are many, of the fastest ones."""
    names = [subcluster.name for subcluster in problem.cluster.subclusters]
    fastest = fastest_first(problem.cluster, problem.dtype)
    for count in range(2, len(names) + 1):
        if len(names) <= ALL_ORDERS_UP_TO:
            yield from itertools.combinations(names, count)
        else:
            yield [names[place] for place in sorted(fastest[:count])]


def _whole_members(of: JoinedSubcluster) -> tuple[Member, ...]:
    return of.members((of.nodes, of.devices_per_node))


def _plan_of(problem: PlanningProblem, stage: StagePlan, planner: str) -> Plan:
    schedule = from_warm_up_counts([1], problem.num_microbatches, problem.warm_up_schedule)
    return pipeline_plan(problem, [stage], schedule, planner)


def pipelines_of_unions(
    problem: PlanningProblem, runs: Runs, plain: StageTable, below: float, planner: str
) -> Timed | None:
    """The fastest pipeline that has stages over unions.

    Args:
        problem: what to plan.
        runs: the work of every run of its layers.
        plain: the table of the subclusters as they are.
        below: no plan is wanted that takes this or more, nor one that must take nearly so.
        planner: what the plan says that it was made by.

    Returns:
        Seconds of a step, and the plan; None where none is faster.
    """
    if not may_have_unions(problem) or problem.options.objective != "step_time":
        return None
    devices = {each.name: each.num_devices for each in problem.cluster.subclusters}
    least = problem.num_microbatches * least_seconds(problem, devices)
    best: Timed | None = None
    slices_of = UnionSlices(problem, runs)
    for join in joinings(problem.cluster, problem.dtype):
        if least >= below * _WORTH:
            break
        table = joined_table(slices_of, plain, join)
        limit = below * _WORTH * (1 + CLOSED_FORM_EXCESS)
        met = table and first_look(problem, runs, table, below=limit)
        if not table or not met or met[0].makespan >= below * (1 + _IMPROVABLE):
            continue
        candidates = [each.candidate for each in met]
        judged, *_ = simulated_search(problem, runs, table, candidates, _EFFORT)
        plan = candidate_plan(problem, table, judged.candidate, planner)
        if judged.makespan < below * _WORTH and plan.has_unions:
            below, best = judged.makespan, (judged.makespan, plan)
    return best
