"""The network as resolution sees it: a link between any two numbered devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hetjax.mesh.cluster import Cluster
from hetjax.mesh.links import Link

ALIKE = Link(bandwidth=1e9, latency=1e-5)


@dataclass(frozen=True)
class Network:
    """Which node each device is in, and the links.

    Args:
        nodes: for each device the number of its subcluster and of its node there.
        intra_node: for each subcluster the link inside a node.
        inter_node: the link between nodes, for each pair of subclusters (in order).

    Example:
        >>> Network.alike().link(0, 5).bandwidth
        1000000000.0
    """

    nodes: dict[int, tuple[int, int]] = field(default_factory=dict)
    intra_node: tuple[Link, ...] = ()
    inter_node: dict[tuple[int, int], Link] = field(default_factory=dict)

    @classmethod
    def of(cls, cluster: Cluster) -> Network:
        """The network of a cluster, with its devices' numbers."""
        nodes, number = {}, 0
        for index, sub in enumerate(cluster.subclusters):
            for device in range(sub.num_devices):
                nodes[number] = (index, device // sub.devices_per_node)
                number += 1
        names = [sub.name for sub in cluster.subclusters]
        between = {
            (a, b): cluster.link(names[a], names[b])
            for a in range(len(names))
            for b in range(a, len(names))
        }
        return cls(nodes, tuple(sub.intra_node for sub in cluster.subclusters), between)

    @classmethod
    def alike(cls) -> Network:
        """Any number of devices in one node, of which nothing is known."""
        return cls()

    def node(self, device: int) -> tuple[int, int]:
        """The node of a device."""
        return self.nodes.get(device, (0, 0))

    def link(self, a: int, b: int) -> Link:
        """The link between two devices."""
        if not self.nodes:
            return ALIKE
        first, second = self.node(a), self.node(b)
        if first == second:
            return self.intra_node[first[0]]
        return self.inter_node[min(first[0], second[0]), max(first[0], second[0])]

    def by_node(self, devices: Iterable[int]) -> dict[tuple[int, int], list[int]]:
        """Devices, node by node."""
        found: dict[tuple[int, int], list[int]] = {}
        for device in devices:
            found.setdefault(self.node(device), []).append(device)
        return found
