"""A plan with all that is decided after the search: annotations, the schedule, the prediction."""

from __future__ import annotations

from dataclasses import replace

from hetjax.planner.plan.plan import Plan
from hetjax.planner.predictions.kept_activations import keeping_or_offloading
from hetjax.planner.predictions.kept_layers import keeping_what_fits
from hetjax.planner.predictions.kept_state import keeping_state_that_fits
from hetjax.planner.predictions.more_passes import with_more_passes
from hetjax.planner.predictions.plan_sharding import divide_members, shard_stages
from hetjax.planner.predictions.predict import predict
from hetjax.planner.predictions.schedule_choice import choose_schedule
from hetjax.planner.predictions.scheduled_memory import memory_rank
from hetjax.planner.problem.problem import PlanningProblem


def complete(
    plan: Plan, problem: PlanningProblem, *others: PlanningProblem, annotate: bool = True
) -> Plan:
    """Predict a plan, with the schedule that its problem names.

    Stages that offload or make layers again do so as far as they must, or offload activations
    instead where that is faster; those with a tensor axis are annotated by intra-operator sharding.
    Where the schedule is searched for, the pipeline may pass its submeshes more than once. Where
    members share the context, all of that is as the plan has it.

    Args:
        plan: a plan for the problem, with the warm-up schedule that its stages were chosen for.
        problem: the problem.
        others: the same problem for microbatches of other sizes, where pipelines have them.
        annotate: whether they are; where not, the plan is not meant to be run.

    Returns:
        The plan with that schedule and its prediction; where that holds more at once than there is
        memory for, with the schedule that its stages were chosen for, and a note.
    """
    if plan.shares_context:
        return predict(plan, problem, *others)
    kept = keeping_state_that_fits(predict(plan, problem, *others), problem, *others)
    made = keeping_or_offloading(keeping_what_fits(kept, problem, *others), problem, *others)
    if annotate:
        # Annotations may be too much for it.
        told = annotated(made, problem, *others)
        made = min((told, made), key=lambda each: memory_rank(each.predicted))
    if problem.options.schedule == problem.warm_up_schedule:
        return made
    chosen = choose_schedule(made, problem.options.schedule)
    if memory_rank(made.predicted) < memory_rank(chosen.predicted):
        names = dict.fromkeys(repr(each.schedule.name) for each in made.pipelines)
        note = (
            f"the schedule {problem.options.schedule!r} holds more microbatches at once than there "
            f"is memory for: this plan has {' and '.join(names)}"
        )
        return replace(made, notes=(*made.notes, note))
    if problem.options.schedule != "search" or not annotate:
        return chosen
    return with_more_passes(chosen, problem)


def annotated(plan: Plan, problem: PlanningProblem, *others: PlanningProblem) -> Plan:
    """The plan with annotations on stages with a tensor axis, and what is then predicted of it.

    Args:
        plan: a plan with its prediction.
        problem: the problem that it solves.
        others: the same problem for microbatches of other sizes, where pipelines have them.

    Returns:
        The plan; as it is where no stage is to be annotated.
    """
    sharded = shard_stages(plan, problem, *others)
    return plan if sharded is plan else predict(sharded, problem, *others)


def annotated_context(plan: Plan, problem: PlanningProblem) -> Plan:
    """Predict a plan whose stages share the context, with annotations on what has a tensor axis.

    State that a stage offloads stays on its devices where there is room for it after all, and of
    layers that are made again as many are kept. Stages that still make some again offload
    activations instead where that is faster.

    Args:
        plan: a plan without a prediction.
        problem: the problem that it solves.

    Returns:
        The plan with its prediction.
    """
    told = annotated(predict(divide_members(plan, problem), problem), problem)
    kept = keeping_what_fits(keeping_state_that_fits(told, problem), problem)
    return keeping_or_offloading(kept, problem)
