"""What a cluster is made of: device kinds, links, subclusters, and the slices of them.

Nothing here runs a JAX computation, and reading a cluster file does not import JAX.
"""

from hetjax.mesh.cluster import Cluster as Cluster
from hetjax.mesh.cluster import Subcluster as Subcluster
from hetjax.mesh.cluster import SubMesh as SubMesh
from hetjax.mesh.discovery import cluster_from_connected_ray as cluster_from_connected_ray
from hetjax.mesh.discovery import cluster_from_local_devices as cluster_from_local_devices
from hetjax.mesh.discovery import cluster_from_ray as cluster_from_ray
from hetjax.mesh.discovery import local_devices_in_order as local_devices_in_order
from hetjax.mesh.files import read_cluster_file as read_cluster_file
from hetjax.mesh.hetero import HeteroMesh as HeteroMesh
from hetjax.mesh.host_cpu import measure_host_cpu as measure_host_cpu
from hetjax.mesh.kinds import KINDS as KINDS
from hetjax.mesh.kinds import DeviceKind as DeviceKind
from hetjax.mesh.kinds import kind as kind
from hetjax.mesh.links import Link as Link
