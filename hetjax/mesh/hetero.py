"""`HeteroMesh`: submeshes of a cluster, bound to real JAX devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hetjax.errors import InputError
from hetjax.mesh.cluster import Cluster, SubMesh

if TYPE_CHECKING:
    import jax


class JaxDevice(Protocol):
    """What is read of a `jax.Device`, which has no type of its own for a type checker."""

    @property
    def platform(self) -> str:
        """The backend: ``"cpu"``, ``"gpu"`` or ``"tpu"``."""
        ...

    @property
    def device_kind(self) -> str:
        """The maker's name of the device, such as ``"NVIDIA A100-SXM4-40GB"``."""
        ...


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
            devices: the device behind each device of the cluster, in the cluster's order. More
                than it has may be given; the rest is not used.

        Returns:
            The bound union.

        Raises:
            InputError: there are fewer devices than the cluster has, or a submesh is not in it.
        """
        if len(devices) < cluster.num_devices:
            raise InputError(
                f"devices: cluster {cluster.name!r} has {cluster.num_devices} devices, and "
                f"{len(devices)} are given (host CPU devices are made before JAX starts, by "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={cluster.num_devices})"
            )
        bound = tuple(
            tuple(devices[number] for number in cluster.device_ids(submesh))
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
