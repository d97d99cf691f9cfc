"""The table of annotations: for each stage and each kind of buffer, how its leaves lie.

It follows from the plan and the cut program alone. Residuals and deferred values are not in it:
they lie as they are made.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.pipeline.build import PipelinePrograms
from hetjax.pipeline.program.loss import accumulator_dtype
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.planner.plan.plan import Plan
from hetjax.runtime.instructions.buffers import (
    BatchLeaf,
    Buffer,
    Gradient,
    GradientRows,
    OptimizerState,
    Parameter,
    ParameterRows,
    PipelineLoss,
    ReceivedCotangent,
    ReceivedValue,
    ReducedGradient,
    SentCotangent,
    SentValue,
    UpdatedGradient,
    UpdatedParameter,
    UpdateMessage,
)
from hetjax.runtime.instructions.stage_annotator import StageAnnotator
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.deduction.annotated_program import shape_on


@dataclass(frozen=True)
class AnnotatedLeaves:
    """The leaves of one kind of buffer on a stage, in the order of their places.

    Args:
        names: what tells them apart: of parameters, gradients and state the `ParameterPart`, of
            the batch the leaf, of values their number in the program, of cotangents the place of
            the value; of messages phase, sender and place, of losses the figure.
        shapes: their shapes.
        annotations: how each lies on the stage's devices, in the cluster's numbers.
    """

    names: tuple[Hashable, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    annotations: tuple[HSharding, ...]

    @property
    def specs(self) -> tuple[PartitionSpec, ...]:
        """How the submesh of a stage of one member divides each, whichever submesh it is."""
        return tuple(annotation.subgroups[0].spec for annotation in self.annotations)

    def on(self, mesh: Mesh) -> list[NamedSharding]:
        """The shardings of leaves of a stage of one member, none of which is a partial sum.

        Args:
            mesh: the stage's mesh.
        """
        return [annotation.on(mesh) for annotation in self.annotations]

    def of_member(self, member: int, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
        """What one member has of the leaves: shapes and shardings.

        Args:
            member: which member of the stage.
            mesh: its mesh.
        """
        pairs = zip(self.shapes, self.annotations, strict=True)
        return [shape_on(mesh, member, shape, annotation) for shape, annotation in pairs]

    def chosen(self, names: Iterable[Hashable]) -> AnnotatedLeaves:
        """Some of the leaves, in the order of the names given."""
        places = {name: place for place, name in enumerate(self.names)}
        chosen = [places[name] for name in names]
        return AnnotatedLeaves(
            tuple(self.names[place] for place in chosen),
            tuple(self.shapes[place] for place in chosen),
            tuple(self.annotations[place] for place in chosen),
        )


StageAnnotations = Mapping[type[Buffer], AnnotatedLeaves]
"""Of one stage, by the kind of buffer."""


def annotation_table(pipelines: PipelinePrograms, plan: Plan) -> tuple[StageAnnotations, ...]:
    """Annotate the leaves of every kind of buffer on every stage.

    Args:
        pipelines: the pipelines' programs; where they are only cut, what microbatches and messages
            have is left out.
        plan: the plan.

    Returns:
        For each stage, the kinds of which it may have buffers.

    Raises:
        InputError: the plan says of a parameter what does not divide it evenly.
    """
    return tuple(
        dict(_TableRows(pipelines, plan, stage).rows()) for stage in range(pipelines.num_stages)
    )


class _TableRows:
    def __init__(self, pipelines: PipelinePrograms, plan: Plan, stage: int):
        self.pipelines, self.stage = pipelines, stage
        self.lies = StageAnnotator(pipelines, plan, stage)
        self.held = pipelines.stages[stage].parameters
        self.update = pipelines.updates[stage]

    def rows(self) -> Iterator[tuple[type[Buffer], AnnotatedLeaves]]:
        yield from self._parameters()
        yield OptimizerState, self._state()
        yield from self._shared_rows()
        if self.pipelines.programs:
            yield from self._of_microbatches()
            yield from self._of_updates()

    def _parameters(self) -> Iterator[tuple[type[Buffer], AnnotatedLeaves]]:
        held, updated = self.held, self.update.parts
        reduced = tuple(map(self.lies.gradient, held))
        sums = self._sums(reduced)
        yield Parameter, self._of_parts(held)
        yield Gradient, self._of_gradients(held, sums)
        if sums != reduced or self._members_share_rows():
            yield ReducedGradient, self._of_gradients(held, reduced)
        yield UpdatedParameter, self._of_parts(updated)
        yield UpdatedGradient, self._of_gradients(updated, map(self.lies.gradient, updated))

    def _sums(self, reduced: tuple[HSharding, ...]) -> tuple[HSharding, ...]:
        """How the sums of gradients lie while microbatches add to them."""
        if self.lies.is_union:
            programs = self.pipelines.programs
            found = programs[self.stage].gradient_annotations if programs else ()
            return tuple(a or b for a, b in zip(found, reduced, strict=True)) if found else reduced
        late = self.lies.summed_late()
        return tuple(
            self.lies.partial(part) if place in late else reduced[place]
            for place, part in enumerate(self.held)
        )

    def _members_share_rows(self) -> bool:
        """Whether several members have rows that other stages have, too: all must give the same."""
        shared = self.pipelines.shared_of_leaf
        return self.lies.is_union and any(part.leaf in shared for part in self.held)

    def _state(self) -> AnnotatedLeaves:
        state = self.update.state
        annotations = map(self.lies.state, state, self.update.like)
        shapes = map(self.pipelines.state_shape, state)
        return AnnotatedLeaves(state, tuple(shapes), tuple(annotations))

    def _shared_rows(self) -> Iterator[tuple[type[Buffer], AnnotatedLeaves]]:
        pieces = [
            piece
            for piece, holders in self.pipelines.shared.items()
            if self.stage in holders.stages or self.stage in holders.updaters
        ]
        yield ParameterRows, self._of_parts(pieces)
        yield GradientRows, self._of_gradients(pieces, map(self.lies.part, pieces))

    def _of_microbatches(self) -> Iterator[tuple[type[Buffer], AnnotatedLeaves]]:
        stage, programs = self.pipelines.stages[self.stage], self.pipelines.programs[self.stage]
        yield BatchLeaf, self._examples(stage.batch, programs.batch)
        places = range(len(stage.receives))
        yield ReceivedValue, self._passed(stage.receives, stage.receives, places, programs.received)
        given = programs.cotangents_out
        yield SentCotangent, self._passed(given, stage.receives, given, programs.received)
        if not self.pipelines.is_last(self.stage):
            places = range(len(stage.sends))
            yield SentValue, self._passed(stage.sends, stage.sends, places, programs.sent)
            wanted = programs.cotangents_in
            yield ReceivedCotangent, self._passed(wanted, stage.sends, wanted, programs.sent)

    def _of_updates(self) -> Iterator[tuple[type[Buffer], AnnotatedLeaves]]:
        scalar = jax.ShapeDtypeStruct((), self.pipelines.program.loss_dtype)
        yield PipelineLoss, self._whole(("sum", "count"), (scalar, scalar))
        messages = [
            ((phase, sender, place), shape)
            for phase, of_phase in enumerate(self.pipelines.messages)
            for sender, shapes in enumerate(of_phase)
            if sender == self.stage or sender in self.update.receives[phase]
            for place, shape in enumerate(shapes)
        ]
        names, shapes = [name for name, _ in messages], [shape for _, shape in messages]
        yield UpdateMessage, self._whole(names, shapes)

    def _of_parts(self, parts: Sequence[ParameterPart]) -> AnnotatedLeaves:
        shapes, annotations = map(self.pipelines.part_shape, parts), map(self.lies.part, parts)
        return AnnotatedLeaves(tuple(parts), tuple(shapes), tuple(annotations))

    def _of_gradients(
        self, parts: Sequence[ParameterPart], annotations: Iterable[HSharding]
    ) -> AnnotatedLeaves:
        shapes = [self.pipelines.part_shape(part) for part in parts]
        sums = [jax.ShapeDtypeStruct(s.shape, accumulator_dtype(s.dtype)) for s in shapes]
        return AnnotatedLeaves(tuple(parts), tuple(sums), tuple(annotations))

    def _examples(
        self, names: Iterable[Hashable], shapes: Sequence[jax.ShapeDtypeStruct]
    ) -> AnnotatedLeaves:
        annotations = (self.lies.example(shape.shape) for shape in shapes)
        return AnnotatedLeaves(tuple(names), tuple(shapes), tuple(annotations))

    def _passed(
        self,
        names: Iterable[Hashable],
        values: Sequence[int],
        places: Sequence[int],
        shapes: Sequence[jax.ShapeDtypeStruct],
    ) -> AnnotatedLeaves:
        """Of values between stages, or their cotangents, by the places among such values."""
        chosen = [shapes[place] for place in places]
        pairs = zip((values[place] for place in places), chosen, strict=True)
        annotations = (self.lies.passed(value, shape.shape) for value, shape in pairs)
        return AnnotatedLeaves(tuple(names), tuple(chosen), tuple(annotations))

    def _whole(
        self, names: Iterable[Hashable], shapes: Sequence[jax.ShapeDtypeStruct]
    ) -> AnnotatedLeaves:
        return AnnotatedLeaves(tuple(names), tuple(shapes), (self.lies.whole,) * len(shapes))
