"""Reshards of the user's loss, obeyed: what each of them is on the stage that computes it."""

from __future__ import annotations

import bisect

from jax.sharding import AbstractMesh, NamedSharding

from hetjax.errors import InputError
from hetjax.pipeline.program.reshards import FoundReshard, with_obeyed_reshards
from hetjax.pipeline.program.traced_program import Program
from hetjax.planner.plan.member_annotations import Wider, on_members, restricted, union_of_members
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.rules import MESH_AXES


def obey_reshards(plan: Plan, pipeline: PipelinePlan, program: Program) -> Program:
    """The program of a pipeline, in which reshards say what its stages do.

    In a stage of several members a reshard moves a value among them; in one of one member it says
    how the value lies on its mesh. On one device it is the identity.

    Args:
        plan: the plan.
        pipeline: one of its pipelines.
        program: the loss function, traced at the size of the pipeline's microbatches.

    Returns:
        The program.

    Raises:
        InputError: a reshard names other devices than those of its stage, or says what their
            members cannot do; the message has its line.
    """

    def obey(found: FoundReshard) -> HSharding | NamedSharding | None:
        stage = _stage_of(plan, pipeline, found)
        union = union_of_members(stage.members, plan.cluster)
        devices = stage.device_ids(plan.cluster)
        wider = _wider(plan, pipeline, found)
        what = f"hetjax.reshard at {found.line}: the value"
        meant = next((a for a in found.annotations if restricted(a, devices, wider)), None)
        if meant is None:
            raise InputError(
                f"{what} is annotated on devices {sorted(found.annotations[0].devices)}, and its "
                f"stage is on {sorted(devices)}; allowed: an annotation on these devices (a plan "
                f"of the annotations is what hetjax.plan makes, given annotations=)"
            )
        lies = on_members(meant, found.shape.shape, union, what, wider)
        if len(union) > 1:
            return lies
        if lies.is_partial:
            raise InputError(
                f"{what} is to be a partial sum inside {stage.submesh}, its stage's one member; "
                f"allowed: whole, or divided"
            )
        mesh = AbstractMesh(stage.mesh_shape, MESH_AXES)
        return NamedSharding(mesh, lies.subgroups[0].spec) if len(devices) > 1 else None

    return with_obeyed_reshards(program, obey)


def check_reshards(plan: Plan, program: Program) -> None:
    """Check that the stages of a plan can obey the reshards of the loss.

    Args:
        plan: the plan.
        program: the loss function; pipelines with microbatches of another size are not looked at.

    Raises:
        InputError: as `obey_reshards`.
    """
    size = program.num_examples
    for pipeline in plan.pipelines:
        if pipeline.microbatch_size == size:
            obey_reshards(plan, pipeline, program)


def _wider(plan: Plan, pipeline: PipelinePlan, found: FoundReshard) -> Wider:
    """Which devices of other pipelines a reshard may name beside those of its stage."""
    if len(plan.pipelines) == 1:
        return "no"
    has_examples = found.shape.shape[:1] == (pipeline.microbatch_size,)
    return "pipelines" if has_examples else "stages"


def _stage_of(plan: Plan, pipeline: PipelinePlan, found: FoundReshard) -> StagePlan:
    """The stage that computes a reshard."""
    return pipeline.stages[bisect.bisect_right(plan.boundaries(pipeline), found.start) - 1]
