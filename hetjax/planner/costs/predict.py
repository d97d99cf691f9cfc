"""What the cost model and the schedule's timeline expect of a plan."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hetjax.errors import InputError
from hetjax.pipeline.schedule_search.interleaved_search import search_interleaved
from hetjax.pipeline.schedule_search.named_schedules import make_schedule
from hetjax.pipeline.schedule_search.schedule_search import fixed_schedules
from hetjax.pipeline.schedules.memory import (
    MicrobatchBytes,
    host_peak_bytes,
    live_limit,
    peak_bytes,
    row_peak_bytes,
)
from hetjax.pipeline.schedules.schedule import INTERLEAVED, Schedule
from hetjax.pipeline.timeline.lower_bound import lower_bound
from hetjax.pipeline.timeline.quick_clock import makespan
from hetjax.pipeline.timeline.simulate import StageClock, simulate_schedule, stage_clocks
from hetjax.pipeline.timeline.streamed_update import GroupTimes, stream_update
from hetjax.pipeline.timeline.timeline import Event, Timeline, host_track, stage_track
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.planner.costs.context_cost import predict_context
from hetjax.planner.costs.cost_model import (
    copies_overlap,
    estimate,
    estimate_halves,
    update_groups,
    update_rate,
)
from hetjax.planner.costs.crossing_ends import crossing_parts, end_of, joined_link
from hetjax.planner.costs.member_timeline import by_members
from hetjax.planner.costs.modules_cost import predict_modules
from hetjax.planner.costs.network_cards import with_shared_cards
from hetjax.planner.costs.sharing_cost import SharedParameters, sharing_seconds
from hetjax.planner.costs.union_cost import (
    estimate_union,
    executions_of,
    move_seconds,
    union_execution,
)
from hetjax.planner.plan.plan import Plan, as_plan, validate_for
from hetjax.planner.plan.prediction import (
    Held,
    MemberPrediction,
    Prediction,
    StagePrediction,
    times_of,
)
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.layer_runs import Runs, one_run
from hetjax.planner.work.rates import transfer_seconds
from hetjax.planner.work.stage_work import Work, measure

INTERLEAVING = ("search", INTERLEAVED)
"""What a schedule may be asked to be where stages share devices."""


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
    return _with_schedules(replace(plan, prediction=Prediction(0.0, 0.0, tuple(stages))))


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
    stages: list[StagePrediction] = []
    for first, pipeline in plan.numbered_pipelines():
        if pipeline.microbatch_size not in problems:
            raise InputError(
                f"the plan has microbatches of {pipeline.microbatch_size} examples; the model was "
                f"traced for microbatches of {sorted(problems)}"
            )
        of_size = problems[pipeline.microbatch_size]
        for s, stage in enumerate(_stage_predictions(plan, pipeline, of_size)):
            alone = _without_shared_state(plan, problem, shared, first + s, stage)
            stages.append(replace(alone, sharing_seconds=sharing[first + s]))
    return tuple(stages)


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


def _stage_predictions(
    plan: Plan, pipeline: PipelinePlan, problem: PlanningProblem
) -> Iterator[StagePrediction]:
    works = pipeline_works(plan, pipeline, problem)
    alone = [
        _stage_prediction(plan, pipeline, problem, s, works) for s in range(len(pipeline.stages))
    ]
    ends = [end_of(stage) for stage in pipeline.stages]
    times = with_shared_cards(times_of(alone), plan.cluster, ends, pipeline.schedule.groups)
    for stage, sent, returned in zip(
        alone, [*times.sends, 0.0], [0.0, *times.returns], strict=True
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
        replace(member, state_bytes=member.state_bytes - int(each))
        for member, each in zip(predicted.members, saved, strict=False)
    )
    return replace(
        predicted,
        state_bytes=predicted.state_bytes - int(saved[0]) * (not members),
        update_seconds=predicted.update_seconds - faster,
        members=members,
    )


def _with_less_offloaded(predicted: StagePrediction, saved: float) -> StagePrediction:
    """A stage whose offloaded state is less: each of its groups by the same share."""
    share = 1 - saved / predicted.host_bytes
    groups = tuple(
        GroupTimes(share * each.fetch, share * each.update, share * each.store)
        for each in predicted.update_groups
    )
    overlaps = predicted.copies_overlap
    faster = _ends_at(predicted.update_groups, overlaps) - _ends_at(groups, overlaps)
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


def _with_schedules(plan: Plan) -> Plan:
    """A plan whose prediction has the times of its stages, with what follows from schedules."""
    prediction = _prediction(plan)
    clocks = _clocks(plan)
    step_time = max(clock.end for clock in clocks)
    stages, bounds = [], []
    busy = {
        stage: sum(sum(clocks[each].durations) for each in group)
        for group in plan.sharing
        for stage in group
    }
    for first, pipeline in plan.numbered_pipelines():
        held = prediction.stages[first : first + len(pipeline.stages)]
        for s, told in enumerate(_with_memories(held, pipeline.schedule)):
            bubble = max(0.0, 1 - busy[first + s] / step_time) if step_time else 0.0
            stages.append(replace(told, bubble=bubble))
        bounds.append(_lower_bound(held, pipeline))
    # At the bound itself, sums in another order may differ in their last bit.
    bound = min(max(bounds), step_time)
    return replace(plan, prediction=Prediction(step_time, bound, tuple(stages)))


def _clocks(plan: Plan) -> tuple[StageClock, ...]:
    """What `simulate` tells of each stage, to the bit: its tasks and its update, and their end."""
    prediction = _prediction(plan)
    clocks = [
        clock
        for first, pipeline in plan.numbered_pipelines()
        for clock in stage_clocks(
            pipeline.schedule, times_of(prediction.stages[first : first + len(pipeline.stages)])
        )
    ]
    sharing = [stage.sharing_seconds for stage in prediction.stages]
    # Stages exchange what several hold, once all of these have computed.
    begin = max((c.end for c, each in zip(clocks, sharing, strict=True) if each > 0), default=0.0)
    found: dict[int, StageClock] = {}
    for group in plan.sharing:
        start, free = clocks[group[0]].end, 0.0
        for stage in group:
            seconds = prediction.stages[stage].update_seconds
            span = start, start + seconds
            shared = begin + sharing[stage] if sharing[stage] > 0 else 0.0
            start += seconds
            first, free = _not_before(span, max(free, shared))
            found[stage] = StageClock((*clocks[stage].durations, free - first), free)
    return tuple(found[stage] for stage in range(len(clocks)))


def _not_before(span: tuple[float, float], moment: float) -> tuple[float, float]:
    """A span of an update, moved to a moment at which what it waits for is there."""
    start, end = span
    return span if start >= moment else (moment, moment + (end - start))


def _lower_bound(held: Sequence[StagePrediction], pipeline: PipelinePlan) -> float:
    """A time that no schedule of a pipeline beats: what a stage exchanges follows its last task."""
    times = times_of(held)
    closing = [stage.sharing_seconds + stage.update_seconds for stage in held]
    alone = lower_bound(pipeline.num_microbatches, replace(times, update=closing))
    groups = pipeline.schedule.groups
    if not groups:
        return alone
    # Of stages that share devices one may exchange something while another one computes.
    return max(alone, lower_bound(pipeline.num_microbatches, times, sharing=groups))


def reschedule(plan: Plan, schedule: Schedule, times: StepTimes | None = None) -> Plan:
    """The plan with another schedule, and what is predicted of it then.

    Args:
        plan: a plan with a prediction, which says what each stage takes.
        schedule: of as many stages and microbatches.
        times: what tasks and transfers take, where it is known better than the prediction has it.

    Returns:
        The plan with the schedule and its prediction.

    Raises:
        InputError: the plan has no prediction.
    """
    prediction = _prediction(plan)
    if times is not None:
        prediction = replace(prediction, stages=_with_times(prediction.stages, times))
    return _with_schedules(replace(plan.with_schedule(schedule), prediction=prediction))


def _with_times(held: Sequence[StagePrediction], times: StepTimes) -> tuple[StagePrediction, ...]:
    """A pipeline's stages with other times of their tasks and transfers."""
    return tuple(
        replace(
            stage,
            forward_seconds=times.forward[s],
            backward_seconds=times.backward[s],
            recompute_seconds=times.recompute_seconds(s),
            input_gradient_seconds=times.input_gradient[s],
            weight_gradient_seconds=times.weight_gradient[s],
            update_seconds=times.update[s],
            communication_seconds=[*times.sends, 0.0][s],
            return_seconds=[0.0, *times.returns][s],
        )
        for s, stage in enumerate(held)
    )


def choose_schedule(plan: Plan, name: str, times: StepTimes | None = None) -> Plan:
    """The plan with the schedule of a name, made for what its tasks and transfers take.

    Args:
        plan: a plan with a prediction.
        name: one of `hetjax.pipeline.SCHEDULES`. A search may use the memory that is left. Where
            stages share devices, ``"search"`` or ``"interleaved"``, which are the same there.
        times: what tasks and transfers take, where it is known better than the prediction has it;
            of a plan of one pipeline.

    Returns:
        The plan with the schedule, on each of its pipelines, and its prediction.

    Raises:
        InputError: the plan has no prediction, or the name is unknown, or another one is allowed
            where stages share devices.
    """
    prediction = _prediction(plan)
    if times is not None:
        known = times.with_copies_of(prediction.times)
        return reschedule(
            plan, _named_schedule(plan.pipeline, prediction.stages, name, known), times
        )
    pipelines = []
    for first, pipeline in plan.numbered_pipelines():
        held = prediction.stages[first : first + len(pipeline.stages)]
        schedule = _named_schedule(pipeline, held, name, times_of(held))
        pipelines.append(replace(pipeline, schedule=schedule))
    return _with_schedules(replace(plan, pipelines=tuple(pipelines)))


def _named_schedule(
    pipeline: PipelinePlan, held: Sequence[StagePrediction], name: str, times: StepTimes
) -> Schedule:
    """The schedule of a name for a pipeline of which something is predicted."""
    if pipeline.schedule.groups:
        return _interleaved_schedule(pipeline, held, name, times)
    count = pipeline.num_microbatches
    limits = _live_limits(held, count)
    alone = times.with_copies_in_tasks
    made = make_schedule(name, len(pipeline.stages), count, alone, live_limits=limits)
    if name != "search" or not times.has_copies:
        return made
    # The search knows no copies that run beside tasks: what it finds is weighed with them.
    fitting = (
        schedule
        for schedule in fixed_schedules(times, count)
        if all(stage.fits for stage in _with_memories(held, schedule))
    )
    return min((made, *fitting), key=lambda schedule: makespan(schedule, times))


def _interleaved_schedule(
    pipeline: PipelinePlan, held: Sequence[StagePrediction], name: str, times: StepTimes
) -> Schedule:
    """The best interleaved schedule that is found for a pipeline whose stages share devices.

    Where none fits it is the one that the pipeline has.
    """
    if name not in INTERLEAVING:
        raise InputError(
            f"schedule is {name!r}, and stages of the pipeline share devices; allowed there: "
            f"{' or '.join(map(repr, INTERLEAVING))}"
        )
    sharing = pipeline.schedule.sharing
    submeshes, count = len(sharing), len(pipeline.stages)
    if sharing != tuple(tuple(range(row, count, submeshes)) for row in range(submeshes)):
        raise InputError(
            f"schedule is {name!r}, and the pipeline's stages share devices as "
            f"{[list(group) for group in sharing]}; allowed there: stage s on submesh s modulo "
            f"their number, {submeshes}, or an order that is written down"
        )

    def fits(schedule: Schedule) -> bool:
        return all(stage.fits for stage in _with_memories(held, schedule))

    found = search_interleaved(times, submeshes, pipeline.num_microbatches, fits)
    return pipeline.schedule if found is None else found


def live_limits(plan: Plan) -> tuple[int, ...]:
    """How many live microbatches fit on each stage, by the plan's own prediction.

    Args:
        plan: a plan with a prediction.

    Returns:
        For each stage a number from 1 to the number of microbatches.

    Raises:
        InputError: the plan has no prediction.
    """
    return _live_limits(_prediction(plan).stages, plan.pipeline.num_microbatches)


def _live_limits(held: Sequence[StagePrediction], count: int) -> tuple[int, ...]:
    return tuple(
        min(
            max(1, live_limit(_room(each), _microbatch_bytes(each), count, _host_room(each)))
            for each in stage.members or (stage,)
        )
        for stage in held
    )


def simulate(plan: Plan | str | os.PathLike[str]) -> Timeline:
    """The timeline of one step as the plan's own prediction has it; no model is needed.

    Args:
        plan: a plan with a prediction, or the path of its file.

    Returns:
        The timeline, from 0; a member of a stage has a track of its own.

    Raises:
        InputError: the plan has no prediction.

    Example:
        >>> plan = Plan.load("plan.json")  # doctest: +SKIP
        >>> simulate(plan).makespan == plan.prediction.step_time  # doctest: +SKIP
        True
    """
    plan = as_plan(plan)
    return by_members(stage_timeline(plan), _prediction(plan).stages)


def stage_timeline(plan: Plan) -> Timeline:
    """The timeline of one step, in which a stage of several members has one track for all.

    Args:
        plan: a plan with a prediction.

    Returns:
        The timeline, from 0.
    """
    prediction = _prediction(plan)
    events = [
        event
        for first, pipeline in plan.numbered_pipelines()
        for event in simulate_schedule(
            pipeline.schedule, times_of(prediction.stages[first : first + len(pipeline.stages)])
        )
        .from_stage(first)
        .events
    ]
    sharing = {
        stage_track(s): stage.sharing_seconds
        for s, stage in enumerate(prediction.stages)
        if stage.sharing_seconds > 0
    }
    leads = {stage_track(stage): lead for stage, lead in plan.leads.items()}
    events = list(_with_sharing(events, sharing, leads)) if sharing else events
    groups = {stage_track(s): (s, stage) for s, stage in enumerate(prediction.stages)}
    return Timeline(tuple(_with_groups(events, groups)))


def _with_groups(
    events: Sequence[Event], stages: Mapping[str, tuple[int, StagePrediction]]
) -> Iterator[Event]:
    """Events in which an update whose state is offloaded is one of groups, with their copies."""
    for event in events:
        number, stage = stages.get(event.track, (0, None))
        if event.kind != "update" or stage is None or not stage.update_groups:
            yield event
            continue
        spans = stream_update(stage.update_groups, stage.copies_overlap)
        start = event.end - max(span.end for span in spans)
        if start > event.start:
            yield replace(event, end=start)
        for span in spans:
            is_copy = span.what != "update"
            yield Event(
                host_track(number, inward=span.what == "fetch") if is_copy else event.track,
                f"{span.what} {span.group}",
                span.what,
                None,
                start + span.start,
                min(event.end, start + span.end),
            )


def _with_sharing(
    events: Sequence[Event], sharing: Mapping[str, float], leads: Mapping[str, int]
) -> Iterator[Event]:
    """Events in which stages exchange what several hold, once all of these have computed."""
    computed = [each for each in events if each.track in sharing and each.kind != "update"]
    begin = max(event.end for event in computed)
    for track, seconds in sharing.items():
        yield Event(track, "share", "share", None, begin, begin + seconds)
    free: dict[int, float] = {}
    for event in events:
        if event.kind != "update":
            yield event
            continue
        lead, shared = leads[event.track], sharing.get(event.track)
        moment = max(free.get(lead, 0.0), 0.0 if shared is None else begin + shared)
        start, free[lead] = _not_before((event.start, event.end), moment)
        yield replace(event, start=start, end=free[lead])


def _prediction(plan: Plan) -> Prediction:
    if plan.prediction is None:
        raise InputError(
            "the plan has no prediction to simulate; make one with hetjax.planner.predict"
        )
    return plan.prediction


def _microbatch_bytes(held: Held) -> MicrobatchBytes:
    offloaded = held.offloaded_bytes if isinstance(held, StagePrediction) else 0
    return MicrobatchBytes(
        held.activation_bytes, held.recomputed_bytes, held.deferred_bytes, offloaded
    )


def _room(held: Held) -> float:
    """What microbatches may hold."""
    return held.memory_limit_bytes - held.state_bytes - held.working_bytes


def _host_room(held: Held) -> float:
    """What they may hold in the hosts' memory."""
    return held.host_limit_bytes - held.host_bytes if isinstance(held, StagePrediction) else 0.0


def _memory_bytes(held: Held, schedule: Schedule, index: int) -> int:
    peak = peak_bytes(schedule.order[index], _microbatch_bytes(held))
    in_update = held.update_bytes if isinstance(held, StagePrediction) else 0
    return int(held.state_bytes + max(held.working_bytes + peak, in_update))


def _with_memories(
    held: Sequence[StagePrediction], schedule: Schedule
) -> Iterator[StagePrediction]:
    """Stages with what their devices hold by a schedule; of those that share devices, all."""
    together = {stage: group for group in schedule.groups for stage in group}
    rows = dict(zip(schedule.sharing, schedule.rows, strict=True))
    for s, stage in enumerate(held):
        if s not in together:
            yield _with_memory(stage, schedule, s)
            continue
        there = {each: held[each] for each in together[s]}
        peak = row_peak_bytes(
            rows[together[s]], {k: _microbatch_bytes(v) for k, v in there.items()}
        )
        working = max(each.working_bytes for each in there.values())
        state = sum(each.state_bytes for each in there.values())
        yield replace(stage, memory_bytes=int(state + working + peak))


def _with_memory(stage: StagePrediction, schedule: Schedule, index: int) -> StagePrediction:
    """A stage with what its devices hold by a schedule: of several members the fullest ones'."""
    if not stage.members:
        on_host = host_peak_bytes(schedule.order[index], _microbatch_bytes(stage))
        return replace(
            stage,
            memory_bytes=_memory_bytes(stage, schedule, index),
            host_activation_bytes=int(on_host),
        )
    members = tuple(
        replace(member, memory_bytes=_memory_bytes(member, schedule, index))
        for member in stage.members
    )
    fullest = max(members, key=lambda member: member.memory_bytes / member.memory_limit_bytes)
    return replace(
        stage,
        members=members,
        state_bytes=fullest.state_bytes,
        working_bytes=fullest.working_bytes,
        activation_bytes=fullest.activation_bytes,
        recomputed_bytes=fullest.recomputed_bytes,
        deferred_bytes=fullest.deferred_bytes,
        memory_bytes=fullest.memory_bytes,
        memory_limit_bytes=fullest.memory_limit_bytes,
    )


def _stage_prediction(
    plan: Plan,
    pipeline: PipelinePlan,
    problem: PlanningProblem,
    index: int,
    works: Sequence[Work],
) -> StagePrediction:
    """What the cost model expects of a stage; what depends on the schedule is left at 0."""
    stages = pipeline.stages
    stage, work = stages[index], works[index]
    after = works[index + 1] if index + 1 < len(stages) else None
    run = stage_run(plan, stage, problem, work, after)
    links = [
        joined_link(crossing_parts(plan.cluster, end_of(a), end_of(b)))
        for a, b in itertools.pairwise(stages)
    ]
    back = transfer_seconds(links[index - 1], work.returned_bytes) if index else 0.0
    there = transfer_seconds(links[index], after.received_bytes) if after else 0.0
    if stage.members_share_context:
        alone = predict_context(plan, pipeline, index, problem, after, run)
    elif stage.shares.modules:
        alone = predict_modules(plan, stage, problem, work)
    else:
        of_stage = _of_one_member if len(stage.members) == 1 else _of_members
        alone = of_stage(plan, stage, problem, work, run)
    return replace(alone, communication_seconds=there, return_seconds=back)


def _of_one_member(
    plan: Plan, stage: StagePlan, problem: PlanningProblem, work: Work, run: Runs
) -> StagePrediction:
    """What a stage takes and holds that has one member."""
    (execution,) = executions_of(plan.cluster, stage)
    whole = estimate(problem, run, execution)
    halves = estimate_halves(problem, work, run, execution)
    groups = update_groups(problem, run, execution)
    streamed = _ends_at(groups, copies_overlap(execution)) + float(whole.exchange_seconds)
    return StagePrediction(
        forward_seconds=float(whole.forward_seconds),
        backward_seconds=float(whole.backward_seconds) - halves.recompute_seconds,
        recompute_seconds=halves.recompute_seconds,
        input_gradient_seconds=halves.input_gradient_seconds,
        weight_gradient_seconds=halves.weight_gradient_seconds,
        update_seconds=streamed if groups else float(whole.update_seconds),
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


def _ends_at(groups: Sequence[GroupTimes], overlaps: bool) -> float:
    return max((span.end for span in stream_update(groups, overlaps)), default=0.0)


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
        )
        for each, half, execution in zip(whole.members, halves, union.members, strict=True)
    )
    inputs = max(each.input_gradient_seconds for each in halves) + backward - again
    return StagePrediction.of_members(
        members,
        forward_seconds=float(whole.forward_seconds),
        backward_seconds=float(whole.backward_seconds) - recompute,
        recompute_seconds=recompute,
        input_gradient_seconds=inputs,
        weight_gradient_seconds=max(each.weight_gradient_seconds for each in halves),
        update_seconds=float(whole.update_seconds),
    )


def _layers_in(problem: PlanningProblem, plan: Plan, stage: StagePlan) -> tuple[int, int] | None:
    """The problem's layers of a stage of a plan, which may have other ones; None where none fit."""
    place = {position: layer for layer, position in enumerate(problem.layers)}
    first, end = (place.get(plan.layers[layer]) for layer in stage.layers)
    return None if first is None or end is None else (first, end)
