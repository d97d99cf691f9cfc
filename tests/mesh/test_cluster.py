import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from visible_text import VISIBLE

from hetjax.errors import InputError
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh, kind

LOCAL = Link(25e9, 1e-6)
NETWORK = Link(1.25e9, 50e-6)
SLOW = Link(125e6, 5e-4)
FAST = Subcluster("fast", kind("A100-40"), 2, 4, LOCAL, NETWORK)
OLD = Subcluster("old", kind("V100"), 1, 2, LOCAL, LOCAL, ray_resource="accelerator_type:V100")
CLUSTER = Cluster("test", (FAST, OLD), (("old", "fast", SLOW),))

positive = st.floats(min_value=1e-12, max_value=1e18)
texts = st.text(VISIBLE, min_size=1, max_size=8)
links = st.builds(Link, bandwidth=positive, latency=st.floats(min_value=0, max_value=10))
kinds = st.builds(
    DeviceKind,
    name=texts,
    peak_flops=st.dictionaries(
        st.sampled_from(["bfloat16", "float16", "float64"]), positive
    ).flatmap(lambda rates: positive.map(lambda rate: rates | {"float32": rate})),
    memory_bytes=st.integers(1, 2**50),
    memory_bandwidth=positive,
    source=st.text(VISIBLE, max_size=8),
)


@st.composite
def clusters(draw) -> Cluster:
    pool = draw(st.lists(kinds, min_size=1, max_size=3, unique_by=lambda kind: kind.name))
    names = draw(st.lists(texts, min_size=1, max_size=4, unique=True))
    subclusters = tuple(
        Subcluster(
            name=name,
            kind=draw(st.sampled_from(pool)),
            nodes=draw(st.integers(1, 4)),
            devices_per_node=draw(st.integers(1, 4)),
            intra_node=draw(links),
            inter_node=draw(links),
            ray_resource=draw(st.none() | texts),
        )
        for name in names
    )
    pairs = [(a, b) for i, a in enumerate(names) for b in names[:i]]
    return Cluster(draw(texts), subclusters, tuple((a, b, draw(links)) for a, b in pairs))


@st.composite
def clusters_with_submesh(draw) -> tuple[Cluster, SubMesh]:
    cluster = draw(clusters())
    sub = draw(st.sampled_from(cluster.subclusters))
    node = draw(st.integers(0, sub.nodes - 1))
    if draw(st.booleans()):
        nodes = draw(st.integers(1, sub.nodes - node))
        start, shape = node * sub.devices_per_node, (nodes, sub.devices_per_node)
    else:
        device = draw(st.integers(0, sub.devices_per_node - 1))
        count = draw(st.integers(1, sub.devices_per_node - device))
        start, shape = node * sub.devices_per_node + device, (1, count)
    return cluster, SubMesh(sub.name, start, shape)


@given(clusters())
def test_json_round_trip_is_exact(cluster):
    text = json.dumps(cluster.to_json_dict(), allow_nan=False)
    assert Cluster.from_json_dict(json.loads(text)) == cluster


@given(clusters_with_submesh())
def test_submesh_devices_are_numbered_alike_in_both_counts(drawn):
    cluster, submesh = drawn
    sub = cluster.subcluster(submesh.subcluster)
    places, ids = cluster.devices(submesh), cluster.device_ids(submesh)
    before = cluster.subclusters[: cluster.subclusters.index(sub)]
    first = sum(s.num_devices for s in before)
    assert [first + n * sub.devices_per_node + d for n, d in places] == list(ids)
    assert len(ids) == submesh.num_devices
    assert ids[0] == cluster.global_device_offset(submesh)
    assert ids[-1] < cluster.num_devices
    assert list(cluster.nodes(submesh)) == sorted({node for node, _ in places})
    assert len(cluster.nodes(submesh)) == submesh.shape[0]


@given(clusters())
def test_whole_subclusters_cover_the_cluster_in_order(cluster):
    whole = [SubMesh(s.name, 0, (s.nodes, s.devices_per_node)) for s in cluster.subclusters]
    ids = [number for submesh in whole for number in cluster.device_ids(submesh)]
    assert ids == list(range(cluster.num_devices))


def test_cluster_can_be_hashed():
    assert hash(CLUSTER) == hash(dataclasses.replace(CLUSTER))


def test_link_seconds_is_latency_plus_transfer():
    assert SLOW.seconds(125e6) == 1.0005
    assert SLOW.seconds(0) == 5e-4


@pytest.mark.parametrize(
    ("a", "b", "link"),
    [
        (SubMesh("fast", 0, (1, 2)), SubMesh("fast", 2, (1, 2)), LOCAL),
        (SubMesh("fast", 4, (1, 4)), SubMesh("fast", 4, (1, 4)), LOCAL),
        (SubMesh("fast", 0, (1, 2)), SubMesh("fast", 4, (1, 2)), NETWORK),
        (SubMesh("fast", 0, (2, 4)), SubMesh("fast", 0, (2, 4)), NETWORK),
        (SubMesh("fast", 0, (2, 4)), SubMesh("old", 1, (1, 1)), SLOW),
        (SubMesh("old", 1, (1, 1)), SubMesh("fast", 0, (2, 4)), SLOW),
    ],
)
def test_link_between_is_the_slowest_on_the_way(a, b, link):
    assert CLUSTER.link_between(a, b) == link


def test_link_of_a_subcluster_with_itself_is_between_its_nodes():
    assert CLUSTER.link("fast", "fast") == NETWORK
    assert CLUSTER.link("fast", "old") == CLUSTER.link("old", "fast") == SLOW


@pytest.mark.parametrize(
    ("submesh", "part"),
    [
        (SubMesh("fsat", 0, (1, 1)), "unknown subcluster 'fsat'; did you mean 'fast'"),
        (SubMesh("old", 1, (1, 2)), r"old\[1:3\] 1x2: device 2 is not there.*devices 0 to 1"),
        (SubMesh("fast", 8, (1, 1)), "device 8 is not there"),
        (SubMesh("fast", 3, (1, 2)), "neither within one node nor of whole nodes"),
        (SubMesh("fast", 0, (2, 2)), "neither within one node nor of whole nodes"),
        (SubMesh("fast", 2, (1, 4)), "neither within one node nor of whole nodes"),
    ],
)
def test_submesh_that_is_not_there_is_refused(submesh, part):
    for method in (CLUSTER.check_submesh, CLUSTER.devices, CLUSTER.device_ids):
        with pytest.raises(InputError, match=part):
            method(submesh)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Link(0, 0), "bandwidth: 0 is not allowed"),
        (lambda: Link(1, -1), "latency: -1 is not allowed"),
        (lambda: SubMesh("fast", -1, (1, 1)), "start: -1 is not allowed"),
        (lambda: SubMesh("fast", 0, (0, 1)), r"shape: \(0, 1\) is not allowed"),
        (lambda: dataclasses.replace(FAST, name=""), "must not be empty"),
        (lambda: dataclasses.replace(FAST, nodes=0), "nodes: 0 is not allowed"),
        (lambda: Cluster("c", ()), "subclusters: none is given"),
        (lambda: Cluster("c", (FAST, FAST)), r"subclusters\[1\].name: 'fast' is given twice"),
        (lambda: Cluster("c", (FAST, OLD)), "'fast' and 'old' have no link"),
        (lambda: Cluster("c", (FAST,), (("fast", "old", SLOW),)), r"links\[0\]: unknown.*'old'"),
        (lambda: Cluster("c", (FAST,), (("fast", "fast", SLOW),)), "linked with itself"),
        (
            lambda: Cluster("c", (FAST, OLD), (("fast", "old", SLOW), ("old", "fast", SLOW))),
            r"links\[1\]: 'old' and 'fast' are linked twice",
        ),
        (
            lambda: Cluster(
                "c",
                (
                    FAST,
                    dataclasses.replace(OLD, kind=dataclasses.replace(OLD.kind, name="A100-40")),
                ),
                (("fast", "old", SLOW),),
            ),
            "'A100-40' names two kinds",
        ),
    ],
)
def test_impossible_values_are_refused(make, part):
    with pytest.raises(InputError, match=part):
        make()
