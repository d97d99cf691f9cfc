"""From measured nodes to subclusters: unlike ones apart, like ones together where Ray can tell."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from hetjax.errors import InputError
from hetjax.mesh import Cluster, Link, kind
from hetjax.mesh.discovery import PCIE
from hetjax.mesh.host_cpu import HostCpu
from hetjax.mesh.measured import ProcessorLoad, measured_cluster, measured_nodes

MACHINES = itertools.count()
FAST, SLOW = Link(1e9, 1e-4), Link(25e6, 2e-4)


def node(number: int, **resources: float) -> dict[str, Any]:
    named = {name.replace("__", ":"): amount for name, amount in resources.items()}
    return {
        "NodeID": f"id{number}",
        "Alive": True,
        "NodeManagerAddress": f"10.0.0.{number}",
        "Resources": named or {"CPU": 1.0},
        "Labels": {},
    }


def host(speed: float = 1.0, machine: str = "", cores: tuple[int, ...] = (0,), quota=math.inf):
    """A host on a machine of its own, unless it has a name."""
    return HostCpu(
        machine or f"machine {next(MACHINES)}", cores, quota, speed * 1e11, 2e10, 8 * 10**9
    )


def cluster_of(
    nodes: list[dict[str, Any]],
    hosts: list[HostCpu],
    slow: Mapping[tuple[int, int], Link] = {},
    loads: Mapping[str, ProcessorLoad] | None = None,
) -> Cluster:
    measured = measured_nodes(nodes)
    names = [each["NodeID"] for each in measured]
    links = {frozenset(pair): FAST for pair in itertools.combinations(names, 2)}
    links |= {frozenset((f"id{a}", f"id{b}")): link for (a, b), link in slow.items()}
    return measured_cluster(measured, dict(zip(names, hosts, strict=False)), links, loads)


def summary(cluster: Cluster) -> list[tuple[str, int, str | None]]:
    return [(s.name, s.nodes, s.ray_resource) for s in cluster.subclusters]


def rates(cluster: Cluster) -> list[float]:
    return [s.kind.flops("float32") for s in cluster.subclusters]


def test_each_host_is_addressed_by_its_own_node_in_the_order_of_addresses():
    cluster = cluster_of([node(10), node(9)], [host(), host(0.5)], {(9, 10): SLOW})
    assert summary(cluster) == [
        ("10.0.0.9", 1, "node:10.0.0.9"),
        ("10.0.0.10", 1, "node:10.0.0.10"),
    ]
    assert [s.kind.name for s in cluster.subclusters] == ["host-cpu", "host-cpu-2"]
    assert rates(cluster) == [1e11, 5e10]
    assert cluster.link("10.0.0.9", "10.0.0.10") == SLOW
    assert Cluster.from_json_dict(cluster.to_json_dict()) == cluster


def test_hosts_carry_what_messages_cost_them_and_accelerators_carry_nothing():
    with_gpu = node(3, GPU=1, accelerator_type__T4=1)
    loads = {f"id{place}": ProcessorLoad(place * 1e-9, place * 1e-4) for place in (1, 2, 3)}
    cluster = cluster_of([node(1), node(2), with_gpu], [host(), host(0.5)], loads=loads)
    assert [each.transfer_load for each in cluster.subclusters] == [1e-9, 2e-9, 0.0]
    assert [each.message_load for each in cluster.subclusters] == [1e-4, 2e-4, 0.0]
    assert Cluster.from_json_dict(cluster.to_json_dict()) == cluster


def test_hosts_of_one_mark_and_speed_are_one_subcluster():
    marked = [node(i, CPU=1, **{"hetjax__host-cpu": 1}) for i in (1, 2, 3)]
    together = cluster_of(marked, [host(1.0), host(0.97), host(0.98)], {(1, 2): Link(9e8, 1e-4)})
    assert summary(together) == [("host-cpu", 3, "hetjax:host-cpu")]
    assert rates(together) == [9.7e10], "as fast as its slowest host"
    assert together.subclusters[0].inter_node == Link(9e8, 1e-4)
    apart = cluster_of(marked, [host(1.0), host(0.9), host(1.0)])
    assert [s.ray_resource for s in apart.subclusters] == [f"node:10.0.0.{i}" for i in (1, 2, 3)]


def test_hosts_with_unlike_links_are_apart():
    marked = [node(i, GPU=2, accelerator_type__L4=1) for i in (1, 2, 3)]
    alike = cluster_of(marked, [])
    assert summary(alike) == [("L4", 3, "accelerator_type:L4")]
    apart = cluster_of(marked, [], {(1, 3): SLOW, (2, 3): SLOW})
    assert [s.nodes for s in apart.subclusters] == [1, 1, 1]
    assert apart.link("10.0.0.1", "10.0.0.2") == FAST
    assert apart.link("10.0.0.2", "10.0.0.3") == SLOW
    assert all(s.kind == kind("L4") for s in apart.subclusters)


def test_islands_are_subclusters_of_their_own_marks():
    marks = ["hetjax:RTX3080", "hetjax:RTX3080", "hetjax:RTX4090", "hetjax:RTX4090"]
    nodes = [node(i, GPU=2, **{mark: 2}) for i, mark in enumerate(marks, start=1)]
    crossing = {(a, b): SLOW for a in (1, 2) for b in (3, 4)}
    cluster = cluster_of(nodes, [], crossing)
    assert [(s.name, s.nodes, s.inter_node) for s in cluster.subclusters] == [
        ("RTX3080", 2, FAST),
        ("RTX4090", 2, FAST),
    ]
    assert cluster.link("RTX3080", "RTX4090") == SLOW


def test_kinds_of_one_node_are_joined_inside_it():
    cluster = cluster_of([node(1, GPU=4, hetjax__RTX3080=2, hetjax__RTX4090=2)], [])
    assert cluster.link("RTX3080", "RTX4090") == PCIE


def test_nodes_on_one_machine_share_its_cores_and_memory():
    shared = [host(machine="m", cores=(0, 1)) for _ in range(2)]
    cluster = cluster_of([node(1), node(2)], shared)
    assert rates(cluster) == [1e11, 1e11]
    assert [s.kind.memory_bytes for s in cluster.subclusters] == [4 * 10**9] * 2
    pinned = [host(machine="m", cores=(0,)), host(machine="m", cores=(1,), quota=0.25)]
    assert rates(cluster_of([node(1), node(2)], pinned)) == [1e11, 2.5e10]


def test_what_one_host_does_not_want_of_a_core_is_left_to_the_other():
    """As in the lab of three hosts, where two of unlike speed share a core."""
    hosts = [
        host(machine="m", cores=(0,)),
        host(machine="m", cores=(1,), quota=0.6),
        host(machine="m", cores=(1,), quota=0.3),
    ]
    cluster = cluster_of([node(1), node(2), node(3)], hosts)
    np.testing.assert_allclose(rates(cluster), [1e11, 6e10, 3e10])


def test_nodes_of_one_address_have_names_of_their_own():
    first, second = node(1), {**node(2), "NodeManagerAddress": "10.0.0.1"}
    cluster = cluster_of([first, second], [host(), host()])
    assert summary(cluster) == [
        ("10.0.0.1", 1, "node:10.0.0.1"),
        ("10.0.0.1-2", 1, "node:10.0.0.1"),
    ]


def test_nodes_without_devices_are_left_out():
    assert measured_nodes([node(1, CPU=0), node(2), {**node(3), "Alive": False}]) == [node(2)]
    with pytest.raises(InputError, match="no node that is alive"):
        measured_nodes([node(1, CPU=0)])
