"""What a stage takes and holds whose members compute programs of its modules."""

from __future__ import annotations

from hetjax.planner.costs.member_rates import member_rates
from hetjax.planner.module_programs.module_chain import chain_of
from hetjax.planner.module_programs.reading import ReadPrograms, read_programs
from hetjax.planner.module_programs.step_time import held_bytes, step_time
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.prediction import MemberPrediction, StagePrediction
from hetjax.planner.plan.stage_plan import StagePlan
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.rates import TASK_SECONDS
from hetjax.planner.work.stage_work import Work


def stage_programs_of(plan: Plan, stage: StagePlan, problem: PlanningProblem) -> ReadPrograms:
    """What the members of a stage compute, as its plan says.

    Args:
        plan: the plan.
        stage: a stage of it with modules; it computes the loss.
        problem: the problem that the plan solves.

    Raises:
        InputError: an operand of an equation lies in a way in which it cannot be taken.
    """
    chain = chain_of(problem.program, stage.shares.module_edges)
    where = f"{plan.field_of(plan.stages.index(stage))}.shares"
    return read_programs(chain, stage.shares, len(stage.members), where)


def predict_modules(
    plan: Plan, stage: StagePlan, problem: PlanningProblem, work: Work
) -> StagePrediction:
    """Predict a stage whose members compute programs of its modules.

    Args:
        plan: the plan.
        stage: the stage.
        problem: the problem that it solves.
        work: the stage's work on one device, for what it exchanges with other stages.

    Returns:
        The prediction, without what depends on the schedule.

    Raises:
        InputError: an operand of an equation lies in a way in which it cannot be taken.
    """
    read, rates = stage_programs_of(plan, stage, problem), member_rates(problem, stage.members)
    where = (read.chain, read.programs, rates, read.ratios, problem.optimizer_bytes)
    time, held = step_time(*where), held_bytes(*where)
    waiting = work.received_bytes + work.returned_bytes
    has_backward = work.backward_passes > 0
    computing = TASK_SECONDS + time.computing
    backward = (TASK_SECONDS + time.backward) * has_backward
    members = tuple(
        MemberPrediction(
            forward_seconds=float(computing[0, m]),
            backward_seconds=float(computing[1, m]) * has_backward,
            state_bytes=int(held.state[m]),
            working_bytes=waiting + int(held.working[m]),
            activation_bytes=int(held.residuals[m]),
            recomputed_bytes=0,
            deferred_bytes=0,
            memory_bytes=0,
            memory_limit_bytes=problem.cluster.subcluster(
                member.submesh.subcluster
            ).kind.memory_bytes,
        )
        for m, member in enumerate(stage.members)
    )
    return StagePrediction.of_members(
        members,
        forward_seconds=TASK_SECONDS + time.forward,
        backward_seconds=backward,
        recompute_seconds=0.0,
        input_gradient_seconds=backward / 2,
        weight_gradient_seconds=backward / 2,
        update_seconds=TASK_SECONDS + time.update,
    )


def starting_seconds(num_microbatches: int) -> float:
    """What a step of one stage pays for starting its passes and its update.

    Args:
        num_microbatches: microbatches in a step.
    """
    return (2 * num_microbatches + 1) * TASK_SECONDS
