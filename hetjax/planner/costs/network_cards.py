"""What transfers take where one network card carries those of several neighbours."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.planner.costs.crossing_ends import CrossingPart, End, crossing_parts, joined_link

Card = tuple[str, int, int, str]
"""A direction of a network card: subcluster, node, its number there, and "out" or "in"."""


@dataclass(frozen=True)
class _Transfer:
    """One microbatch's values on their way from a stage to its neighbour.

    Args:
        seconds: what they take where nothing else is on the way.
        carried: of these, what the link is filled for; the rest is latency.
        cards: for how many seconds they fill each card that they pass.
    """

    seconds: float
    carried: float
    cards: dict[Card, float]


def with_shared_cards(
    times: StepTimes, cluster: Cluster, stages: Sequence[SubMesh | End]
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

    Returns:
        The times, the same but for transfers that share a card.
    """
    ends: list[End] = [((s, 1.0),) if isinstance(s, SubMesh) else s for s in stages]
    crossings = [
        (_parts(cluster, a, b), _parts(cluster, b, a)) for a, b in itertools.pairwise(ends)
    ]
    there = [
        _transfer(cluster, parts, each)
        for (parts, _), each in zip(crossings, times.sends, strict=True)
    ]
    back = [
        _transfer(cluster, parts, each)
        for (_, parts), each in zip(crossings, times.returns, strict=True)
    ]
    filled: Counter[Card] = Counter()
    for transfer in (*there, *back):
        filled.update(transfer.cards)
    pace = max((*times.compute, *filled.values(), *(each.carried for each in (*there, *back))))
    return replace(
        times,
        sends=[_beside(each, filled, pace) for each in there],
        returns=[_beside(each, filled, pace) for each in back],
    )


def _parts(cluster: Cluster, a: End, b: End) -> tuple[CrossingPart, ...]:
    """What goes from whom to whom; mostly there is one."""
    if len(a) == len(b) == 1:
        (sender, share), (receiver, _) = a[0], b[0]
        return (CrossingPart(sender, receiver, share, cluster.link_between(sender, receiver)),)
    return crossing_parts(cluster, a, b)


def _transfer(cluster: Cluster, parts: Sequence[CrossingPart], seconds: float) -> _Transfer:
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
            share = moved * link.bandwidth / _card_bandwidth(cluster, submesh)
            share *= submesh.shape[0] / len(cards)
            filled.update({(submesh.subcluster, *card, way): share for card in cards})
    return _Transfer(seconds, carried, dict(filled))


def is_in_one_node(cluster: Cluster, a: SubMesh, b: SubMesh) -> bool:
    """Whether two submeshes have the same nodes, so that no network card is between them.

    Args:
        cluster: the cluster.
        a: a submesh.
        b: another.
    """
    return a.subcluster == b.subcluster and _nodes(cluster, a) == _nodes(cluster, b)


def _nodes(cluster: Cluster, submesh: SubMesh) -> set[int]:
    return {node for node, _ in cluster.devices(submesh)}


def _card_bandwidth(cluster: Cluster, submesh: SubMesh) -> float:
    subcluster = cluster.subcluster(submesh.subcluster)
    links = [link for a, b, link in cluster.links if subcluster.name in (a, b)]
    if subcluster.nodes > 1:
        links.append(subcluster.inter_node)
    return max(link.bandwidth for link in links)


def _beside(transfer: _Transfer, filled: Counter[Card], pace: float) -> float:
    """What a transfer takes beside all others."""
    # Were it not for rounding, what the others leave of a pace would be enough.
    left = {card: max(own, pace - (filled[card] - own)) for card, own in transfer.cards.items()}
    stretched = (pace * own / left[card] for card, own in transfer.cards.items() if own)
    return transfer.seconds + max(0.0, max(stretched, default=0.0) - transfer.carried)
