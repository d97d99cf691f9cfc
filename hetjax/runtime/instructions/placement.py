"""Where a stage's arrays live: its plan, and the annotation of every buffer on it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from hetjax.errors import InputError
from hetjax.pipeline.build import PipelinePrograms
from hetjax.pipeline.program.constraints import constrained
from hetjax.pipeline.program.traced_program import Program, num_bytes
from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.plan_context import values_inside
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
from hetjax.runtime.instructions.instruction import Route, RouteKind, Tag
from hetjax.runtime.instructions.member_instructions import DividedPrograms, MemberPart
from hetjax.runtime.instructions.shared_rows import gradients_given, values_given
from hetjax.runtime.instructions.stage_annotator import MemberLayouts, StageAnnotator
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.rules import MESH_AXES, REDUCTION_GROUPS, divides
from hetjax.sharding.deduction.annotated_program import union_of


@dataclass(frozen=True, eq=False)
class Placement:
    """Where every buffer of every stage lies; a pure function of plan and program.

    Both ends of a transfer derive each other's annotations from it: nothing has to be agreed on.

    Args:
        pipelines: the pipelines' programs.
        plan: the plan.
        table: for each stage and kind of buffer, how its leaves lie.
        divided: for each stage of several members its programs, as segments and moves.
        traced: for each size of microbatches the loss as it was traced, before the plan tells it
            anything.
    """

    pipelines: PipelinePrograms
    plan: Plan
    table: tuple[StageAnnotations, ...]
    divided: Mapping[int, DividedPrograms] = field(default_factory=dict)
    traced: Mapping[int, Program] = field(default_factory=dict)

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

    def annotator(self, stage: int) -> StageAnnotator:
        """What says how arrays of a stage lie."""
        return StageAnnotator(self.pipelines, self.plan, stage)

    def part(self, stage: int, member: int) -> MemberPart | None:
        """What a member does of its stage's programs; None where the stage has no other members."""
        if stage not in self.divided:
            return None
        submesh = union_of(self.annotator(stage).whole)[member]
        return MemberPart(submesh, self.divided[stage])

    def first_example(self, stage: int) -> int:
        """Where in a step's batch the examples of a stage's pipeline begin."""
        before = self.plan.pipelines[: self.pipelines.pipeline_of(stage)]
        return sum(each.num_microbatches * each.microbatch_size for each in before)

    def examples_of(self, stage: int, member: int) -> tuple[int, int]:
        """The first of a microbatch's examples that a member has, and the one after the last."""
        size = self.pipeline_plan(stage).microbatch_size
        shares = self.stage_plan(stage).shares.batch
        if not shares:
            return 0, size
        return sum(shares[:member]), sum(shares[: member + 1])

    def leaves(self, stage: int, kind: type[Buffer]) -> AnnotatedLeaves:
        """How the leaves of a kind of buffer lie on a stage; none where it has no such buffers."""
        return self.table[stage].get(kind, _NO_LEAVES)

    def ends(self, tag: Tag) -> tuple[AnnotatedLeaves, AnnotatedLeaves]:
        """How the arrays of a transfer lie as they are sent, and as they are received.

        Args:
            tag: the transfer.
        """
        kind, source, target = tag.route
        match kind:
            case RouteKind.VALUE:
                return self.leaves(source, SentValue), self.leaves(target, ReceivedValue)
            case RouteKind.COTANGENT:
                return self.leaves(source, SentCotangent), self.leaves(target, ReceivedCotangent)
            case RouteKind.GRADIENT:
                rows = gradients_given(self.pipelines, source, target)
                return self._at_both(tag.route, GradientRows, rows)
            case RouteKind.PARAMETER:
                rows = values_given(self.pipelines, source, target)
                return self._at_both(tag.route, ParameterRows, rows)
            case RouteKind.LOSS:
                return self.leaves(source, PipelineLoss), self.leaves(target, PipelineLoss)
            case RouteKind.MOVE:
                return self._moved(tag)
            case RouteKind.MESSAGE:
                places = range(len(self.pipelines.messages[tag.phase][source]))
                names = [(tag.phase, source, place) for place in places]
                return self._at_both(tag.route, UpdateMessage, names)

    def _at_both(
        self, route: Route, kind: type[Buffer], names: Iterable[Hashable]
    ) -> tuple[AnnotatedLeaves, AnnotatedLeaves]:
        chosen = tuple(names)
        source, target = (self.leaves(end, kind) for end in (route.source, route.target))
        return source.chosen(chosen), target.chosen(chosen)

    def _moved(self, tag: Tag) -> tuple[AnnotatedLeaves, AnnotatedLeaves]:
        """How the values of a move lie before it, and after."""
        name, _, place = tag.move.rpartition("/")
        divided = self.divided[tag.route.source][name]
        moves = divided.moves[int(place)].moves
        shapes = tuple(divided.program.shapes[move.input] for move in moves)
        before = [move.source for move in moves if move.source is not None]
        after = [move.destination for move in moves]
        return (
            AnnotatedLeaves(tuple(move.input for move in moves), shapes, tuple(before)),
            AnnotatedLeaves(tuple(move.output for move in moves), shapes, tuple(after)),
        )


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
    trained = placement.pipelines.stages[stage].trained
    held, reduced = (placement.leaves(stage, kind) for kind in (Parameter, ReducedGradient))
    if not (reduced.names and trained):
        return ()
    held, reduced = (each.chosen(each.names[p] for p in trained) for each in (held, reduced))
    sizes = [num_bytes(shape) for shape in held.shapes]
    ends = np.cumsum(sizes) - sizes
    whole = reduced.annotations == held.annotations
    group = np.zeros(len(sizes)) if whole else ends * REDUCTION_GROUPS // max(1, sum(sizes))
    places = np.array(trained)
    return tuple(tuple(places[group == each].tolist()) for each in np.unique(group))


def told(plan: Plan, place: int, program: Program) -> Program:
    """A pipeline's program, in which it is told how some values lie.

    Args:
        plan: the plan.
        place: which of its pipelines.
        program: the loss function, traced at the size of its microbatches.

    Returns:
        The program with the constraints of all stages.

    Raises:
        InputError: a specification does not divide its value evenly.
    """
    pipeline, cluster = plan.pipelines[place], plan.cluster
    lies: dict[int, NamedSharding | HSharding] = {}
    for s, stage in enumerate(pipeline.stages):
        if stage.shares.values:
            layouts, size = MemberLayouts(stage, cluster), pipeline.microbatch_size
            lies |= {
                value: layouts.value(program.avals[value].shape, share, size)
                for value, share in stage.shares.values.items()
            }
        if not stage.values:
            continue
        for value, axes in stage.values.items():
            spec, shape = PartitionSpec(*axes), program.avals[value].shape
            for mesh_shape in {member.mesh_shape for member in stage.members}:
                if not divides(spec, shape, mesh_shape):
                    raise InputError(
                        f"plan: pipelines[{place}].stages[{s}].values[{value}] is {list(axes)}, "
                        f"which does not divide its shape {shape} evenly on the mesh "
                        f"{list(mesh_shape)}"
                    )
            if not stage.members_share_context and stage.submesh.num_devices > 1:
                lies[value] = NamedSharding(AbstractMesh(stage.mesh_shape, MESH_AXES), spec)
        lies |= values_inside(stage, cluster, program)
    return constrained(program, lies) if lies else program
