"""The members of a stage, and what its plan says, from the annotations of what it holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from jax.sharding import PartitionSpec

from hetjax.errors import InputError
from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.planner.plan.member_annotations import Wider, on_members, restricted, union_of_members
from hetjax.planner.plan.module_shares import Share
from hetjax.planner.plan.stage_plan import Member, Shares, Spec, StagePlan
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.rules import DATA, MESH_AXES
from hetjax.sharding.annotation.subgroup import Subgroup, axes_of, entries_of
from hetjax.sharding.deduction.annotated_program import Union
from hetjax.sharding.deduction.refinement import layout_of, spec_over


@dataclass(frozen=True)
class AnnotatedArray:
    """Something of a stage that is annotated.

    Args:
        what: what errors name it.
        shape: its shape, whole.
        annotation: how it lies.
        examples: whether its first dimension is that of examples, which the mesh of each member
            must divide so, or does if it can.
    """

    what: str
    shape: tuple[int, ...]
    annotation: HSharding
    examples: Literal["no", "preferred", "must"] = "no"


@dataclass(frozen=True)
class StageArrays:
    """The arrays of a stage.

    Args:
        layers: its layers.
        devices: its devices.
        parameters: those of its parameters that are annotated, by name.
        others: the names of those that are not.
        examples: the leaves of the batch; where none is annotated, the first value that is.
        values: the other values that are.
        wider: which further devices annotations may name.
    """

    layers: tuple[int, int]
    devices: frozenset[int]
    parameters: Mapping[str, AnnotatedArray]
    others: Sequence[str]
    examples: Sequence[AnnotatedArray]
    values: Sequence[AnnotatedArray]
    wider: Wider


def annotated_stage_plan(arrays: StageArrays, cluster: Cluster, num_microbatches: int) -> StagePlan:
    """The plan of a stage in which annotations hold.

    Args:
        arrays: what is annotated.
        cluster: the devices.
        num_microbatches: into how many microbatches the batch is divided.

    Returns:
        The stage's plan.

    Raises:
        InputError: an annotation says what a plan of the stage cannot.
    """
    refusals: list[InputError] = []
    for members in _members(arrays, cluster):
        try:
            return _plan_on(members, arrays, cluster, num_microbatches)
        except InputError as error:
            refusals.append(error)
    raise refusals[0]


def _plan_on(
    members: tuple[Member, ...], arrays: StageArrays, cluster: Cluster, num_microbatches: int
) -> StagePlan:
    """The plan of a stage on members with given meshes."""
    union = union_of_members(members, cluster)
    specs: dict[str, Spec] = {}
    shares: dict[str, Share] = {}
    for name, array in arrays.parameters.items():
        # A share of rows among pipelines is none: each needs the whole parameter.
        found = on_members(array.annotation, array.shape, union, array.what, "stages")
        specs[name] = _spec(found, array)
        if isinstance(found.hdim, int):
            shares[name] = _share(found, array.shape)
    if any(member.mesh_shape[1] > 1 for member in members):
        specs |= dict.fromkeys(arrays.others, ())
    else:
        specs = {name: spec for name, spec in specs.items() if any(spec)}
    batch = _batch(arrays, union, num_microbatches)
    return StagePlan(
        arrays.layers, members, parameters=specs, shares=Shares(batch=batch, parameters=shares)
    )


def _members(arrays: StageArrays, cluster: Cluster) -> Iterator[tuple[Member, ...]]:
    """The finest submeshes that annotations name, in the order of the first of them.

    Yields:
        They with all meshes on which each of them may be, the likely ones first.
    """
    everything = [*arrays.parameters.values(), *arrays.examples, *arrays.values]
    here = [
        replace(array, annotation=annotation)
        for array in everything
        if (annotation := restricted(array.annotation, arrays.devices, arrays.wider)) is not None
    ]
    places: dict[int, list[int]] = {}
    for array in here:
        for place, group in enumerate(array.annotation.subgroups):
            for device in group.devices:
                places.setdefault(device, []).append(place)
    blocks: dict[tuple[int, ...], list[int]] = {}
    for device, key in places.items():
        blocks.setdefault(tuple(key), []).append(device)
    yield from itertools.product(
        *(_on_meshes(sorted(block), here, cluster) for block in blocks.values())
    )


def _on_meshes(
    devices: Sequence[int], arrays: Sequence[AnnotatedArray], cluster: Cluster
) -> list[Member]:
    """Some devices as a member, on the meshes on which all of the arrays lie as they are told."""
    submesh = _submesh(devices, cluster)
    sizes = [size for size in range(1, len(devices) + 1) if len(devices) % size == 0]
    named = _named_sizes(arrays, devices)
    sizes.sort(key=lambda size: (size not in named, size))
    found: dict[Member, None] = {}
    for is_strict, data in itertools.product((True, False), sizes):
        shape = data, len(devices) // data
        mesh = Subgroup(tuple(devices), tuple(zip(MESH_AXES, shape, strict=True)), PartitionSpec())
        if all(_lies(array, mesh, is_strict=is_strict) for array in arrays):
            found[Member(submesh, shape)] = None
    if found:
        return list(found)
    told = "; ".join(f"{array.what} as {array.annotation}" for array in arrays)
    raise InputError(
        f"annotations: on devices {list(devices)} there is no mesh of a data and a tensor axis, of "
        f"which the data axis divides the examples and nothing else does, on which all of this "
        f"lies as annotated: {told}"
    )


def _named_sizes(arrays: Sequence[AnnotatedArray], devices: Sequence[int]) -> set[int]:
    """The sizes of axes that are called as a plan's data axis."""
    return {
        size
        for array in arrays
        for group in array.annotation.subgroups
        if set(group.devices) == set(devices)
        for name, size in group.axes
        if name == DATA
    }


def _lies(array: AnnotatedArray, mesh: Subgroup, *, is_strict: bool) -> bool:
    """Whether an array lies on a mesh as it is annotated, and examples as the mesh divides them."""
    spec = spec_over(mesh, layout_of(array.annotation, array.shape))
    is_free = array.examples == "no" or (array.examples == "preferred" and not is_strict)
    if spec is None or is_free:
        return spec is not None
    dimensions = entries_of(spec, len(array.shape))
    wanted = (DATA,) if dict(mesh.axes)[DATA] > 1 else ()
    return axes_of(dimensions[0]) == wanted and not any(map(axes_of, dimensions[1:]))


def _submesh(devices: Sequence[int], cluster: Cluster) -> SubMesh:
    """Some devices as a slice of the cluster."""
    offset = 0
    for subcluster in cluster.subclusters:
        start, per_node = devices[0] - offset, subcluster.devices_per_node
        if 0 <= start < subcluster.num_devices:
            inside = start % per_node + len(devices) <= per_node
            shape = (1, len(devices)) if inside else (len(devices) // per_node, per_node)
            submesh = SubMesh(subcluster.name, start, (max(1, shape[0]), shape[1]))
            is_slice = list(devices) == list(range(devices[0], devices[0] + len(devices)))
            if is_slice and prod(submesh.shape) == len(devices):
                try:
                    cluster.check_submesh(submesh)
                except InputError:
                    break
                return submesh
        offset += subcluster.num_devices
    parts = ", ".join(f"{s.name}: {s.nodes} x {s.devices_per_node}" for s in cluster.subclusters)
    raise InputError(
        f"annotations: devices {list(devices)} are one submesh, but no slice of cluster "
        f"{cluster.name!r}, which has {parts}; allowed: devices of one node in a row, or whole "
        f"nodes, of one subcluster"
    )


def _share(annotation: HSharding, shape: Sequence[int]) -> Share:
    assert isinstance(annotation.hdim, int)
    regions = (region[annotation.hdim] for region in annotation.regions(shape))
    return Share(annotation.hdim, tuple(stop - start for start, stop in regions))


def _spec(annotation: HSharding, array: AnnotatedArray) -> Spec:
    """The one specification that all members of a stage have."""
    entries = [entries_of(group.spec, len(array.shape)) for group in annotation.subgroups]
    found: list[str | None] = [None] * len(array.shape)
    for dimension in range(len(array.shape)):
        axes = {axis for each in entries for axis in axes_of(each[dimension])}
        if len(axes) > 1:
            raise InputError(
                f"{array.what} lies as {annotation}: dimension {dimension} is divided by "
                f"{' and '.join(sorted(axes))}; allowed: one axis a dimension"
            )
        found[dimension] = next(iter(axes), None)
    regions = annotation.regions(array.shape)
    for group, each, region in zip(annotation.subgroups, entries, regions, strict=True):
        sizes = dict(group.axes)
        is_empty = any(start == stop for start, stop in region)
        if not is_empty and any(
            axis is not None and sizes[axis] > 1 and axis not in axes_of(each[dimension])
            for dimension, axis in enumerate(found)
        ):
            raise InputError(
                f"{array.what} lies as {annotation}: members divide it unlike; allowed: one way "
                f"for all members of a stage whose axes have several devices"
            )
    while found and found[-1] is None:
        found.pop()
    return tuple(found)


def _batch(arrays: StageArrays, union: Union, num_microbatches: int) -> tuple[int, ...]:
    """The examples of a microbatch that each member computes; none where all have all."""
    told: dict[tuple[int, ...], str] = {}
    for array in arrays.examples:
        found = on_members(array.annotation, array.shape, union, array.what, arrays.wider)
        sizes: tuple[int, ...] = ()
        if isinstance(found.hdim, int):
            if found.hdim:
                raise InputError(
                    f"{array.what} is shared along dimension {found.hdim}; allowed: along its "
                    f"examples, dimension 0, or the same on each submesh"
                )
            sizes = _share(found, array.shape).sizes
        told.setdefault(sizes, array.what)
    if len(told) > 1:
        words = " and ".join(f"{what} by {list(sizes)}" for sizes, what in told.items())
        raise InputError(f"{words} are of one stage; allowed: the same examples of each")
    sizes, what = next(iter(told.items()), ((), ""))
    if any(size % num_microbatches for size in sizes):
        raise InputError(
            f"{what} is shared in {list(sizes)} examples, which num_microbatches, "
            f"{num_microbatches}, does not divide"
        )
    return tuple(size // num_microbatches for size in sizes)
