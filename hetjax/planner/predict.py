"""What the cost model and the schedule's timeline expect of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hetjax.errors import InputError
from hetjax.pipeline.lower_bound import lower_bound
from hetjax.pipeline.simulate import simulate_schedule
from hetjax.pipeline.timeline import Timeline, stage_track
from hetjax.pipeline.times import StepTimes
from hetjax.planner.cost_model import (
    Estimate,
    Execution,
    collective_link,
    estimate,
    one_run,
    transfer_seconds,
)
from hetjax.planner.plan import Plan, Prediction, StagePlan, StagePrediction, validate_for
from hetjax.planner.problem import PlanningProblem
from hetjax.planner.work import Work, measure


def predict(plan: Plan, problem: PlanningProblem) -> Plan:
    """Predict a plan's step time, and each stage's seconds and bytes.

    The program is cut and differentiated at the plan's own stages; the cost model gives each
    stage's times and the discrete-event model of the schedule the whole step's.

    Args:
        plan: a plan of one pipeline, made by whichever planner or by hand.
        problem: the problem that it solves.

    Returns:
        The plan with its prediction.

    Raises:
        InputError: the plan was made for another model, or for microbatches of another size.
    """
    validate_for(plan, problem.program)
    pipeline = plan.pipeline
    if pipeline.microbatch_size != problem.microbatch_size:
        raise InputError(
            f"the plan has microbatches of {pipeline.microbatch_size} examples; the model was "
            f"traced for microbatches of {problem.microbatch_size}"
        )
    works = measure(
        problem.program, plan.boundaries(pipeline), [stage.recompute for stage in pipeline.stages]
    )
    times = [
        _stage_times(plan, problem, stage, works[s : s + 2])
        for s, stage in enumerate(pipeline.stages)
    ]
    links = [
        plan.cluster.link_between(a.submesh, b.submesh)
        for a, b in itertools.pairwise(pipeline.stages)
    ]
    sends = [transfer_seconds(k, w.received_bytes) for k, w in zip(links, works[1:], strict=True)]
    returns = [transfer_seconds(k, w.returned_bytes) for k, w in zip(links, works[1:], strict=True)]
    step = StepTimes(
        forward=[float(each.forward_seconds) for each in times],
        backward=[float(each.backward_seconds) for each in times],
        sends=sends,
        returns=returns,
        update=[float(each.update_seconds) for each in times],
    )
    timeline = simulate_schedule(pipeline.schedule, step)
    stages = tuple(
        StagePrediction(
            forward_seconds=step.forward[s],
            backward_seconds=step.backward[s],
            update_seconds=step.update[s],
            communication_seconds=[*sends, 0.0][s],
            return_seconds=[0.0, *returns][s],
            state_bytes=int(each.state_bytes),
            activation_bytes=int(each.activation_bytes),
            memory_bytes=int(each.memory_bytes(pipeline.schedule.live_bound(s))),
            memory_limit_bytes=plan.cluster.subcluster(stage.submesh.subcluster).kind.memory_bytes,
            bubble=timeline.bubble(stage_track(s)),
        )
        for s, (stage, each) in enumerate(zip(pipeline.stages, times, strict=True))
    )
    bound = lower_bound(pipeline.num_microbatches, step)
    return replace(plan, prediction=Prediction(timeline.makespan, bound, stages))


def simulate(plan: Plan) -> Timeline:
    """The timeline of one step as the plan's own prediction has it; no model is needed.

    Args:
        plan: a plan with a prediction.

    Returns:
        The timeline, from 0.

    Raises:
        InputError: the plan has no prediction.

    Example:
        >>> plan = Plan.load("plan.json")  # doctest: +SKIP
        >>> simulate(plan).makespan == plan.prediction.step_time  # doctest: +SKIP
        True
    """
    if plan.prediction is None:
        raise InputError(
            "the plan has no prediction to simulate; make one with hetjax.planner.predict"
        )
    stages = plan.prediction.stages
    step = StepTimes(
        forward=[stage.forward_seconds for stage in stages],
        backward=[stage.backward_seconds for stage in stages],
        sends=[stage.communication_seconds for stage in stages[:-1]],
        returns=[stage.return_seconds for stage in stages[1:]],
        update=[stage.update_seconds for stage in stages],
    )
    return simulate_schedule(plan.pipeline.schedule, step)


def _stage_times(
    plan: Plan, problem: PlanningProblem, stage: StagePlan, works: Sequence[Work]
) -> Estimate:
    """The estimate of a stage, from its work and that of the stage after, where there is one."""
    work, *after = works
    execution = Execution(
        kind=plan.cluster.subcluster(stage.submesh.subcluster).kind,
        link=collective_link(plan.cluster, stage.submesh),
        mesh_shape=stage.mesh_shape,
        sharding=stage.sharding,
        recompute=stage.recompute,
        parameters=stage.parameters,
    )
    sent = after[0].received_bytes if after else 0
    return estimate(problem, one_run(work, sent), execution)
