"""What a stage takes and holds whose members share the context, by the program that they run.

The stage is rewritten and traced as the runtime does, with its attentions as reshards and blocks; a
walk over the trace tells what each member computes of every equation and sends in every move; and
the members' timeline is played for each task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from hetjax.pipeline.program.constraints import constrained
from hetjax.pipeline.program.costs import steps_cost
from hetjax.pipeline.program.pieces import where_they_belong
from hetjax.pipeline.program.step_program import StepProgram
from hetjax.pipeline.program.traced_program import Program, Step
from hetjax.pipeline.program.work_classes import steps_work
from hetjax.pipeline.stages.backward import StagePrograms, differentiate
from hetjax.pipeline.stages.cutting import Body, Stage, cut
from hetjax.pipeline.stages.recomputing import with_open_calls, with_open_regions
from hetjax.pipeline.stages.shared_context import share_context
from hetjax.pipeline.stages.traced_stage import TracedStage, trace_stage
from hetjax.planner.costs.context_memory import ContextPrograms, ContextTask, held_bytes
from hetjax.planner.costs.context_timeline import network_among
from hetjax.planner.costs.cost_model import handling_seconds
from hetjax.planner.costs.offloading_members import host_figures, with_copies
from hetjax.planner.costs.task_costs import BACKWARD, FORWARD, MemberSpeeds, TaskCosts
from hetjax.planner.costs.union_cost import executions_of, union_execution, union_update_seconds
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.plan_context import ring_of, token_order, values_inside, with_tokens
from hetjax.planner.plan.prediction import MemberPrediction, StagePrediction
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.context_items import items_of
from hetjax.planner.work.context_walk import Amounts, ContextTrace, walk_context
from hetjax.planner.work.execution import spec_of_leaf
from hetjax.planner.work.grouped_stage import Groups
from hetjax.planner.work.layer_runs import Runs
from hetjax.planner.work.run_structure import inputs_of
from hetjax.planner.work.stage_work import Work
from hetjax.planner.work.tensor_walk import TensorTrace, divided_evenly, walk_tensor
from hetjax.sharding.context.context_split import ContextSplit
from hetjax.sharding.context.ring_attention import ContextRing
from hetjax.sharding.deduction.top_tier import TopTier


def predict_context(
    plan: Plan,
    pipeline: PipelinePlan,
    index: int,
    problem: PlanningProblem,
    after: Work | None,
    run: Runs,
) -> StagePrediction:
    """Predict a stage of several members that share the context.

    Args:
        plan: the plan.
        pipeline: a pipeline of it.
        index: which of its stages.
        problem: the problem that it solves; its program has attention as equations of their own.
        after: the work of the stage after it, on one device; None for the last stage.
        run: its own work, as `hetjax.planner.work.layer_runs.one_run` has it.

    Returns:
        The prediction, without what depends on the schedule.

    Raises:
        InputError: the program has no attention, or something in it depends on the order of tokens.
    """
    stage = pipeline.stages[index]
    costs = task_costs(plan, pipeline, index, problem, after, run)
    found, union = costs.found, costs.union
    handled = [handling_seconds(problem, run, member) for member in union.members]
    there, back = (np.array([float(each[way]) for each in handled]) for way in (0, 1))
    forward, backward = costs.played("F"), costs.played("B")
    recompute = costs.played("R") if "R" in found.tasks else None
    again = np.zeros(len(stage.members)) if recompute is None else recompute.computing
    halves = [costs.played(each) for each in ("input gradient", "weight gradient")]
    has_backward = float(found.programs.has_backward)
    held = held_bytes(problem, run, union, found)
    members = tuple(
        MemberPrediction(
            forward_seconds=float(forward.computing[m] + there[m]),
            backward_seconds=has_backward * float(backward.computing[m] + again[m] + back[m]),
            memory_bytes=0,
            memory_limit_bytes=execution.kind.memory_bytes,
            **held[m],
            **host_figures(problem, run, execution, held[m]["activation_bytes"]),
        )
        for m, execution in enumerate(union.members)
    )
    update, exchange = union_update_seconds(problem, run, union)
    first, second = (has_backward * half.seconds for half in halves)
    predicted = StagePrediction.of_members(
        members,
        forward_seconds=float((forward.ends + there).max()),
        backward_seconds=has_backward * float((backward.ends + back).max()),
        recompute_seconds=0.0 if recompute is None else recompute.seconds,
        input_gradient_seconds=first + has_backward * float(back.max()),
        weight_gradient_seconds=second,
        update_seconds=float(update),
        exchange_seconds=float(exchange),
    )
    return with_copies(predicted, problem, run, union)


def task_costs(
    plan: Plan,
    pipeline: PipelinePlan,
    index: int,
    problem: PlanningProblem,
    after: Work | None,
    run: Runs,
) -> TaskCosts:
    """What the tasks of a stage take whose members share the context.

    Args:
        plan: as for `predict_context`, and so are the others.
        pipeline: a pipeline of it.
        index: which of its stages.
        problem: the problem.
        after: the work of the stage after it.
        run: its own work.
    """
    stage = pipeline.stages[index]
    found = context_programs(plan, pipeline, index, problem, after)
    union = union_execution(plan.cluster, stage)
    split = stage.shares.context
    assert split is not None, "the stage shares the context"
    speeds = MemberSpeeds(problem, union, split, found)
    network = network_among(plan.cluster, stage.members)

    def alone() -> tuple[Amounts, Amounts]:
        return amounts_alone(problem, plan.boundaries(pipeline), index, after)

    return TaskCosts(problem, run, speeds, network, alone)


def context_programs(
    plan: Plan, pipeline: PipelinePlan, index: int, problem: PlanningProblem, after: Work | None
) -> ContextPrograms:
    """What the members of a stage compute and move.

    Args:
        plan: the plan.
        pipeline: a pipeline of it.
        index: which of its stages; its members share the context.
        problem: the problem that it solves.
        after: the work of the stage after it, on one device; None for the last stage.

    Raises:
        InputError: the program has no attention, or something in it depends on the order of tokens.
    """
    stage = pipeline.stages[index]
    known = _known.setdefault(problem.program, {})
    ways = tuple(
        (each.shares.context, each.members, each.recompute, each.recompute_layers)
        for each in pipeline.stages
    )
    lies = stage.sharding, tuple(stage.parameters.items()), tuple(stage.values.items())
    key = plan.boundaries(pipeline), ways, lies, index
    if key not in known:
        known[key] = _traced(plan, pipeline, stage, index, problem, after)
        if len(known) > _KEPT:
            known.pop(next(iter(known)))
    return known[key]


_KEPT = 16
"""How many stages of a program are kept."""

_known: WeakKeyDictionary[Program, dict[object, ContextPrograms]] = WeakKeyDictionary()
"""The last stages of programs: a plan is predicted several times until it is complete."""


def _traced(
    plan: Plan,
    pipeline: PipelinePlan,
    stage: StagePlan,
    index: int,
    problem: PlanningProblem,
    after: Work | None,
) -> ContextPrograms:
    order, split = token_order(pipeline), stage.shares.context
    assert order is not None, "the stage shares the context"
    assert split is not None, "the stage shares the context"
    program = with_tokens(problem.program, order)
    program = constrained(program, values_inside(stage, plan.cluster, program))
    ring = ring_of(stage, plan.cluster, order)
    assert ring is not None, "the stage shares the context"
    runs = cut(program, plan.boundaries(pipeline))
    inputs = inputs_of(program, runs)[index]
    is_last = after is None
    edges = problem.known.groups.edges if problem.known.groups else ()
    made_again = plan.recompute_positions(stage)
    if made_again:
        # What is traced of pieces that are alike makes nothing again.
        shared = share_context(runs[index], program, ring)
    else:
        shared = _grouped(runs[index], program, ring, edges, is_last=is_last)
    traces: list[TracedStage] = []

    def tracer(*arguments: object) -> TracedStage:
        traced = trace_stage(*arguments)  # type: ignore[arg-type]
        traces.append(with_open_calls(with_open_regions(traced) if made_again else traced))
        return traces[-1]

    programs = differentiate(
        shared,
        *inputs,
        is_last=is_last,
        cotangents_in=() if after is None else after.returned,
        recompute=stage.recompute,
        recompute_runs=made_again,
        tracer=tracer,
    )
    (traced,) = traces
    lies = _inputs_lie(runs[index], traced, program, split)
    trace = walk_context(traced, ring.union, lies)
    inside = _inside_members(plan, stage, program, shared, traced, ring)
    return ContextPrograms(programs, trace, dict(_tasks(programs, trace)), inside)


def amounts_alone(
    problem: PlanningProblem, boundaries: Sequence[int], index: int, after: Work | None
) -> tuple[Amounts, Amounts]:
    """What one device computes of a stage by itself, forward and backward: what profiles measure.

    Args:
        problem: the problem.
        boundaries: the positions where stages begin, and the end.
        index: which stage.
        after: the work of the stage after it; None for the last stage.
    """
    known = _known_alone.setdefault(problem.program, {})
    key = tuple(boundaries), index
    if key not in known:
        known[key] = _found_alone(problem, boundaries, index, after)
    return known[key]


_known_alone: WeakKeyDictionary[Program, dict[object, tuple[Amounts, Amounts]]] = (
    WeakKeyDictionary()
)
"""What was found: a stage is predicted with many splits."""


def _found_alone(
    problem: PlanningProblem, boundaries: Sequence[int], index: int, after: Work | None
) -> tuple[Amounts, Amounts]:
    program, is_last = problem.program, after is None
    runs = cut(program, boundaries)
    groups = problem.known.groups
    grouped = groups and groups.grouped(runs[index], is_last=is_last)
    programs = differentiate(
        grouped or runs[index],
        *inputs_of(program, runs)[index],
        is_last=is_last,
        cotangents_in=() if after is None else after.returned,
    )
    return _amounts_of(programs.forward_steps), _amounts_of(programs.backward_steps)


def _amounts_of(steps: Sequence[Step]) -> Amounts:
    cost = steps_cost(steps)
    classes = {name: np.array(amount) for name, amount in steps_work(steps).items()}
    return Amounts(np.array(cost.matmul_flops), np.array(cost.bytes), classes)


def _inside_members(
    plan: Plan,
    stage: StagePlan,
    program: Program,
    run: Stage,
    traced: TracedStage,
    ring: ContextRing,
) -> tuple[TensorTrace | None, ...]:
    """Of each member that divides values over a tensor axis, what its devices have of them."""
    known: dict[tuple[int, bool], TensorTrace] = {}
    found: list[TensorTrace | None] = []
    for place, execution in enumerate(executions_of(plan.cluster, stage)):
        devices = execution.mesh_shape[1]
        if devices == 1:
            found.append(None)
            continue
        key = devices, ring.divides_heads(place)
        if key not in known:
            lies = {}
            for number, part in zip(traced.parameters, run.parameters, strict=True):
                shape = traced.flat.avals[number].shape
                spec = spec_of_leaf(program, part.leaf, shape, execution)
                lies[number] = divided_evenly(tuple(spec), shape, devices)
            known[key] = walk_tensor(traced, place, devices, lies)
        found.append(known[key])
    return tuple(found)


def _grouped(
    run: Stage, program: Program, ring: ContextRing, edges: Sequence[int], *, is_last: bool
) -> Stage:
    """A stage whose members share the context, in which blocks that are alike are traced once."""
    shared, before = share_context(run, program, ring), run.function
    body = shared.function
    assert isinstance(body, Body), "the context is shared before anything else"
    assert isinstance(before, Body), "the context is shared before anything else"
    changed = dict(zip(before.steps, body.steps, strict=True))
    steps = tuple(changed.get(step, step) for step in program.steps)
    groups = Groups(replace(program, steps=steps), edges)
    return groups.grouped(replace(shared, steps=body.steps), is_last=is_last)


def _inputs_lie(
    run: Stage, traced: TracedStage, program: Program, split: ContextSplit
) -> dict[int, TopTier]:
    """How values lie that come from other stages, and their cotangents: by tokens."""
    known = program.tokens.values
    received = zip(traced.received, run.receives, strict=True)
    # The last stage sends nothing on: its cotangent is that of the loss.
    sends = dict(enumerate(run.sends))
    returned = (
        (n, sends.get(place, -1)) for n, place in zip(traced.cotangents, traced.seeds, strict=True)
    )
    return {
        number: TopTier(known[value], split.tokens)
        for number, value in (*received, *returned)
        if value in known
    }


def _tasks(programs: StagePrograms, trace: ContextTrace) -> Iterator[tuple[str, ContextTask]]:
    given, returned = trace.given

    def task(program: StepProgram, direction: int, given: float = 0.0) -> ContextTask:
        # As the runtime divides it: what is cheap is made where it is needed.
        program = replace(program, steps=tuple(where_they_belong(program.steps)))
        return ContextTask(program, items_of(trace, program.steps, given), direction)

    yield "F", task(programs.forward, FORWARD, given)
    if programs.recompute is not None:
        yield "R", task(programs.recompute, FORWARD)
    yield "B", task(programs.backward, BACKWARD, returned)
    yield "input gradient", task(programs.split.input_gradient, BACKWARD, returned)
    yield "weight gradient", task(programs.split.weight_gradient, BACKWARD)
