"""The cluster: homogeneous subclusters in an order, the links between them, and slices of them.

Devices are counted twice. Inside a subcluster they are numbered node by node (row-major); a
`SubMesh` starts at such a number. Over the cluster, the subclusters' devices follow one another;
`Cluster.device_ids` gives these numbers, and a `HeteroMesh` binds them to real devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetjax.checked_files import read_yaml
from hetjax.errors import InputError, unknown_name
from hetjax.limits import Index, Name, check_name
from hetjax.mesh.discovery import NETWORK, PCIE, local_subclusters, ray_subclusters
from hetjax.mesh.files import checked_record, content_of, links_of, subclusters_of
from hetjax.mesh.jax_devices import JaxDevice
from hetjax.mesh.kinds import DeviceKind
from hetjax.mesh.links import Link
from hetjax.mesh.ray_offers import connected_ray_nodes
from hetjax.mesh.subcluster import Links, Subcluster, all_linked


@dataclass(frozen=True)
class SubMesh:
    """A slice of one subcluster: m devices of one node, or n whole nodes.

    Whether the subcluster has these devices is checked by `Cluster.check_submesh`.

    Args:
        subcluster: the name of the subcluster.
        start: the number of the first device in the subcluster, counted node by node from 0.
        shape: ``(1, m)`` for m devices of one node, ``(n, devices_per_node)`` for n whole nodes.

    Raises:
        InputError: `start` is negative, or a side of `shape` is less than 1.

    Example:
        >>> str(SubMesh("fast", 2, (1, 2)))
        'fast[2:4] 1x2'
    """

    subcluster: Name
    start: Index
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        nodes, devices = self.shape
        object.__setattr__(self, "shape", (nodes, devices))
        if self.start < 0:
            raise InputError(f"submesh: start: {self.start} is not allowed: it must be 0 or more")
        if nodes < 1 or devices < 1:
            raise InputError(
                f"submesh: shape: {self.shape} is not allowed: both sides must be 1 or more"
            )

    @property
    def num_devices(self) -> int:
        """How many devices the submesh has."""
        return self.shape[0] * self.shape[1]

    def __str__(self) -> str:
        stop = self.start + self.num_devices
        return f"{self.subcluster}[{self.start}:{stop}] {self.shape[0]}x{self.shape[1]}"


@dataclass(frozen=True)
class Cluster:
    """Subclusters in an order, and the links between them.

    Args:
        name: the cluster's name, for people.
        subclusters: one or more, with names of their own. Kinds of the same name must be equal.
        links: ``(name_a, name_b, link)``, one for every pair of subclusters, in either order.

    Raises:
        InputError: a name is given twice or has invisible characters, a link names no subcluster,
            or a pair has no link.

    Example:
        >>> from hetjax.mesh import kind
        >>> local, gigabit = Link(10e9, 1e-6), Link(125e6, 0.5e-3)
        >>> fast = Subcluster("fast", kind("RTX4090"), 1, 4, local, local)
        >>> slow = Subcluster("slow", kind("RTX3080"), 1, 2, local, local)
        >>> cluster = Cluster("home", (fast, slow), (("fast", "slow", gigabit),))
        >>> cluster.device_ids(SubMesh("slow", 0, (1, 2)))
        (4, 5)
        >>> cluster.link_between(SubMesh("fast", 0, (1, 4)), SubMesh("slow", 0, (1, 2))) == gigabit
        True
        >>> Cluster.from_json_dict(cluster.to_json_dict()) == cluster
        True
    """

    name: str
    subclusters: tuple[Subcluster, ...]
    links: Links = ()

    def __post_init__(self) -> None:
        check_name(self.name, "cluster: name: ")
        object.__setattr__(self, "subclusters", tuple(self.subclusters))
        object.__setattr__(self, "links", tuple((a, b, link) for a, b, link in self.links))
        if not self.subclusters:
            raise InputError("subclusters: none is given: a cluster has one or more")
        _check_names(self.subclusters)
        _check_kinds(self.subclusters)
        _check_links([s.name for s in self.subclusters], [(a, b) for a, b, _ in self.links])

    @classmethod
    def from_file(cls, path: str | Path) -> Cluster:
        """Reads a cluster file in YAML; see `hetjax.mesh.files` for its layout.

        JAX is not imported; the host is measured only where a subcluster is of the kind
        ``host-cpu``.

        Args:
            path: a YAML file in UTF-8.

        Returns:
            The cluster.

        Raises:
            InputError: there is no such file, it is not UTF-8 or not YAML, or a field is missing,
                unknown or wrong; the message names the file, the field, its value and what is
                allowed.
        """
        content = read_yaml(path, "cluster file")
        try:
            return cls.from_json_dict(content)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    @classmethod
    def local(cls, devices: Sequence[JaxDevice] | None = None) -> Cluster:
        """The devices of this process as a cluster: a subcluster of one node for each kind.

        JAX may count cards of two kinds by turns; `devices_in_order` finds them again. Links are
        assumed; see `hetjax.mesh.discovery`.

        Args:
            devices: the devices; `jax.local_devices` unless given.

        Returns:
            A cluster named ``"local"``, its kinds in the order in which they come first.

        Raises:
            InputError: a device is of a kind that has no known figures.
        """
        subclusters = local_subclusters(devices)
        return cls("local", subclusters, all_linked(subclusters, PCIE))

    @classmethod
    def from_ray(cls, nodes: Iterable[Mapping[str, Any]] | None = None) -> Cluster:
        """The nodes of a Ray cluster as a cluster: like nodes make a subcluster.

        How the kind of a node's devices is read is told in `hetjax.mesh.discovery`; links are
        assumed.

        Args:
            nodes: what ``ray.nodes()`` returns, of which those that are not alive are left out; of
                the Ray cluster that this process is connected to unless given.

        Returns:
            A cluster named ``"ray"``.

        Raises:
            InputError: this process is not connected, a node's accelerator is of a kind that is not
                known, or no node is left.
        """
        subclusters = ray_subclusters(connected_ray_nodes() if nodes is None else nodes)
        return cls("ray", subclusters, all_linked(subclusters, NETWORK))

    @classmethod
    def from_json_dict(cls, data: object) -> Cluster:
        """Reads what `to_json_dict` wrote; a cluster file's content is read likewise.

        Args:
            data: the content, as `json` gives it.

        Returns:
            The cluster, equal to the one written.

        Raises:
            InputError: a field is missing, unknown or wrong.
        """
        record = checked_record(data)
        return cls(record.name, subclusters_of(record), links_of(record))

    def to_json_dict(self) -> dict[str, Any]:
        """The whole cluster, its kinds included, as plain values in SI units.

        The layout is that of a cluster file, so that a plan holds all that it was made for.

        Returns:
            Dicts, lists, texts and numbers only.
        """
        return content_of(self.name, self.subclusters, self.links)

    @property
    def num_devices(self) -> int:
        """How many devices the cluster has."""
        return sum(s.num_devices for s in self.subclusters)

    def subcluster(self, name: str) -> Subcluster:
        """The subcluster of a name.

        Raises:
            InputError: no subcluster has the name.
        """
        for subcluster in self.subclusters:
            if subcluster.name == name:
                return subcluster
        raise InputError(unknown_name("subcluster", name, [s.name for s in self.subclusters]))

    def part(self, names: Sequence[str]) -> Cluster:
        """Some of its subclusters, with the links between them.

        Args:
            names: the subclusters' names.

        Returns:
            A cluster of these alone.

        Raises:
            InputError: no subcluster has a name.
        """
        chosen = tuple(self.subcluster(name) for name in names)
        links = tuple(link for link in self.links if {link[0], link[1]} <= set(names))
        return Cluster(f"{self.name}: {', '.join(names)}", chosen, links)

    def link(self, name_a: str, name_b: str) -> Link:
        """The link between two subclusters, or between the nodes of one.

        Args:
            name_a: a subcluster's name.
            name_b: another's name, or the same.

        Raises:
            InputError: no subcluster has the name.
        """
        first, second = self.subcluster(name_a), self.subcluster(name_b)
        if first == second:
            return first.inter_node
        return next(link for a, b, link in self.links if {a, b} == {name_a, name_b})

    def link_between(self, a: SubMesh, b: SubMesh) -> Link:
        """The slowest kind of link on the way between two submeshes.

        Args:
            a: a submesh.
            b: another, or the same: its link with itself carries its collectives.

        Returns:
            The link inside a node where one node holds both, the link between nodes where one
            subcluster does, the link between the two subclusters otherwise. Where nodes have
            several network cards, it is as many times as fast as both have cards of their devices.

        Raises:
            InputError: a submesh is not in the cluster.
        """
        first, last = self._nodes(a)
        if a.subcluster == b.subcluster and first == last and self._nodes(b) == (first, last):
            return self.subcluster(a.subcluster).intra_node
        link = self.link(a.subcluster, b.subcluster)
        if any(self.subcluster(each.subcluster).num_cards == 1 for each in (a, b)):
            return link
        cards = min(len(self.cards(each)) // each.shape[0] for each in (a, b))
        return Link(cards * link.bandwidth, link.latency)

    def _nodes(self, submesh: SubMesh) -> tuple[int, int]:
        """The first and the last node of a submesh."""
        self.check_submesh(submesh)
        per_node = self.subcluster(submesh.subcluster).devices_per_node
        last = submesh.start + submesh.num_devices - 1
        return submesh.start // per_node, last // per_node

    def node_link(self, name_a: str, name_b: str) -> Link:
        """The link between whole nodes of two subclusters, or two whole nodes of one.

        Args:
            name_a: a subcluster's name.
            name_b: another's name, or the same.

        Returns:
            The link over all network cards that both have.
        """
        link = self.link(name_a, name_b)
        cards = min(self.subcluster(name).num_cards for name in (name_a, name_b))
        return Link(cards * link.bandwidth, link.latency)

    def cards(self, submesh: SubMesh) -> set[tuple[int, int]]:
        """The network cards of a submesh's devices.

        Args:
            submesh: a submesh.

        Returns:
            Pairs of a node and a card's number in it; each of its nodes has as many.

        Raises:
            InputError: the submesh is not in the cluster.
        """
        part = self.subcluster(submesh.subcluster)
        if not part.network_cards:
            return {(node, 0) for node in self.nodes(submesh)}
        devices = self.devices(submesh)
        return {(node, card) for node, device in devices for card in part.cards_of([device])}

    def check_submesh(self, submesh: SubMesh) -> None:
        """Checks that the cluster has a submesh's devices, and that they are a slice.

        Raises:
            InputError: it names a subcluster or a device that is not there, or its shape is
                neither within one node nor of whole nodes.
        """
        subcluster = self.subcluster(submesh.subcluster)
        per_node = subcluster.devices_per_node
        last = submesh.start + submesh.num_devices - 1
        if last >= subcluster.num_devices:
            raise InputError(
                f"submesh {submesh}: device {last} is not there: subcluster {subcluster.name!r} "
                f"has devices 0 to {subcluster.num_devices - 1} "
                f"({subcluster.nodes} node(s) of {per_node})"
            )
        nodes, devices = submesh.shape
        in_one_node = nodes == 1 and submesh.start % per_node + devices <= per_node
        whole_nodes = devices == per_node and submesh.start % per_node == 0
        if not (in_one_node or whole_nodes):
            raise InputError(
                f"submesh {submesh}: it is neither within one node nor of whole nodes: "
                f"subcluster {subcluster.name!r} has {per_node} device(s) a node. "
                f"Allowed: shape (1, m) inside a node, or (n, {per_node}) of whole nodes"
            )

    def nodes(self, submesh: SubMesh) -> range:
        """Which nodes of its subcluster a submesh's devices are in.

        Raises:
            InputError: the submesh is not in the cluster.
        """
        self.check_submesh(submesh)
        per_node = self.subcluster(submesh.subcluster).devices_per_node
        last = submesh.start + submesh.num_devices - 1
        return range(submesh.start // per_node, last // per_node + 1)

    def devices(self, submesh: SubMesh) -> tuple[tuple[int, int], ...]:
        """Where a submesh's devices are in their subcluster.

        Returns:
            ``(node, device in the node)`` of each device, row-major.

        Raises:
            InputError: the submesh is not in the cluster.
        """
        self.check_submesh(submesh)
        per_node = self.subcluster(submesh.subcluster).devices_per_node
        numbers = range(submesh.start, submesh.start + submesh.num_devices)
        return tuple(divmod(number, per_node) for number in numbers)

    def global_device_offset(self, submesh: SubMesh) -> int:
        """The number, over the whole cluster, of a submesh's first device.

        Raises:
            InputError: the submesh is not in the cluster.
        """
        self.check_submesh(submesh)
        before = itertools.takewhile(lambda s: s.name != submesh.subcluster, self.subclusters)
        return sum(s.num_devices for s in before) + submesh.start

    def device_ids(self, submesh: SubMesh) -> tuple[int, ...]:
        """The number, over the whole cluster, of each of a submesh's devices.

        Raises:
            InputError: the submesh is not in the cluster.
        """
        offset = self.global_device_offset(submesh)
        return tuple(range(offset, offset + submesh.num_devices))


def _check_names(subclusters: Sequence[Subcluster]) -> None:
    seen: set[str] = set()
    for index, subcluster in enumerate(subclusters):
        if subcluster.name in seen:
            raise InputError(
                f"subclusters[{index}].name: {subcluster.name!r} is given twice: "
                "each subcluster has a name of its own"
            )
        seen.add(subcluster.name)


def _check_kinds(subclusters: Sequence[Subcluster]) -> None:
    by_name: dict[str, DeviceKind] = {}
    for index, subcluster in enumerate(subclusters):
        kind = subcluster.kind
        if by_name.setdefault(kind.name, kind) != kind:
            raise InputError(
                f"subclusters[{index}].kind: {kind.name!r} names two kinds with unlike figures: "
                "each kind has a name of its own"
            )


def _check_links(names: Sequence[str], ends: Sequence[tuple[str, str]]) -> None:
    """Checks that each pair of subclusters is linked exactly once."""
    linked: set[frozenset[str]] = set()
    known = set(names)
    for index, pair in enumerate(ends):
        for name in pair:
            if name not in known:
                raise InputError(f"links[{index}]: {unknown_name('subcluster', name, names)}")
        if pair[0] == pair[1]:
            raise InputError(
                f"links[{index}]: {pair[0]!r} is linked with itself: a link joins two subclusters; "
                "inter_node is the link between the nodes of one"
            )
        if frozenset(pair) in linked:
            raise InputError(f"links[{index}]: {pair[0]!r} and {pair[1]!r} are linked twice")
        linked.add(frozenset(pair))
    for a, b in itertools.combinations(names, 2):
        if frozenset((a, b)) not in linked:
            raise InputError(
                f"links: {a!r} and {b!r} have no link: every pair of subclusters needs one "
                "(or a default_link in the cluster file)"
            )
