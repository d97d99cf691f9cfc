"""What the cost model and the schedule's timeline expect of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetjax.errors import InputError
from hetjax.pipeline.timeline.streamed_update import GroupTimes, stream_seconds
from hetjax.planner.costs.crossing_ends import end_of
from hetjax.planner.costs.network_cards import PipelineTimes, with_cards_of_all
from hetjax.planner.costs.sharing_cost import SharedParameters, sharing_seconds
from hetjax.planner.costs.union_cost import executions_of
from hetjax.planner.costs.update_cost import update_rate
from hetjax.planner.plan.plan import Plan, validate_for
from hetjax.planner.plan.prediction import MemberPrediction, Prediction, StagePrediction, times_of
from hetjax.planner.predictions.stage_prediction import pipeline_works, predict_stage
from hetjax.planner.predictions.step_prediction import with_schedules
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.execution import Execution


def predict(plan: Plan, problem: PlanningProblem, *others: PlanningProblem) -> Plan:
    """Predict a plan's step time, and each stage's seconds and bytes.

    The program is cut and differentiated at the plan's own stages; the cost model gives each
    stage's times and the discrete-event model of the schedule the whole step's.

    Args:
        plan: a plan, made by whichever planner or by hand.
        problem: the problem that it solves.
        others: the same problem for microbatches of other sizes, where pipelines have them.

    Returns:
        The plan with its prediction.

    Raises:
        InputError: the plan was made for another model, or for microbatches of another size, or
            members of a stage share something else than the examples or the context.
    """
    return with_stages(plan, predict_stages(plan, problem, *others))


def with_stages(plan: Plan, stages: Sequence[StagePrediction]) -> Plan:
    """The plan with what `predict_stages` found of each of its stages, and what follows from it.

    Args:
        plan: the plan.
        stages: what is predicted of them.

    Returns:
        The plan with its prediction, as `predict` makes it.
    """
    return with_schedules(replace(plan, prediction=Prediction(0.0, 0.0, tuple(stages))))


def predict_stages(
    plan: Plan, problem: PlanningProblem, *others: PlanningProblem
) -> tuple[StagePrediction, ...]:
    """Predict what the stages of a plan take, whatever their schedules: a part of `predict`.

    Args:
        plan: as for `predict`.
        problem: as for `predict`.
        others: as for `predict`.

    Returns:
        Each stage, those of one pipeline after those of the other; what depends on the schedule,
        `memory_bytes` and `bubble`, is 0.

    Raises:
        InputError: as for `predict`.
    """
    check_predictable(plan)
    validate_for(plan, problem.program)
    problems = {each.microbatch_size: each for each in (*others, problem)}
    shared = SharedParameters.of(plan, problem.program)
    sharing = sharing_seconds(plan, shared)
    alone: list[list[StagePrediction]] = []
    for pipeline in plan.pipelines:
        if pipeline.microbatch_size not in problems:
            raise InputError(
                f"the plan has microbatches of {pipeline.microbatch_size} examples; the model was "
                f"traced for microbatches of {sorted(problems)}"
            )
        of_size = problems[pipeline.microbatch_size]
        own = replace(of_size, num_microbatches=pipeline.num_microbatches)
        works = pipeline_works(plan, pipeline, own)
        places = range(len(pipeline.stages))
        alone.append([predict_stage(plan, pipeline, own, s, works) for s in places])
    return tuple(
        replace(
            _without_shared_state(plan, problem, shared, place, stage),
            sharing_seconds=sharing[place],
        )
        for place, stage in enumerate(_with_cards(plan, alone))
    )


def check_predictable(plan: Plan, where: str = "plan") -> None:
    """Check that a plan has no stage of which nothing can be predicted.

    Args:
        plan: the plan.
        where: what errors name as the plan.

    Raises:
        InputError: members of a stage share something else than the examples or the context.
    """
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if not stage.is_predictable:
                raise InputError(
                    f"{where}: pipelines[{p}].stages[{s}] has {len(stage.members)} members, and "
                    f"its shares are not those of the batch or the context alone; the cost model "
                    f"knows no other stages of several members"
                )


def _with_cards(
    plan: Plan, alone: Sequence[Sequence[StagePrediction]]
) -> Iterator[StagePrediction]:
    """The stages of all pipelines, with what their transfers take beside one another."""
    pipelines = [
        PipelineTimes(times_of(stages), [end_of(each) for each in of.stages], of.schedule.groups)
        for of, stages in zip(plan.pipelines, alone, strict=True)
    ]
    every = with_cards_of_all(pipelines, plan.cluster)
    for stages, times in zip(alone, every, strict=True):
        for stage, sent, returned in zip(
            stages, [*times.sends, 0.0], [0.0, *times.returns], strict=True
        ):
            yield replace(stage, communication_seconds=sent, return_seconds=returned)


def _without_shared_state(
    plan: Plan,
    problem: PlanningProblem,
    shared: SharedParameters,
    stage: int,
    predicted: StagePrediction,
) -> StagePrediction:
    """A stage without the optimizer state that others hold for it."""
    executions = executions_of(plan.cluster, plan.stages[stage])
    saved = [_saved_bytes(shared, problem, stage, execution) for execution in executions]
    faster = min(
        each / update_rate(problem, execution)
        for each, execution in zip(saved, executions, strict=True)
    )
    if predicted.host_bytes:
        return _with_less_offloaded(predicted, saved[0])
    members = tuple(
        _member_with_less(member, int(each))
        for member, each in zip(predicted.members, saved, strict=False)
    )
    if predicted.update_groups:
        # Its groups are those of the slowest member, of which the others may save more.
        return replace(predicted, members=members)
    return replace(
        predicted,
        state_bytes=predicted.state_bytes - int(saved[0]) * (not members),
        update_seconds=predicted.update_seconds - faster,
        members=members,
    )


def _member_with_less(member: MemberPrediction, saved: int) -> MemberPrediction:
    """A member without optimizer state that others hold for it, wherever it has its own."""
    if member.host_bytes:
        return replace(member, host_bytes=max(0, member.host_bytes - saved))
    return replace(member, state_bytes=member.state_bytes - saved)


def _with_less_offloaded(predicted: StagePrediction, saved: float) -> StagePrediction:
    """A stage whose offloaded state is less: each of its groups by the same share."""
    share = 1 - saved / predicted.host_bytes
    groups = tuple(
        GroupTimes(share * each.fetch, share * each.update, share * each.store)
        for each in predicted.update_groups
    )
    overlaps = predicted.copies_overlap
    faster = stream_seconds(predicted.update_groups, overlaps) - stream_seconds(groups, overlaps)
    return replace(
        predicted,
        host_bytes=int(share * predicted.host_bytes),
        update_bytes=int(share * predicted.update_bytes),
        update_groups=groups,
        update_seconds=predicted.update_seconds - faster,
    )


def _saved_bytes(
    shared: SharedParameters, problem: PlanningProblem, stage: int, execution: Execution
) -> float:
    """What a device holds less, or where below 0 more, since other stages hold the same."""
    saved = shared.saved_bytes(stage, problem.optimizer_bytes, execution)
    return saved - shared.undivided_bytes(stage, problem.optimizer_bytes, execution)
