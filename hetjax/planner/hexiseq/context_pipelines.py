"""Pipelines whose stages share the context, over the islands of a cluster.

Where islands are joined by a slow link, keys and values of every layer are too much for it. What a
pipeline hands on is one activation a token, and what several pipelines exchange are gradients, once
a step. So islands are stages of one pipeline or of several, in several orders and groups: each
stage has blocks by its speed, and of these and its devices the best context split, or is one member
where memory is short; each pipeline has microbatches by its speed. What a layout takes is estimated
first; the best few are to be predicted as plans are.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetjax.planner.hexiseq.apportion import apportion_tokens
from hetjax.planner.hexiseq.context_choice import (
    ContextChoice,
    context_models,
    context_pipeline,
    context_plan,
    offloading,
)
from hetjax.planner.hexiseq.context_layouts import Layout, Part, layouts
from hetjax.planner.hexiseq.context_model import ContextModel
from hetjax.planner.hexiseq.predicted_choice import CLEARLY
from hetjax.planner.hexiseq.program_work import attending_layers
from hetjax.planner.hexiseq.single_members import SingleMember, SingleMembers
from hetjax.planner.hexiseq.stage_splits import StageSplits
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.repeating_layers import LayerRun

MOST_STAGES = 4
"""Of more islands, neighbours are one stage."""

ALONE = 0.9
"""Of what a layout takes at least, what it may take after all: stages of one member are timed by
another model."""


@dataclass(frozen=True)
class ContextPipeline:
    """A pipeline whose stages share the context.

    Args:
        parts: the devices of each stage.
        choices: of each stage its split, or that it is one member.
        layers: where stages begin, and the end, in the problem's layers.
        first_seconds: what its first microbatch is estimated to take.
        next_seconds: what each microbatch after it adds.
        once_seconds: what its stages take once a step.
        microbatches: how many it has.
    """

    parts: tuple[Part, ...]
    choices: tuple[ContextChoice | SingleMember, ...]
    layers: tuple[int, ...]
    first_seconds: float
    next_seconds: float
    once_seconds: float
    microbatches: int = 1

    @property
    def seconds(self) -> float:
        """What its part of a step is estimated to take."""
        later = (self.microbatches - 1) * self.next_seconds
        return self.first_seconds + later + self.once_seconds

    def planned(self, problem: PlanningProblem) -> PipelinePlan:
        """The pipeline of a plan that it makes.

        Args:
            problem: the problem.
        """
        stages = (
            choice.stage(problem, layers)
            for choice, layers in zip(self.choices, itertools.pairwise(self.layers), strict=True)
        )
        return context_pipeline(problem, tuple(stages), self.microbatches)


@dataclass(frozen=True)
class ContextPipelines:
    """Pipelines whose stages share the context.

    Args:
        pipelines: the pipelines, one or more.
        seconds: what a step is estimated to take.
    """

    pipelines: tuple[ContextPipeline, ...]
    seconds: float

    @property
    def figures(self) -> Hashable:
        """What is equal for pipelines on devices that are alike."""
        pipelines = (
            (each.microbatches, tuple(choice.blocks for choice in each.choices))
            for each in self.pipelines
        )
        return float(f"{self.seconds:.9g}"), tuple(sorted(pipelines))

    def plan(self, problem: PlanningProblem) -> Plan:
        """The plan that they make.

        Args:
            problem: the problem.
        """
        return context_plan(problem, *(each.planned(problem) for each in self.pipelines))


def context_pipelines(
    problem: PlanningProblem, most_stages: int, most: int | None = None
) -> list[ContextPipelines]:
    """Pipelines over a cluster's islands.

    Args:
        problem: the problem; its program was traced with `divides_sequences`.
        most_stages: how many stages each may have.
        most: how many of the fastest are wanted; all unless given.

    Returns:
        Those whose stages fit by themselves, the fastest first; none of one stage of all devices.

    Raises:
        InputError: the model has no attention, or something that goes along the sequence.
    """
    count = problem.num_microbatches
    if count == 1:
        return []
    models = context_models(problem)
    stages = min(most_stages, MOST_STAGES, max(1, len(attending_layers(problem))), count)
    most_pipelines = min(problem.options.max_pipelines, count)
    ways = _StageWays(problem, models)
    bounded = [
        (ALONE * _least_seconds(problem, models[0], ways, layout), layout)
        for layout in layouts(_islands(models[0], problem), stages, most_pipelines)
    ]
    # Of those that are alike, as in another order of islands that are, one is enough.
    found: dict[Hashable, ContextPipelines] = {}
    for least, layout in sorted(bounded, key=lambda each: each[0]):
        seconds = sorted(each.seconds for each in found.values())
        if most is not None and len(seconds) >= most and least >= seconds[most - 1]:
            break
        made = _pipelines(problem, models[0], ways, layout)
        if made is not None:
            found.setdefault(made.figures, made)
    return sorted(found.values(), key=lambda each: each.seconds)[:most]


class _StageWays:
    """The best ways to run some layers on some devices.

    Args:
        problem: the problem.
        models: its cost models, of layers that are kept and made again, for each tensor axis.
    """

    def __init__(self, problem: PlanningProblem, models: Sequence[ContextModel]):
        self._splits = StageSplits(models, offloading(problem, models))
        self._alone = SingleMembers(problem, models[0])
        self._count = problem.num_microbatches

    def best(
        self, part: Part, layers: LayerRun, blocks: int, live: int, *, is_last: bool
    ) -> ContextChoice | SingleMember | None:
        """The best context split; where memory is short, one member if that is faster.

        Args:
            part: the numbers of the stage's devices.
            layers: the first of its layers, and the one after the last.
            blocks: how many of them attend.
            live: how many microbatches are between their passes at once.
            is_last: whether it has the logits.

        Returns:
            The way; None where nothing fits.
        """
        split = self._splits.best(part, blocks, live, is_last=is_last)
        if split is not None and split.model.work.keeps_all:
            return split
        alone = self._alone.best(part, layers, blocks, live)
        if split is None or alone is None:
            return split or alone
        alone_seconds, split_seconds = (
            self._count * each.round_seconds + each.once_seconds for each in (alone, split)
        )
        return alone if alone_seconds < CLEARLY * split_seconds else split

    def least_round_seconds(self, part: Part, blocks: int, *, is_last: bool) -> float:
        """What a microbatch takes in a stage at least; see `StageSplits`."""
        return self._splits.least_round_seconds(part, blocks, is_last=is_last)


def _islands(model: ContextModel, problem: PlanningProblem) -> list[Part]:
    """The devices of each subcluster, or of each node where there is one subcluster."""
    devices = model.devices
    of = devices.subcluster if len(problem.cluster.subclusters) > 1 else devices.node
    usable = devices.usable
    return [tuple(usable[of[usable] == each].tolist()) for each in np.unique(of[usable])]


def _least_seconds(
    problem: PlanningProblem, model: ContextModel, ways: _StageWays, layout: Layout
) -> float:
    """What a layout takes at least: no device ever waits for others of its stage."""
    made = []
    for parts in layout:
        counts, layers = _blocks(problem, model, parts)
        rounds = [
            ways.least_round_seconds(part, count, is_last=place == len(parts) - 1)
            for place, (part, count) in enumerate(zip(parts, counts, strict=True))
        ]
        made.append(ContextPipeline(tuple(parts), (), layers, sum(rounds), max(rounds), 0.0))
    return _together(problem, model, made, layout).seconds


def _pipelines(
    problem: PlanningProblem,
    model: ContextModel,
    ways: _StageWays,
    layout: Layout,
) -> ContextPipelines | None:
    """The pipelines of a layout; None where a stage is too small for its blocks."""
    made = []
    for parts in layout:
        pipeline = _pipeline(problem, model, ways, parts)
        if pipeline is None:
            return None
        made.append(pipeline)
    return _together(problem, model, made, layout)


def _together(
    problem: PlanningProblem,
    model: ContextModel,
    made: Sequence[ContextPipeline],
    layout: Layout,
) -> ContextPipelines:
    """The pipelines of a layout, each with its microbatches."""
    counts = _microbatches(made, problem.num_microbatches)
    pipelines = tuple(
        replace(each, microbatches=own) for each, own in zip(made, counts, strict=True)
    )
    seconds = max(each.seconds for each in pipelines) + _exchange_seconds(model, layout)
    return ContextPipelines(pipelines, seconds)


def _microbatches(pipelines: Sequence[ContextPipeline], count: int) -> list[int]:
    """How many of some microbatches each pipeline has, that the last is done early; 1 or more."""
    counts = [1] * len(pipelines)
    ends = [(each.seconds + each.next_seconds, place) for place, each in enumerate(pipelines)]
    heapq.heapify(ends)
    for _ in range(count - len(pipelines)):
        end, place = ends[0]
        counts[place] += 1
        heapq.heapreplace(ends, (end + pipelines[place].next_seconds, place))
    return counts


def _exchange_seconds(model: ContextModel, layout: Layout) -> float:
    """What several pipelines take to give gradients to whichever updates, and take parameters."""
    if len(layout) == 1:
        return 0.0
    work, of_pipelines = model.work, [[*itertools.chain(*parts)] for parts in layout]
    pairs = itertools.combinations(of_pipelines, 2)
    slowest = max(model.devices.byte_seconds(*pair) for pair in pairs)
    return 2 * (len(layout) - 1) * work.parameters * work.sent_weight_bytes * slowest


def _pipeline(
    problem: PlanningProblem,
    model: ContextModel,
    ways: _StageWays,
    parts: Sequence[Part],
) -> ContextPipeline | None:
    """The pipeline of some stages' devices; None where one of these is too small for its blocks."""
    counts, layers = _blocks(problem, model, parts)
    choices: list[ContextChoice | SingleMember] = []
    for place, (part, count) in enumerate(zip(parts, counts, strict=True)):
        live = min(len(parts) - place, problem.num_microbatches)
        is_last = place == len(parts) - 1
        choice = ways.best(part, (layers[place], layers[place + 1]), count, live, is_last=is_last)
        if choice is None:
            return None
        choices.append(choice)
    return of_choices(parts, choices, layers)


def of_choices(
    parts: Sequence[Part],
    choices: Sequence[ContextChoice | SingleMember],
    layers: tuple[int, ...],
) -> ContextPipeline:
    """The pipeline of stages that run in some ways, of one microbatch.

    Args:
        parts: the devices of each.
        choices: how each runs.
        layers: where stages begin, and the end, in the problem's layers.
    """
    rounds = [each.round_seconds for each in choices]
    once = max(each.once_seconds for each in choices)
    return ContextPipeline(tuple(parts), tuple(choices), layers, sum(rounds), max(rounds), once)


def _blocks(
    problem: PlanningProblem, model: ContextModel, parts: Sequence[Part]
) -> tuple[list[int], tuple[int, ...]]:
    """How many attentions the stages on some devices have; where stages begin, and the end."""
    if len(parts) == 1:
        return [model.work.layers], (0, problem.num_layers)
    blocks = attending_layers(problem)
    speeds = np.array([[model.devices.flops[[*part]].sum() for part in parts]])
    counts = np.maximum(apportion_tokens(speeds, len(blocks))[0], 1)
    # Whoever is too slow for a block takes it of who has most.
    while counts.sum() > len(blocks):
        counts[counts.argmax()] -= 1
    firsts = np.cumsum(counts) - counts
    begins = (blocks[first][0] for first in firsts[1:].tolist())
    attentions = np.maximum(counts * model.work.layers // len(blocks), 1)
    return attentions.tolist(), (0, *begins, problem.num_layers)
