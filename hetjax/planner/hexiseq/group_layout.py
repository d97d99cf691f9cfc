"""A partition of devices into groups in the order of the ring, as arrays over their devices.

Figures of devices are arrays of two dimensions: one row a candidate, one column a device, group by
group and in each node by node. So a few calls of NumPy cost many candidates at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.hexiseq.context_devices import ContextDevices

Floats = NDArray[np.float64]
Numbers = NDArray[np.intp]


class GroupLayout:
    """Groups of devices.

    Args:
        devices: the cluster's devices.
        groups: the devices of each group; within a group they are put in order of their numbers,
            and so node by node.

    Attributes:
        groups: the devices of each group, in order.
        order: all devices that are in groups, group by group.
        group: the group of each of them.
        starts: where each group begins among them.
        segments: where each run of devices of one group and one node begins.
        segment: the run of each device.
    """

    def __init__(self, devices: ContextDevices, groups: Sequence[Sequence[int]]):
        self.devices = devices
        self.groups = tuple(tuple(sorted(group)) for group in groups)
        self.order = np.array([device for group in self.groups for device in group])
        sizes = np.array([len(group) for group in self.groups])
        self.sizes = sizes
        self.group = np.repeat(np.arange(len(sizes)), sizes)
        self.starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
        node = devices.node[self.order]
        is_new = np.ones(len(node), bool)
        is_new[1:] = (node[1:] != node[:-1]) | (self.group[1:] != self.group[:-1])
        self.segments = np.flatnonzero(is_new)
        self.segment = np.cumsum(is_new) - 1
        self.segment_group = self.group[self.segments]

    @property
    def num_groups(self) -> int:
        """How many groups there are."""
        return len(self.groups)

    def of(self, figures: NDArray) -> NDArray:
        """Figures of all devices of the cluster, as those of this layout's columns."""
        return figures[self.order]

    @functools.cached_property
    def node(self) -> Numbers:
        """The node of each device."""
        return self.of(self.devices.node)

    @functools.cached_property
    def subcluster(self) -> Numbers:
        """The subcluster of each device."""
        return self.of(self.devices.subcluster)

    @functools.cached_property
    def card(self) -> Numbers:
        """The network card of each device, numbered among those that are in use."""
        return np.unique(self.of(self.devices.card), return_inverse=True)[1]

    @functools.cached_property
    def parts(self) -> tuple[Numbers, Numbers, Numbers]:
        """Where each run of devices of one group and one subcluster begins, and of which it is."""
        key = self.group * len(self.devices.cluster.subclusters) + self.subcluster
        starts = np.flatnonzero(np.concatenate(([True], key[1:] != key[:-1])))
        return starts, self.group[starts], self.subcluster[starts]

    @functools.cached_property
    def kinds(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Of each group what makes it like another: its runs of devices, by subcluster and size."""
        bounds = [*self.segments.tolist(), len(self.order)]
        found: list[list[tuple[int, ...]]] = [[] for _ in self.groups]
        for number, group in enumerate(self.segment_group.tolist()):
            part = int(self.subcluster[bounds[number]])
            found[group].append((part, bounds[number + 1] - bounds[number]))
        return tuple(tuple(each) for each in found)

    @functools.cached_property
    def types(self) -> Numbers:
        """The type of each group: groups of one type are alike."""
        known: dict[tuple[tuple[int, ...], ...], int] = {}
        return np.array([known.setdefault(each, len(known)) for each in self.kinds])

    @functools.cached_property
    def ring_byte_seconds(self) -> float:
        """Seconds of a byte around a ring of all devices, node by node: its slowest link counts.

        Each device of a member sends what it has, between nodes over its network card.
        """
        devices = self.devices
        _, first, place, counts = np.unique(
            self.node, return_index=True, return_inverse=True, return_counts=True
        )
        near = self.of(devices.near_cost) / self.of(devices.sizes)
        slowest = float(near[counts[place] > 1].max(initial=0.0))
        if len(first) == 1:
            return slowest
        parts, nodes = np.unique(self.subcluster[first], return_counts=True)
        far = devices.far_cost[np.ix_(parts, parts)]
        # No two nodes of a subcluster talk that has one.
        np.fill_diagonal(far, np.where(nodes > 1, far.diagonal(), 0.0))
        return max(slowest, float(far.max()) / float(self.of(devices.cards).min()))

    def group_max(self, figures: NDArray) -> NDArray:
        """The largest figure of each group's devices: [rows, groups]."""
        return np.maximum.reduceat(figures, self.starts, axis=1)

    def group_sum(self, figures: NDArray) -> NDArray:
        """The sum over each group's devices: [rows, groups]."""
        return np.add.reduceat(figures, self.starts, axis=1)


class Overlaps(NamedTuple):
    """Who hands keys and values on to whom around the ring, and of which heads.

    All fields are flat arrays over the pairs of all rows, in the order of the receivers.

    Args:
        row: the candidate.
        receiver: the column of the device that receives.
        sender: the column of the one in the group before.
        start: the first query head that both have.
        stop: the one after the last.
        firsts: where the pairs of each row and group begin.
    """

    row: Numbers
    receiver: Numbers
    sender: Numbers
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    firsts: Numbers


def overlaps(layout: GroupLayout, heads: NDArray[np.int64], query_heads: int) -> Overlaps:
    """Which devices of neighbouring groups have heads in common.

    In each group, devices have their heads in the layout's order.

    Args:
        layout: the groups.
        heads: how many query heads each device has, int64 [rows, devices]; of each row and group
            they add up to all.
        query_heads: how many there are.

    Returns:
        The pairs.
    """
    rows, columns = heads.shape
    count = layout.num_groups
    ends = np.cumsum(heads, axis=1)
    before = layout.group * query_heads
    stops = ends - before
    starts = stops - heads
    row_offset = np.arange(rows)[:, None] * (count * query_heads)
    flat_ends = (ends + row_offset).ravel()
    giver = ((layout.group - 1) % count) * query_heads + row_offset
    row, receiver = np.nonzero(heads)
    first = np.searchsorted(flat_ends, (giver + starts)[row, receiver], side="right")
    last = np.searchsorted(flat_ends, (giver + stops)[row, receiver] - 1, side="right")
    counts = last - first + 1
    total = np.cumsum(counts)
    place = np.repeat(np.arange(len(row)), counts)
    row, receiver = row[place], receiver[place]
    sender = first[place] + np.arange(total[-1]) - np.repeat(total - counts, counts)
    sender = sender - row * columns
    has_any = heads[row, sender] > 0
    row, receiver, sender = row[has_any], receiver[has_any], sender[has_any]
    key = row * count + layout.group[receiver]
    firsts = np.flatnonzero(np.concatenate(([True], key[1:] != key[:-1])))
    start = np.maximum(starts[row, receiver], starts[row, sender])
    stop = np.minimum(stops[row, receiver], stops[row, sender])
    return Overlaps(row, receiver, sender, start, stop, firsts)
