"""What exchanges and rings take on links; all that crosses a node's border shares its card."""

from __future__ import annotations

import numpy as np

from hetjax.planner.hexiseq.context_devices import ContextDevices
from hetjax.planner.hexiseq.context_work import ContextWork
from hetjax.planner.hexiseq.group_layout import Floats, GroupLayout, Numbers, overlaps


class RingLinks:
    """What goes round for a token of the source, whatever the lengths of groups are.

    Args:
        devices: the cluster's devices.
        work: the model and its sequences.
        layout: the groups.
        heads: query heads of each device, [divisions, devices].

    Attributes:
        copies: heads of keys and values that each device attends with, [rows, devices]: one that
            its sub-rings divide counts for each of them.
        token_seconds: what a token takes to each group, on the slowest link, [rows, groups].
        latency: seconds before the first byte, [rows, groups].
    """

    def __init__(
        self, devices: ContextDevices, work: ContextWork, layout: GroupLayout, heads: np.ndarray
    ):
        rows = len(heads)
        served = work.heads_per_key_value
        stops = np.cumsum(heads, axis=1) - layout.group * work.query_heads
        starts = stops - heads
        has_any = heads > 0
        needed = (stops - 1) // served - starts // served + 1
        count = layout.num_groups
        if count == 1:
            self.copies = np.where(has_any, needed, 0)
            self.token_seconds = self.latency = np.zeros((rows, 1))
            return
        cuts = np.zeros((rows, work.query_heads), bool)
        cuts[:, ::served] = True
        row, column = np.nonzero(has_any)
        cuts[row, starts[row, column]] = True
        passed = np.cumsum(cuts, axis=1)
        found = np.zeros_like(heads)
        own_starts, own_stops = starts[row, column], stops[row, column]
        found[row, column] = passed[row, own_stops - 1] - passed[row, own_starts] + 1
        self.copies = found
        self._links(devices, work, layout, heads, passed)

    def _links(
        self,
        devices: ContextDevices,
        work: ContextWork,
        layout: GroupLayout,
        heads: np.ndarray,
        passed: np.ndarray,
    ) -> None:
        rows, columns = heads.shape
        pairs = overlaps(layout, heads, work.query_heads)
        row, receiver, sender = pairs.row, pairs.receiver, pairs.sender
        copies = passed[row, pairs.stop - 1] - passed[row, pairs.start] + 1
        num_bytes = 2.0 * copies * (work.batch * work.head_size * work.item_bytes)
        ends = layout.subcluster[sender], layout.subcluster[receiver]
        is_near = layout.node[receiver] == layout.node[sender]
        near = np.where(is_near, num_bytes * layout.of(devices.near_cost)[receiver], 0.0)
        far = np.where(is_near, 0.0, num_bytes * devices.far_cost[ends])
        taken = _added(near, row * columns + receiver)
        given = _added(near, row * columns + sender)
        cards = int(layout.card.max()) + 1
        into = _added(far, row * cards + layout.card[receiver])
        out = _added(far, row * cards + layout.card[sender])
        seconds = np.where(is_near, np.maximum(taken, given), np.maximum(into, out))
        wait = np.where(
            is_near, layout.of(devices.near_latency)[receiver], devices.far_latency[ends]
        )
        shape = (rows, layout.num_groups)
        self.token_seconds = np.maximum.reduceat(seconds, pairs.firsts).reshape(shape)
        self.latency = np.maximum.reduceat(wait, pairs.firsts).reshape(shape)


class HeadExchange:
    """An exchange between those that have tokens and those that have heads, of all groups at once.

    The way back takes as long: what was sent is received.

    Args:
        devices: the cluster's devices.
        work: the model and its sequences.
        layout: the groups.
        tokens: of each device, [rows, devices].
        columns: how many heads, of queries, keys and values, each device gets, [rows, devices].

    Attributes:
        seconds: of each group, [rows, groups].
        busy: for how long the busiest link is in use, [rows].
    """

    def __init__(
        self,
        devices: ContextDevices,
        work: ContextWork,
        layout: GroupLayout,
        tokens: np.ndarray,
        columns: np.ndarray,
    ):
        sides = (
            _Side(layout, tokens.astype(float)),
            _Side(layout, columns * float(work.batch * work.head_size * work.item_bytes)),
        )
        (given, taken), near = sides, layout.of(devices.near_cost)
        seconds = near * np.maximum(given.own * taken.beside, taken.own * given.beside)
        is_shared = layout.sizes > 1
        latency = np.where(is_shared, layout.group_max(layout.of(devices.near_latency)[None]), 0.0)
        is_far = np.bincount(layout.segment_group) > 1
        if is_far.any():
            cost = devices.far_cost
            out, into = given.own * taken.far(cost), taken.own * given.far(cost)
            card = np.maximum(_by_card(layout, out), _by_card(layout, into))
            seconds = np.maximum(seconds, np.where(is_far[layout.group], card, 0.0))
            wait = layout.group_max(devices.far_latency.max(axis=1)[layout.subcluster][None])
            latency = np.where(is_far, np.maximum(latency, wait), latency)
        self.seconds = layout.group_max(seconds) + latency
        self.busy = seconds.max(axis=1)


class _Side:
    """What devices have on one side of an exchange, and what all others of their groups have.

    Attributes:
        own: of each device, [rows, devices].
        beside: of the others of its group and node.
    """

    def __init__(self, layout: GroupLayout, own: Floats):
        self._layout, self.own = layout, own
        self._of_node = np.add.reduceat(own, layout.segments, axis=1)[:, layout.segment]
        self.beside = self._of_node - own

    def far(self, cost: Floats) -> Floats:
        """What those of its group on other nodes have, times what a byte between them costs."""
        layout = self._layout
        starts, group, part = layout.parts
        of_parts = np.zeros((len(self.own), layout.num_groups, len(cost)))
        of_parts[:, group, part] = np.add.reduceat(self.own, starts, axis=1)
        own = layout.subcluster
        return (of_parts @ cost)[:, layout.group, own] - self._of_node * cost[own, own]


def _by_card(layout: GroupLayout, seconds: Floats) -> Floats:
    """What all devices of each device's network card have together, [rows, devices]."""
    rows = np.arange(len(seconds))[:, None] * (int(layout.card.max()) + 1)
    keys = (rows + layout.card).ravel()
    return _added(seconds.ravel(), keys).reshape(seconds.shape)


def _added(amounts: Floats, keys: Numbers) -> Floats:
    """For each key the sum of the amounts that have it."""
    return np.bincount(keys, weights=amounts).astype(float)[keys]
