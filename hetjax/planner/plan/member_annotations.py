"""Annotations of users on the members of a stage: the same layout, over a plan's own meshes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from jax.sharding import PartitionSpec

from hetjax.errors import InputError
from hetjax.mesh.cluster import Cluster
from hetjax.planner.plan.stage_plan import Member
from hetjax.sharding.annotation.annotation import DUPLICATE, HSharding
from hetjax.sharding.annotation.rules import MESH_AXES
from hetjax.sharding.annotation.subgroup import Subgroup
from hetjax.sharding.annotation.symbol_numbers import numbers_of
from hetjax.sharding.deduction.annotated_program import Union
from hetjax.sharding.deduction.refinement import layout_of, written_over


def union_of_members(members: Sequence[Member], cluster: Cluster) -> Union:
    """The submeshes of a stage's members, as annotations name them.

    Args:
        members: the members.
        cluster: the devices.

    Returns:
        A submesh for each, with the axes of a plan.
    """
    return tuple(
        Subgroup(
            tuple(cluster.device_ids(member.submesh)),
            tuple(zip(MESH_AXES, member.mesh_shape, strict=True)),
            PartitionSpec(),
        )
        for member in members
    )


Wider = Literal["no", "stages", "pipelines"]
"""Which further devices an annotation of something on a stage may name: none; those of other
stages, which have the same; or those of other pipelines, which have that or their own examples."""


def on_members(
    annotation: HSharding, shape: Sequence[int], union: Union, what: str, wider: Wider = "no"
) -> HSharding:
    """An annotation over the members of a stage: every device holds what the annotation says.

    Args:
        annotation: the annotation; it may name other submeshes of the same devices, and other axes.
        shape: the shape of what lies so.
        union: the members' submeshes.
        what: what errors name as the place.
        wider: which further devices it may name.

    Returns:
        The annotation over these submeshes.

    Raises:
        InputError: it names other devices, or what it says cannot be said over these submeshes.

    Example:
        >>> four = Subgroup((0, 1, 2, 3), (("x", 4),), PartitionSpec("x"))
        >>> pairs = [Subgroup((i, i + 1), (("tensor", 2),), PartitionSpec()) for i in (0, 2)]
        >>> print(on_members(HSharding((four,)), (8,), tuple(pairs), "parameter 'w'"))
        HSharding(split on dimension 0 among 2 submeshes:
          devices [0-1] as tensor=2: P('tensor'), 4 of it
          devices [2-3] as tensor=2: P('tensor'), 4 of it)
    """
    devices = [device for submesh in union for device in submesh.devices]
    try:
        numbers = numbers_of([annotation], [shape], {})
        mine = restricted(annotation.bind(numbers), devices, wider)
        found = mine and written_over(layout_of(mine, tuple(shape)), union, tuple(shape))
    except InputError as error:
        raise InputError(f"{what}: {error}") from None
    if mine is None:
        raise InputError(
            f"{what} is annotated on devices {sorted(annotation.devices)}, and its stage is on "
            f"{sorted(devices)}; allowed: an annotation on these devices"
        )
    if found is None:
        raise InputError(
            f"{what} lies as {annotation}, which cannot be said over the members of its stage, "
            f"{', '.join(map(str, union))}, in this order; allowed: what each of them can have a "
            f"share of along one dimension, divided inside by its axes"
        )
    return found


def restricted(
    annotation: HSharding, devices: Collection[int], wider: Wider = "no"
) -> HSharding | None:
    """What an annotation says of the devices of a stage.

    Args:
        annotation: the annotation.
        devices: the devices.
        wider: which further devices it may name.

    Returns:
        The annotation of these devices alone; None where it is of others.

    Example:
        >>> first, last = (Subgroup((device,), (), PartitionSpec()) for device in (0, 3))
        >>> print(restricted(HSharding((first, last)), [3], "stages"))
        HSharding(devices [3]: P())
    """
    kept = tuple(g for g in annotation.subgroups if set(g.devices) <= set(devices))
    if {device for group in kept for device in group.devices} != set(devices):
        return None
    if len(kept) == len(annotation.subgroups):
        return annotation
    if wider != "no" and annotation.hdim == DUPLICATE:
        return replace(annotation, subgroups=kept)
    is_own = wider == "pipelines" and annotation.hdim == 0 and len(kept) == 1
    return HSharding(kept) if is_own else None
