"""A cluster from what was measured of the nodes of a Ray cluster and of the links between them."""

from __future__ import annotations

import ipaddress
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hetjax.errors import InputError
from hetjax.mesh.cluster import Cluster
from hetjax.mesh.discovery import HOST_MEMORY, NETWORK, PCIE
from hetjax.mesh.host_cpu import HOST_CPU, HostCpu
from hetjax.mesh.kinds import DeviceKind
from hetjax.mesh.links import Link
from hetjax.mesh.published_kinds import kind
from hetjax.mesh.ray_offers import NODE_RESOURCE, Offer, ray_offers
from hetjax.mesh.subcluster import Subcluster

_ALIKE = 0.05
"""How much the speeds of like hosts may differ, as a share of the faster one's."""

_LINKS_ALIKE = 1.25
"""How much longer a message may take on one of two like links."""

_MESSAGES = (1e5, 1e7)
"""Bytes of the messages by which links are compared."""


class ProcessorLoad(NamedTuple):
    """Seconds of computing that a processor loses to what it sends or receives.

    Args:
        of_byte: to each byte; see `Subcluster.transfer_load`.
        of_message: to each message besides; see `Subcluster.message_load`.
    """

    of_byte: float
    of_message: float


@dataclass(frozen=True)
class _NodeDevices:
    """The devices of one kind on one node, `node` being the node's number for Ray."""

    node: str
    address: str
    offer: Offer


def measured_nodes(nodes: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The nodes that are to be measured: those that are alive and offer devices.

    Args:
        nodes: what ``ray.nodes()`` returns.

    Returns:
        These nodes by their address, so that the order is the same each time.

    Raises:
        InputError: a node's accelerator is of a kind that is not known, or no node is left.
    """
    found = [node for node in nodes if node["Alive"] and ray_offers(node)]
    if not found:
        raise InputError("ray: no node that is alive offers a CPU or an accelerator")
    return sorted(found, key=lambda node: (_address_key(node), node["NodeID"]))


def measured_cluster(
    nodes: Sequence[Mapping[str, Any]],
    hosts: Mapping[str, HostCpu],
    links: Mapping[frozenset[str], Link],
    loads: Mapping[str, ProcessorLoad] | None = None,
) -> Cluster:
    """The cluster of measured nodes.

    Nodes that offer the same under a resource that they alone have make a subcluster, if their
    speeds differ by 5% at most and no other node is better linked to one of them than to another.
    Every other node is a subcluster of its own, addressed by the resource ``node:<address>``.
    Processes on one machine share its cores and its memory.

    Args:
        nodes: what `measured_nodes` returned.
        hosts: the processor of every node that offers one, by ``NodeID``.
        links: the link between every two nodes, by their ``NodeID``.
        loads: what sending and receiving costs the processors of nodes, by ``NodeID``.

    Returns:
        A cluster named ``"ray"``. Links inside a node are assumed, as for `Cluster.from_ray`.

    Raises:
        InputError: a node's accelerator is of a kind that is not known.
    """
    places = [
        _NodeDevices(node["NodeID"], node["NodeManagerAddress"], offer)
        for node in nodes
        for offer in ray_offers(node)
    ]
    speeds = {node: _speed(host, hosts) for node, host in hosts.items()}
    groups = [
        group
        for together in _by_resource(places)
        for group in ([together] if _alike(together, speeds, links) else [[p] for p in together])
    ]
    own = [_owns_resource(group, places) for group in groups]
    described = zip(_names(groups, own), groups, own, _kinds(groups, hosts), strict=True)
    subclusters = [_subcluster(*each, links, loads or {}) for each in described]
    between = [
        (a.name, b.name, _link_between(one, other, links))
        for (a, one), (b, other) in itertools.combinations(zip(subclusters, groups, strict=True), 2)
    ]
    return Cluster("ray", tuple(subclusters), tuple(between))


def _address_key(node: Mapping[str, Any]) -> tuple[int, int, str]:
    text = node["NodeManagerAddress"]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # A name.
        return 0, 0, text
    return address.version, int(address), text


def _by_resource(places: Sequence[_NodeDevices]) -> list[list[_NodeDevices]]:
    """Places that one resource stands for, in the order of their first ones; others alone."""
    groups: dict[object, list[_NodeDevices]] = {}
    for place in places:
        groups.setdefault(place.offer.ray_resource or place, []).append(place)
    return list(groups.values())


def _owns_resource(group: Sequence[_NodeDevices], places: Sequence[_NodeDevices]) -> bool:
    """Whether a resource stands for the nodes of a group and no others."""
    resource = group[0].offer.ray_resource
    count = sum(place.offer.ray_resource == resource for place in places)
    return resource is not None and count == len(group)


def _alike(
    group: Sequence[_NodeDevices], speeds: Mapping[str, float], links: Mapping[frozenset[str], Link]
) -> bool:
    """Whether nodes may be one subcluster: of one offer, of one speed, and linked alike."""
    return all(_twins(a, b, speeds, links) for a, b in itertools.combinations(group, 2))


def _twins(
    a: _NodeDevices,
    b: _NodeDevices,
    speeds: Mapping[str, float],
    links: Mapping[frozenset[str], Link],
) -> bool:
    if a.offer != b.offer or a.node == b.node:
        return False
    if a.offer.kind == HOST_CPU:
        slow, fast = sorted((speeds[a.node], speeds[b.node]))
        if slow < (1 - _ALIKE) * fast:
            return False
    others = {node for pair in links for node in pair} - {a.node, b.node}
    return all(
        _links_alike(links[frozenset((a.node, other))], links[frozenset((b.node, other))])
        for other in others
    )


def _links_alike(a: Link, b: Link) -> bool:
    times = [sorted((a.seconds(size), b.seconds(size))) for size in _MESSAGES]
    return all(slow <= _LINKS_ALIKE * fast for fast, slow in times)


def _names(groups: Sequence[Sequence[_NodeDevices]], own: Sequence[bool]) -> list[str]:
    """The kind of nodes that a resource stands for, the address of others; numbered where twice."""
    return _numbered(
        group[0].offer.kind if owns else group[0].address
        for group, owns in zip(groups, own, strict=True)
    )


def _numbered(names: Iterable[str]) -> list[str]:
    """Names, each from its second occurrence on with its number."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return numbered


def _subcluster(
    name: str,
    group: Sequence[_NodeDevices],
    own_resource: bool,
    device_kind: DeviceKind,
    links: Mapping[frozenset[str], Link],
    loads: Mapping[str, ProcessorLoad],
) -> Subcluster:
    offer = group[0].offer
    is_host = offer.kind == HOST_CPU
    known = [loads[place.node] for place in group if is_host and place.node in loads]
    pairs = itertools.combinations((place.node for place in group), 2)
    return Subcluster(
        name,
        device_kind,
        len(group),
        offer.num_devices,
        HOST_MEMORY if is_host else PCIE,
        _worst([links[frozenset(pair)] for pair in pairs]) or NETWORK,
        offer.ray_resource if own_resource else NODE_RESOURCE + group[0].address,
        transfer_load=max((load.of_byte for load in known), default=0.0),
        message_load=max((load.of_message for load in known), default=0.0),
    )


def _kinds(
    groups: Sequence[Sequence[_NodeDevices]], hosts: Mapping[str, HostCpu]
) -> list[DeviceKind]:
    """The kind of each group's devices; hosts are seldom equal, so each has a kind of its own."""
    names = _numbered(group[0].offer.kind for group in groups)
    return [
        min((_host_kind(name, place, hosts) for place in group), key=_float32_rate)
        if group[0].offer.kind == HOST_CPU
        else kind(group[0].offer.kind)
        for name, group in zip(names, groups, strict=True)
    ]


def _host_kind(name: str, place: _NodeDevices, hosts: Mapping[str, HostCpu]) -> DeviceKind:
    host = hosts[place.node]
    cores = _shared_cores(host, hosts)
    sharing = sum(other.machine == host.machine for other in hosts.values())
    source = f"measured on {place.address}: {min(cores, host.quota):g} cores"
    return host.kind(name, source, cores=cores, sharing=sharing)


def _float32_rate(device_kind: DeviceKind) -> float:
    return device_kind.flops("float32")


_NOTHING = 1e-9
"""Of a core's time: less is none."""


def _shared_cores(host: HostCpu, hosts: Mapping[str, HostCpu]) -> float:
    """How many cores' time a host has, where nodes on the same machine share its cores.

    All of a machine's hosts get more alike until each has its quota, or its cores are used up: what
    one does not want is left to the others.
    """
    place = next(node for node, other in hosts.items() if other == host)
    sharing = {node: other for node, other in hosts.items() if other.machine == host.machine}
    given = dict.fromkeys(sharing, 0.0)
    free = {core: 1.0 for other in sharing.values() for core in other.cores}
    while True:
        open_cores = {
            node: [core for core in other.cores if free[core] > _NOTHING]
            for node, other in sharing.items()
            if other.quota - given[node] > _NOTHING
        }
        growing = {node: cores for node, cores in open_cores.items() if cores}
        if not growing:
            return given[place]
        demand: defaultdict[int, float] = defaultdict(float)
        for cores in growing.values():
            for core in cores:
                demand[core] += 1 / len(cores)
        step = min(
            *(free[core] / demand[core] for core in demand),
            *(sharing[node].quota - given[node] for node in growing),
        )
        for node in growing:
            given[node] += step
        for core in demand:
            free[core] -= step * demand[core]


def _speed(host: HostCpu, hosts: Mapping[str, HostCpu]) -> float:
    return host.core_flops * min(_shared_cores(host, hosts), host.quota)


def _link_between(
    one: Sequence[_NodeDevices], other: Sequence[_NodeDevices], links: Mapping[frozenset[str], Link]
) -> Link:
    """The worst of the links between two subclusters; that in a node where they share it."""
    pairs = itertools.product((p.node for p in one), (p.node for p in other))
    return _worst([links[frozenset((a, b))] for a, b in pairs if a != b]) or PCIE


def _worst(links: Sequence[Link]) -> Link | None:
    """As slow as the slowest of several links; None where there are none."""
    if not links:
        return None
    return Link(min(link.bandwidth for link in links), max(link.latency for link in links))
