"""HexiSeq's own cost model, equations 2 to 12 as they stand.

What is off in it is ours to know: all groups wait for the slowest in every step of the ring, each
pair of devices has its link for itself, a mask changes nothing, keys and values have as many heads
as queries, two of six transfers around the ring are left out, and activations are those of one
layer. `ContextModel` has these otherwise.

Source: HexiSeq, section 4.2 and appendix A.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetjax.mesh.quantities import format_bytes
from hetjax.planner.hexiseq.context_devices import ContextDevices
from hetjax.planner.hexiseq.context_work import ContextWork
from hetjax.planner.hexiseq.costs_of_rows import Candidates, RowCosts, by_rows
from hetjax.planner.hexiseq.group_layout import Floats, GroupLayout, Numbers, overlaps

RETAINED = 2
"""Activations of a layer that are kept (the paper's gamma)."""

_CELLS = 500_000
"""How many numbers a table over rows, groups and steps has at most."""


class PaperModel:
    """The paper's model of a step.

    Where boundaries of heads are unlike, a device has several peers around the ring; the paper has
    one. Its message is then taken to come over the slowest of their links.

    Args:
        devices: the cluster's devices.
        work: the model and its sequences. The state is divided among all devices or whole, as it
            says; this is the paper's residency that no schedule changes.

    Example:
        >>> from hetjax.mesh import Cluster, Link, Subcluster, kind
        >>> from hetjax.planner.hexiseq.context_work import transformer_work
        >>> near, far = Link(450e9, 5e-6), Link(25e9, 1e-5)
        >>> island = Subcluster("h100", kind("H100"), 1, 2, near, far)
        >>> devices = ContextDevices(Cluster("island", (island,)), efficiency=0.5)
        >>> work = transformer_work(2**15, width=4096, layers=32, query_heads=32)
        >>> model = PaperModel(devices, work)
        >>> layout = GroupLayout(devices, [(0, 1)])
        >>> even = Candidates.one(np.array([2**14, 2**14]), np.array([16, 16]))
        >>> costs = model.costs(layout, even)
        >>> round(float(costs.seconds[0]), 2)
        3.61
    """

    def __init__(self, devices: ContextDevices, work: ContextWork):
        self.devices, self.work = devices, work
        width, batch, item = work.width, work.batch, work.item_bytes
        # Equations 4 to 6, for a token.
        computed = 72 * batch * width**2 / devices.flops
        moved = 40 * batch * width * item / devices.memory_bandwidth
        self.token_seconds = np.maximum(computed, moved)
        # Equation 11 over the rate: seconds of a query token, a key token and a head.
        self.head_seconds = 16 * batch * work.head_size / devices.flops
        self.exchanged = 3 * batch * work.head_size * item
        self.handed_on = 4 * batch * work.head_size * item

    def costs(self, layout: GroupLayout, candidates: Candidates) -> RowCosts:
        """Seconds of a step, and how full memory is.

        Args:
            layout: the groups.
            candidates: tokens and heads of its devices.

        Returns:
            Both, of every candidate.
        """
        tokens = candidates.tokens
        others = (tokens * layout.of(self.token_seconds)).max(axis=1)
        exchange = 4 * self._exchange(layout, tokens, candidates.all_heads)
        ring = self._ring(layout, layout.group_sum(tokens), candidates)
        passes = self.work.layers * self.work.rounds
        filled = self.memory(layout, candidates) / layout.of(self.devices.memory)
        return RowCosts(passes * (others + exchange + ring), filled.max(axis=1))

    def best(
        self, layout: GroupLayout, candidates: Candidates, below: float = np.inf
    ) -> tuple[int, float]:
        """The best candidate.

        Args:
            layout: the groups.
            candidates: tokens and heads of its devices.
            below: only a score under this is wanted.

        Returns:
            Its number and its score; where none is under `below`, any and no score under it.
        """
        scores = self.costs(layout, candidates).scores
        number = int(scores.argmin())
        return number, float(scores[number])

    def least_seconds(self, flops: float) -> float:
        """What a step takes devices if none ever waits: the FLOPs of equations 5 and 7.

        Args:
            flops: FLOP/s of all devices together.

        Returns:
            Seconds.
        """
        work = self.work
        attention = 16 * work.length * work.query_heads * work.head_size
        counted = work.batch * work.length * (72 * work.width**2 + attention)
        return work.layers * work.rounds * counted / flops

    def memory(self, layout: GroupLayout, candidates: Candidates) -> NDArray:
        """Bytes of each device: equation 3, and the state.

        Args:
            layout: the groups.
            candidates: tokens and heads of its devices.

        Returns:
            Bytes, [candidates, devices].
        """
        work, tokens, heads = self.work, candidates.tokens, candidates.all_heads
        length = layout.group_sum(tokens)[:, layout.group]
        kept = RETAINED * tokens * work.width + 2 * length * heads * work.head_size
        return self._state_bytes(layout) + work.batch * work.item_bytes * kept

    def memory_told(self, layout: GroupLayout, candidates: Candidates, column: int) -> str:
        """What a device holds, in words.

        Args:
            layout: the groups.
            candidates: tokens and heads of its devices, of which the first is told of.
            column: the device's place in the layout.

        Returns:
            Bytes, by what they are for.
        """
        total = self.memory(layout, candidates)[0, column]
        state = self._state_bytes(layout)
        return (
            f"{format_bytes(state)} of parameters, gradients and optimizer state, "
            f"{format_bytes(total - state)} of activations"
        )

    def _state_bytes(self, layout: GroupLayout) -> float:
        """Bytes of the state that a device holds."""
        members = len(layout.order) if self.work.divides_state else 1
        return self.work.parameters * self.work.state_bytes / members

    def _exchange(self, layout: GroupLayout, tokens: np.ndarray, heads: np.ndarray) -> np.ndarray:
        """Equation 9 but for its factor: the slowest message of all groups."""
        devices = self.devices
        near = _largest_products(layout, tokens, heads)
        part = layout.subcluster[layout.segments]
        has_pair = np.diff(np.append(layout.segments, len(layout.order))) > 1
        cost, latency = devices.near_cost, devices.near_latency
        first = layout.order[layout.segments]
        times = latency[first] + cost[first] * self.exchanged * near
        slowest = np.where(has_pair, times, 0.0).max(axis=1)
        senders, receivers = _node_pairs(layout)
        if len(senders):
            most = np.maximum.reduceat(tokens, layout.segments, axis=1)
            widest = np.maximum.reduceat(heads, layout.segments, axis=1)
            ends = part[senders], part[receivers]
            volume = self.exchanged * most[:, senders] * widest[:, receivers]
            far = devices.far_latency[ends] + devices.far_cost[ends] * volume
            slowest = np.maximum(slowest, far.max(axis=1))
        return slowest

    def _ring(self, layout: GroupLayout, lengths: np.ndarray, candidates: Candidates) -> Floats:
        """The sum of equation 12 over all steps."""
        count, of = layout.num_groups, candidates.division
        rate = layout.group_max(candidates.heads * layout.of(self.head_seconds))[of]
        if count == 1:
            return rate[:, 0] * lengths[:, 0].astype(float) ** 2
        links = [each.of(of) for each in self._links(layout, candidates.heads)]
        alike = (lengths == lengths[:, :1]).all(axis=1)
        found = np.empty(len(lengths))
        if alike.any():
            length = lengths[alike, :1].astype(float)
            computed = (rate[alike] * length**2).max(axis=1)
            each = [link.of(alike) for link in links]
            sent = np.max([link.latency + link.token_seconds * length for link in each], axis=0)
            found[alike] = computed + (count - 1) * np.maximum(computed, sent.max(axis=1))
        for rows in by_rows(np.flatnonzero(~alike), _CELLS // count**2):
            own = lengths[rows].astype(float)
            # Of each group the source of its last step, then of the one before, up to the first.
            twice = np.concatenate((own, own), axis=1)[:, 1:]
            source = np.lib.stride_tricks.sliding_window_view(twice, count, axis=1)
            times = (rate[rows] * own)[:, :, None] * source
            for link in (link.of(rows) for link in links):
                sent = link.token_seconds[:, :, None] * source[:, :, :-1]
                sent += link.latency[:, :, None]
                np.maximum(times[:, :, :-1], sent, out=times[:, :, :-1])
            found[rows] = times.max(axis=1).sum(axis=1)
        return found

    def _links(self, layout: GroupLayout, heads: np.ndarray) -> list[_RingLink]:
        """What the slowest message to each group takes, over links of each latency."""
        devices = self.devices
        pairs = overlaps(layout, heads, self.work.query_heads)
        receiver, sender = pairs.receiver, pairs.sender
        is_near = layout.node[receiver] == layout.node[sender]
        ends = layout.subcluster[sender], layout.subcluster[receiver]
        cost = np.where(is_near, layout.of(devices.near_cost)[receiver], devices.far_cost[ends])
        wait = np.where(
            is_near, layout.of(devices.near_latency)[receiver], devices.far_latency[ends]
        )
        amount = cost * heads[pairs.row, receiver] * self.handed_on
        found = []
        for latency in devices.latencies:
            most = np.maximum.reduceat(np.where(wait == latency, amount, 0.0), pairs.firsts)
            most = most.reshape(len(heads), -1)
            found.append(_RingLink(np.where(most > 0, latency, 0.0), most))
        return found


class _RingLink(NamedTuple):
    """What the slowest message to each group takes over links of one latency; 0 for none.

    Args:
        latency: seconds before the first byte, [rows, groups].
        token_seconds: seconds for a token of the source, [rows, groups].
    """

    latency: Floats
    token_seconds: Floats

    def of(self, rows: np.ndarray) -> _RingLink:
        """Those of some rows."""
        return _RingLink(self.latency[rows], self.token_seconds[rows])


def _largest_products(layout: GroupLayout, tokens: np.ndarray, heads: np.ndarray) -> Floats:
    """The largest product of one device's tokens and another's heads, of each group and node."""
    bounds = np.append(layout.segments, len(layout.order))
    width = int(np.diff(bounds).max())
    columns = layout.segments[:, None] + np.arange(width)
    is_there = columns < bounds[1:, None]
    columns = np.where(is_there, columns, 0)
    first, second = (
        _two_largest(np.where(is_there, each[:, columns], 0)) for each in (tokens, heads)
    )
    apart = first.place != second.place
    crossed = np.maximum(first.most * second.next, first.next * second.most)
    return np.where(apart, first.most * second.most, crossed).astype(float)


class _Largest(NamedTuple):
    """The largest number, its place, and the one after it."""

    most: np.ndarray
    place: np.ndarray
    next: np.ndarray


def _two_largest(numbers: np.ndarray) -> _Largest:
    """Of each row of the last dimension."""
    place = numbers.argmax(axis=-1)
    most = numbers.max(axis=-1)
    others = np.where(np.arange(numbers.shape[-1]) == place[..., None], 0, numbers)
    return _Largest(most, place, others.max(axis=-1))


def _node_pairs(layout: GroupLayout) -> tuple[Numbers, Numbers]:
    """All pairs of runs of devices in one group and two nodes: of the senders, of the receivers."""
    group = layout.segment_group
    counts = np.bincount(group)[group]
    senders = np.repeat(np.arange(len(group)), counts)
    begins = np.searchsorted(group, group)
    total = np.cumsum(counts)
    within = np.arange(total[-1]) - np.repeat(total - counts, counts)
    receivers = np.repeat(begins, counts) + within
    is_pair = senders != receivers
    return senders[is_pair], receivers[is_pair]
