"""`HeteroMesh`: submeshes of a cluster, bound to real JAX devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hetjax.errors import InputError
from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.mesh.device_order import devices_in_order
from hetjax.mesh.jax_devices import JaxDevice

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class HeteroMesh:
    """A union of submeshes on the devices of one process.

    Make one with `bind`. Submeshes may share devices, as the stages of two plans do.

    Args:
        cluster: the cluster of which the submeshes are slices.
        submeshes: the submeshes, in the order by which `mesh` counts them.
        devices: for each submesh its devices, row-major.
    """

    cluster: Cluster
    submeshes: tuple[SubMesh, ...]
    devices: tuple[tuple[JaxDevice, ...], ...]

    @classmethod
    def bind(
        cls, cluster: Cluster, submeshes: Sequence[SubMesh], devices: Sequence[JaxDevice]
    ) -> HeteroMesh:
        """Gives each submesh its devices.

        Args:
            cluster: the cluster.
            submeshes: slices of it.
            devices: as many devices as it has or more, in any order: each goes where its kind is
                wanted, see `devices_in_order`.

        Returns:
            The bound union.

        Raises:
            InputError: there are fewer devices than the cluster has, they are of other kinds, or a
                submesh is not in it.
        """
        ordered = devices_in_order(cluster, devices)
        bound = tuple(
            tuple(ordered[number] for number in cluster.device_ids(submesh))
            for submesh in submeshes
        )
        return cls(cluster, tuple(submeshes), bound)

    def mesh(self, i: int, axis_names: Sequence[str], shape: Sequence[int]) -> jax.sharding.Mesh:
        """The `jax.sharding.Mesh` of one submesh, in a logical shape.

        Args:
            i: which submesh.
            axis_names: a name for each axis.
            shape: the size of each axis; their product is the submesh's number of devices.

        Returns:
            The mesh, with the submesh's devices in row-major order.

        Raises:
            InputError: the shape holds another number of devices, or has not one name an axis.
        """
        # Not at the top: whoever only reads cluster files does not wait for JAX.
        import jax

        if len(axis_names) != len(shape):
            raise InputError(
                f"axis_names: {tuple(axis_names)} are {len(axis_names)} names for the "
                f"{len(shape)} axes of shape {tuple(shape)}"
            )
        submesh = self.submeshes[i]
        if math.prod(shape) != submesh.num_devices:
            raise InputError(
                f"shape: {tuple(shape)} holds {math.prod(shape)} devices, and submesh {submesh} "
                f"has {submesh.num_devices}"
            )
        devices = np.array(self.devices[i], dtype=object).reshape(tuple(shape))
        return jax.sharding.Mesh(devices, tuple(axis_names))
