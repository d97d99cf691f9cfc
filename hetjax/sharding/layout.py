"""Layouts: which part of an array each device of a stage holds, and what two parts share.

Two stages never share a JAX world, so neither sees the other's shardings. A layout describes a
sharding as plain numbers that both derive from the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import PartitionSpec

from hetjax.sharding.bounds import Bounds
from hetjax.sharding.rules import MESH_AXES


@dataclass(frozen=True)
class Shard:
    """What one device holds of an array.

    Args:
        process: the device's process, counted inside its stage.
        device: the device's place in the stage's mesh, row-major.
        bounds: the part.
    """

    process: int
    device: int
    bounds: Bounds


def shards(
    shape: Sequence[int], spec: PartitionSpec, mesh_shape: tuple[int, int], devices_per_process: int
) -> tuple[Shard, ...]:
    """The shard of every device of a stage, in the order of its mesh.

    Args:
        shape: the array's shape.
        spec: how it is divided.
        mesh_shape: sizes of the mesh's axes.
        devices_per_process: how many of the mesh's devices each process has.

    Returns:
        One shard a device.

    Example:
        >>> [s.bounds for s in shards((8, 4), PartitionSpec("data"), (2, 1), 2)]
        [((0, 4), (0, 4)), ((4, 8), (0, 4))]
    """
    sizes = dict(zip(MESH_AXES, mesh_shape, strict=True))
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    found = []
    for device in range(int(np.prod(mesh_shape))):
        place = dict(zip(MESH_AXES, np.unravel_index(device, mesh_shape), strict=True))
        bounds = []
        for size, entry in zip(shape, entries, strict=True):
            axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            pieces, index = 1, 0
            for axis in axes:
                index = index * sizes[axis] + int(place[axis])
                pieces *= sizes[axis]
            width = size // pieces
            bounds.append((index * width, (index + 1) * width))
        found.append(Shard(device // devices_per_process, device, tuple(bounds)))
    return tuple(found)
