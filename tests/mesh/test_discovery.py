from dataclasses import dataclass
from typing import Any

import jax
import pytest

from hetjax.errors import InputError
from hetjax.mesh import Cluster, devices_in_order, kind, measure_host_cpu
from hetjax.mesh.discovery import HOST_MEMORY, NETWORK, PCIE


@dataclass(frozen=True)
class Device:
    device_kind: str
    platform: str = "gpu"
    number: int = 0


def ray_node(
    name: str = "a", *, alive: bool = True, labels=None, **resources: float
) -> dict[str, Any]:
    """A node as `ray.nodes()` lists it; ``__`` in a resource's name stands for ``:``."""
    named = {
        key.replace("__", ":").replace("_dash_", "-"): value for key, value in resources.items()
    }
    return {
        "NodeID": "00",
        "Alive": alive,
        "NodeManagerAddress": f"10.0.0.{name}",
        "NodeManagerHostname": f"host-{name}",
        "Resources": named,
        "Labels": labels or {},
    }


def summary(cluster: Cluster) -> list[tuple[str, str, int, int, str | None]]:
    return [
        (s.name, s.kind.name, s.nodes, s.devices_per_node, s.ray_resource)
        for s in cluster.subclusters
    ]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-PCIE-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-PCIE-32GB", "V100e"),
        ("Tesla P100-SXM2-16GB", "P100"),
        ("Tesla T4", "T4"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 3080", "RTX3080"),
        ("AMD Instinct MI250X / MI250", "MI250"),
        ("AMD Instinct MI300X", "MI300X"),
        ("TPU v4", "TPUv4"),
        ("TPU v5 lite", "TPUv5e"),
        ("TPU v5", "TPUv5p"),
        ("TPU v6 lite", "TPUv6e"),
    ],
)
def test_names_of_jax_are_known(text, name):
    (subcluster,) = Cluster.local([Device(text), Device(text)]).subclusters
    assert subcluster.kind == kind(name)
    assert (subcluster.nodes, subcluster.devices_per_node) == (1, 2)
    assert subcluster.intra_node == PCIE


@pytest.mark.parametrize("text", ["NVIDIA GeForce RTX 3080 Ti", "NVIDIA GeForce RTX 4090 D", "H2"])
def test_other_cards_are_not_taken_for_known_ones(text):
    with pytest.raises(InputError, match=f"'{text}' is of no known device kind"):
        Cluster.local([Device(text)])


def test_kinds_that_jax_counts_by_turns_are_grouped():
    names = ["NVIDIA GeForce RTX 3080", "NVIDIA GeForce RTX 4090"] * 2
    devices = [Device(name, number=i) for i, name in enumerate(names)]
    cluster = Cluster.local(devices)
    assert summary(cluster) == [
        ("RTX3080", "RTX3080", 1, 2, None),
        ("RTX4090", "RTX4090", 1, 2, None),
    ]
    ordered = devices_in_order(cluster, devices)
    assert [device.number for device in ordered if isinstance(device, Device)] == [0, 2, 1, 3]


def test_host_devices_share_the_measured_host():
    (host,) = Cluster.local().subclusters
    assert host.num_devices == len(jax.local_devices())
    assert host.kind == measure_host_cpu(host.num_devices)
    assert host.intra_node == HOST_MEMORY


def test_like_ray_nodes_make_a_subcluster():
    cluster = Cluster.from_ray(
        [
            ray_node("1", CPU=8, GPU=4, accelerator_type__A100=1),
            ray_node("2", CPU=8, GPU=4, accelerator_type__A100=1),
            ray_node("3", CPU=8, GPU=2, accelerator_type__A100=1),
            ray_node("4", CPU=8, GPU=2, labels={"ray.io/accelerator-type": "L40S"}),
            ray_node("5", CPU=8, GPU=2, labels={"hetjax": "A100-80"}),
            ray_node("6", CPU=8, TPU=4, accelerator_type__TPU_dash_V5LITEPOD=1),
            ray_node("7", CPU=8),
            ray_node("8", CPU=4),
            ray_node("9", CPU=0),
            ray_node("10", CPU=8, GPU=2, alive=False),
            ray_node("11", CPU=8, GPU=4, accelerator_type__V100=1),
            ray_node("12", CPU=8, GPU=4, accelerator_type__V100=1),
        ]
    )
    # By its resource alone Ray would put a worker of two cards on a node of four.
    assert summary(cluster) == [
        ("A100-40", "A100-40", 1, 4, "node:10.0.0.1"),
        ("A100-40-2", "A100-40", 1, 4, "node:10.0.0.2"),
        ("A100-40-3", "A100-40", 1, 2, "node:10.0.0.3"),
        ("L40S", "L40S", 1, 2, "node:10.0.0.4"),
        ("A100-80", "A100-80", 1, 2, "node:10.0.0.5"),
        ("TPUv5e", "TPUv5e", 1, 4, "accelerator_type:TPU-V5LITEPOD"),
        ("host-cpu", "host-cpu", 2, 1, None),
        ("V100", "V100", 2, 4, "accelerator_type:V100"),
    ]
    assert cluster.link("L40S", "host-cpu") == NETWORK
    assert cluster.subcluster("host-cpu").kind == measure_host_cpu()


def test_ray_node_of_two_kinds_is_part_of_two_subclusters():
    node = ray_node("1", CPU=8, GPU=4, hetjax__RTX3080=2, hetjax__RTX4090=2)
    assert summary(Cluster.from_ray([node, node])) == [
        ("RTX3080", "RTX3080", 2, 2, "hetjax:RTX3080"),
        ("RTX4090", "RTX4090", 2, 2, "hetjax:RTX4090"),
    ]


def test_ray_nodes_on_one_machine_share_it():
    cluster = Cluster.from_ray([ray_node("1", CPU=1), ray_node("1", CPU=1)])
    assert cluster.subclusters[0].nodes == 2
    assert cluster.subclusters[0].kind == measure_host_cpu(2)


@pytest.mark.parametrize(
    ("node", "part"),
    [
        (
            ray_node("1", GPU=1, accelerator_type__B300=1),
            "Ray node 'host-1': accelerator type: 'B300'",
        ),
        (ray_node("1", GPU=1), "accelerator type: '' is of no known device kind"),
        (ray_node("1", GPU=1, labels={"hetjax": "A10"}), "label hetjax: 'A10' is of no known"),
        (ray_node("1", hetjax__A10=1), "resource hetjax:A10: 'A10' is of no known"),
        (ray_node("1", hetjax__T4=0.5), "its amount is the number of devices"),
        (ray_node("1", CPU=0), "no node that is alive offers"),
    ],
)
def test_ray_node_of_unknown_kind_is_named(node, part):
    with pytest.raises(InputError, match=part):
        Cluster.from_ray([node])


def test_ray_that_is_not_connected_is_said():
    with pytest.raises(InputError, match=r"ray\.init"):
        Cluster.from_ray()
