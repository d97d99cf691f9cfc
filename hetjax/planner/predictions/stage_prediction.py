"""What the cost model expects of one stage, whatever its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hetjax.mesh.cluster import Cluster
from hetjax.mesh.links import Link
from hetjax.pipeline.timeline.streamed_update import stream_seconds
from hetjax.planner.costs.context_cost import predict_context
from hetjax.planner.costs.cost_model import estimate
from hetjax.planner.costs.crossing_ends import crossing_parts, end_of, joined_link
from hetjax.planner.costs.half_costs import estimate_halves
from hetjax.planner.costs.modules_cost import predict_modules
from hetjax.planner.costs.offloading_members import host_figures, with_copies
from hetjax.planner.costs.union_cost import (
    estimate_union,
    executions_of,
    move_seconds,
    union_execution,
)
from hetjax.planner.costs.update_cost import copies_overlap, update_groups
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.prediction import MemberPrediction, StagePrediction
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.layer_runs import Runs, one_run
from hetjax.planner.work.rates import transfer_seconds
from hetjax.planner.work.stage_work import Work, measure


def pipeline_works(
    plan: Plan, pipeline: PipelinePlan, problem: PlanningProblem
) -> tuple[Work, ...]:
    """The work of a pipeline's stages for one microbatch.

    Args:
        plan: the plan.
        pipeline: a pipeline of it.
        problem: the problem for microbatches of its size.
    """
    return measure(
        problem.program,
        plan.boundaries(pipeline),
        [stage.recompute for stage in pipeline.stages],
        recompute_runs=[plan.recompute_positions(stage) for stage in pipeline.stages],
        split=True,
        known=problem.known,
    )


def stage_run(
    plan: Plan, stage: StagePlan, problem: PlanningProblem, work: Work, after: Work | None
) -> Runs:
    """The work of a stage as the cost model takes it.

    Args:
        plan: the plan.
        stage: a stage of it.
        problem: the problem.
        work: the stage's work.
        after: that of the stage after it; None for the last one.
    """
    sent, coming = (after.received_bytes, after.returned_bytes) if after else (0, 0)
    return one_run(problem.program, work, sent, _layers_in(problem, plan, stage), coming)


def predict_stage(
    plan: Plan,
    pipeline: PipelinePlan,
    problem: PlanningProblem,
    index: int,
    works: Sequence[Work],
) -> StagePrediction:
    """What the cost model expects of a stage; what depends on the schedule is left at 0.

    Args:
        plan: the plan.
        pipeline: a pipeline of it.
        problem: the problem for microbatches of its size.
        index: which of the pipeline's stages.
        works: the work of all of them.
    """
    stages = pipeline.stages
    stage, work = stages[index], works[index]
    after = works[index + 1] if index + 1 < len(stages) else None
    run = stage_run(plan, stage, problem, work, after)
    there = back = 0.0
    if index:
        link = _link(plan.cluster, stage, stages[index - 1])
        back = transfer_seconds(link, work.returned_bytes)
    if after:
        link = _link(plan.cluster, stage, stages[index + 1])
        there = transfer_seconds(link, after.received_bytes)
    if stage.members_share_context:
        alone = predict_context(plan, pipeline, index, problem, after, run)
    elif stage.shares.modules:
        alone = predict_modules(plan, stage, problem, work)
    else:
        of_stage = _of_one_member if len(stage.members) == 1 else _of_members
        alone = of_stage(plan, stage, problem, work, run)
    return replace(alone, communication_seconds=there, return_seconds=back)


def _link(cluster: Cluster, sender: StagePlan, receiver: StagePlan) -> Link:
    """What stands for all that is between the members of two stages."""
    return joined_link(crossing_parts(cluster, end_of(sender), end_of(receiver)))


def _of_one_member(
    plan: Plan, stage: StagePlan, problem: PlanningProblem, work: Work, run: Runs
) -> StagePrediction:
    """What a stage takes and holds that has one member."""
    (execution,) = executions_of(plan.cluster, stage)
    whole = estimate(problem, run, execution)
    halves = estimate_halves(problem, work, run, execution)
    groups = update_groups(problem, run, execution)
    streamed = stream_seconds(groups, copies_overlap(execution)) + float(whole.exchange_seconds)
    return StagePrediction(
        forward_seconds=float(whole.forward_seconds),
        backward_seconds=float(whole.backward_seconds) - halves.recompute_seconds,
        recompute_seconds=halves.recompute_seconds,
        input_gradient_seconds=halves.input_gradient_seconds,
        weight_gradient_seconds=halves.weight_gradient_seconds,
        update_seconds=streamed if groups else float(whole.update_seconds),
        exchange_seconds=float(whole.exchange_seconds),
        communication_seconds=0.0,
        return_seconds=0.0,
        state_bytes=int(whole.state_bytes),
        working_bytes=int(whole.working_bytes) - halves.recomputed_bytes,
        activation_bytes=int(whole.activation_bytes),
        recomputed_bytes=halves.recomputed_bytes,
        deferred_bytes=halves.deferred_bytes,
        memory_bytes=0,
        memory_limit_bytes=execution.kind.memory_bytes,
        bubble=0.0,
        update_bytes=int(whole.update_bytes),
        host_bytes=int(whole.host_bytes),
        host_limit_bytes=int(execution.host_bytes),
        update_groups=groups,
        copies_overlap=bool(stage.offload) and copies_overlap(execution),
        offloaded_bytes=int(whole.offloaded_bytes),
        store_seconds=float(whole.copy_seconds),
        fetch_seconds=float(whole.copy_seconds),
    )


def _of_members(
    plan: Plan, stage: StagePlan, problem: PlanningProblem, work: Work, run: Runs
) -> StagePrediction:
    """What a data-parallel stage of several members takes; what is held, each member says."""
    union = union_execution(plan.cluster, stage)
    whole = estimate_union(problem, run, union)
    halves = [estimate_halves(problem, work, run, member) for member in union.members]
    backward = float(move_seconds(problem, run, union)[1])
    recompute = max(each.recompute_seconds for each in halves)
    again = 0.0
    if stage.recompute:
        # It does again what the forward pass exchanged.
        none = np.zeros(())
        told = replace(run, given_moves=none, given_moved=none)
        again = float(move_seconds(problem, told, union)[0])
        recompute += again
    members = tuple(
        MemberPrediction(
            forward_seconds=float(each.forward_seconds),
            backward_seconds=float(each.backward_seconds),
            state_bytes=int(each.state_bytes),
            working_bytes=int(each.working_bytes) - half.recomputed_bytes,
            activation_bytes=int(each.activation_bytes),
            recomputed_bytes=half.recomputed_bytes,
            deferred_bytes=half.deferred_bytes,
            memory_bytes=0,
            memory_limit_bytes=execution.kind.memory_bytes,
            **host_figures(problem, run, execution, float(each.activation_bytes)),
        )
        for each, half, execution in zip(whole.members, halves, union.members, strict=True)
    )
    inputs = max(each.input_gradient_seconds for each in halves) + backward - again
    predicted = StagePrediction.of_members(
        members,
        forward_seconds=float(whole.forward_seconds),
        backward_seconds=float(whole.backward_seconds) - recompute,
        recompute_seconds=recompute,
        input_gradient_seconds=inputs,
        weight_gradient_seconds=max(each.weight_gradient_seconds for each in halves),
        update_seconds=float(whole.update_seconds),
        exchange_seconds=float(whole.exchange_seconds),
    )
    return with_copies(predicted, problem, run, union)


def _layers_in(problem: PlanningProblem, plan: Plan, stage: StagePlan) -> tuple[int, int] | None:
    """The problem's layers of a stage of a plan, which may have other ones; None where none fit."""
    place = {position: layer for layer, position in enumerate(problem.layers)}
    first, end = (place.get(plan.layers[layer]) for layer in stage.layers)
    return None if first is None or end is None else (first, end)
