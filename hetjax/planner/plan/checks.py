"""What makes no sense in a pipeline of a plan, whatever its file says."""

from __future__ import annotations

import itertools

from hetjax.errors import InputError, unknown_name
from hetjax.mesh.cluster import Cluster
from hetjax.pipeline.schedules.schedule import check
from hetjax.planner.plan.share_checks import check_shared_batch, check_shares
from hetjax.planner.plan.stage_plan import Member, PipelinePlan, Spec, StagePlan
from hetjax.sharding.annotation.rules import MESH_AXES, RULES


def check_pipeline(pipeline: PipelinePlan, num_layers: int, cluster: Cluster, where: str) -> None:
    """Check a pipeline in itself: layers, meshes, shardings, schedule.

    Args:
        pipeline: the pipeline.
        num_layers: how many layers the model has.
        cluster: the devices.
        where: what errors name as the place.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """
    _check_coverage(pipeline, num_layers, where)
    for s, stage in enumerate(pipeline.stages):
        _check_stage(stage, cluster, f"{where}.stages[{s}]")
    _check_batch(pipeline, where)


def _check_coverage(pipeline: PipelinePlan, num_layers: int, where: str) -> None:
    if not pipeline.stages:
        raise InputError(f"{where}.stages is empty; a pipeline has one or more")
    expected = 0
    for s, stage in enumerate(pipeline.stages):
        first, end = stage.layers
        field_name = f"{where}.stages[{s}].layers is [{first}, {end}]"
        if first < expected:
            raise InputError(
                f"{field_name}; it overlaps the stage before, which ends at {expected}"
            )
        if first > expected:
            raise InputError(f"{field_name}; layers {expected} to {first - 1} are in no stage")
        if end <= first:
            raise InputError(f"{field_name}; a stage has one layer or more")
        expected = end
    if expected != num_layers:
        raise InputError(
            f"{where}: the last stage ends at layer {expected}, the model has {num_layers} layers"
        )


def _check_batch(pipeline: PipelinePlan, where: str) -> None:
    for name in ("num_microbatches", "microbatch_size"):
        if getattr(pipeline, name) < 1:
            raise InputError(f"{where}.{name} is {getattr(pipeline, name)}; it must be 1 or more")
    schedule = pipeline.schedule
    if schedule.num_stages != len(pipeline.stages):
        raise InputError(
            f"{where}.schedule has {schedule.num_stages} stages, the pipeline has "
            f"{len(pipeline.stages)}"
        )
    if schedule.num_microbatches != pipeline.num_microbatches:
        raise InputError(
            f"{where}.schedule has {schedule.num_microbatches} microbatches, num_microbatches is "
            f"{pipeline.num_microbatches}"
        )
    check(schedule)
    for s, (stage, tasks) in enumerate(zip(pipeline.stages, schedule.order, strict=True)):
        again = next((task for task in tasks if task.kind == "R"), None)
        if again is not None and not stage.recompute:
            raise InputError(
                f"{where}.schedule has task {again} on stage {s}, which does not recompute; remove "
                f"it, or set stages[{s}].recompute to true"
            )
    for s, stage in enumerate(pipeline.stages):
        check_shared_batch(stage, pipeline.microbatch_size, where, f"stages[{s}]")
    _check_sharing(pipeline, where)


def _check_sharing(pipeline: PipelinePlan, where: str) -> None:
    """Check that stages that take turns have the same devices."""
    for group in pipeline.schedule.sharing:
        for before, s in itertools.pairwise(group):
            stages, here = pipeline.stages, f"{where}.stages[{s}]"
            if stages[s].submeshes != stages[before].submeshes or len(stages[s].members) > 1:
                raise InputError(
                    f"{here} is on {stages[s].devices_text}, stages[{before}], with which it takes "
                    f"turns in the schedule, on {stages[before].devices_text}; allowed: the same "
                    f"submesh, of one member"
                )
            if s == before + 1:
                raise InputError(
                    f"{here} follows stages[{before}] on the same devices, {stages[s].devices_text}"
                    f"; make them one stage"
                )
            if offloaded := (*stages[before].offload, *stages[s].offload):
                raise InputError(
                    f"{here} takes turns with stages[{before}], and one of them offloads "
                    f"{offloaded[0]}; allowed there: nothing"
                )


def _check_stage(stage: StagePlan, cluster: Cluster, where: str) -> None:
    if not stage.members:
        raise InputError(f"{where}.members is empty; a stage has one or more")
    for m, member in enumerate(stage.members):
        _check_member(member, cluster, f"{where}.members[{m}]")
    check_shares(stage, f"{where}.shares")
    _check_recompute_layers(stage, where)
    _check_offload(stage, cluster, where)
    if stage.sharding not in RULES:
        raise InputError(unknown_name(f"{where}.sharding", stage.sharding, RULES))
    for name, spec in stage.parameters.items():
        _check_spec(spec, f"{where}.parameters[{name!r}]")
    for value, spec in stage.values.items():
        _check_spec(spec, f"{where}.values[{value}]")


def _check_recompute_layers(stage: StagePlan, where: str) -> None:
    runs = stage.recompute_layers
    if not runs:
        return
    if stage.recompute:
        raise InputError(
            f"{where}.recompute_layers is given, and recompute is true, which makes all layers of "
            f"the stage again; allowed: one of the two"
        )
    if len(stage.members) > 1 and stage.shares.context is None:
        raise InputError(
            f"{where}.recompute_layers is given, and the stage has {len(stage.members)} members "
            f"that do not share the context; allowed there: recompute true"
        )
    first, end = stage.layers
    before = first
    for start, stop in runs:
        if not before <= start < stop <= end:
            raise InputError(
                f"{where}.recompute_layers is {[list(run) for run in runs]}; allowed: runs of "
                f"layers {first} to {end - 1} in order, none twice, each as its first layer and "
                f"the one after its last"
            )
        before = stop


def _check_offload(stage: StagePlan, cluster: Cluster, where: str) -> None:
    told = list(stage.offload)
    if not told:
        return
    if len(set(told)) < len(told):
        raise InputError(f"{where}.offload is {told}; allowed: each once")
    if stage.shares.modules:
        raise InputError(
            f"{where}.offload is {told}, and shares.modules is given; allowed there: nothing"
        )
    for name in dict.fromkeys(member.submesh.subcluster for member in stage.members):
        if cluster.subcluster(name).host_memory_bytes is None:
            raise InputError(
                f"{where}.offload is {told}, and subcluster {name!r} gives no host_memory (in "
                f"Python host_memory_bytes); allowed: nothing, or say in the cluster how much "
                f"memory of a node may be used"
            )


def _check_member(member: Member, cluster: Cluster, where: str) -> None:
    try:
        cluster.check_submesh(member.submesh)
    except InputError as error:
        raise InputError(f"{where}.submesh: {error}") from None
    data, tensor = member.mesh_shape
    if data < 1 or tensor < 1 or data * tensor != member.submesh.num_devices:
        raise InputError(
            f"{where}.mesh_shape is {list(member.mesh_shape)}; its product must be the number of "
            f"devices of the submesh, {member.submesh.num_devices}"
        )
    part = cluster.subcluster(member.submesh.subcluster)
    if not part.allows_tensor_axis(tensor):
        raise InputError(
            f"{where}.mesh_shape is {list(member.mesh_shape)}; the tensor axis must have at most "
            f"{part.max_tensor_parallelism} devices, the max_tensor_parallelism of subcluster "
            f"{part.name!r}"
        )


def _check_spec(spec: Spec, where: str) -> None:
    for axis in spec:
        if axis is not None and axis not in MESH_AXES:
            raise InputError(unknown_name(where, axis, MESH_AXES))
    used = [axis for axis in spec if axis is not None]
    if len(used) > len(set(used)):
        raise InputError(f"{where} is {list(spec)}; an axis may divide one dimension")
