"""Where a stage's arrays live: its mesh, and the sharding of every buffer on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from jax.sharding import NamedSharding, PartitionSpec

from hetjax.errors import InputError
from hetjax.pipeline.backward import accumulator_dtype
from hetjax.pipeline.build import PipelineProgram, Shapes
from hetjax.pipeline.schedule import Schedule
from hetjax.pipeline.stages import ParameterPart
from hetjax.planner.plan import PipelinePlan
from hetjax.runtime.instructions import Route, owned_leaves, shared_leaves
from hetjax.sharding.rules import divides, example_spec, parameter_spec


@dataclass(frozen=True, eq=False)
class Placement:
    """The specification of every buffer of every stage; a pure function of plan and program.

    Both ends of a transfer derive each other's shardings from it: nothing has to be agreed on.

    Args:
        pipeline: the pipeline's programs.
        plan: the pipeline's plan.
    """

    pipeline: PipelineProgram
    plan: PipelinePlan

    def with_schedule(self, schedule: Schedule) -> Placement:
        """The same with another order of tasks."""
        return replace(self, plan=replace(self.plan, schedule=schedule))

    def parameters(self, stage: int) -> tuple[PartitionSpec, ...]:
        """Of the parameter parts of a stage, and of their gradients."""
        return tuple(self._parameter(stage, p) for p in self.pipeline.stages[stage].parameters)

    def _parameter(self, stage: int, part: ParameterPart) -> PartitionSpec:
        plan = self.plan.stages[stage]
        name = self.pipeline.program.parameter_names[part.leaf]
        shape = self.pipeline.part_shape(part).shape
        if name in plan.parameters:
            spec = PartitionSpec(*plan.parameters[name])
            if not divides(spec, shape, plan.mesh_shape):
                raise InputError(
                    f"plan: stages[{stage}].parameters[{name!r}] is {list(spec)}, which does not "
                    f"divide its shape {shape} evenly on the mesh {list(plan.mesh_shape)}"
                )
            return spec
        return parameter_spec(plan.sharding, shape, plan.mesh_shape)

    def state(self, stage: int) -> tuple[PartitionSpec, ...]:
        """Of the parts of the optimizer's state of a stage."""
        plan = self.plan.stages[stage]
        shapes = [self.pipeline.state_shape(p).shape for p in self.pipeline.updates[stage].state]
        return tuple(parameter_spec(plan.sharding, shape, plan.mesh_shape) for shape in shapes)

    def examples(self, stage: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[PartitionSpec]:
        """Of arrays of one microbatch on a stage."""
        mesh_shape = self.plan.stages[stage].mesh_shape
        size = self.plan.microbatch_size
        return [example_spec(shape.shape, size, mesh_shape) for shape in shapes]

    def route_shapes(self, route: Route, microbatch: int) -> Shapes:
        """Shapes of the arrays of one transfer."""
        kind, source, target = route
        if kind == "value":
            return self.pipeline.programs[target].received
        if kind == "cotangent":
            programs = self.pipeline.programs[target]
            return tuple(programs.sent[i] for i in programs.cotangents_in)
        if kind in ("gradient", "parameter"):
            shapes = [self.pipeline.part_shape(ParameterPart(leaf)) for leaf in self._leaves(route)]
            if kind == "parameter":
                return tuple(shapes)
            return tuple(jax.ShapeDtypeStruct(s.shape, accumulator_dtype(s.dtype)) for s in shapes)
        assert kind == "message", kind
        return self.pipeline.messages[microbatch][source]

    def _leaves(self, route: Route) -> tuple[int, ...]:
        """The tied leaves whose gradients or values a transfer moves."""
        chosen = shared_leaves if route.kind == "gradient" else owned_leaves
        return chosen(self.pipeline, route.source, route.target)

    def route_specs(self, route: Route, microbatch: int, stage: int) -> list[PartitionSpec]:
        """Shardings of the arrays of one transfer at one of its ends."""
        shapes = self.route_shapes(route, microbatch)
        if route.kind in ("value", "cotangent"):
            return self.examples(stage, shapes)
        if route.kind in ("gradient", "parameter"):
            return [self._parameter(stage, ParameterPart(leaf)) for leaf in self._leaves(route)]
        return [PartitionSpec()] * len(shapes)


def named(mesh: jax.sharding.Mesh, specs: Sequence[PartitionSpec]) -> list[NamedSharding]:
    """Shardings of several arrays on a mesh."""
    return [NamedSharding(mesh, spec) for spec in specs]
