"""What a cluster is made of: device kinds, links, subclusters, and the slices of them.

Nothing here runs a JAX computation, and reading a cluster file does not import JAX.
"""

from hetjax.mesh.cluster import Cluster, Subcluster, SubMesh
from hetjax.mesh.discovery import (
    cluster_from_connected_ray,
    cluster_from_local_devices,
    cluster_from_ray,
)
from hetjax.mesh.files import read_cluster_file
from hetjax.mesh.hetero import HeteroMesh
from hetjax.mesh.host_cpu import measure_host_cpu
from hetjax.mesh.jax_devices import devices_in_order
from hetjax.mesh.kinds import KINDS, DeviceKind, kind
from hetjax.mesh.links import Link

__all__ = [
    "KINDS",
    "Cluster",
    "DeviceKind",
    "HeteroMesh",
    "Link",
    "SubMesh",
    "Subcluster",
    "cluster_from_connected_ray",
    "cluster_from_local_devices",
    "cluster_from_ray",
    "devices_in_order",
    "kind",
    "measure_host_cpu",
    "read_cluster_file",
]
