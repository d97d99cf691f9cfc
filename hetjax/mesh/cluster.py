"""The cluster: homogeneous subclusters in an order, the links between them, and slices of them.

Devices are counted twice. Inside a subcluster they are numbered node by node (row-major); a
`SubMesh` starts at such a number. Over the cluster, the subclusters' devices follow one another;
`Cluster.device_ids` gives these numbers, and a `HeteroMesh` binds them to real devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetjax.errors import InputError, unknown_name
from hetjax.limits import check_name
from hetjax.mesh.kinds import DeviceKind
from hetjax.mesh.links import Link

if TYPE_CHECKING:
    from hetjax.mesh.jax_devices import JaxDevice


@dataclass(frozen=True)
class Subcluster:
    """Homogeneous nodes: ``nodes`` x ``devices_per_node`` devices of one kind.

    Args:
        name: the name by which submeshes refer to it; not empty.
        kind: the kind of every device.
        nodes: how many nodes, 1 or more.
        devices_per_node: devices in each node, 1 or more.
        intra_node: the link between two devices of a node.
        inter_node: the link between devices of two nodes; of no effect where there is one node.
        ray_resource: the Ray resource that the nodes offer, where Ray places workers by one.
        price_per_device_hour: what a device costs an hour, in any currency, more than 0; None where
            it is not known.
        transfer_load: seconds of computing that each byte costs a device which its stage sends or
            receives; 0 where another processor sees to transfers, as beside a GPU.
        message_load: seconds of computing that each message costs it besides.

    Raises:
        InputError: the name is empty or has invisible characters, a count is less than 1, the price
            is not more than 0, or a load is less than 0.
    """

    name: str
    kind: DeviceKind
    nodes: int
    devices_per_node: int
    intra_node: Link
    inter_node: Link
    ray_resource: str | None = None
    price_per_device_hour: float | None = None
    transfer_load: float = 0.0
    message_load: float = 0.0

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError("subcluster: name: '' is not allowed: it must not be empty")
        check_name(self.name, "subcluster: name: ")
        for field in ("nodes", "devices_per_node"):
            if getattr(self, field) < 1:
                raise InputError(
                    f"subcluster {self.name!r}: {field}: {getattr(self, field)} is not allowed: "
                    "it must be 1 or more"
                )
        price = self.price_per_device_hour
        if price is not None and not (math.isfinite(price) and price > 0):
            raise InputError(
                f"subcluster {self.name!r}: price_per_device_hour: {price!r} is not allowed: it "
                "must be more than 0 and finite"
            )
        for field in ("transfer_load", "message_load"):
            load = getattr(self, field)
            if not (math.isfinite(load) and load >= 0):
                raise InputError(
                    f"subcluster {self.name!r}: {field}: {load!r} is not allowed: it must be 0 or "
                    "more and finite"
                )

    @property
    def num_devices(self) -> int:
        """How many devices the subcluster has."""
        return self.nodes * self.devices_per_node


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

    subcluster: str
    start: int
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
        >>> from hetjax.mesh.kinds import kind
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
    links: tuple[tuple[str, str, Link], ...] = ()

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
        """Reads a cluster file in YAML; see `hetjax.mesh.files.read_cluster_file`."""
        from hetjax.mesh import files

        return files.read_cluster_file(path)

    @classmethod
    def local(cls, devices: Sequence[JaxDevice] | None = None) -> Cluster:
        """The devices of this process; see `hetjax.mesh.discovery.cluster_from_local_devices`."""
        from hetjax.mesh import discovery

        return discovery.cluster_from_local_devices(devices)

    @classmethod
    def from_ray(cls, nodes: Iterable[Mapping[str, Any]] | None = None) -> Cluster:
        """The nodes of a Ray cluster, the connected one unless its nodes are given.

        See `hetjax.mesh.discovery.cluster_from_ray`.
        """
        from hetjax.mesh import discovery

        if nodes is None:
            return discovery.cluster_from_connected_ray()
        return discovery.cluster_from_ray(nodes)

    @classmethod
    def from_json_dict(cls, data: object, source: str = "cluster") -> Cluster:
        """Reads what `to_json_dict` wrote; a cluster file's content is read likewise.

        Args:
            data: the content, as `json` gives it.
            source: what errors name as the place, such as ``"plan.json: cluster"``.

        Returns:
            The cluster, equal to the one written.

        Raises:
            InputError: a field is missing, unknown or wrong.
        """
        from hetjax.mesh import files

        return files.cluster_from_content(data, source)

    def to_json_dict(self) -> dict[str, Any]:
        """The whole cluster, its kinds included, as plain values in SI units.

        The layout is that of a cluster file, so that a plan holds all that it was made for.

        Returns:
            Dicts, lists, texts and numbers only.
        """
        return {
            "name": self.name,
            "kinds": {s.kind.name: _kind_to_json(s.kind) for s in self.subclusters},
            "subclusters": [_subcluster_to_json(s) for s in self.subclusters],
            "links": [{"between": [a, b], **_link_to_json(link)} for a, b, link in self.links],
        }

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
            subcluster does, the link between the two subclusters otherwise.

        Raises:
            InputError: a submesh is not in the cluster.
        """
        nodes = {node for submesh in (a, b) for node, _ in self.devices(submesh)}
        if a.subcluster == b.subcluster and len(nodes) == 1:
            return self.subcluster(a.subcluster).intra_node
        return self.link(a.subcluster, b.subcluster)

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


def _link_to_json(link: Link) -> dict[str, Any]:
    return {"bandwidth": link.bandwidth, "latency": link.latency}


def _kind_to_json(kind: DeviceKind) -> dict[str, Any]:
    return {
        "peak_flops": dict(kind.peak_flops),
        "memory": kind.memory_bytes,
        "memory_bandwidth": kind.memory_bandwidth,
        "source": kind.source,
        "platform": kind.platform,
        **({"product_shares": dict(kind.product_shares)} if kind.product_shares else {}),
        **({"product_source": kind.product_source} if kind.product_source else {}),
    }


def _subcluster_to_json(subcluster: Subcluster) -> dict[str, Any]:
    price = subcluster.price_per_device_hour
    return {
        "name": subcluster.name,
        "kind": subcluster.kind.name,
        "nodes": subcluster.nodes,
        "devices_per_node": subcluster.devices_per_node,
        "intra_node": _link_to_json(subcluster.intra_node),
        "inter_node": _link_to_json(subcluster.inter_node),
        "ray_resource": subcluster.ray_resource,
        **({} if price is None else {"price_per_device_hour": price}),
        **{
            field: load
            for field in ("transfer_load", "message_load")
            if (load := getattr(subcluster, field))
        },
    }
