"""The plan of pipelines whose stages share the context, where it fits in other ways if it must.

The scheduler counts what devices hold before there is a program. Where the program needs more,
stages make their layers again, or are of one member.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from hetjax.planner.hexiseq.context_choice import ContextChoice, context_models, offloading
from hetjax.planner.hexiseq.context_layouts import Part
from hetjax.planner.hexiseq.context_pipelines import ContextPipelines, of_choices
from hetjax.planner.hexiseq.single_members import SingleMember, SingleMembers
from hetjax.planner.hexiseq.stage_splits import StageSplits
from hetjax.planner.plan.plan import Plan
from hetjax.planner.predictions.complete import annotated_context
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.repeating_layers import LayerRun


def planned(problem: PlanningProblem, found: ContextPipelines) -> Plan:
    """The plan of pipelines, with its prediction.

    Args:
        problem: the problem.
        found: the pipelines.

    Returns:
        The plan. Stages that are predicted not to fit make their layers again, or are one member
        each, whichever then fits and is faster; those with a tensor axis say how parameters and
        values lie.
    """
    plan = annotated_context(found.plan(problem), problem)
    if plan.predicted.fits:
        return plan
    ways = (_made_again, _alone), (_alone,)
    mended = [_mended(problem, found, plan, each) for each in ways]
    fitting = [each for each in mended if each.predicted.fits]
    return min(fitting, key=lambda each: each.predicted.step_time, default=plan)


def _mended(
    problem: PlanningProblem, found: ContextPipelines, plan: Plan, ways: Sequence[_Way]
) -> Plan:
    """The plan whose stages hold less that do not fit, in one way after the other."""
    for smaller in ways:
        too_large = {s for s, stage in enumerate(plan.predicted.stages) if not stage.fits}
        other = _with_smaller(found, too_large, smaller(problem)) if too_large else None
        if other is not None:
            found, plan = other, annotated_context(other.plan(problem), problem)
    return plan


class _Slot(NamedTuple):
    """Where a stage is, and what it has to do.

    Args:
        part: its devices.
        layers: the first of its layers, and the one after the last.
        live: how many microbatches are between their passes at once.
        is_last: whether it has the logits.
        choice: the way that was found to run it.
    """

    part: Part
    layers: LayerRun
    live: int
    is_last: bool
    choice: ContextChoice | SingleMember


_Smaller = Callable[[_Slot], "ContextChoice | SingleMember | None"]
"""Another way to run a stage, which holds less; None where there is none."""


_Way = Callable[[PlanningProblem], _Smaller]


def _made_again(problem: PlanningProblem) -> _Smaller:
    """Stages that make again what they keep; those that keep nothing stay as they are."""
    models = context_models(problem)
    again = [each for each in (*models, *offloading(problem, models)) if each.work.is_recomputed]

    def smaller(slot: _Slot) -> ContextChoice | SingleMember | None:
        choice = slot.choice
        if not isinstance(choice, ContextChoice) or choice.model.work.is_recomputed or not again:
            return choice
        splits = StageSplits(again)
        return splits.best(slot.part, choice.blocks, slot.live, is_last=slot.is_last) or choice

    return smaller


def _alone(problem: PlanningProblem) -> _Smaller:
    """Stages of one member each."""
    members = SingleMembers(problem, context_models(problem)[0])
    return lambda slot: members.best(slot.part, slot.layers, slot.choice.blocks, slot.live)


def _with_smaller(
    found: ContextPipelines, too_large: Collection[int], smaller: _Smaller
) -> ContextPipelines | None:
    """Pipelines of whose stages some run in another way; None where one does not fit in any.

    Stages are counted over all pipelines.
    """
    made, first = [], 0
    for pipeline in found.pipelines:
        choices = [*pipeline.choices]
        for place, part in enumerate(pipeline.parts):
            if first + place not in too_large:
                continue
            layers = pipeline.layers[place], pipeline.layers[place + 1]
            live = min(len(choices) - place, pipeline.microbatches)
            is_last = place == len(choices) - 1
            choice = smaller(_Slot(part, layers, live, is_last, choices[place]))
            if choice is None:
                return None
            choices[place] = choice
        first += len(choices)
        pipeline_of = of_choices(pipeline.parts, choices, pipeline.layers)
        made.append(replace(pipeline_of, microbatches=pipeline.microbatches))
    if all(new.choices == old.choices for new, old in zip(made, found.pipelines, strict=True)):
        return None
    slower = max(each.seconds for each in made) - max(each.seconds for each in found.pipelines)
    return ContextPipelines(tuple(made), found.seconds + slower)
