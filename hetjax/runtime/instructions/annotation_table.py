"""The table of annotations: for each stage and each kind of buffer, how its leaves lie.

It follows from the plan and the cut program alone. What the compiler divides by itself, residuals
and deferred values, is not in it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.errors import InputError
from hetjax.pipeline.build import PipelinePrograms
from hetjax.pipeline.stages.backward import accumulator_dtype
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
from hetjax.sharding.annotation.annotation import HSharding, Subgroup, axes_of
from hetjax.sharding.annotation.rules import (
    DATA,
    MESH_AXES,
    TENSOR,
    divides,
    example_spec,
    parameter_spec,
    state_spec,
)


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
        """How the stage's submesh divides each, whichever submesh it is."""
        return tuple(annotation.subgroups[0].spec for annotation in self.annotations)

    def on(self, mesh: Mesh) -> list[NamedSharding]:
        """The shardings of leaves none of which is a partial sum.

        Args:
            mesh: the stage's mesh.
        """
        return [annotation.on(mesh) for annotation in self.annotations]

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
        dict(_StageAnnotator(pipelines, plan, stage).rows())
        for stage in range(pipelines.num_stages)
    )


class _StageAnnotator:
    def __init__(self, pipelines: PipelinePrograms, plan: Plan, stage: int):
        self.pipelines, self.stage, self.plan = pipelines, stage, plan.stages[stage]
        self.pipeline = plan.pipelines[pipelines.pipeline_of(stage)]
        self.mesh_shape = self.plan.mesh_shape
        self.held = pipelines.stages[stage].parameters
        self.update = pipelines.updates[stage]
        axes = tuple(zip(MESH_AXES, self.mesh_shape, strict=True))
        devices = tuple(plan.cluster.device_ids(self.plan.submesh))
        self.group = Subgroup(devices, axes, PartitionSpec())
        self.known: dict[PartitionSpec, HSharding] = {}

    def rows(self) -> Iterator[tuple[type[Buffer], AnnotatedLeaves]]:
        yield from self._parameters()
        yield (
            OptimizerState,
            self._leaves(
                self.update.state,
                map(self.pipelines.state_shape, self.update.state),
                map(self._state, self.update.state, self.update.like),
            ),
        )
        yield from self._shared_rows()
        if self.pipelines.programs:
            yield from self._of_microbatches()
            yield from self._of_updates()

    def _leaves(
        self,
        names: Iterable[Hashable],
        shapes: Iterable[jax.ShapeDtypeStruct],
        specs: Iterable[PartitionSpec],
    ) -> AnnotatedLeaves:
        annotations = tuple(map(self._annotation, specs))
        return AnnotatedLeaves(tuple(names), tuple(shapes), annotations)

    def _annotation(self, spec: PartitionSpec) -> HSharding:
        if spec not in self.known:
            self.known[spec] = HSharding((self.group.with_spec(spec),))
        return self.known[spec]

    def _parameters(self) -> Iterator[tuple[type[Buffer], AnnotatedLeaves]]:
        held, updated = self.held, self.update.parts
        late = self._summed_late()
        reduced = [self._gradient(part) for part in held]
        sums = [
            partial_sums(self._part(part)) if place in late else reduced[place]
            for place, part in enumerate(held)
        ]
        yield Parameter, self._of_parts(held, map(self._part, held))
        yield Gradient, self._of_gradients(held, sums)
        if late:
            yield ReducedGradient, self._of_gradients(held, reduced)
        yield UpdatedParameter, self._of_parts(updated, map(self._part, updated))
        yield UpdatedGradient, self._of_gradients(updated, map(self._gradient, updated))

    def _shared_rows(self) -> Iterator[tuple[type[Buffer], AnnotatedLeaves]]:
        pieces = [
            piece
            for piece, holders in self.pipelines.shared.items()
            if self.stage in holders.stages or self.stage in holders.updaters
        ]
        yield ParameterRows, self._of_parts(pieces, map(self._part, pieces))
        yield GradientRows, self._of_gradients(pieces, map(self._part, pieces))

    def _of_microbatches(self) -> Iterator[tuple[type[Buffer], AnnotatedLeaves]]:
        stage, programs = self.pipelines.stages[self.stage], self.pipelines.programs[self.stage]
        yield BatchLeaf, self._examples(stage.batch, programs.batch)
        yield ReceivedValue, self._examples(stage.receives, programs.received)
        given = programs.cotangents_out
        yield SentCotangent, self._examples(given, [programs.received[i] for i in given])
        if not self.pipelines.is_last(self.stage):
            yield SentValue, self._examples(stage.sends, programs.sent)
            wanted = programs.cotangents_in
            yield ReceivedCotangent, self._examples(wanted, [programs.sent[i] for i in wanted])

    def _of_updates(self) -> Iterator[tuple[type[Buffer], AnnotatedLeaves]]:
        scalar = jax.ShapeDtypeStruct((), np.float32)
        yield PipelineLoss, self._leaves(("sum", "count"), (scalar,) * 2, (PartitionSpec(),) * 2)
        messages = [
            ((phase, sender, place), shape)
            for phase, of_phase in enumerate(self.pipelines.messages)
            for sender, shapes in enumerate(of_phase)
            if sender == self.stage or sender in self.update.receives[phase]
            for place, shape in enumerate(shapes)
        ]
        yield (
            UpdateMessage,
            self._leaves(
                [name for name, _ in messages],
                [shape for _, shape in messages],
                [PartitionSpec()] * len(messages),
            ),
        )

    def _of_parts(
        self, parts: Sequence[ParameterPart], specs: Iterable[PartitionSpec]
    ) -> AnnotatedLeaves:
        return self._leaves(parts, map(self.pipelines.part_shape, parts), specs)

    def _of_gradients(
        self, parts: Sequence[ParameterPart], specs: Iterable[PartitionSpec]
    ) -> AnnotatedLeaves:
        shapes = [self.pipelines.part_shape(part) for part in parts]
        sums = [jax.ShapeDtypeStruct(s.shape, accumulator_dtype(s.dtype)) for s in shapes]
        return self._leaves(parts, sums, specs)

    def _examples(
        self, names: Iterable[Hashable], shapes: Sequence[jax.ShapeDtypeStruct]
    ) -> AnnotatedLeaves:
        size = self.pipeline.microbatch_size
        specs = [example_spec(shape.shape, size, self.mesh_shape) for shape in shapes]
        return self._leaves(names, shapes, specs)

    def _part(self, part: ParameterPart) -> PartitionSpec:
        """Of what the stage holds of a parameter, or of some of its rows."""
        plan = self.plan
        name = self.pipelines.program.parameter_names[part.leaf]
        shape = self.pipelines.part_shape(part).shape
        if name not in plan.parameters:
            return parameter_spec(plan.sharding, shape, self.mesh_shape)
        spec = PartitionSpec(*plan.parameters[name])
        if divides(spec, shape, self.mesh_shape):
            return spec
        if part not in self.held:
            return PartitionSpec(None, *plan.parameters[name][1:])
        raise InputError(
            f"plan: stages[{self.stage}].parameters[{name!r}] is {list(spec)}, which does not "
            f"divide its shape {shape} evenly on the mesh {list(self.mesh_shape)}"
        )

    def _gradient(self, part: ParameterPart) -> PartitionSpec:
        """As the optimizer's state, unless other stages have summands, too."""
        spec = self._part(part)
        if part.leaf in self.pipelines.shared_of_leaf:
            return spec
        shape = self.pipelines.part_shape(part).shape
        return state_spec(self.plan.sharding, spec, shape, self.mesh_shape)

    def _state(self, part: ParameterPart, like: int | None) -> PartitionSpec:
        """As the parameter that it belongs to, or finer."""
        rule, shape = self.plan.sharding, self.pipelines.state_shape(part).shape
        if like is not None:
            spec = self._part(ParameterPart(like, part.start, part.stop))
        else:
            spec = parameter_spec(rule, shape, self.mesh_shape)
        return state_spec(rule, spec, shape, self.mesh_shape)

    def _summed_late(self) -> frozenset[int]:
        """The places of the parameters whose gradients are reduced once a step.

        Those are the ones that each of several devices along the data axis has whole: of these,
        sums over the examples of all microbatches can stay partial until the last one. Where a
        plan says what the tensor axis divides, the compiler divides the whole program, and reduces
        as it does: deduction does not bring sums along two axes together as GPTs need it.
        """
        plan, (data, _) = self.plan, self.mesh_shape
        says = bool(plan.values) or any(TENSOR in spec for spec in plan.parameters.values())
        if data == 1 or self.pipeline.num_microbatches == 1 or says:
            return frozenset()
        specs = map(self._part, self.held)
        return frozenset(
            place
            for place, spec in enumerate(specs)
            if not any(DATA in axes_of(entry) for entry in spec)
        )


def partial_sums(spec: PartitionSpec) -> PartitionSpec:
    """How partial sums along the data axis lie.

    Args:
        spec: how the whole sums would.

    Example:
        >>> partial_sums(PartitionSpec(None, "tensor"))
        P(None, 'tensor', unreduced={'data'})
    """
    return PartitionSpec(*spec.partitions, unreduced=frozenset({DATA}))
