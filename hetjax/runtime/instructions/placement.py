"""Where a stage's arrays live: its mesh, and the sharding of every buffer on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from hetjax.errors import InputError
from hetjax.pipeline.build import PipelinePrograms, Shapes
from hetjax.pipeline.program.constraints import constrained
from hetjax.pipeline.program.traced_program import Program, num_bytes
from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.pipeline.stages.backward import accumulator_dtype
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.planner.plan.plan import PipelinePlan, Plan, StagePlan
from hetjax.runtime.instructions.instruction import Route, RouteKind, Tag
from hetjax.runtime.instructions.shared_rows import gradients_given, values_given
from hetjax.sharding.annotation.annotation import HSharding, Subgroup, axes_of
from hetjax.sharding.annotation.rules import (
    DATA,
    MESH_AXES,
    REDUCTION_GROUPS,
    TENSOR,
    divides,
    example_spec,
    parameter_spec,
    state_spec,
)


@dataclass(frozen=True, eq=False)
class Placement:
    """The specification of every buffer of every stage; a pure function of plan and program.

    Both ends of a transfer derive each other's shardings from it: nothing has to be agreed on.

    Args:
        pipelines: the pipelines' programs.
        plan: the plan.
    """

    pipelines: PipelinePrograms
    plan: Plan

    def with_schedule(self, schedule: Schedule) -> Placement:
        """The same with another order of tasks, of the one pipeline of the plan."""
        return replace(self, plan=self.plan.with_schedule(schedule))

    def pipeline_plan(self, stage: int) -> PipelinePlan:
        """The plan of the pipeline that a stage is in."""
        return self.plan.pipelines[self.pipelines.pipeline_of(stage)]

    def place(self, stage: int) -> int:
        """Which stage of its pipeline a stage is."""
        return stage - self.pipelines.first_stages[self.pipelines.pipeline_of(stage)]

    def stage_plan(self, stage: int) -> StagePlan:
        """The plan of a stage."""
        return self.plan.stages[stage]

    def annotation(self, stage: int, spec: PartitionSpec) -> HSharding:
        """Of an array that a stage holds, divided by a specification, in the cluster's numbers."""
        plan = self.stage_plan(stage)
        axes = tuple(zip(MESH_AXES, plan.mesh_shape, strict=True))
        devices = self.plan.cluster.device_ids(plan.submesh)
        return HSharding((Subgroup(tuple(devices), axes, spec),))

    def first_example(self, stage: int) -> int:
        """Where in a step's batch the examples of a stage's pipeline begin."""
        before = self.plan.pipelines[: self.pipelines.pipeline_of(stage)]
        return sum(each.num_microbatches * each.microbatch_size for each in before)

    def parameters(self, stage: int) -> tuple[PartitionSpec, ...]:
        """Of the parameter parts of a stage."""
        return tuple(self.part(stage, p) for p in self.pipelines.stages[stage].parameters)

    def gradients(self, stage: int) -> tuple[PartitionSpec, ...]:
        """Of their gradients, summed over all microbatches of the pipeline."""
        return tuple(self._gradient(stage, p) for p in self.pipelines.stages[stage].parameters)

    def updated(self, stage: int) -> tuple[PartitionSpec, ...]:
        """Of the parameter parts that a stage updates."""
        return tuple(self.part(stage, part) for part in self.pipelines.updates[stage].parts)

    def updated_gradients(self, stage: int) -> tuple[PartitionSpec, ...]:
        """Of their gradients, summed over all microbatches."""
        return tuple(self._gradient(stage, p) for p in self.pipelines.updates[stage].parts)

    def part(self, stage: int, part: ParameterPart) -> PartitionSpec:
        """Of what a stage holds of a parameter, or of some of its rows."""
        plan = self.stage_plan(stage)
        name = self.pipelines.program.parameter_names[part.leaf]
        shape = self.pipelines.part_shape(part).shape
        if name not in plan.parameters:
            return parameter_spec(plan.sharding, shape, plan.mesh_shape)
        spec = PartitionSpec(*plan.parameters[name])
        if divides(spec, shape, plan.mesh_shape):
            return spec
        if part not in self.pipelines.stages[stage].parameters:
            return PartitionSpec(None, *plan.parameters[name][1:])
        raise InputError(
            f"plan: stages[{stage}].parameters[{name!r}] is {list(spec)}, which does not "
            f"divide its shape {shape} evenly on the mesh {list(plan.mesh_shape)}"
        )

    def _gradient(self, stage: int, part: ParameterPart) -> PartitionSpec:
        """As the optimizer's state, unless other stages have summands, too."""
        spec = self.part(stage, part)
        if part.leaf in self.pipelines.shared_of_leaf:
            return spec
        plan, shape = self.stage_plan(stage), self.pipelines.part_shape(part).shape
        return state_spec(plan.sharding, spec, shape, plan.mesh_shape)

    def summed_late(self, stage: int) -> frozenset[int]:
        """The places of a stage's parameters whose gradients are reduced once a step.

        Those are the ones that each of several devices along the data axis has whole: of these,
        sums over the examples of all microbatches can stay partial until the last one. Where a
        plan says what the tensor axis divides, the compiler divides the whole program, and reduces
        as it does: deduction does not bring sums along two axes together as GPTs need it.
        """
        pipeline, (data, _) = self.pipeline_plan(stage), self.stage_plan(stage).mesh_shape
        if data == 1 or pipeline.num_microbatches == 1 or self._says_what_is_divided(stage):
            return frozenset()
        return frozenset(
            place
            for place, spec in enumerate(self.parameters(stage))
            if not any(DATA in axes_of(entry) for entry in spec)
        )

    def _says_what_is_divided(self, stage: int) -> bool:
        plan = self.stage_plan(stage)
        return bool(plan.values) or any(TENSOR in spec for spec in plan.parameters.values())

    def reductions(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """The places of a stage's parameters in groups whose gradients are reduced one by one.

        Where sums that are whole are scattered, both are there for a moment: groups keep that
        small. Elsewhere there is one group, or none where nothing is summed late.
        """
        if not self.summed_late(stage):
            return ()
        parts = self.pipelines.stages[stage].parameters
        sizes = [num_bytes(self.pipelines.part_shape(part)) for part in parts]
        whole = self.gradients(stage) == self.parameters(stage)
        ends = np.cumsum(sizes) - sizes
        group = np.zeros(len(sizes)) if whole else ends * REDUCTION_GROUPS // max(1, sum(sizes))
        return tuple(tuple(np.flatnonzero(group == each).tolist()) for each in np.unique(group))

    def state(self, stage: int) -> tuple[PartitionSpec, ...]:
        """Of the parts of the optimizer's state of a stage."""
        update = self.pipelines.updates[stage]
        pairs = zip(update.state, update.like, strict=True)
        return tuple(self._state(stage, part, like) for part, like in pairs)

    def _state(self, stage: int, part: ParameterPart, like: int | None) -> PartitionSpec:
        """As the parameter that it belongs to, or finer."""
        plan, shape = self.stage_plan(stage), self.pipelines.state_shape(part).shape
        if like is not None:
            spec = self.part(stage, ParameterPart(like, part.start, part.stop))
        else:
            spec = parameter_spec(plan.sharding, shape, plan.mesh_shape)
        return state_spec(plan.sharding, spec, shape, plan.mesh_shape)

    def examples(self, stage: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[PartitionSpec]:
        """Of arrays of one microbatch on a stage."""
        mesh_shape = self.stage_plan(stage).mesh_shape
        size = self.pipeline_plan(stage).microbatch_size
        return [example_spec(shape.shape, size, mesh_shape) for shape in shapes]

    def route_shapes(self, tag: Tag) -> Shapes:
        """Shapes of the arrays of one transfer."""
        route = tag.route
        kind, source, target = route
        if kind == RouteKind.VALUE:
            return self.pipelines.programs[target].received
        if kind == RouteKind.COTANGENT:
            programs = self.pipelines.programs[target]
            return tuple(programs.sent[i] for i in programs.cotangents_in)
        if kind in (RouteKind.GRADIENT, RouteKind.PARAMETER):
            shapes = [self.pipelines.part_shape(part) for part in self._parts(route)]
            if kind == RouteKind.PARAMETER:
                return tuple(shapes)
            return tuple(jax.ShapeDtypeStruct(s.shape, accumulator_dtype(s.dtype)) for s in shapes)
        if kind == RouteKind.LOSS:
            return (jax.ShapeDtypeStruct((), np.float32),) * 2
        assert kind == RouteKind.MESSAGE, kind
        return self.pipelines.messages[tag.phase][source]

    def _parts(self, route: Route) -> tuple[ParameterPart, ...]:
        """The rows of parameters whose gradients or values a transfer moves."""
        chosen = gradients_given if route.kind == RouteKind.GRADIENT else values_given
        return chosen(self.pipelines, route.source, route.target)

    def route_annotations(self, tag: Tag, stage: int) -> list[HSharding]:
        """How the arrays of one transfer lie at one of its ends."""
        route, shapes = tag.route, self.route_shapes(tag)
        if route.kind in (RouteKind.VALUE, RouteKind.COTANGENT):
            specs = self.examples(stage, shapes)
        elif route.kind in (RouteKind.GRADIENT, RouteKind.PARAMETER):
            specs = [self.part(stage, part) for part in self._parts(route)]
        else:
            specs = [PartitionSpec()] * len(shapes)
        return [self.annotation(stage, spec) for spec in specs]


def told(pipeline: PipelinePlan, program: Program) -> Program:
    """A pipeline's program, in which the compiler is told how some values lie.

    Args:
        pipeline: the pipeline's plan.
        program: the loss function, traced at the size of its microbatches.

    Returns:
        The program with the constraints of all stages.

    Raises:
        InputError: a specification does not divide its value evenly.
    """
    shardings: dict[int, NamedSharding] = {}
    for s, stage in enumerate(pipeline.stages):
        mesh = AbstractMesh(stage.mesh_shape, MESH_AXES)
        for value, axes in stage.values.items():
            spec, shape = PartitionSpec(*axes), program.avals[value].shape
            if not divides(spec, shape, stage.mesh_shape):
                raise InputError(
                    f"plan: stages[{s}].values[{value}] is {list(axes)}, which does not divide its "
                    f"shape {shape} evenly on the mesh {list(stage.mesh_shape)}"
                )
            if stage.submesh.num_devices > 1:
                shardings[value] = NamedSharding(mesh, spec)
    return constrained(program, shardings) if shardings else program


def named(mesh: jax.sharding.Mesh, specs: Sequence[PartitionSpec]) -> list[NamedSharding]:
    """Shardings of several arrays on a mesh."""
    return [NamedSharding(mesh, spec) for spec in specs]
