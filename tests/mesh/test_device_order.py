"""Devices that say they are of other kinds: which one becomes which device of a cluster."""

from dataclasses import dataclass

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.errors import InputError
from hetjax.mesh import (
    Cluster,
    DeviceKind,
    HeteroMesh,
    Link,
    Subcluster,
    SubMesh,
    devices_in_order,
    kind,
)
from hetjax.mesh.jax_devices import is_of_kind

LINK = Link(1e9, 1e-6)
THROTTLED = DeviceKind("throttled", {"float32": 6e13}, 24 * 10**9, 1e12, source="a test")
CALLED = {
    "RTX3080": "NVIDIA GeForce RTX 3080",
    "RTX4090": "NVIDIA GeForce RTX 4090",
    "T4": "Tesla T4",
    "A100-40": "NVIDIA A100-SXM4-40GB",
    "A100-80": "NVIDIA A100-SXM4-80GB",
    "V100": "Tesla V100-SXM2-16GB",
    "V100e": "Tesla V100-SXM2-32GB",
}


@dataclass(frozen=True)
class Device:
    """What JAX says of a card."""

    device_kind: str
    number: int = 0
    platform: str = "gpu"


def cards(*names: str) -> list[Device]:
    return [Device(CALLED.get(name, name), number) for number, name in enumerate(names)]


def cluster_of(*subclusters: tuple[DeviceKind, int]) -> Cluster:
    made = [
        Subcluster(f"part {i}", of, 1, count, LINK, LINK)
        for i, (of, count) in enumerate(subclusters)
    ]
    links = [(a.name, b.name, LINK) for i, a in enumerate(made) for b in made[:i]]
    return Cluster("test", tuple(made), tuple(links))


def numbers(cluster: Cluster, devices: list[Device]) -> list[int]:
    found = devices_in_order(cluster, devices)
    assert devices_in_order(cluster, found) == found
    return [device.number for device in found if isinstance(device, Device)]


def test_stages_land_on_their_cards():
    """JAX counts by turns what a cluster counts by kind."""
    devices = cards("RTX3080", "RTX4090", "RTX3080", "RTX4090")
    cluster = Cluster.local(devices)
    submeshes = [SubMesh("RTX3080", 0, (1, 2)), SubMesh("RTX4090", 0, (1, 2))]
    union = HeteroMesh.bind(cluster, submeshes, devices)
    assert union.devices == ((devices[0], devices[2]), (devices[1], devices[3]))


@given(st.lists(st.sampled_from(sorted(CALLED)), min_size=1, max_size=9), st.randoms())
def test_any_order_of_jax_is_bound_by_kind(names, random):
    first = cards(*names)
    cluster = Cluster.local(first)
    devices = random.sample(first, len(first))
    union = HeteroMesh.bind(
        cluster, [SubMesh(s.name, 0, (1, s.num_devices)) for s in cluster.subclusters], devices
    )
    for subcluster, bound in zip(cluster.subclusters, union.devices, strict=True):
        wanted = [each for each in devices if each.device_kind == CALLED[subcluster.kind.name]]
        assert list(bound) == wanted


@given(
    st.lists(st.sampled_from(["RTX3080", "T4", "throttled"]), min_size=1, max_size=6),
    st.lists(st.sampled_from(["RTX3080", "T4", "a card from next year"]), max_size=9),
)
def test_none_is_bound_to_another_kind_and_few_are_refused(kinds, names):
    """A Hall condition says by counting when devices can be bound."""
    cluster = cluster_of(*[(THROTTLED if each == "throttled" else kind(each), 1) for each in kinds])
    devices = cards(*names)
    spare = names.count("a card from next year")
    missing = sum(max(0, kinds.count(each) - names.count(each)) for each in ("RTX3080", "T4"))
    if len(names) < len(kinds) or missing > spare:
        with pytest.raises(InputError, match=r"devices: cluster 'test'"):
            devices_in_order(cluster, devices)
        return
    found = [devices[number] for number in numbers(cluster, devices)]
    assert len(set(found)) == len(kinds)
    said = [each.device_kind for each in found]
    for each in ("RTX3080", "T4"):
        own = sum(a == each and b == CALLED[each] for a, b in zip(kinds, said, strict=True))
        assert own == min(kinds.count(each), names.count(each))


@pytest.mark.parametrize(
    ("subclusters", "names", "order"),
    [
        # Own kinds, and devices of no known kind, keep the order given.
        ([("throttled", 1), ("RTX4090", 1)], ["RTX4090", "RTX4090"], [0, 1]),
        ([("RTX4090", 1), ("throttled", 1)], ["RTX3080", "RTX4090"], [1, 0]),
        ([("T4", 1), ("V100", 2)], ["new", "newer", "newest"], [0, 1, 2]),
        ([("T4", 1), ("V100", 1)], ["new", "T4"], [1, 0]),
        # More than there are places.
        ([("T4", 2)], ["V100", "T4", "T4", "T4"], [1, 2]),
        # Two subclusters of one kind.
        ([("T4", 1), ("V100", 1), ("T4", 1)], ["V100", "T4", "T4"], [1, 0, 2]),
        # A larger card for the same with less memory, where it is not wanted itself.
        ([("A100-40", 1), ("A100-80", 1)], ["A100-80", "A100-80"], [0, 1]),
        ([("V100", 1), ("V100e", 1)], ["V100e", "V100"], [1, 0]),
    ],
)
def test_order(subclusters, names, order):
    named = [(THROTTLED if name == "throttled" else kind(name), n) for name, n in subclusters]
    assert numbers(cluster_of(*named), cards(*names)) == order


@pytest.mark.parametrize(
    ("subclusters", "names", "part"),
    [
        ([("RTX4090", 2)], ["RTX3080", "RTX4090"], "wants 2 RTX4090, and 1 RTX3080 and 1 RTX4090"),
        ([("A100-80", 1)], ["A100-40"], "wants 1 A100-80, and 1 A100-40 are given"),
        ([("T4", 1)], [], "has 1 devices, and 0 are given"),
    ],
)
def test_other_cards_are_refused(subclusters, names, part):
    cluster = cluster_of(*[(kind(name), count) for name, count in subclusters])
    with pytest.raises(InputError, match=part):
        devices_in_order(cluster, cards(*names))


def test_host_devices_alone_play_any_kind():
    devices = jax.devices()
    cluster = cluster_of((kind("A100-40"), 2), (kind("T4"), 3))
    assert devices_in_order(cluster, devices) == devices[:5]
    # Beside cards that are there they play none.
    (cpu,) = Cluster.local(devices[:1]).subclusters
    mixed = cluster_of((kind("T4"), 1), (cpu.kind, 1))
    card = Device("Tesla T4")
    assert devices_in_order(mixed, [devices[0], card]) == [card, devices[0]]
    with pytest.raises(InputError, match="wants 2 T4, and 1 host-cpu and 1 T4 are given"):
        devices_in_order(cluster_of((kind("T4"), 2)), [devices[0], card])


def test_cards_do_not_stand_in_for_a_host():
    (cpu,) = Cluster.local(jax.devices()[:1]).subclusters
    assert not is_of_kind(Device("Tesla T4"), cpu.kind)
    with pytest.raises(InputError, match="wants 1 host-cpu, and 1 T4 are given"):
        devices_in_order(cluster_of((cpu.kind, 1)), [Device("Tesla T4")])
