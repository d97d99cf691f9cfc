"""Context splits that are compared by the cost model of plans, where the scheduler is misled.

The scheduler's model has layers that are all alike, and no notice of what messages cost processors
that see to them. What is predicted of a plan has the last word: whether it fits, and which of
several is the fastest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hetjax.errors import DoesNotFitError
from hetjax.mesh.quantities import format_bytes
from hetjax.planner.hexiseq.context_choice import (
    ContextChoice,
    context_pipeline,
    context_plan,
    offloading,
)
from hetjax.planner.hexiseq.context_devices import ContextDevices
from hetjax.planner.hexiseq.context_model import ContextModel
from hetjax.planner.hexiseq.partitions import SMALL
from hetjax.planner.hexiseq.scheduler import schedule_context
from hetjax.planner.plan.plan import Plan
from hetjax.planner.predictions.complete import annotated_context
from hetjax.planner.problem.problem import PlanningProblem

PREDICTED = 3
"""How many others are predicted, of those that the scheduler says are the fastest."""

MISLED = 1.1
"""By how much longer a split of many devices may be predicted to take than the scheduler said."""

FINALISTS = 1 + PREDICTED
"""How many splits of few devices the scheduler gives."""

CLEARLY = 0.97
"""Of what is predicted of the scheduler's choice, what another one may be predicted to take at most
to be chosen: models of one shape, however they are written, should have one plan."""

CORRECTIONS = 3
"""How often the scheduler is told what devices hold by prediction, where nothing fits by that."""


class Chosen(NamedTuple):
    """A context split, and for how many microbatches.

    Args:
        microbatches: their number.
        choice: the split.
    """

    microbatches: int
    choice: ContextChoice


def best_that_fits(
    found: Sequence[Chosen],
    evens: Sequence[Chosen],
    problem_for: Callable[[int], PlanningProblem],
    *,
    is_even: bool,
) -> tuple[Chosen, Plan]:
    """The fastest choice that also fits by the cost model of plans.

    Where that says that it takes much longer than the scheduler said, and of few devices always,
    others are asked after too; where it is still much longer, splits of fewer devices are. Where it
    says that nothing fits, uneven splits are searched for again, with what devices are predicted to
    hold.

    Args:
        found: what the scheduler found; there is something.
        evens: even splits, which are only asked after.
        problem_for: the problem for a number of microbatches.
        is_even: whether the splits must stay even.

    Returns:
        The choice, and its plan with the prediction.

    Raises:
        DoesNotFitError: nothing of what the scheduler found fits.
    """
    ordered = sorted(found, key=lambda each: each.choice.schedule.seconds)
    chosen, plan = _first_that_fits(ordered, problem_for, is_even=is_even)
    seconds = plan.predicted.step_time
    few = has_few_devices(chosen.choice.model)
    if not few and seconds <= MISLED * chosen.choice.schedule.seconds:
        return chosen, plan
    others = (each for each in (*ordered, *evens) if each is not chosen)
    promising = [each for each in others if each.choice.schedule.seconds < seconds]
    best, least = (chosen, plan), CLEARLY * seconds
    for each in sorted(promising, key=lambda each: each.choice.schedule.seconds)[:PREDICTED]:
        made = _predicted(each, problem_for)
        if made.predicted.fits and made.predicted.step_time < least:
            best, least = (each, made), made.predicted.step_time
    if is_even or best[1].predicted.step_time <= MISLED * best[0].choice.schedule.seconds:
        return best
    for each in _of_fewer_devices(best[0]):
        made = _predicted(each, problem_for)
        if made.predicted.fits and made.predicted.step_time < least:
            best, least = (each, made), made.predicted.step_time
    return best


def _of_fewer_devices(chosen: Chosen) -> Iterator[Chosen]:
    """The best splits of the fastest half of a split's devices, of half of these, down to one.

    And of the fastest half of all devices, and so on: a scheduler that has no notice of messages
    may choose many slow ones where a fast one by itself is faster.
    """
    schedule, model = chosen.choice.schedule, chosen.choice.model
    devices, own = model.devices, schedule.split.devices
    tried = {frozenset(own)}
    for left in (*_halves(devices, own), *_halves(devices, devices.usable.tolist())):
        if frozenset(left) in tried:
            continue
        tried.add(frozenset(left))
        part = np.flatnonzero(np.isin(devices.owners, left)).tolist()
        fewer = ContextModel(devices.among(part), model.work, model.paces)
        with contextlib.suppress(DoesNotFitError):
            yield Chosen(chosen.microbatches, ContextChoice(schedule_context(fewer), fewer))


def _halves(devices: ContextDevices, some: Sequence[int]) -> Iterator[list[int]]:
    """The fastest half of some devices, the fastest half of these, down to one."""
    left = sorted(some, key=lambda each: (-devices.flops[each], each))
    while len(left) > 1:
        left = left[: (len(left) + 1) // 2]
        yield left


def has_few_devices(model: ContextModel) -> bool:
    """Whether a model's devices are so few that predicting several plans takes no time.

    Members of several devices count as one.

    Args:
        model: the scheduler's cost model.
    """
    return len(model.devices.usable) <= SMALL


def _first_that_fits(
    ordered: Sequence[Chosen], problem_for: Callable[[int], PlanningProblem], *, is_even: bool
) -> tuple[Chosen, Plan]:
    pairs: list[tuple[Chosen, Plan]] = []
    for chosen in ordered:
        plan = _predicted(chosen, problem_for)
        if plan.predicted.fits:
            return chosen, plan
        pairs.append((chosen, plan))
    nearest = min(pairs, key=lambda pair: _filled(pair[1]))
    corrected = None if is_even else _corrected(*nearest, problem_for)
    corrected = corrected or (None if is_even else _offloaded(nearest[0], problem_for))
    if corrected is not None:
        return corrected
    plan = nearest[1]
    (over,) = plan.predicted.stages
    needed = (over.memory_bytes, over.memory_limit_bytes, "")
    if not over.fits_host:
        needed = (over.all_host_bytes, over.host_limit_bytes, "'s share of its host's memory")
    bytes_needed, limit, of_what = needed
    raise DoesNotFitError(
        f"planner.name is 'hexiseq': no context split that was found fits; in the nearest one a "
        f"device of {plan.stages[0].devices_text} needs {format_bytes(bytes_needed)} of "
        f"{format_bytes(limit)}{of_what}"
    )


def _filled(plan: Plan) -> float:
    """How full the memory of a plan's one stage is predicted to be, of a device or of its host."""
    (stage,) = plan.predicted.stages
    of_host = stage.all_host_bytes / max(stage.host_limit_bytes, 1)
    return max(stage.memory_bytes / stage.memory_limit_bytes, of_host)


def _corrected(
    chosen: Chosen, plan: Plan, problem_for: Callable[[int], PlanningProblem]
) -> tuple[Chosen, Plan] | None:
    """What the scheduler finds that is told what devices hold by prediction; None if none fits."""
    for _ in range(CORRECTIONS):
        schedule, model = chosen.choice.schedule, chosen.choice.model
        more = dict(model.devices.more_held)
        (stage,) = plan.predicted.stages
        members = stage.members or (stage,)
        held = zip(schedule.split.devices, schedule.memory, members, strict=True)
        for device, counted, member in held:
            name, _place = model.devices.place(device)
            held_by_all = member.memory_bytes * int(model.devices.sizes[device])
            more[name] = max(more.get(name, 1.0), held_by_all / counted)
        told = ContextModel(replace(model.devices, more_held=more), model.work, model.paces)
        try:
            choice = ContextChoice(schedule_context(told), told)
        except DoesNotFitError:
            return None
        chosen = Chosen(chosen.microbatches, choice)
        plan = _predicted(chosen, problem_for)
        if plan.predicted.fits:
            return chosen, plan
    return None


def _offloaded(
    chosen: Chosen, problem_for: Callable[[int], PlanningProblem]
) -> tuple[Chosen, Plan] | None:
    """What the scheduler finds with the optimizer's state in hosts' memory; None if none fits."""
    model = chosen.choice.model
    if model.work.offloaded_bytes:
        return None
    for away in offloading(problem_for(chosen.microbatches), [model]):
        with contextlib.suppress(DoesNotFitError):
            other = Chosen(chosen.microbatches, ContextChoice(schedule_context(away), away))
            plan = _predicted(other, problem_for)
            if plan.predicted.fits:
                return other, plan
    return None


def one_stage_plan(problem: PlanningProblem, choice: ContextChoice) -> Plan:
    """The plan of one stage that a context split makes of a problem.

    Args:
        problem: the problem.
        choice: the split, by the numbers of its model's devices.
    """
    stage = choice.stage(problem, (0, problem.num_layers))
    return context_plan(problem, context_pipeline(problem, (stage,), problem.num_microbatches))


def _predicted(chosen: Chosen, problem_for: Callable[[int], PlanningProblem]) -> Plan:
    problem = problem_for(chosen.microbatches)
    return annotated_context(one_stage_plan(problem, chosen.choice), problem)
