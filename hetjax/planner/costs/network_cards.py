"""What transfers take where one network card carries those of several neighbours."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.planner.costs.crossing_ends import (
    CrossingPart,
    End,
    crossing_parts,
    joined_link,
    transfer_link,
)

Card = tuple[str, int, int, str]
"""A direction of a network card: subcluster, node, its number there, and "out" or "in"."""


@dataclass(frozen=True)
class _Transfer:
    """One microbatch's values on their way from a stage to its neighbour.

    Args:
        seconds: what they take where nothing else is on the way.
        carried: of these, what the link is filled for; the rest is latency.
        cards: for how many seconds they fill each card that they pass.
        lane: from which devices to which; on one lane transfers wait for one another.
    """

    seconds: float
    carried: float
    cards: dict[Card, float]
    lane: tuple[End, End]


def with_shared_cards(
    times: StepTimes,
    cluster: Cluster,
    stages: Sequence[SubMesh | End],
    sharing: Sequence[Sequence[int]] = (),
) -> StepTimes:
    """Lengthen a pipeline's transfers by what else their nodes send and receive.

    What a stage sends to those before and after it leaves its nodes through the network cards of
    its devices, in equal parts, and what it receives comes in through them. In the time from one
    microbatch to the next, the pace, every transfer is made once, and has what the others leave of
    the card: one that takes a seconds by itself, beside others of b seconds, takes
    a / (1 - b / pace); that is all of the pace where the card is never idle. A card is as fast as
    the fastest link of its subcluster; where a node has several, those of unlike stages do not
    meet.

    Args:
        times: of tasks, and of transfers that have their link for themselves.
        cluster: the cluster.
        stages: where the stages are: on a submesh, or on several that share the examples.
        sharing: groups of stages that share devices. From one microbatch to the next these do the
            work of all of them; and what goes the same way for several of them does so in turn,
            which is the timeline's to tell.

    Returns:
        The times, the same but for transfers that share a card.
    """
    return with_cards_of_all([PipelineTimes(times, stages, sharing)], cluster)[0]


@dataclass(frozen=True)
class PipelineTimes:
    """What the tasks and transfers of a pipeline take; see `with_shared_cards`.

    Args:
        times: of tasks, and of transfers that have their link for themselves.
        stages: where the stages are.
        sharing: groups of stages that share devices.
    """

    times: StepTimes
    stages: Sequence[SubMesh | End]
    sharing: Sequence[Sequence[int]] = ()


def with_cards_of_all(pipelines: Sequence[PipelineTimes], cluster: Cluster) -> list[StepTimes]:
    """Lengthen the transfers of pipelines that train side by side.

    What those of one have of a card, the others have not. Where all of them together want more than
    it carries, each is at a pace by so much slower.

    Args:
        pipelines: what their tasks and transfers take.
        cluster: the cluster.

    Returns:
        The times of each, the same but for transfers that share a card.
    """
    loads = [_Load.of(each, cluster) for each in pipelines]
    wanted: Counter[Card] = Counter()
    for load in loads:
        wanted.update(load.used())
    slower = [
        replace(load, pace=load.pace * max([1.0, *(wanted[card] for card in load.used())]))
        if len(loads) > 1
        else load
        for load in loads
    ]
    return [load.beside([other for other in slower if other is not load]) for load in slower]


@dataclass(frozen=True)
class _Load:
    """What a pipeline's transfers want of network cards, from one microbatch to the next.

    Args:
        times: what tasks and transfers take by themselves.
        there: the transfers to the stages after.
        back: those to the stages before.
        filled: for how many seconds they fill each card.
        lanes: all transfers from some devices to others, together.
        pace: the time from one microbatch to the next, in which every transfer is made once.
    """

    times: StepTimes
    there: Sequence[_Transfer]
    back: Sequence[_Transfer]
    filled: Counter[Card]
    lanes: dict[tuple[End, End], _Lane]
    pace: float

    @classmethod
    def of(cls, pipeline: PipelineTimes, cluster: Cluster) -> _Load:
        """That of a pipeline."""
        times, stages = pipeline.times, pipeline.stages
        ends: list[End] = [((s, 1.0),) if isinstance(s, SubMesh) else s for s in stages]
        pairs = list(itertools.pairwise(ends))
        there = [
            _transfer(cluster, _parts(cluster, a, b), each, (a, b))
            for each, (a, b) in zip(times.sends, pairs, strict=True)
        ]
        back = [
            _transfer(cluster, _parts(cluster, b, a), each, (b, a))
            for each, (a, b) in zip(times.returns, pairs, strict=True)
        ]
        filled: Counter[Card] = Counter()
        lanes: dict[tuple[End, End], _Lane] = {}
        for transfer in (*there, *back):
            filled.update(transfer.cards)
            lane = lanes.setdefault(transfer.lane, _Lane())
            lane.cards.update(transfer.cards)
            lane.carried += transfer.carried
        computed = list(times.compute)
        rows = [sum(computed[stage] for stage in group) for group in pipeline.sharing]
        busy = (lane.carried for lane in lanes.values())
        pace = max((*computed, *rows, *filled.values(), *busy))
        return cls(times, there, back, filled, lanes, pace)

    def used(self) -> dict[Card, float]:
        """What share of its time each card is filled."""
        return {card: seconds / self.pace for card, seconds in self.filled.items() if seconds}

    def beside(self, others: Sequence[_Load]) -> StepTimes:
        """What tasks and transfers take beside those of other pipelines."""
        taken: Counter[Card] = Counter()
        for other in others:
            taken.update(other.used())
        return replace(
            self.times,
            sends=[self._beside(each, taken) for each in self.there],
            returns=[self._beside(each, taken) for each in self.back],
        )

    def _beside(self, transfer: _Transfer, taken: Mapping[Card, float]) -> float:
        """What a transfer takes beside all others, but those of its lane."""
        lane = self.lanes[transfer.lane]
        # Were it not for rounding, what the others leave of a pace would be enough.
        left = {
            card: max(
                lane.cards[card],
                self.pace * (1 - taken[card]) - (self.filled[card] - lane.cards[card]),
            )
            for card in transfer.cards
        }
        stretched = (self.pace * own / left[card] for card, own in transfer.cards.items() if own)
        return transfer.seconds + max(0.0, max(stretched, default=0.0) - transfer.carried)


@dataclass
class _Lane:
    """All transfers from some devices to others, from one microbatch to the next."""

    carried: float = 0.0
    cards: Counter[Card] = field(default_factory=Counter)


def _parts(cluster: Cluster, a: End, b: End) -> tuple[CrossingPart, ...]:
    """What goes from whom to whom; mostly there is one."""
    if len(a) == len(b) == 1:
        (sender, share), (receiver, _) = a[0], b[0]
        return (CrossingPart(sender, receiver, share, transfer_link(cluster, sender, receiver)),)
    return crossing_parts(cluster, a, b)


def _transfer(
    cluster: Cluster, parts: Sequence[CrossingPart], seconds: float, lane: tuple[End, End]
) -> _Transfer:
    link = joined_link(parts)
    carried = max(0.0, seconds - link.latency)
    filled: Counter[Card] = Counter()
    for part in parts:
        sender, receiver = part.sender, part.receiver
        ends = (("out", sender, cluster.cards(sender)), ("in", receiver, cluster.cards(receiver)))
        (_, _, mine), (_, _, theirs) = ends
        is_far = {node for node, _ in mine} != {node for node, _ in theirs}
        if sender.subcluster == receiver.subcluster and not is_far:
            continue
        # The link's bandwidth times the seconds is the whole transfer, of which this is a share.
        moved = carried if len(parts) == 1 else carried * part.share
        for way, submesh, cards in ends:
            share = moved * link.bandwidth / card_bandwidth(cluster, submesh) / len(cards)
            filled.update({(submesh.subcluster, *card, way): share for card in cards})
    return _Transfer(seconds, carried, dict(filled), lane)


def card_bandwidth(cluster: Cluster, submesh: SubMesh) -> float:
    """How fast a network card of a submesh's nodes is: as the fastest link of its subcluster.

    Args:
        cluster: the cluster.
        submesh: the submesh.

    Returns:
        Bytes/s.
    """
    subcluster = cluster.subcluster(submesh.subcluster)
    links = [link for a, b, link in cluster.links if subcluster.name in (a, b)]
    if subcluster.nodes > 1:
        links.append(subcluster.inter_node)
    return max(link.bandwidth for link in links)
