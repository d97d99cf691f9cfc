"""Even context splits: ring attention, Ulysses, and every legal USP mesh between them.

All devices have as many tokens and as many heads; what may be chosen is the mesh, and which devices
stand beside each other in it. They are the systems that a schedule is compared with, at their best.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.planner.hexiseq.apportion import apportion_tokens
from hetjax.planner.hexiseq.context_devices import ContextDevices
from hetjax.planner.hexiseq.context_work import ContextWork
from hetjax.planner.hexiseq.partitions import Members, Partition


@dataclass(frozen=True)
class EvenContext:
    """An even split.

    Args:
        ring: how many groups there are.
        exchange: how many devices share the heads of a group.
        partition: the groups.
    """

    ring: int
    exchange: int
    partition: Partition

    @property
    def system(self) -> str:
        """What is known by this: ring attention, Ulysses or USP."""
        if self.exchange == 1:
            return "ring"
        return "ulysses" if self.ring == 1 else "usp"

    def is_of(self, system: str) -> bool:
        """Whether it is known by a name; a device alone by that of Ulysses, too."""
        return system == self.system or (system == "ulysses" and self.ring == 1)

    def tokens(self, length: int) -> np.ndarray:
        """Tokens of each device, int64 [devices]."""
        return apportion_tokens(np.ones((1, self.ring * self.exchange)), length)[0]

    def heads(self, query_heads: int) -> np.ndarray:
        """Query heads of each device, int64 [devices]."""
        return np.full(self.ring * self.exchange, query_heads // self.exchange, np.int64)


def even_contexts(
    devices: ContextDevices, work: ContextWork, members: Members
) -> Iterator[EvenContext]:
    """All legal even splits among some devices, with these in several orders.

    A mesh is legal where as many devices as share heads divide all devices and the query heads, and
    where each group has a token.

    Args:
        devices: the cluster's devices.
        work: the model and its sequences.
        members: the devices in use, of each subcluster.

    Yields:
        The splits.

    Example:
        >>> from hetjax.mesh import Cluster, Link, Subcluster, kind
        >>> from hetjax.planner.hexiseq.context_work import transformer_work
        >>> near, far = Link(450e9, 5e-6), Link(25e9, 1e-5)
        >>> island = Subcluster("h100", kind("H100"), 1, 4, near, far)
        >>> devices = ContextDevices(Cluster("island", (island,)))
        >>> work = transformer_work(2**15, width=5120, layers=40, query_heads=40)
        >>> evens = even_contexts(devices, work, [(0, 1, 2, 3)])
        >>> sorted({(each.system, each.ring) for each in evens})
        [('ring', 4), ('ulysses', 1), ('usp', 2)]
    """
    everyone = np.array(list(itertools.chain(*members)))
    for exchange in range(1, len(everyone) + 1):
        ring = len(everyone) // exchange
        if len(everyone) % exchange or work.head_parts % exchange or ring > work.length:
            continue
        made = (
            partition
            for order in _orders(devices, everyone)
            for partition in _meshes(order, ring, exchange)
        )
        for partition in dict.fromkeys(made):
            yield EvenContext(ring, exchange, partition)


def _meshes(order: Sequence[int], ring: int, exchange: int) -> tuple[Partition, Partition]:
    """Groups of neighbours in an order, and groups of devices that are far apart in it."""
    near = (order[first : first + exchange] for first in range(0, len(order), exchange))
    apart = (order[first::ring] for first in range(ring))
    return tuple(tuple(sorted(of)) for of in near), tuple(tuple(sorted(of)) for of in apart)


def _orders(devices: ContextDevices, members: np.ndarray) -> Iterator[Sequence[int]]:
    """Orders of devices: as they are numbered, and by turns of the subclusters, or of the nodes."""
    yield members.tolist()
    for of in (devices.subcluster[members], devices.node[members]):
        place = np.zeros(len(members))
        for part in np.unique(of):
            own = np.flatnonzero(of == part)
            place[own] = (np.arange(len(own)) + 0.5) / len(own)
        yield members[np.lexsort((of, place))].tolist()
