"""Subclusters: homogeneous nodes, of which a cluster is made."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hetjax.errors import InputError
from hetjax.limits import check_name
from hetjax.mesh.kinds import DeviceKind
from hetjax.mesh.links import Link

Links = tuple[tuple[str, str, Link], ...]
"""``(name_a, name_b, link)`` for pairs of subclusters."""


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
        max_tensor_parallelism: over how many devices a tensor axis goes at most (H2's ``TP_MAX``);
            None for any number.
        network_cards: for each network card of a node the devices in it that send and receive over
            it; empty for one card of all. A link to other nodes is as fast as one card makes it.
        host_memory_bytes: bytes of a node's own memory that its devices may keep arrays in,
            together; None where they may not.
        host_link: the link between a device and that memory, one way; where it is not given, what
            `hetjax.mesh.host_links.link_to_host` assumes.

    Raises:
        InputError: the name is empty or has invisible characters, a count is less than 1, the price
            or the memory is not more than 0, a load is less than 0, or network cards do not have
            each device of a node once.

    Example:
        >>> from hetjax.mesh import kind
        >>> near, far = Link(25e9, 10e-6), Link(12.5e9, 50e-6)
        >>> cards = ((0, 1), (2, 3))
        >>> part = Subcluster("old", kind("V100"), 2, 4, near, far, network_cards=cards)
        >>> part.cards_of(range(1, 3)), part.cards_of([3])
        ({0, 1}, {1})
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
    max_tensor_parallelism: int | None = None
    network_cards: tuple[tuple[int, ...], ...] = ()
    host_memory_bytes: int | None = None
    host_link: Link | None = None

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
        widest = self.max_tensor_parallelism
        if widest is not None and widest < 1:
            raise InputError(
                f"subcluster {self.name!r}: max_tensor_parallelism: {widest} is not allowed: it "
                "must be 1 or more"
            )
        cards = tuple(tuple(devices) for devices in self.network_cards)
        object.__setattr__(self, "network_cards", cards)
        if cards and not _has_each_once(cards, self.devices_per_node):
            raise InputError(
                f"subcluster {self.name!r}: network_cards: {[list(each) for each in cards]} is not "
                f"allowed: each of the devices 0 to {self.devices_per_node - 1} of a node has one "
                f"card, and each card one device or more"
            )
        price = self.price_per_device_hour
        if price is not None and not (math.isfinite(price) and price > 0):
            raise InputError(
                f"subcluster {self.name!r}: price_per_device_hour: {price!r} is not allowed: it "
                "must be more than 0 and finite"
            )
        if self.host_memory_bytes is not None and self.host_memory_bytes < 1:
            raise InputError(
                f"subcluster {self.name!r}: host_memory_bytes: {self.host_memory_bytes} is not "
                "allowed: it must be 1 or more"
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

    @property
    def num_cards(self) -> int:
        """How many network cards a node has."""
        return len(self.network_cards) or 1

    def cards_of(self, devices: Iterable[int]) -> set[int]:
        """The network cards of some devices of a node.

        Args:
            devices: their numbers in the node.

        Returns:
            The cards' numbers in the node.
        """
        if not self.network_cards:
            return {0}
        asked = set(devices)
        return {number for number, of in enumerate(self.network_cards) if asked & set(of)}

    def allows_tensor_axis(self, size: int) -> bool:
        """Whether a tensor axis may go over so many of its devices."""
        return self.max_tensor_parallelism is None or size <= self.max_tensor_parallelism

    def reduced(self, nodes: int, devices_per_node: int) -> Subcluster:
        """The same with fewer nodes, or with the first devices of each and their hosts' memory.

        Args:
            nodes: how many nodes.
            devices_per_node: devices in each.
        """
        kept = (tuple(d for d in of if d < devices_per_node) for of in self.network_cards)
        memory = self.host_memory_bytes
        return replace(
            self,
            nodes=nodes,
            devices_per_node=devices_per_node,
            network_cards=tuple(of for of in kept if of),
            host_memory_bytes=memory and memory * devices_per_node // self.devices_per_node,
        )

    def card_share(self, devices_per_node: int) -> float:
        """What part of their network cards the first devices of a node have, if all have alike.

        Args:
            devices_per_node: how many devices.
        """
        of_cards = self.network_cards or (tuple(range(self.devices_per_node)),)
        used = [of for of in of_cards if min(of) < devices_per_node]
        return devices_per_node / sum(map(len, used))


def cards_in_turn(count: int, devices_per_node: int) -> tuple[tuple[int, ...], ...]:
    """The devices of each of some network cards, neighbours sharing one, as evenly as they can.

    Args:
        count: how many cards a node has, from 1 to the number of its devices.
        devices_per_node: how many devices it has.

    Example:
        >>> cards_in_turn(2, 5)
        ((0, 1, 2), (3, 4))
    """
    edges = [-(-devices_per_node * card // count) for card in range(count + 1)]
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(edges))


def _has_each_once(cards: Sequence[Sequence[int]], devices_per_node: int) -> bool:
    devices = sorted(device for of in cards for device in of)
    return all(cards) and devices == list(range(devices_per_node))


def all_linked(subclusters: Sequence[Subcluster], link: Link) -> Links:
    """One link between every two subclusters.

    Args:
        subclusters: the subclusters.
        link: what is between any two of them.
    """
    names = [subcluster.name for subcluster in subclusters]
    return tuple((a, b, link) for a, b in itertools.combinations(names, 2))
