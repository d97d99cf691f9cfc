"""Subclusters: homogeneous nodes, of which a cluster is made."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

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
        host_memory_bytes: bytes of a node's own memory that its devices may keep arrays in,
            together; None where they may not.
        host_link: the link between a device and that memory, one way; where it is not given, what
            `hetjax.mesh.host_links.link_to_host` assumes.

    Raises:
        InputError: the name is empty or has invisible characters, a count is less than 1, the price
            or the memory is not more than 0, or a load is less than 0.
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


def all_linked(subclusters: Sequence[Subcluster], link: Link) -> Links:
    """One link between every two subclusters.

    Args:
        subclusters: the subclusters.
        link: what is between any two of them.
    """
    names = [subcluster.name for subcluster in subclusters]
    return tuple((a, b, link) for a, b in itertools.combinations(names, 2))
