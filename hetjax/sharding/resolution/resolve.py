"""Resolution: from two annotations of an array to the communication steps between them.

Where only the sharding inside submeshes changes, each submesh has a step of its own (the bottom
tier). Where the submeshes stay and what they share changes too, the bottom tier goes first or last.
A direct exchange is always possible. Of the forms that are possible the cheapest is taken.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetjax.errors import InputError
from hetjax.sharding.annotation.annotation import DUPLICATE, HSharding
from hetjax.sharding.annotation.bounds import contains, volume
from hetjax.sharding.annotation.subgroup import Shard, Subgroup, Summand
from hetjax.sharding.resolution.exchange import exchange
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.senders import BestLink
from hetjax.sharding.resolution.step_cost import resolution_seconds
from hetjax.sharding.resolution.steps import CommunicationStep, Phase, Resolution

DETOUR = 1.1
"""By how much a form over annotations in between must be faster than the direct one: it sends more
in all, which is felt where others use the links too."""


def resolve(
    source: HSharding,
    destination: HSharding,
    shape: Sequence[int],
    *,
    network: Network | None = None,
    itemsize: int = 4,
) -> Resolution:
    """Find the communication steps from one annotation to another.

    Args:
        source: how the array lies.
        destination: how it shall lie; partial sums where the source has some, of any number.
        shape: the array's shape.
        network: the links; None: all alike.
        itemsize: bytes of an element.

    Returns:
        The steps.

    Raises:
        InputError: an annotation does not fit the shape, or the destination has partial sums of
            what the source has the value of.

    Source: Hetu v2, section 4.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> two = Subgroup((0, 1), (("tensor", 2),), P("tensor"))
        >>> one = Subgroup((2,), (), P())
        >>> gradients = HSharding((two, one), hdim="partial")
        >>> resolve(gradients, HSharding((two, one)), (8,)).kinds
        (('split_all_reduce',),)
    """
    network = network or Network.alike()
    resolver = _Resolver(tuple(shape), network, itemsize)
    direct = (source, destination)
    chains = [direct, *_detours(source, destination)]
    costs: dict[int, float] = {}
    tried: dict[int, Resolution] = {}
    for i, chain in enumerate(chains):
        # Each form is tried with loads of its own: one that is not taken must leave none behind.
        with contextlib.suppress(InputError):
            tried[i] = resolver.along(chain)
            costs[i] = resolution_seconds(tried[i], network, itemsize) * (DETOUR if i else 1.0)
    best = min(costs, key=lambda i: (costs[i], i), default=0)
    return tried[best] if best in tried else resolver.along(direct)


@functools.lru_cache(maxsize=16384)
def moved_elements(
    source: HSharding | None, destination: HSharding | None, shape: tuple[int, ...]
) -> int | None:
    """How many elements move between devices from one annotation to another.

    Args:
        source: how an array lies; None: it is known everywhere.
        destination: how it shall lie; None: it is known everywhere, and stays so.
        shape: its shape.

    Returns:
        The elements; None where it cannot come to lie so.
    """
    if source is None:
        return 0
    if destination is None:
        return None
    try:
        found = resolve(source, destination, shape)
    except InputError:
        return None
    return sum(sum(step.elements_sent().values()) for steps in found.rounds for step in steps)


def _detours(source: HSharding, destination: HSharding) -> Iterator[tuple[HSharding, ...]]:
    """Annotations to pass through where both tiers change: the bottom tier first, or last.

    Source: Hetu v2, section 4.2, case II.
    """
    if not _same_devices(source, destination) or _same_top_tier(source, destination):
        return
    for between in (
        replace(source, subgroups=destination.subgroups),
        replace(destination, subgroups=source.subgroups),
    ):
        if between not in (source, destination):
            yield source, between, destination


def _same_devices(a: HSharding, b: HSharding) -> bool:
    """Whether two annotations have the same submeshes in the same order."""
    return [set(g.devices) for g in a.subgroups] == [set(g.devices) for g in b.subgroups]


def _same_top_tier(a: HSharding, b: HSharding) -> bool:
    return (
        len(a.subgroups) == len(b.subgroups) and len(a.subgroups) > 1 and a.top_tier == b.top_tier
    )


class _Resolver:
    def __init__(self, shape: tuple[int, ...], network: Network, itemsize: int):
        self.shape, self.network, self.itemsize = shape, network, itemsize

    def along(self, chain: Sequence[HSharding]) -> Resolution:
        """The steps through a chain of annotations."""
        senders = BestLink(self.network)
        rounds = tuple(self._round(a, b, senders) for a, b in itertools.pairwise(chain))
        ends = chain[0].shards(self.shape), chain[-1].shards(self.shape)
        return Resolution(self.shape, ends[0], rounds, ends[1])

    def _round(
        self, source: HSharding, destination: HSharding, senders: BestLink
    ) -> tuple[CommunicationStep, ...]:
        """One step over all devices, or one for each submesh where only the bottom tier changes."""
        before, after = source.shards(self.shape), destination.shards(self.shape)
        same_devices = _same_devices(source, destination)
        # Where subgroups with the same value move, each may find better owners in another one.
        is_bottom = same_devices or source.hdim != DUPLICATE
        pairs = zip(source.subgroups, destination.subgroups, strict=False)
        # A submesh that has the value makes no summands; among several some may be zero.
        enough = all(a.num_summands >= b.num_summands for a, b in pairs)
        if not (is_bottom and enough and _same_top_tier(source, destination)):
            return (self._step(before, after, source, senders),)
        parts = zip(
            _divided(before, source.subgroups), _divided(after, destination.subgroups), strict=True
        )
        return tuple(
            replace(self._step(_alone(a), _alone(b), source, senders), after=b) for a, b in parts
        )

    def _step(
        self,
        before: Sequence[Shard],
        after: Sequence[Shard],
        source: HSharding,
        senders: BestLink,
    ) -> CommunicationStep:
        phases = exchange(
            self.shape,
            before,
            after,
            network=self.network,
            senders=senders,
            itemsize=self.itemsize,
        )
        return CommunicationStep(_kind(before, after, phases, source), phases, tuple(after))


def _alone(shards: Sequence[Shard]) -> list[Shard]:
    """The shards of one subgroup as they are without the others: its own summands alone."""
    summands = sorted({shard.summand for shard in shards if shard.summand})
    if len(summands) < 2:
        return [replace(shard, summand=None) for shard in shards]
    places = {summand: Summand(0, i) for i, summand in enumerate(summands)}
    return [replace(s, summand=places[s.summand]) if s.summand else s for s in shards]


def _divided(shards: Sequence[Shard], subgroups: Sequence[Subgroup]) -> Iterator[tuple[Shard, ...]]:
    start = 0
    for group in subgroups:
        yield tuple(shards[start : start + len(group.devices)])
        start += len(group.devices)


def _kind(
    before: Sequence[Shard],
    after: Sequence[Shard],
    phases: Sequence[Phase],
    source: HSharding,
) -> str:
    """The collective that a step is, by what changes on its devices."""
    held = {shard.device: shard for shard in before}
    gets = {shard.device: shard for shard in after}
    if held == gets:
        return "identity"
    moved = [pair for phase in phases for part in phase for pair in part.messages]
    if not moved:
        unlike = set(held) != set(gets) or any(held[d].bounds != gets[d].bounds for d in held)
        return "slice" if unlike else "identity"
    summed = any(len(part.senders) > 1 for phase in phases for part in phase)
    if set(held) != set(gets):
        return _kind_of_move(held, gets, moved, summed=summed)
    subgroup = {device: i for i, group in enumerate(source.subgroups) for device in group.devices}
    split = "split_" if any(subgroup[a] != subgroup[b] for a, b in moved) else ""
    grows = all(contains(gets[d].bounds, held[d].bounds) for d in held)
    shrinks = all(contains(held[d].bounds, gets[d].bounds) for d in held)
    if summed:
        if grows and shrinks:
            return f"{split}all_reduce"
        return f"{split}reduce_scatter" if shrinks else "batched_reduce"
    if grows:
        return f"{split}all_gather"
    sizes = {volume(shard.bounds) for shard in (*before, *after)}
    return f"{split}all_to_all" if len(sizes) == 1 else "batched_send_receive"


def _kind_of_move(
    held: dict[int, Shard],
    gets: dict[int, Shard],
    moved: Sequence[tuple[int, int]],
    *,
    summed: bool,
) -> str:
    if summed:
        return "batched_reduce"
    wholes = all(held[a].bounds == gets[b].bounds for a, b in moved if a in held)
    relayed = any(a not in held for a, _ in moved)
    return "send_receive" if wholes and not relayed else "batched_send_receive"
