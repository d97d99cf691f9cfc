"""What stages take that exchange what several of them hold: gradients, and values made of them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.mesh.links import Link
from hetjax.pipeline.program.loss import accumulator_dtype
from hetjax.pipeline.program.traced_program import num_bytes
from hetjax.pipeline.stages.holders import Holders
from hetjax.planner.costs.crossing_ends import is_in_one_node
from hetjax.planner.costs.network_cards import Card

_Traffic = Mapping[tuple[int, int], int]
"""Bytes that stages give each other, all at once, by who gives and who takes them."""


class ExchangedBytes(NamedTuple):
    """What stages tell each other of a parameter.

    Args:
        gradient: bytes of its gradient, summed over microbatches.
        value: bytes of itself.
    """

    gradient: int
    value: int

    @classmethod
    def of(cls, shape: jax.ShapeDtypeStruct) -> ExchangedBytes:
        """Those of a parameter of some shape."""
        summed = math.prod(shape.shape) * accumulator_dtype(shape.dtype).itemsize
        return cls(summed, num_bytes(shape))


def exchange_seconds(
    cluster: Cluster,
    submeshes: Sequence[Sequence[SubMesh]],
    pieces: Iterable[tuple[Holders, ExchangedBytes]],
) -> tuple[float, ...]:
    """How long stages take to exchange what several of them hold.

    Gradients go first, then values; whoever has something for another stage gives it in one
    message. Both directions of a link move at once. A network card that carries what several stages
    exchange takes as long as for all of them, and devices that see to transfers themselves also
    lose what their bytes and messages cost.

    Args:
        cluster: the cluster.
        submeshes: where the stages are; several submeshes share a stage.
        pieces: who holds and updates what is shared, and its bytes.

    Returns:
        Seconds of each stage; 0 where it shares nothing.
    """
    gradients: Counter[tuple[int, int]] = Counter()
    values: Counter[tuple[int, int]] = Counter()
    for holders, size in pieces:
        owner = holders.updaters[0]
        for stage in holders.stages:
            for updater in holders.updaters:
                if updater != stage:
                    gradients[stage, updater] += size.gradient
            if stage != owner:
                values[owner, stage] += size.value
    seconds = [0.0] * len(submeshes)
    for traffic in (gradients, values):
        for stage, taken in _seconds_of(cluster, submeshes, traffic):
            seconds[stage] += taken
    return tuple(seconds)


def _seconds_of(
    cluster: Cluster, submeshes: Sequence[Sequence[SubMesh]], traffic: _Traffic
) -> Iterator[tuple[int, float]]:
    """What each of the stages takes that give each other something."""
    links = {
        (stage, other): _link_between(cluster, submeshes[stage], submeshes[other])
        for pair in traffic
        for stage, other in (pair, pair[::-1])
    }
    stages = sorted({stage for stage, _ in links})
    carried = _carried(cluster, submeshes, traffic, links) if len(stages) > 2 else {}
    for stage in stages:
        mine = [link for (each, _), link in links.items() if each == stage]
        given = [size for (source, _), size in traffic.items() if source == stage]
        taken = [size for (_, target), size in traffic.items() if target == stage]
        alone = max(sum(given), sum(taken)) / min(link.bandwidth for link in mine)
        beside = (carried[card] for card in _cards(cluster, submeshes[stage]) if card in carried)
        handled = _handled_seconds(cluster, submeshes[stage], [*given, *taken])
        yield stage, max([alone, *beside]) + max(link.latency for link in mine) + handled


def _link_between(cluster: Cluster, mine: Sequence[SubMesh], others: Sequence[SubMesh]) -> Link:
    """The slowest link between the submeshes of two stages, with all that works side by side."""
    pairs = list(itertools.product(mine, others))
    return Link(
        min(exchange_bandwidth(cluster, *pair) for pair in pairs),
        max(cluster.link_between(*pair).latency for pair in pairs),
    )


def exchange_bandwidth(cluster: Cluster, mine: SubMesh, other: SubMesh) -> float:
    """How fast a stage exchanges what it holds with another one.

    Between nodes, as many network cards work side by side as a submesh has nodes; within a node, as
    many devices as it has.

    Args:
        cluster: the cluster.
        mine: where the stage is.
        other: where the other one is.

    Returns:
        Bytes/s, over all network cards or devices that work side by side.
    """
    link = cluster.link_between(mine, other)
    near = is_in_one_node(cluster, mine, other)
    return link.bandwidth * (mine.num_devices if near else mine.shape[0])


def _carried(
    cluster: Cluster,
    submeshes: Sequence[Sequence[SubMesh]],
    traffic: _Traffic,
    links: Mapping[tuple[int, int], Link],
) -> Mapping[Card, float]:
    """For how many seconds each network card carries what all stages exchange."""
    carried: Counter[Card] = Counter()
    for (source, target), size in traffic.items():
        ends = (("out", source, target), ("in", target, source))
        for way, stage, other in ends:
            far = [
                mine
                for mine in submeshes[stage]
                if not all(is_in_one_node(cluster, mine, each) for each in submeshes[other])
            ]
            seconds = size / links[stage, other].bandwidth
            carried.update(dict.fromkeys(_cards(cluster, far, way), seconds))
    return carried


def _cards(cluster: Cluster, submeshes: Sequence[SubMesh], *ways: str) -> set[Card]:
    """The network cards of some submeshes, in both directions unless one is named."""
    return {
        (submesh.subcluster, *card, way)
        for submesh in submeshes
        for card in cluster.cards(submesh)
        for way in ways or ("out", "in")
    }


def _handled_seconds(cluster: Cluster, stage: Sequence[SubMesh], sizes: Sequence[int]) -> float:
    """What devices of a stage lose to messages of some sizes that they see to: the slowest."""
    parts = [cluster.subcluster(submesh.subcluster) for submesh in stage]
    return max(
        part.transfer_load * sum(sizes) / submesh.num_devices + part.message_load * len(sizes)
        for submesh, part in zip(stage, parts, strict=True)
    )
