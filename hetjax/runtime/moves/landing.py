"""Arrays as they land on a member: how their parts make them, and how slices are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.runtime.compilation.compiled_stage import Compiled
from hetjax.runtime.moves.crossing_arrays import CrossingArray
from hetjax.runtime.moves.peers import Peer
from hetjax.sharding.annotation.bounds import extent
from hetjax.sharding.annotation.subgroup import axes_of
from hetjax.sharding.resolution.crossing import Gathering


class Landing:
    """An array on the mesh of a member, as it is when all pieces have landed.

    Where slices are to be gathered, it is the array of the slices: every device has its own, all of
    them padded to the same size.

    Args:
        array: what crosses.
        mesh: the member's mesh.
        peer: a process of the member.

    Attributes:
        peers: the processes of the member.
        shards: what the devices of the process have of it.
        gathering: how slices are gathered; None where there are none.
        wanted: how the member wants the array.
        shape: the shape of the array that lands.
        sharding: how it is divided.
    """

    def __init__(self, array: CrossingArray, mesh: Mesh, peer: Peer):
        member = array.taking_member(peer)
        group, whole = array.target.subgroups[member], array.shape.shape or (1,)
        region = array.target.regions(whole)[member]
        first = sum(len(each.devices) for each in array.target.subgroups[:member])
        landed = array.crossing.landed[first : first + len(group.devices)]
        self.peers = frozenset(array.takers[device] for device in group.devices)
        self.shards = [shard for shard in landed if array.takers[shard.device] == peer]
        self.gathering = array.crossing.gatherings[member]
        self.wanted = jax.ShapeDtypeStruct(
            array.extent(region), array.shape.dtype, sharding=NamedSharding(mesh, group.spec)
        )
        self.along = _undivided(group.spec, mesh)
        self.shape, spec = self.wanted.shape, group.spec
        if self.gathering is not None:
            axis, widths = self.gathering.axis, self.gathering.widths
            divisions = group.divisions(len(whole))
            shape = list(extent(region))
            shape[axis] = divisions[axis] * len(widths) * max(widths)
            entries = [axes_of(entry) for entry in spec.partitions]
            entries += [()] * (len(shape) - len(entries))
            entries[axis] += self.along
            self.shape, spec = tuple(shape), PartitionSpec(*entries)
        self.sharding = NamedSharding(mesh, spec)
        self._devices = dict(zip(group.devices, mesh.devices.flat, strict=True))
        # A program takes what lies on its one device, however that says how it is divided.
        self._is_alone = len(self._devices) == 1

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of what each device has of it."""
        return self.sharding.shard_shape(self.shape)

    def device(self, number: int) -> Any:
        """The device of a number."""
        return self._devices[number]

    def array(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The array, of the parts that devices hold."""
        if self._is_alone:
            (part,) = parts
            return part
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)


def gatherer(landings: Sequence[Landing], mesh: Mesh) -> Compiled | None:
    """Compile what gathers the slices of arrays inside a member; None where there are none.

    Args:
        landings: the arrays, as they land.
        mesh: the member's mesh.

    Returns:
        The program, on those of the arrays that have slices.
    """
    sliced = [(landing, landing.gathering) for landing in landings if landing.gathering is not None]
    if not sliced:
        return None

    def gather(landed: Sequence[jax.Array]) -> list[jax.Array]:
        return [
            jax.shard_map(
                partial(_gathered, gathering, landing.along),
                mesh=mesh,
                in_specs=landing.sharding.spec,
                out_specs=landing.wanted.sharding.spec,
                check_vma=False,
            )(slices).reshape(landing.wanted.shape)
            for (landing, gathering), slices in zip(sliced, landed, strict=True)
        ]

    shapes = [
        jax.ShapeDtypeStruct(landing.shape, landing.wanted.dtype, sharding=landing.sharding)
        for landing, _ in sliced
    ]
    outputs = [landing.wanted.sharding for landing, _ in sliced]
    return jax.jit(gather, out_shardings=outputs).lower(shapes).compile()


def _gathered(gathering: Gathering, axes: tuple[str, ...], mine: jax.Array) -> jax.Array:
    """A device's whole part, of its slice and those of the others along some mesh axes."""
    axis, widths = gathering.axis, gathering.widths
    padded = jax.lax.all_gather(mine, axes, axis=axis, tiled=True)
    if len(set(widths)) == 1:
        return padded
    slices = [
        jax.lax.slice_in_dim(padded, place * max(widths), place * max(widths) + width, axis=axis)
        for place, width in enumerate(widths)
    ]
    return jax.lax.concatenate(slices, axis)


def _undivided(spec: PartitionSpec, mesh: Mesh) -> tuple[str, ...]:
    """The axes of a mesh along which an array is held alike.

    A slice of a part is for one of the devices that hold the part alike.
    """
    used = {axis for entry in spec.partitions for axis in axes_of(entry)}
    return tuple(axis for axis in mesh.axis_names if axis not in used)
