"""What a cluster is made of: device kinds, links, subclusters, and the slices of them.

Nothing here runs a JAX computation, and reading a cluster file does not import JAX.
"""

from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.mesh.device_order import devices_in_order
from hetjax.mesh.hetero import HeteroMesh
from hetjax.mesh.host_cpu import measure_host_cpu
from hetjax.mesh.kinds import DeviceKind
from hetjax.mesh.links import Link
from hetjax.mesh.published_kinds import KINDS, kind
from hetjax.mesh.subcluster import Subcluster

__all__ = [
    "KINDS",
    "Cluster",
    "DeviceKind",
    "HeteroMesh",
    "Link",
    "SubMesh",
    "Subcluster",
    "devices_in_order",
    "kind",
    "measure_host_cpu",
]
