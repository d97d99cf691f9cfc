"""Rows of parameters that several stages hold: their gradients are summed, their values stay equal.

Stages of several pipelines hold the same parameters, each with the gradients of its own
microbatches; and a parameter that is used in several stages of one pipeline gets a gradient in
each. Both are summands of one sum, whatever rows and shardings the stages have. Every holder gives
its own to those who update the rows, cut where any holder's rows begin or end; these add up all in
the same order, and the first of them gives the others the new values. Where all update what they
hold this is an all-reduce, where the rows are divided among them a reduce-scatter and an
all-gather.

Source: Hetu v2, section 4.2 (split-all-reduce, split-reduce-scatter, split-all-gather).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hetjax.pipeline.build import PipelinePrograms
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.runtime.instructions.buffers import (
    Buffer,
    Buffers,
    Gradient,
    GradientRows,
    Parameter,
    ParameterRows,
    ReducedGradient,
    UpdatedGradient,
    UpdatedParameter,
)
from hetjax.runtime.instructions.instruction import (
    Instruction,
    Receive,
    Route,
    RouteKind,
    Run,
    Send,
    Tag,
)

Parts = tuple[ParameterPart, ...]


class RowNames(NamedTuple):
    """What the parameters of a stage, or their gradients, are called while they are shared.

    Args:
        held: what the stage holds.
        updated: rows of it that the stage updates.
        rows: the finest rows, as a stage has them.
    """

    held: type[Parameter | Gradient | ReducedGradient]
    updated: type[UpdatedParameter | UpdatedGradient]
    rows: type[ParameterRows | GradientRows]


PARAMETERS = RowNames(Parameter, UpdatedParameter, ParameterRows)
GRADIENTS = RowNames(Gradient, UpdatedGradient, GradientRows)
REDUCED_GRADIENTS = GRADIENTS._replace(held=ReducedGradient)
"""Where sums were partial before."""


def gradients_given(pipelines: PipelinePrograms, source: int, target: int) -> Parts:
    """The finest parts that two stages hold and the second one updates by their gradients."""
    return tuple(
        part
        for part, holders in pipelines.shared.items()
        if source in holders.stages and target in holders.updaters and pipelines.trains(part)
    )


def values_given(pipelines: PipelinePrograms, source: int, target: int) -> Parts:
    """The finest parts that two stages hold and whose values the first one decides."""
    return tuple(
        part
        for part, holders in pipelines.shared.items()
        if source == holders.updaters[0] and target in holders.stages
    )


def pieces_of(pipelines: PipelinePrograms, parts: Sequence[ParameterPart]) -> dict[int, Parts]:
    """The places of those parts that others hold too, and the finest parts of each."""
    found: dict[int, Parts] = {}
    for place, whole in enumerate(parts):
        pieces = pipelines.shared_of_leaf.get(whole.leaf, ())
        inside = tuple(piece for piece in pieces if whole.contains(piece))
        if inside:
            found[place] = inside
    return found


class StageSharing:
    """What a stage shares with others, and what has to be cut and joined for it.

    Args:
        pipelines: the pipelines' programs.
        stage: which stage.

    Attributes:
        held: the parameter parts that it holds.
        updated: those that it updates.
        pieces: the places of held parts that others hold too, and the finest parts of each.
        updated_pieces: the same of the updated ones.
        summed_pieces: those of them that have gradients.
        cut_gradients: the places of held parts whose gradients are cut into finest parts.
        taken: the places of updated parts that are rows of a held one.
        cut_values: the places of updated parts of which others take over some finest parts, but
            not as one.
        joined: the places of held parts whose values are put together of finest parts.
    """

    def __init__(self, pipelines: PipelinePrograms, stage: int):
        self.pipelines, self.stage = pipelines, stage
        self.held = pipelines.stages[stage].parameters
        self.updated = pipelines.updates[stage].parts
        self.pieces = pieces_of(pipelines, self.held)
        self.updated_pieces = pieces_of(pipelines, self.updated)
        cut = [place for place, parts in self.pieces.items() if parts != (self.held[place],)]
        self.summed_pieces = {
            place: parts
            for place, parts in self.updated_pieces.items()
            if pipelines.trains(self.updated[place])
        }
        self.cut_gradients = tuple(place for place in cut if pipelines.trains(self.held[place]))
        held = frozenset(self.held)
        self.taken = tuple(place for place, part in enumerate(self.updated) if part not in held)
        self.cut_values = tuple(
            place
            for place, parts in self.updated_pieces.items()
            if parts != (self.updated[place],) and any(map(self.decides, parts))
        )
        self.joined = tuple(
            place for place in cut if not all(map(self.decides, self.pieces[place]))
        )

    @property
    def divides(self) -> bool:
        """Whether it updates by the gradients of other parts than it holds."""
        trains = self.pipelines.trains
        return [*filter(trains, self.updated)] != [*filter(trains, self.held)]

    def decides(self, piece: ParameterPart) -> bool:
        """Whether the stage gives the others the values of a finest part."""
        return self.pipelines.shared[piece].updaters[0] == self.stage

    def updated_buffers(self, names: RowNames) -> Buffers:
        """Where the update has its parameters or gradients; what is held whole is there itself."""
        places = {part: place for place, part in enumerate(self.held)}
        return tuple(
            names.held(places[part]) if part in places else names.updated(place)
            for place, part in enumerate(self.updated)
        )

    def summed_buffers(self, names: RowNames) -> Buffers:
        """Where the update has its gradients, of the parts that have any."""
        buffers = self.updated_buffers(names)
        return tuple(buffers[p] for p in self.pipelines.updates[self.stage].summed)

    def buffer_of(self, names: RowNames, piece: ParameterPart, holder: int) -> Buffer:
        """Where the stage has a holder's gradient or value of a finest part."""
        if holder == self.stage:
            if piece in self.held:
                return names.held(self.held.index(piece))
            if names is PARAMETERS and piece in self.updated:
                return self.updated_buffers(names)[self.updated.index(piece)]
        return names.rows(piece.leaf, piece.start, holder)

    def others(self) -> Iterator[int]:
        """All other stages."""
        return (other for other in range(self.pipelines.num_stages) if other != self.stage)


def sum_gradients(sharing: StageSharing, names: RowNames) -> Iterator[Instruction]:
    """Give others the gradients of what they update, and sum those of what this stage updates.

    Args:
        sharing: what a stage shares.
        names: what its gradients are called.

    Yields:
        The stage's instructions; none where it shares nothing.
    """
    stage = sharing.stage

    def mine(piece: ParameterPart) -> Buffer:
        return sharing.buffer_of(names, piece, stage)

    if sharing.cut_gradients:
        wholes = tuple(names.held(place) for place in sharing.cut_gradients)
        pieces = (piece for place in sharing.cut_gradients for piece in sharing.pieces[place])
        yield Run("cut_gradient", (wholes,), tuple(map(mine, pieces)))
    for other in sharing.others():
        given = gradients_given(sharing.pipelines, stage, other)
        if given:
            yield Send(Tag(Route(RouteKind.GRADIENT, stage, other)), tuple(map(mine, given)))
    for other in sharing.others():
        taken = gradients_given(sharing.pipelines, other, stage)
        if taken:
            theirs = tuple(sharing.buffer_of(names, piece, other) for piece in taken)
            yield Receive(Tag(Route(RouteKind.GRADIENT, other, stage)), theirs)
    summands = tuple(
        tuple(
            sharing.buffer_of(names, piece, holder)
            for holder in sharing.pipelines.shared[piece].stages
        )
        for pieces in sharing.summed_pieces.values()
        for piece in pieces
    )
    if summands:
        updated = sharing.updated_buffers(names)
        yield Run("sum_gradient", summands, tuple(updated[p] for p in sharing.summed_pieces))


def take_parameters(sharing: StageSharing) -> Iterator[Instruction]:
    """Cut the rows that the stage updates out of the parameters that it holds.

    Args:
        sharing: what a stage shares.

    Yields:
        The stage's instructions; none where it updates all that it holds.
    """
    if sharing.taken:
        held = tuple(Parameter(place) for place in held_around(sharing))
        updated = sharing.updated_buffers(PARAMETERS)
        yield Run("take_parameter", (held,), tuple(updated[place] for place in sharing.taken))


def held_around(sharing: StageSharing) -> tuple[int, ...]:
    """The places of the held parts that the taken ones are rows of, in their order."""
    return tuple(
        next(
            place
            for place, part in enumerate(sharing.held)
            if part.leaf == sharing.updated[taken].leaf
        )
        for taken in sharing.taken
    )


def share_parameters(sharing: StageSharing) -> Iterator[Instruction]:
    """Take over the values that other stages decide, and give those that this one does.

    Where several stages make the same update, unlike devices and programs round differently, and
    copies must not drift apart.

    Args:
        sharing: what a stage shares.

    Yields:
        The stage's instructions; none where it shares nothing.
    """
    stage = sharing.stage

    def mine(piece: ParameterPart) -> Buffer:
        return sharing.buffer_of(PARAMETERS, piece, stage)

    if sharing.cut_values:
        updated = sharing.updated_buffers(PARAMETERS)
        pieces = (piece for p in sharing.cut_values for piece in sharing.updated_pieces[p])
        wholes = tuple(updated[place] for place in sharing.cut_values)
        yield Run("cut_parameter", (wholes,), tuple(map(mine, pieces)))
    for other in sharing.others():
        given = values_given(sharing.pipelines, stage, other)
        if given:
            yield Send(Tag(Route(RouteKind.PARAMETER, stage, other)), tuple(map(mine, given)))
    for other in sharing.others():
        taken = values_given(sharing.pipelines, other, stage)
        if taken:
            yield Receive(Tag(Route(RouteKind.PARAMETER, other, stage)), tuple(map(mine, taken)))
    if sharing.joined:
        parts = tuple((mine(piece),) for p in sharing.joined for piece in sharing.pieces[p])
        yield Run("join_parameter", parts, tuple(Parameter(p) for p in sharing.joined))
