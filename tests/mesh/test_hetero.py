import jax
import pytest

from hetjax.errors import InputError
from hetjax.mesh import Cluster, HeteroMesh, Link, Subcluster, SubMesh, kind

LINK = Link(1e9, 1e-6)
CLUSTER = Cluster(
    "test",
    (
        Subcluster("fast", kind("A100-40"), 1, 4, LINK, LINK),
        Subcluster("slow", kind("V100"), 2, 1, LINK, LINK),
    ),
    (("fast", "slow", LINK),),
)
SUBMESHES = (SubMesh("fast", 0, (1, 4)), SubMesh("slow", 1, (1, 1)), SubMesh("slow", 0, (2, 1)))


def test_submeshes_get_their_own_devices():
    devices = jax.devices()
    union = HeteroMesh.bind(CLUSTER, SUBMESHES, devices)
    assert union.devices == (tuple(devices[:4]), (devices[5],), tuple(devices[4:6]))
    mesh = union.mesh(0, ("data", "model"), (2, 2))
    assert dict(mesh.shape) == {"data": 2, "model": 2}
    assert list(mesh.devices.flat) == devices[:4]


def test_arrays_live_on_their_submesh():
    union = HeteroMesh.bind(CLUSTER, SUBMESHES, jax.devices())
    sharding = jax.NamedSharding(union.mesh(2, ("data",), (2,)), jax.P("data"))
    assert jax.device_put(jax.numpy.arange(4.0), sharding).devices() == set(jax.devices()[4:6])


@pytest.mark.parametrize(
    ("axis_names", "shape", "part"),
    [
        (("a",), (2, 2), "1 names for the 2 axes"),
        (("a", "b"), (2, 1), r"\(2, 1\) holds 2 devices, and submesh fast\[0:4\] 1x4 has 4"),
    ],
)
def test_logical_shape_must_fit(axis_names, shape, part):
    union = HeteroMesh.bind(CLUSTER, SUBMESHES, jax.devices())
    with pytest.raises(InputError, match=part):
        union.mesh(0, axis_names, shape)


def test_too_few_devices_are_refused():
    with pytest.raises(InputError, match="has 6 devices, and 5 are given"):
        HeteroMesh.bind(CLUSTER, SUBMESHES, jax.devices()[:5])


def test_submesh_outside_the_cluster_is_refused():
    with pytest.raises(InputError, match="device 2 is not there"):
        HeteroMesh.bind(CLUSTER, (SubMesh("slow", 2, (1, 1)),), jax.devices())
