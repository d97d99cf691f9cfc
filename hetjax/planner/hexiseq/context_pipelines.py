"""Pipelines whose stages share the context, each on an island of its own.

Where islands are joined by a slow link, keys and values of every layer are too much for it, but
what a pipeline hands on is one activation a token. So islands are stages, in several orders and
groups; each has blocks by its speed, and of these and its devices the best context split. What a
pipeline takes is estimated first; the best few are to be predicted as plans are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetjax.errors import DoesNotFitError
from hetjax.planner.hexiseq.apportion import apportion_tokens
from hetjax.planner.hexiseq.context_choice import (
    ContextChoice,
    context_models,
    context_plan,
    context_stage,
)
from hetjax.planner.hexiseq.context_model import ContextModel
from hetjax.planner.hexiseq.program_work import attending_layers
from hetjax.planner.hexiseq.scheduler import schedule_context
from hetjax.planner.plan.plan import Plan
from hetjax.planner.problem.problem import PlanningProblem

MOST_STAGES = 4
"""Of more islands, neighbours are one stage."""

Part = tuple[int, ...]
"""The numbers of the devices of a stage."""


@dataclass(frozen=True)
class ContextPipeline:
    """A pipeline whose stages share the context.

    Args:
        choices: the split of each stage.
        layers: where stages begin, and the end, in the problem's layers.
        seconds: what a step is estimated to take.
    """

    choices: tuple[ContextChoice, ...]
    layers: tuple[int, ...]
    seconds: float

    def plan(self, problem: PlanningProblem) -> Plan:
        """The plan that it makes.

        Args:
            problem: the problem.
        """
        stages = (
            context_stage(problem, choice, layers)
            for choice, layers in zip(self.choices, itertools.pairwise(self.layers), strict=True)
        )
        return context_plan(problem, *stages)


def context_pipelines(problem: PlanningProblem, most_stages: int) -> list[ContextPipeline]:
    """Pipelines over a cluster's islands.

    Args:
        problem: the problem; its program was traced with `divides_sequences`.
        most_stages: how many stages they may have.

    Returns:
        Those whose stages fit by themselves, the fastest first; none of one stage.

    Raises:
        InputError: the model has no attention, or something that goes along the sequence.
    """
    models, blocks = context_models(problem), attending_layers(problem)
    most = min(most_stages, MOST_STAGES, len(blocks), problem.num_microbatches)
    if most < 2:
        return []
    known: dict[tuple[Part, int, bool], ContextChoice | None] = {}
    found: dict[tuple[Part, ...], ContextPipeline] = {}
    for parts in _partitions(problem, models[0], most):
        made = _pipeline(problem, models, parts, known)
        if made is not None:
            found[parts] = made
    return sorted(found.values(), key=lambda each: each.seconds)


def _islands(problem: PlanningProblem, model: ContextModel) -> list[Part]:
    """The devices of each subcluster, or of each node where there is one subcluster."""
    devices = model.devices
    of = devices.subcluster if len(problem.cluster.subclusters) > 1 else devices.node
    usable = devices.usable
    return [tuple(usable[of[usable] == each].tolist()) for each in np.unique(of[usable])]


def _partitions(
    problem: PlanningProblem, model: ContextModel, most: int
) -> Iterator[tuple[Part, ...]]:
    """The devices of stages: islands in all orders where they are few, neighbours together."""
    islands = _islands(problem, model)
    orders = itertools.permutations(islands) if len(islands) <= MOST_STAGES else [tuple(islands)]
    for order in orders:
        for count in range(2, min(most, len(order)) + 1):
            for cuts in itertools.combinations(range(1, len(order)), count - 1):
                edges = itertools.pairwise((0, *cuts, len(order)))
                yield tuple(tuple(sorted(itertools.chain(*order[a:b]))) for a, b in edges)


def _pipeline(
    problem: PlanningProblem,
    models: Sequence[ContextModel],
    parts: tuple[Part, ...],
    known: dict[tuple[Part, int, bool], ContextChoice | None],
) -> ContextPipeline | None:
    """The pipeline of some stages' devices; None where one of these is too small for its blocks."""
    blocks = attending_layers(problem)
    speeds = np.array([[models[0].devices.flops[[*part]].sum() for part in parts]])
    counts = np.maximum(apportion_tokens(speeds, len(blocks))[0], 1)
    # Whoever is too slow for one takes it of who has most.
    counts[counts.argmax()] -= counts.sum() - len(blocks)
    firsts = np.cumsum(counts) - counts
    layers = (0, *(blocks[first][0] for first in firsts[1:].tolist()), problem.num_layers)
    choices: list[ContextChoice] = []
    for place, (part, count) in enumerate(zip(parts, counts.tolist(), strict=True)):
        is_last = place == len(parts) - 1
        key = part, count, is_last
        if key not in known:
            known[key] = _choice(models, part, count, is_last=is_last)
        choice = known[key]
        if choice is None:
            return None
        choices.append(choice)
    rounds = [each.schedule.seconds / each.model.work.rounds for each in choices]
    seconds = sum(rounds) + (problem.num_microbatches - 1) * max(rounds)
    return ContextPipeline(tuple(choices), layers, seconds)


def _choice(
    models: Sequence[ContextModel], part: Part, blocks: int, *, is_last: bool
) -> ContextChoice | None:
    """The best split of some blocks on some devices, of layers kept or made again."""
    found: list[ContextChoice] = []
    for model in models:
        devices, work = model.devices, model.work
        others = frozenset(range(devices.num_devices)) - frozenset(part)
        of_part = replace(
            work,
            layers=blocks,
            other_parameters=work.other_parameters if is_last else 0,
            vocabulary=work.vocabulary if is_last else 0,
        )
        stage = ContextModel(replace(devices, lost=others), of_part, model.paces)
        try:
            found.append(ContextChoice(schedule_context(stage), stage))
        except DoesNotFitError:
            continue
    return min(found, key=lambda each: each.schedule.seconds, default=None)
