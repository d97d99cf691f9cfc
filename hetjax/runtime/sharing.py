"""Rows of parameters that several stages hold: their gradients are summed, their values stay equal.

Stages of several pipelines hold the same parameters, each with the gradients of its own
microbatches; and a parameter that is used in several stages of one pipeline gets a gradient in
each. Both are summands of one sum, whatever rows and shardings the stages have: every holder gives
the others its own, cut where any holder's rows begin or end, and adds up all in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hetjax.pipeline.build import PipelinePrograms
from hetjax.pipeline.stages import ParameterPart
from hetjax.runtime.buffers import Buffer, Instruction, Receive, Route, Run, Send, Tag

Parts = tuple[ParameterPart, ...]


def shared_with(pipelines: PipelinePrograms, a: int, b: int) -> Parts:
    """The finest parts that two stages both hold."""
    return tuple(part for part, stages in pipelines.shared.items() if a in stages and b in stages)


def owned_for(pipelines: PipelinePrograms, source: int, target: int) -> Parts:
    """The finest parts that two stages hold and of which no stage before the first one does."""
    shared = shared_with(pipelines, source, target)
    return tuple(part for part in shared if pipelines.shared[part][0] == source)


def shared_parameters(pipelines: PipelinePrograms, stage: int) -> dict[int, Parts]:
    """The places of a stage's parameters that others hold too, and the finest parts of each."""
    found: dict[int, Parts] = {}
    for place, held in enumerate(pipelines.stages[stage].parameters):
        parts = pipelines.shared_of_leaf.get(held.leaf, ())
        inside = tuple(part for part in parts if held.contains(part))
        if inside:
            found[place] = inside
    return found


def cut_parameters(pipelines: PipelinePrograms, stage: int) -> dict[int, Parts]:
    """Of these, the ones that are not one finest part themselves."""
    held = pipelines.stages[stage].parameters
    shared = shared_parameters(pipelines, stage)
    return {place: parts for place, parts in shared.items() if parts != (held[place],)}


class _Sharing:
    """The instructions for one kind of buffers: ``gradient`` or ``parameter``."""

    def __init__(self, pipelines: PipelinePrograms, stage: int, kind: str):
        self.pipelines, self.stage, self.kind = pipelines, stage, kind
        self.shared = shared_parameters(pipelines, stage)
        self.cut = cut_parameters(pipelines, stage)
        held = pipelines.stages[stage].parameters
        self.places = {held[place]: place for place in self.shared}
        others = [other for other in range(pipelines.num_stages) if other != stage]
        self.partners = [other for other in others if shared_with(pipelines, stage, other)]

    def mine(self, part: ParameterPart) -> Buffer:
        """Where the stage has a finest part of its own."""
        if part in self.places:
            return Buffer(self.kind, self.places[part])
        return self.of(part, self.stage)

    def of(self, part: ParameterPart, stage: int) -> Buffer:
        """Where the stage has a finest part of its own, cut out, or another stage's."""
        return Buffer(f"shared_{self.kind}", part.leaf, part.start, stage)

    def cut_out(self, places: Sequence[int]) -> Iterator[Instruction]:
        """Cut parameters at some places into their finest parts."""
        if places:
            wholes = tuple(Buffer(self.kind, place) for place in places)
            parts = tuple(self.mine(part) for place in places for part in self.cut[place])
            yield Run(f"cut_{self.kind}", (wholes,), parts)


def sum_gradients(pipelines: PipelinePrograms, stage: int) -> Iterator[Instruction]:
    """Exchange the gradients of shared parts and sum them, in the order of the stages.

    Args:
        pipelines: the pipelines' programs.
        stage: which stage.

    Yields:
        The stage's instructions; none where it shares nothing.
    """
    sharing = _Sharing(pipelines, stage, "gradient")
    if not sharing.shared:
        return
    yield from sharing.cut_out(tuple(sharing.cut))
    for other in sharing.partners:
        mine = tuple(sharing.mine(part) for part in shared_with(pipelines, stage, other))
        yield Send(Tag(Route("gradient", stage, other)), mine)
    for other in sharing.partners:
        theirs = tuple(sharing.of(part, other) for part in shared_with(pipelines, stage, other))
        yield Receive(Tag(Route("gradient", other, stage)), theirs)
    summands = tuple(
        tuple(
            sharing.mine(part) if holder == stage else sharing.of(part, holder)
            for holder in pipelines.shared[part]
        )
        for parts in sharing.shared.values()
        for part in parts
    )
    yield Run("sum_gradient", summands, tuple(Buffer("gradient", p) for p in sharing.shared))


def share_parameters(pipelines: PipelinePrograms, stage: int) -> Iterator[Instruction]:
    """Take over the first holder's parameters.

    Every holder has made the same update, but unlike devices and programs round differently, and
    copies must not drift apart.

    Args:
        pipelines: the pipelines' programs.
        stage: which stage.

    Yields:
        The stage's instructions; none where it shares nothing.
    """
    sharing = _Sharing(pipelines, stage, "parameter")
    yield from sharing.cut_out(given_parameters(pipelines, stage))
    for other in sharing.partners:
        owned = owned_for(pipelines, stage, other)
        if owned:
            mine = tuple(sharing.mine(part) for part in owned)
            yield Send(Tag(Route("parameter", stage, other)), mine)
    for other in sharing.partners:
        taken = owned_for(pipelines, other, stage)
        if taken:
            yield Receive(Tag(Route("parameter", other, stage)), tuple(map(sharing.mine, taken)))
    joined = joined_parameters(pipelines, stage)
    if joined:
        parts = tuple((sharing.mine(part),) for place in joined for part in sharing.cut[place])
        yield Run("join_parameter", parts, tuple(Buffer("parameter", p) for p in joined))


def given_parameters(pipelines: PipelinePrograms, stage: int) -> tuple[int, ...]:
    """The places of parameters of which others take over some finest parts, but not as one."""
    return _cut_where(pipelines, stage, lambda owner: owner == stage)


def joined_parameters(pipelines: PipelinePrograms, stage: int) -> tuple[int, ...]:
    """The places of parameters of which the stage takes over some finest parts, but not as one."""
    return _cut_where(pipelines, stage, lambda owner: owner != stage)


def _cut_where(
    pipelines: PipelinePrograms, stage: int, wanted: Callable[[int], bool]
) -> tuple[int, ...]:
    """The places of cut parameters of which some finest part has such a first holder."""
    return tuple(
        place
        for place, parts in cut_parameters(pipelines, stage).items()
        if any(wanted(pipelines.shared[part][0]) for part in parts)
    )
