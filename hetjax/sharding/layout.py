"""Layouts: which part of an array each device of a stage holds, and what two parts share.

Two stages never share a JAX world, so neither sees the other's shardings. A layout describes a
sharding as plain numbers that both derive from the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from hetjax.sharding.annotation import Subgroup
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
    axes = tuple(zip(MESH_AXES, mesh_shape, strict=True))
    whole = tuple((0, size) for size in shape)
    places = tuple(range(math.prod(mesh_shape)))
    return tuple(
        Shard(held.device // devices_per_process, held.device, held.bounds)
        for held in Subgroup(places, axes, spec).shards(whole)
    )
