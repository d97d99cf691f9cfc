"""Our cost model of a context split: asynchronous, causal, with shared network cards.

A layer's pass is: what does not attend, by a device's tokens; the exchange of tokens for heads;
the ring; and the exchange back. Layers are made again in the backward pass, with all they send.
Whatever crosses a node's border shares the network card of its devices with all else that does so
at the time, of all groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetjax.mesh.host_links import link_to_host
from hetjax.planner.hexiseq.context_devices import ContextDevices
from hetjax.planner.hexiseq.context_links import HeadExchange, RingLinks
from hetjax.planner.hexiseq.context_pace import ContextPace
from hetjax.planner.hexiseq.context_work import ACTIVATION_TRAFFIC, ContextWork
from hetjax.planner.hexiseq.costs_of_rows import Candidates, RowCosts, by_rows
from hetjax.planner.hexiseq.group_layout import Floats, GroupLayout, Numbers
from hetjax.planner.hexiseq.ring_timeline import earliest_ends, ring_ends
from hetjax.planner.hexiseq.split_memory import GRADIENT_BYTES, ContextMemory, context_memory

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
"""Products of an attention's passes; the backward one makes the scores again."""

_NOTHING = 1e-30
"""Seconds that stand for none, where something is divided by them."""

AT_ONCE = 2048
"""Of how many groups of candidates timelines are made at once, until those left cannot be better.
Fewer would not be quicker."""


@dataclass(frozen=True)
class ContextLayerTimes:
    """Seconds of a layer, each [rows].

    Args:
        forward: its forward pass.
        backward: its backward pass, but for what is made again.
        others: of both, what does not attend, on the slowest device.
        attention: of both, what attends, on the slowest device.
        exchange: of both, the exchanges of the slowest group.
        cards: of both and what is made again, for how long the busiest network card or link of a
            device is in use, layers that are gathered among it.
        total: of a layer in a step.
    """

    forward: Floats
    backward: Floats
    others: Floats
    attention: Floats
    exchange: Floats
    cards: Floats
    total: Floats


class DeviceSeconds(NamedTuple):
    """For how long devices compute in a step, each [candidates, devices].

    Args:
        attention: what attends.
        others: all else.
    """

    attention: Floats
    others: Floats


class ContextModel:
    """What a step takes by our model.

    Args:
        devices: the cluster's devices.
        work: the model and its sequences.
        paces: what devices take, by subcluster; by their figures and the work's unless given.

    Example:
        >>> from hetjax.mesh import Cluster, Link, Subcluster, kind
        >>> from hetjax.planner.hexiseq.context_work import transformer_work
        >>> near, far = Link(450e9, 5e-6), Link(25e9, 1e-5)
        >>> island = Subcluster("h100", kind("H100"), 1, 2, near, far)
        >>> devices = ContextDevices(Cluster("island", (island,)), efficiency=0.5)
        >>> work = transformer_work(2**15, width=4096, layers=32, query_heads=32)
        >>> model = ContextModel(devices, work)
        >>> layout = GroupLayout(devices, [(0, 1)])
        >>> even = Candidates.one(np.array([2**14, 2**14]), np.array([16, 16]))
        >>> costs = model.costs(layout, even)
        >>> round(float(costs.seconds[0]), 1), round(float(costs.filled[0]), 2)
        (3.0, 0.85)
    """

    def __init__(
        self,
        devices: ContextDevices,
        work: ContextWork,
        paces: Mapping[str, ContextPace] | None = None,
    ):
        self.devices, self.work, self.paces = devices, work, paces
        self._passes = 2 if work.is_recomputed else 1
        self._more = GRADIENT_BYTES / work.item_bytes
        if paces is not None:
            self._told_by(paces)
            return
        weights = work.layer_parameters * work.sent_weight_bytes
        self._weight_seconds = weights / devices.memory_bandwidth
        self._token_flops = work.batch * work.token_flops / devices.flops
        traffic = ACTIVATION_TRAFFIC * work.batch * work.width * work.item_bytes
        self._token_traffic = traffic / devices.memory_bandwidth
        self._backward = np.full(devices.num_devices, 2.0)
        pair = 2 * work.head_size * work.batch / (2 if work.is_causal else 1) / devices.flops
        self._pairs = FORWARD_PRODUCTS * pair, BACKWARD_PRODUCTS * pair
        self._logit_seconds = work.batch * work.logit_flops / devices.flops

    def _told_by(self, paces: Mapping[str, ContextPace]) -> None:
        """What devices take by their paces; the weights are read among that."""
        parts = [paces[part.name] for part in self.devices.cluster.subclusters]

        def each(field: str) -> Floats:
            return np.array([getattr(of, field) for of in parts])[self.devices.subcluster]

        self._weight_seconds = self._token_traffic = np.zeros(self.devices.num_devices)
        self._token_flops = each("token_forward")
        self._backward = each("token_backward") / np.maximum(self._token_flops, _NOTHING)
        self._pairs = each("pair_forward"), each("pair_backward")
        self._logit_seconds = each("logit")

    def _state_seconds(self, layout: GroupLayout) -> tuple[float, float]:
        """What sending weights and gradients takes: of a layer in a pass, and once a step."""
        work, members = self.work, len(layout.order)
        sent = work.sent_weight_bytes * (members - 1) / members * layout.ring_byte_seconds
        if not work.divides_state:
            # Offloaded state comes and goes once a step.
            away = work.parameters * work.offloaded_bytes / members
            copied = 2 * away * self._host_byte_seconds(layout) if away else 0.0
            return 0.0, 2 * work.parameters * sent + copied
        # Weights are gathered for each pass, and gradients are added up once.
        return (self._passes + 1) * work.layer_parameters * sent, 0.0

    def _host_byte_seconds(self, layout: GroupLayout) -> float:
        """What a byte takes from a device to its host, over the slowest of their links.

        Each device of a member has its own.
        """
        parts = self.devices.cluster.subclusters
        pairs = set(zip(layout.subcluster.tolist(), layout.of(self.devices.sizes), strict=True))
        return max(1 / (size * link_to_host(parts[each]).bandwidth) for each, size in pairs)

    def _hosts_filled(self, layout: GroupLayout) -> float:
        """How full the memory of the hosts is in which state waits, of the fullest."""
        if not self.work.offloaded_bytes:
            return 0.0
        away = self.work.parameters * self.work.offloaded_bytes / len(layout.order)
        return away / float(np.maximum(layout.of(self.devices.host_memory), _NOTHING).min())

    def costs(self, layout: GroupLayout, candidates: Candidates) -> RowCosts:
        """Seconds of a step, and how full memory is.

        Args:
            layout: the groups.
            candidates: tokens and heads of its devices.

        Returns:
            Both, of every candidate.
        """
        parts = self._parts(layout, candidates)
        layers = self._layer(parts, np.arange(len(candidates.tokens))).total
        return RowCosts(self._step(parts, layers), parts.filled)

    def best(
        self, layout: GroupLayout, candidates: Candidates, below: float = np.inf
    ) -> tuple[int, float]:
        """The best candidate; the timelines of those that cannot be it are not made.

        Args:
            layout: the groups.
            candidates: tokens and heads of its devices.
            below: only a score under this is wanted.

        Returns:
            Its number and its score; where none is under `below`, any and no score under it.
        """
        parts = self._parts(layout, candidates)
        bounds = RowCosts(self._step(parts, parts.bound), parts.filled).scores
        best, least = int(bounds.argmin()), below
        for rows in by_rows(np.argsort(bounds, kind="stable"), AT_ONCE // layout.num_groups):
            if bounds[rows[0]] >= least:
                break
            seconds = self._step(parts, self._layer(parts, rows).total, rows)
            found = RowCosts(seconds, parts.filled[rows]).scores
            place = int(found.argmin())
            if found[place] < least:
                best, least = int(rows[place]), float(found[place])
        return best, least

    def least_seconds(self, flops: float) -> float:
        """What a step takes devices if none ever waits.

        Args:
            flops: FLOP/s of all devices together.

        Returns:
            Seconds.
        """
        return work_flops(self.work) / flops

    def once_seconds(self, layout: GroupLayout) -> float:
        """What devices take once a step, however many sequences it has.

        Args:
            layout: the groups.

        Returns:
            Seconds, which `costs` counts among those of the step.
        """
        return self._state_seconds(layout)[1]

    def memory(self, layout: GroupLayout, candidates: Candidates) -> NDArray:
        """Bytes of each device.

        Args:
            layout: the groups.
            candidates: tokens and heads of its devices.

        Returns:
            Bytes, [candidates, devices].
        """
        return self.memory_parts(layout, candidates).total

    def memory_parts(self, layout: GroupLayout, candidates: Candidates) -> ContextMemory:
        """The same, by what it is for.

        Args:
            layout: the groups.
            candidates: tokens and heads of its devices.

        Returns:
            Bytes, [candidates, devices] each.
        """
        ring = RingLinks(self.devices, self.work, layout, candidates.heads)
        return context_memory(self.work, layout, candidates, ring.copies)

    def memory_told(self, layout: GroupLayout, candidates: Candidates, column: int) -> str:
        """What a device holds, in words.

        Args:
            layout: the groups.
            candidates: tokens and heads of its devices, of which the first is told of.
            column: the device's place in the layout.

        Returns:
            Bytes, by what they are for.
        """
        return self.memory_parts(layout, candidates).told(0, column)

    def layer_times(self, layout: GroupLayout, candidates: Candidates) -> ContextLayerTimes:
        """What a layer takes, and of what that is made.

        Args:
            layout: the groups.
            candidates: tokens and heads of its devices.

        Returns:
            Seconds, [candidates] each.
        """
        parts = self._parts(layout, candidates)
        return self._layer(parts, np.arange(len(candidates.tokens)))

    def device_seconds(self, layout: GroupLayout, candidates: Candidates) -> DeviceSeconds:
        """For how long each device computes in a step, with what is made again.

        Args:
            layout: the groups.
            candidates: tokens and heads of its devices.

        Returns:
            Seconds, of what attends and of all else.
        """
        work, tokens = self.work, candidates.tokens.astype(float)
        lengths = layout.group_sum(tokens)[:, layout.group]
        forward, backward = map(layout.of, self._pairs)
        heads = candidates.all_heads.astype(float)
        pairs = heads * lengths * work.length * (self._passes * forward + backward)
        flops, traffic = (tokens * layout.of(e) for e in (self._token_flops, self._token_traffic))
        others = np.maximum(flops, traffic + layout.of(self._weight_seconds))
        passes = self._passes + layout.of(self._backward)
        logits = tokens * layout.of(self._logit_seconds)
        return DeviceSeconds(
            work.rounds * work.layers * pairs,
            work.rounds * (work.layers * passes * others + logits),
        )

    def _step(self, parts: _Parts, layers: Floats, rows: Numbers | None = None) -> Floats:
        """Seconds of a step whose layers take so long."""
        logits = parts.logits if rows is None else parts.logits[rows]
        rounds = self.work.rounds * (self.work.layers * layers + logits)
        return rounds + parts.once

    def _parts(self, layout: GroupLayout, candidates: Candidates) -> _Parts:
        devices, work = self.devices, self.work
        tokens, of = candidates.tokens, candidates.division
        products = tokens * layout.of(self._token_flops)
        traffic = tokens * layout.of(self._token_traffic) + layout.of(self._weight_seconds)
        of_devices = np.maximum(products, traffic)
        others = layout.group_max(of_devices)
        others_back = layout.group_max(layout.of(self._backward) * of_devices)
        lengths = layout.group_sum(tokens).astype(float)
        ways = (layout.group_max(candidates.heads * layout.of(each))[of] for each in self._pairs)
        block, block_back = (each * lengths for each in ways)
        ring = RingLinks(devices, work, layout, candidates.heads)
        columns = candidates.heads + 2 * ring.copies
        inward = HeadExchange(devices, work, layout, tokens, columns[of])
        outward = HeadExchange(devices, work, layout, tokens, candidates.all_heads)
        memory = context_memory(work, layout, candidates, ring.copies).total
        passes, hop = self._passes, ring.token_seconds[of]
        around = hop.max(axis=1) * (work.length - lengths.min(axis=1))
        gathered, once = self._state_seconds(layout)
        busy = (passes + 1) * (inward.busy + outward.busy) + gathered
        busy = busy + (passes + 1 + self._more) * around
        latency = ring.latency[of]
        more = self._more * hop
        forward = others + inward.seconds, block, hop
        backward = others_back + outward.seconds, block_back, hop + more
        bound = passes * (earliest_ends(*forward, latency, lengths) + outward.seconds).max(axis=1)
        bound += (earliest_ends(*backward, latency, lengths) + inward.seconds).max(axis=1)
        return _Parts(
            others=others,
            others_back=others_back,
            block=block,
            block_back=block_back,
            lengths=lengths,
            inward=inward.seconds,
            outward=outward.seconds,
            hop=hop,
            latency=latency,
            busy=busy,
            once=once,
            bound=np.maximum(bound, busy),
            logits=(tokens * layout.of(self._logit_seconds)).max(axis=1),
            filled=np.maximum(
                (memory / layout.of(devices.memory)).max(axis=1), self._hosts_filled(layout)
            ),
        )

    def _layer(self, parts: _Parts, rows: Numbers) -> ContextLayerTimes:
        """The timelines of some candidates."""
        lengths, others, back = parts.lengths[rows], parts.others[rows], parts.others_back[rows]
        block, block_back = parts.block[rows], parts.block_back[rows]
        hop, latency = parts.hop[rows], parts.latency[rows]
        inward, outward = parts.inward[rows], parts.outward[rows]
        ends = ring_ends(others + inward, block, hop, latency, lengths)
        forward = (ends + outward).max(axis=1)
        # Gradients of keys and values follow on the same links, and the last come home after all.
        more = self._more * hop
        ends = ring_ends(back + outward, block_back, hop + more, latency, lengths)
        if lengths.shape[1] > 1:
            ends = np.maximum(ends, np.roll(ends, 1, axis=1) + latency + more * lengths)
        backward = (ends + inward).max(axis=1)
        return ContextLayerTimes(
            forward=forward,
            backward=backward,
            others=(others + back).max(axis=1),
            attention=self.work.length * (block + block_back).max(axis=1),
            exchange=2 * (inward + outward).max(axis=1),
            cards=parts.busy[rows],
            total=np.maximum(self._passes * forward + backward, parts.busy[rows]),
        )


def work_flops(work: ContextWork) -> float:
    """FLOPs of products in a step, with those of layers that are made again.

    Args:
        work: the model and its sequences.
    """
    passes = 2 if work.is_recomputed else 1
    products = passes * FORWARD_PRODUCTS + BACKWARD_PRODUCTS
    seen = work.length / (2 if work.is_causal else 1)
    attention = products * 2 * work.head_size * work.query_heads * seen
    layers = work.layers * ((passes + 2) * work.token_flops + attention)
    return work.sequences * work.length * (layers + work.logit_flops)


class _Parts(NamedTuple):
    """Of what the timelines of candidates are made.

    Args:
        others: what does not attend, of a forward pass, [rows, groups].
        others_back: the same of a backward pass.
        block: what a key token takes in a forward pass, [rows, groups].
        block_back: the same in a backward pass.
        lengths: tokens, [rows, groups].
        inward: the exchange of queries, keys and values, [rows, groups].
        outward: the exchange of outputs, [rows, groups].
        hop: what a key token takes to a group, [rows, groups].
        latency: seconds before a block's first byte, [rows, groups].
        busy: for how long the busiest link is in use, [rows].
        once: what is sent once a step.
        bound: what a layer takes at least, [rows].
        logits: what the logits take, [rows].
        filled: how full memory is, [rows].
    """

    others: Floats
    others_back: Floats
    block: Floats
    block_back: Floats
    lengths: Floats
    inward: Floats
    outward: Floats
    hop: Floats
    latency: Floats
    busy: Floats
    once: float
    bound: Floats
    logits: Floats
    filled: Floats
