"""Annotations for the stages of a plan whose logical mesh has a tensor axis."""

from __future__ import annotations

from dataclasses import replace

from hetjax.pipeline.program.sequence import token_dimensions
from hetjax.pipeline.schedules.memory import MicrobatchBytes, peak_bytes
from hetjax.pipeline.stages.cutting import Stage, cut
from hetjax.planner.intra_op.stage_sharding import StageDevices, Training, shard_stage
from hetjax.planner.intra_op.tensor_axis import divided_parameters
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.prediction import StagePrediction
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.rates import USABLE_MEMORY, collective_link


def shard_stages(plan: Plan, problem: PlanningProblem, *others: PlanningProblem) -> Plan:
    """Say how parameters and values lie on every stage with a tensor axis.

    Stages that say it themselves stay as they are, and so do those of which no way is found that
    fits.

    Args:
        plan: a plan with a prediction.
        problem: the problem that it solves.
        others: the same problem for microbatches of other sizes, where pipelines have them.

    Returns:
        The plan, without a prediction where anything has changed.
    """
    if not any(map(_is_open, plan.stages)):
        return plan
    problems = {each.microbatch_size: each for each in (*others, problem)}
    pipelines = tuple(
        replace(
            pipeline,
            stages=_sharded_stages(plan, first, pipeline, problems[pipeline.microbatch_size]),
        )
        for first, pipeline in plan.numbered_pipelines()
    )
    if pipelines == plan.pipelines:
        return plan
    return replace(plan, pipelines=pipelines, prediction=None)


def _sharded_stages(
    plan: Plan, first: int, pipeline: PipelinePlan, problem: PlanningProblem
) -> tuple[StagePlan, ...]:
    """The stages of a pipeline, the first of which has a number in the plan."""
    runs = cut(problem.program, plan.boundaries(pipeline))
    predicted = plan.predicted.stages[first : first + len(pipeline.stages)]
    return tuple(
        _sharded(plan, pipeline, problem, run, expected) if _is_open(stage) else stage
        for stage, run, expected in zip(pipeline.stages, runs, predicted, strict=True)
    )


def _is_open(stage: StagePlan) -> bool:
    is_plain = len(stage.members) == 1 and not stage.parameters and not stage.values
    return is_plain and stage.mesh_shape[1] > 1


def divide_members(plan: Plan, problem: PlanningProblem) -> Plan:
    """Say how parameters and values lie inside members that share the context.

    Args:
        plan: a plan, which need not be predicted yet.
        problem: the problem that it solves.

    Returns:
        The plan, without a prediction where anything has changed. Stages that say it themselves
        stay as they are.
    """
    if not any(map(_has_open_members, plan.stages)):
        return plan
    pipelines = []
    for pipeline in plan.pipelines:
        runs = cut(problem.program, plan.boundaries(pipeline))
        stages = (
            _with_divided_parameters(pipeline, problem, run) if _has_open_members(stage) else stage
            for stage, run in zip(pipeline.stages, runs, strict=True)
        )
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return replace(plan, pipelines=tuple(pipelines), prediction=None)


def _has_open_members(stage: StagePlan) -> bool:
    is_plain = stage.members_share_context and not stage.parameters and not stage.values
    return is_plain and any(member.mesh_shape[1] > 1 for member in stage.members)


def _with_divided_parameters(
    pipeline: PipelinePlan, problem: PlanningProblem, run: Stage
) -> StagePlan:
    """A stage whose members share the context: its parameters are divided inside its members.

    They have a tensor axis for these parameters' sake. Tokens are not divided inside a member: of
    many it is cheaper, but then each device had the parameters whole.
    """
    stage, program = pipeline.stages[run.index], problem.program
    devices = max(each.mesh_shape[1] for each in stage.members)
    tokens = token_dimensions(program).values
    found = divided_parameters(program, run, pipeline.microbatch_size, devices, tokens)
    return replace(stage, parameters=found.parameters, values=found.values)


def _sharded(
    plan: Plan,
    pipeline: PipelinePlan,
    problem: PlanningProblem,
    run: Stage,
    predicted: StagePrediction,
) -> StagePlan:
    stage = pipeline.stages[run.index]
    # What waits in the hosts' memory leaves its place on the devices to what is divided.
    away = float("activations" in stage.offload)
    microbatch = MicrobatchBytes(1, 0, 0, offloaded=away)
    live = int(peak_bytes(pipeline.schedule.order[run.index], microbatch))
    taken = predicted.working_bytes + live * predicted.activation_bytes * stage.recompute
    devices = StageDevices(
        kind=plan.cluster.subcluster(stage.submesh.subcluster).kind,
        count=stage.submesh.num_devices,
        link=collective_link(plan.cluster, stage.submesh),
        memory_bytes=predicted.memory_limit_bytes * USABLE_MEMORY - taken,
        nodes=stage.submesh.shape[0],
    )
    training = Training(
        microbatch_size=pipeline.microbatch_size,
        num_microbatches=pipeline.num_microbatches,
        live_microbatches=1 if stage.recompute else live,
        dtype=problem.dtype,
        optimizer_bytes=0.0 if "optimizer_state" in stage.offload else problem.optimizer_bytes,
    )
    found = shard_stage(
        problem.program,
        run,
        devices,
        training,
        mesh_shapes=[stage.mesh_shape],
        # Where stages share a context, the state is divided as it says.
        divides_state=stage.shares.context is None,
    )
    if found is None:
        return stage
    return replace(stage, sharding=found.sharding, parameters=found.parameters, values=found.values)
