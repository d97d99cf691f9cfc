"""Where a stage's arrays live: its plan, and the annotation of every buffer on it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from hetjax.errors import InputError
from hetjax.pipeline.build import PipelinePrograms
from hetjax.pipeline.program.constraints import constrained
from hetjax.pipeline.program.traced_program import Program, num_bytes
from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.runtime.instructions.annotation_table import (
    AnnotatedLeaves,
    StageAnnotations,
    annotation_table,
)
from hetjax.runtime.instructions.buffers import (
    Buffer,
    GradientRows,
    Parameter,
    ParameterRows,
    PipelineLoss,
    ReceivedCotangent,
    ReceivedValue,
    ReducedGradient,
    SentCotangent,
    SentValue,
    UpdateMessage,
)
from hetjax.runtime.instructions.instruction import RouteKind, Tag
from hetjax.runtime.instructions.shared_rows import gradients_given, values_given
from hetjax.sharding.annotation.rules import MESH_AXES, REDUCTION_GROUPS, divides


@dataclass(frozen=True, eq=False)
class Placement:
    """Where every buffer of every stage lies; a pure function of plan and program.

    Both ends of a transfer derive each other's annotations from it: nothing has to be agreed on.

    Args:
        pipelines: the pipelines' programs.
        plan: the plan.
        table: for each stage and kind of buffer, how its leaves lie.
    """

    pipelines: PipelinePrograms
    plan: Plan
    table: tuple[StageAnnotations, ...]

    @classmethod
    def of(cls, pipelines: PipelinePrograms, plan: Plan) -> Placement:
        """Place the buffers of a plan.

        Args:
            pipelines: the pipelines' programs.
            plan: the plan.

        Raises:
            InputError: the plan says of a parameter what does not divide it evenly.
        """
        return cls(pipelines, plan, annotation_table(pipelines, plan))

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

    def first_example(self, stage: int) -> int:
        """Where in a step's batch the examples of a stage's pipeline begin."""
        before = self.plan.pipelines[: self.pipelines.pipeline_of(stage)]
        return sum(each.num_microbatches * each.microbatch_size for each in before)

    def leaves(self, stage: int, kind: type[Buffer]) -> AnnotatedLeaves:
        """How the leaves of a kind of buffer lie on a stage; none where it has no such buffers."""
        return self.table[stage].get(kind, _NO_LEAVES)

    def transfer(self, tag: Tag, end: int) -> AnnotatedLeaves:
        """How the arrays of a transfer lie at one of its ends.

        Args:
            tag: the transfer.
            end: the stage that sends or the one that receives.
        """
        kind, source, target = tag.route
        match kind:
            case RouteKind.VALUE:
                return self.leaves(end, SentValue if end == source else ReceivedValue)
            case RouteKind.COTANGENT:
                return self.leaves(end, SentCotangent if end == source else ReceivedCotangent)
            case RouteKind.GRADIENT:
                rows = gradients_given(self.pipelines, source, target)
                return self.leaves(end, GradientRows).chosen(rows)
            case RouteKind.PARAMETER:
                rows = values_given(self.pipelines, source, target)
                return self.leaves(end, ParameterRows).chosen(rows)
            case RouteKind.LOSS:
                return self.leaves(end, PipelineLoss)
            case RouteKind.MESSAGE:
                places = range(len(self.pipelines.messages[tag.phase][source]))
                names = ((tag.phase, source, place) for place in places)
                return self.leaves(end, UpdateMessage).chosen(names)


_NO_LEAVES = AnnotatedLeaves((), (), ())


def reduction_groups(placement: Placement, stage: int) -> tuple[tuple[int, ...], ...]:
    """The places of a stage's parameters in groups whose gradients are reduced one by one.

    Where sums that are whole are scattered, both are there for a moment: groups keep that small.

    Args:
        placement: where all buffers lie.
        stage: which stage.

    Returns:
        Such groups, or one; none where nothing is summed late.
    """
    held, reduced = (placement.leaves(stage, kind) for kind in (Parameter, ReducedGradient))
    if not reduced.names:
        return ()
    sizes = [num_bytes(shape) for shape in held.shapes]
    ends = np.cumsum(sizes) - sizes
    whole = reduced.specs == held.specs
    group = np.zeros(len(sizes)) if whole else ends * REDUCTION_GROUPS // max(1, sum(sizes))
    return tuple(tuple(np.flatnonzero(group == each).tolist()) for each in np.unique(group))


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
