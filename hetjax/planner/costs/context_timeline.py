"""How long members that share the context take for a task: each computes, sends and waits.

No member waits for all others. It sends a value when its own part of it is there, goes on, and
waits for what it needs itself when it needs it; so one may be a turn of the ring ahead of another.
What passes one network card goes one after another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.mesh.cluster import Cluster
from hetjax.mesh.links import Link
from hetjax.planner.costs.crossing_ends import is_in_one_node
from hetjax.planner.costs.network_cards import card_bandwidth
from hetjax.planner.plan.stage_plan import Member
from hetjax.planner.work.context_items import ComputedRun, Item, Moved
from hetjax.planner.work.context_walk import Shares
from hetjax.planner.work.rates import TASK_SECONDS


@dataclass(frozen=True)
class MessageWay:
    """The way of messages from one member to another.

    Args:
        link: the link.
        cards: what they fill, by what tells it apart, in seconds for a byte.
    """

    link: Link
    cards: Mapping[Hashable, float]


@dataclass(frozen=True)
class MemberNetwork:
    """What carries messages among the members of a stage.

    Args:
        ways: by the places of who sends and who gets.
        byte_loads: seconds of computing that a byte costs each member, where devices see to
            transfers themselves.
        message_loads: the same of a message.
    """

    ways: Mapping[tuple[int, int], MessageWay]
    byte_loads: tuple[float, ...]
    message_loads: tuple[float, ...]


def network_among(cluster: Cluster, members: Sequence[Member]) -> MemberNetwork:
    """The links and network cards among the members of a stage.

    Args:
        cluster: the devices.
        members: the members.
    """
    subclusters = [cluster.subcluster(member.submesh.subcluster) for member in members]
    ways = {
        (a, b): _way(cluster, members, a, b)
        for a in range(len(members))
        for b in range(len(members))
        if a != b
    }
    return MemberNetwork(
        ways,
        tuple(each.transfer_load for each in subclusters),
        tuple(each.message_load for each in subclusters),
    )


def _way(cluster: Cluster, members: Sequence[Member], sender: int, receiver: int) -> MessageWay:
    source, target = members[sender].submesh, members[receiver].submesh
    link = cluster.link_between(source, target)
    lane: dict[Hashable, float] = {(sender, receiver): 1 / link.bandwidth}
    if is_in_one_node(cluster, source, target):
        own = {("out", sender): 1 / link.bandwidth, ("in", receiver): 1 / link.bandwidth}
        return MessageWay(link, {**lane, **own})
    for way, submesh in (("out", source), ("in", target)):
        cards = cluster.cards(submesh)
        byte = 1 / card_bandwidth(cluster, submesh) / len(cards)
        lane |= {(way, submesh.subcluster, *card): byte for card in cards}
    return MessageWay(link, lane)


@dataclass(frozen=True)
class Sent:
    """A message on its way.

    Args:
        sender: the place of the member that gives it.
        receiver: of the member that gets it.
        start: when it leaves.
        end: when it is there.
    """

    sender: int
    receiver: int
    start: float
    end: float


@dataclass(frozen=True)
class Played:
    """What a task takes.

    Args:
        ends: when each member is done.
        computing: what each computes itself, without what it waits for.
        spans: when each computes something, by member.
        sent: the messages.
    """

    ends: Shares
    computing: Shares
    spans: Sequence[Sequence[tuple[float, float]]] = ()
    sent: Sequence[Sent] = ()

    @property
    def seconds(self) -> float:
        """When all are done."""
        return float(self.ends.max())


def play(items: Sequence[Item], seconds: Sequence[Shares | None], network: MemberNetwork) -> Played:
    """Go through a task.

    A member's host goes ahead of its device: it starts programs and sends values in their order,
    and waits where the next one takes a value that has not come. A value that was computed leaves
    when it is computed.

    Args:
        items: what members compute and move, in turn.
        seconds: of each item that is computed what each member takes for it; None of moves.
        network: what carries the moves.

    Returns:
        What it takes.
    """
    clock = _Clock(network)
    for place, (item, taken) in enumerate(zip(items, seconds, strict=True)):
        if isinstance(item, Moved):
            clock.move(place, item)
        else:
            assert taken is not None
            if place and isinstance(items[place - 1], ComputedRun):
                clock.end_programs()
            clock.compute(place, item, taken)
    return clock.done()


class _Clock:
    def __init__(self, network: MemberNetwork):
        self._network, count = network, len(network.byte_loads)
        self._free: defaultdict[Hashable, float] = defaultdict(float)
        self._hosts, self._devices = [0.0] * count, [0.0] * count
        self._computing = [0.0] * count
        self._is_open = [False] * count
        # What has been sent and not taken yet: by member, in the order in which it is taken.
        self._awaited: list[dict[int, tuple[float, float]]] = [{} for _ in range(count)]
        self._made: list[dict[int, float]] = [{-1: 0.0} for _ in range(count)]
        self._spans: list[list[tuple[float, float]]] = [[] for _ in range(count)]
        self._sent: list[Sent] = []

    def compute(self, place: int, item: ComputedRun, seconds: Shares) -> None:
        """All compute what they have of something, as soon as it is there."""
        for member, own in enumerate(seconds.tolist()):
            if own:
                self._take(member, item.takes)
                self._work(member, own + TASK_SECONDS * (not self._is_open[member]))
                self._is_open[member] = True
            self._made[member][place] = self._devices[member]

    def end_programs(self) -> None:
        """All begin another program with what comes next."""
        self._is_open = [False] * len(self._is_open)

    def move(self, place: int, item: Moved) -> None:
        """Some send something, when they have it."""
        senders = {sender for sender, _ in item.messages}
        for member in senders:
            self._take(member, item.takes)
        ready = {m: max(self._hosts[m], self._made[m][item.made]) for m in senders}
        arrivals: dict[int, tuple[float, float]] = {}
        for (sender, receiver), size in item.messages.items():
            load = self._load(sender, size)
            self._work(sender, load)
            ready[sender] += load
            end = self._carry(sender, receiver, size, ready[sender])
            before, loads = arrivals.get(receiver, (0.0, 0.0))
            arrivals[receiver] = max(before, end), loads + self._load(receiver, size)
        for receiver, arrival in arrivals.items():
            self._awaited[receiver][place] = arrival
        for member in {each for pair in item.messages for each in pair}:
            self._is_open[member] = False

    def done(self) -> Played:
        """What it took, when all that was sent is there."""
        for member, awaited in enumerate(self._awaited):
            self._take(member, [*awaited])
        ends = np.maximum(self._hosts, self._devices)
        return Played(ends, np.array(self._computing), self._spans, self._sent)

    def _load(self, member: int, size: int) -> float:
        """What a message costs a member that sees to it itself."""
        return self._network.message_loads[member] + size * self._network.byte_loads[member]

    def _carry(self, sender: int, receiver: int, size: int, ready: float) -> float:
        way = self._network.ways[sender, receiver]
        start = max(ready, *(self._free[card] for card in way.cards))
        for card, byte in way.cards.items():
            self._free[card] = start + size * byte
        end = start + way.link.latency + size * max(1 / way.link.bandwidth, *way.cards.values())
        self._sent.append(Sent(sender, receiver, start, end))
        return end

    def _take(self, member: int, moves: Collection[int]) -> None:
        """Wait until moves are there, and what was awaited before them."""
        awaited = self._awaited[member]
        wanted = [place for place in moves if place in awaited]
        if not wanted:
            return
        last = max(wanted)
        for place in [each for each in awaited if each <= last]:
            arrival, load = awaited.pop(place)
            self._hosts[member] = max(self._hosts[member], arrival)
            self._work(member, load)

    def _work(self, member: int, seconds: float) -> None:
        """Have a member compute, once its host has come to it."""
        if not seconds:
            return
        start = max(self._devices[member], self._hosts[member])
        self._devices[member] = end = start + seconds
        self._computing[member] += seconds
        spans = self._spans[member]
        if spans and spans[-1][1] == start:
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, end))
