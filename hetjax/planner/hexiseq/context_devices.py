"""A cluster's devices as arrays: what each computes and holds, and what joins every two of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hetjax.errors import InputError
from hetjax.mesh.cluster import Cluster, Subcluster
from hetjax.mesh.host_links import host_share
from hetjax.planner.work.rates import USABLE_MEMORY


@dataclass(frozen=True)
class ContextDevices:
    """All devices of a cluster, numbered as `Cluster.device_ids` does.

    Where members that share the context have a tensor axis, as many neighbours of a node are one
    member, and what is called a device here is such a member.

    Args:
        cluster: the cluster.
        dtype: of what products are of.
        efficiency: share of the peak FLOP/s that products reach, of all kinds alike; None for what
            is known of each kind.
        usable_memory: share of a device's memory that may be filled.
        lost: the cluster's devices that cannot be used.
        tensor: over how many devices the tensor axis of a member goes, by subcluster; they divide
            those of a node. One device is a member where nothing is said.
        rates: FLOP/s that products reach, by subcluster, in place of what is known of kinds.
        more_held: how many times as much devices hold as the scheduler's model counts, by
            subcluster, where that was found.

    Raises:
        InputError: a share is not over 0 or over 1.

    Example:
        >>> from hetjax.mesh import Link, Subcluster, kind
        >>> near, far = Link(450e9, 5e-6), Link(25e9, 1e-5)
        >>> island = Subcluster("h100", kind("H100"), 2, 4, near, far)
        >>> devices = ContextDevices(Cluster("island", (island,)), efficiency=0.5)
        >>> devices.num_devices, devices.node.tolist(), devices.name(5)
        (8, [0, 0, 0, 0, 1, 1, 1, 1], 'h100[5]')
    """

    cluster: Cluster
    dtype: DTypeLike = "bfloat16"
    efficiency: float | None = None
    usable_memory: float = USABLE_MEMORY
    lost: frozenset[int] = frozenset()
    tensor: Mapping[str, int] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    more_held: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("efficiency", "usable_memory"):
            share = getattr(self, name)
            if share is not None and not (math.isfinite(share) and 0 < share <= 1):
                raise InputError(
                    f"{name}: {share!r} is not allowed: it must be over 0, and at most 1"
                )

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        return len(self.subcluster)

    @functools.cached_property
    def _sizes(self) -> list[int]:
        """Devices of a member, by subcluster."""
        return [self.tensor.get(part.name, 1) for part in self.cluster.subclusters]

    @functools.cached_property
    def sizes(self) -> NDArray[np.int64]:
        """How many of the cluster's devices each is."""
        return np.array(self._sizes)[self.subcluster]

    @functools.cached_property
    def firsts(self) -> NDArray[np.int64]:
        """The first of the cluster's devices that each is."""
        return np.cumsum(self.sizes) - self.sizes

    @functools.cached_property
    def owners(self) -> NDArray[np.intp]:
        """For each of the cluster's devices the number of the device here that it is of."""
        return np.repeat(np.arange(self.num_devices), self.sizes)

    @functools.cached_property
    def usable(self) -> NDArray[np.intp]:
        """The devices of which nothing is lost."""
        return np.setdiff1d(np.arange(self.num_devices), self.owners[[*self.lost]])

    def among(self, part: Sequence[int]) -> ContextDevices:
        """The same, of which only some of the cluster's devices can be used.

        Args:
            part: the numbers of the cluster's devices.
        """
        others = frozenset(range(len(self.owners))).difference(part)
        return replace(self, lost=self.lost | others)

    @functools.cached_property
    def subcluster(self) -> NDArray[np.intp]:
        """The number of each device's subcluster."""
        pairs = zip(self.cluster.subclusters, self._sizes, strict=True)
        counts = [part.num_devices // size for part, size in pairs]
        return np.repeat(np.arange(len(counts)), counts)

    def per_node(self, number: int) -> int:
        """How many devices a node of a subcluster has.

        Args:
            number: the subcluster's number.
        """
        return self.cluster.subclusters[number].devices_per_node // self._sizes[number]

    @functools.cached_property
    def node(self) -> NDArray[np.intp]:
        """The number, over the whole cluster, of each device's node."""
        parts = enumerate(self.cluster.subclusters)
        sizes = [self.per_node(number) for number, part in parts for _ in range(part.nodes)]
        return np.repeat(np.arange(len(sizes)), sizes)

    @functools.cached_property
    def card(self) -> NDArray[np.intp]:
        """The number, over the whole cluster, of the network card of each device."""
        found, before = [], 0
        for part, size in zip(self.cluster.subclusters, self._sizes, strict=True):
            firsts = range(0, part.devices_per_node, size)
            of = [min(part.cards_of([device])) for device in firsts]
            for _ in range(part.nodes):
                found += [before + each for each in of]
                before += part.num_cards
        return np.array(found)

    @functools.cached_property
    def cards(self) -> NDArray[np.int64]:
        """How many network cards each has."""
        found = []
        for part, size in zip(self.cluster.subclusters, self._sizes, strict=True):
            firsts = range(0, part.devices_per_node, size)
            found += part.nodes * [len(part.cards_of(range(each, each + size))) for each in firsts]
        return np.array(found)

    @functools.cached_property
    def flops(self) -> NDArray[np.float64]:
        """FLOP/s that each device's products reach."""
        return self._each([self._rate(part) for part in self.cluster.subclusters])

    def _rate(self, part: Subcluster) -> float:
        kind, size = part.kind, self.tensor.get(part.name, 1)
        if part.name in self.rates:
            return self.rates[part.name]
        if self.efficiency is None:
            return size * kind.product_flops(self.dtype)
        return size * self.efficiency * kind.flops(self.dtype)

    @functools.cached_property
    def memory_bandwidth(self) -> NDArray[np.float64]:
        """Bytes/s between each device and its memory."""
        own = [part.kind.memory_bandwidth for part in self.cluster.subclusters]
        return self.sizes * self._each(own)

    @functools.cached_property
    def memory(self) -> NDArray[np.float64]:
        """Bytes of each device that may be filled."""
        return self._each([self._usable(part) for part in self.cluster.subclusters])

    def _usable(self, part: Subcluster) -> float:
        """Bytes that may be filled, as the scheduler's model counts."""
        size = self.tensor.get(part.name, 1)
        usable = size * self.usable_memory * part.kind.memory_bytes
        return usable / self.more_held.get(part.name, 1.0)

    @functools.cached_property
    def host_memory(self) -> NDArray[np.float64]:
        """Bytes of its host's memory that each device may fill."""
        return self.sizes * self._each([host_share(part) for part in self.cluster.subclusters])

    @functools.cached_property
    def near_cost(self) -> NDArray[np.float64]:
        """Seconds of a byte between each device and others of its node."""
        return self._each([1 / part.intra_node.bandwidth for part in self.cluster.subclusters])

    @functools.cached_property
    def near_latency(self) -> NDArray[np.float64]:
        """Seconds before the first byte between each device and others of its node."""
        return self._each([part.intra_node.latency for part in self.cluster.subclusters])

    @functools.cached_property
    def far_cost(self) -> NDArray[np.float64]:
        """Seconds of a byte between nodes of every two subclusters, over one card of each."""
        return np.array([[1 / link.bandwidth for link in row] for row in self._far])

    @functools.cached_property
    def far_latency(self) -> NDArray[np.float64]:
        """Seconds before the first byte between nodes of every two subclusters."""
        return np.array([[link.latency for link in row] for row in self._far])

    @functools.cached_property
    def latencies(self) -> list[float]:
        """All latencies that links have."""
        return np.unique(np.append(self.far_latency, self.near_latency)).tolist()

    @functools.cached_property
    def _far(self):
        names = [part.name for part in self.cluster.subclusters]
        return [[self.cluster.link(a, b) for b in names] for a in names]

    @functools.cached_property
    def card_cost(self) -> NDArray[np.float64]:
        """Seconds of a byte through each device's network card, by its fastest link."""
        return self.far_cost.min(axis=1)[self.subcluster]

    def byte_seconds(self, some: Sequence[int], others: Sequence[int]) -> float:
        """Seconds of a byte between devices and others, over the slowest link.

        Args:
            some: the numbers of devices.
            others: those of others.
        """
        if len({*self.node[[*some]].tolist(), *self.node[[*others]].tolist()}) == 1:
            return float(self.near_cost[some[0]])
        own, theirs = (
            {*zip(self.subcluster[[*each]].tolist(), self.node[[*each]].tolist(), strict=True)}
            for each in (some, others)
        )
        return max(
            float(self.far_cost[part, other])
            for part, node in own
            for other, far in theirs
            if node != far
        )

    def name(self, device: int) -> str:
        """What messages call a device.

        Args:
            device: its number.

        Returns:
            Its subcluster, and its number there; of several, which they are.
        """
        subcluster, place = self.place(device)
        size = int(self.sizes[device])
        return f"{subcluster}[{place}]" if size == 1 else f"{subcluster}[{place}:{place + size}]"

    def place(self, device: int) -> tuple[str, int]:
        """Where a device is.

        Args:
            device: its number.

        Returns:
            The name of its subcluster, and its number there; of several, that of the first.
        """
        part = int(self.subcluster[device])
        first = int(np.searchsorted(self.subcluster, part))
        return self.cluster.subclusters[part].name, (device - first) * self._sizes[part]

    def of(self, part: Sequence[int]) -> tuple[int, ...] | None:
        """Some of the cluster's devices as devices that are used whole.

        Args:
            part: the numbers of the cluster's devices, ascending; of those that are lost, none.

        Returns:
            The numbers of the devices that they are, but for those of which something is lost; None
            where one is only in part among them, and the rest is elsewhere.
        """
        found, counts = np.unique(self.owners[[*part]], return_counts=True)
        lost = np.bincount(self.owners[[*self.lost]], minlength=self.num_devices)[found]
        missing = self.sizes[found] - counts
        return None if (missing > lost).any() else tuple(found[missing == 0].tolist())

    def _each(self, of_parts: list[float]) -> NDArray[np.float64]:
        """Figures of subclusters as figures of devices."""
        return np.array(of_parts, dtype=float)[self.subcluster]
