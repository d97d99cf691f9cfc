"""Crossings: who gives which part of an array to whom, so that it comes to lie in another way.

An array goes from one stage to another, or moves among the members of one. The links between
members are slow, those inside a member are fast: so every byte comes to a member once. Where
several of its processes want the same part, each takes a slice of it, and the member gathers the
slices by itself. All ends derive the same crossing from both annotations.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.bounds import Bounds, contains, even_ends, overlap, volume
from hetjax.sharding.annotation.subgroup import Shard, Summand
from hetjax.sharding.resolution.exchange import exchange
from hetjax.sharding.resolution.senders import BestLink, Shares
from hetjax.sharding.resolution.steps import Combination


@dataclass(frozen=True)
class Gathering:
    """How devices that want the same part make it of a slice each.

    Args:
        axis: the dimension along which the part is sliced.
        widths: the slices' sizes, in the order of these devices; they differ by one at most.
    """

    axis: int
    widths: tuple[int, ...]


@dataclass(frozen=True)
class Crossing:
    """How an array comes to lie in another way.

    Args:
        parts: who gives what to whom, all in one phase. Of several senders each has a summand; they
            are added where they are wanted, in this order. A device that keeps a part gives it to
            itself. No two parts overlap on a receiver.
        landed: what every device of the target has when the parts are there, before slices are
            gathered. One that gets no part has it from another device of its process, unless it is
            empty.
        gatherings: for each subgroup of the target, how it gathers slices; None where each of its
            devices then has what it wants.
    """

    parts: tuple[Combination, ...]
    landed: tuple[Shard, ...]
    gatherings: tuple[Gathering | None, ...]


def crossing(
    source: HSharding,
    target: HSharding,
    shape: Sequence[int],
    processes: Mapping[int, Hashable],
    senders: BestLink,
    itemsize: int = 4,
) -> Crossing:
    """Plan how an array comes to lie in another way; every byte comes to a member once.

    A part that one process wants is sent to it once, for all its devices; what a device has already
    is not sent. Where processes of one member want the same part, it is cut into even slices along
    one dimension, one for each device that wants it: a batched send-receive to a finer sharding of
    the receiving submesh, and an all-gather inside it. Summands are all sent to whoever wants their
    sum.

    Args:
        source: how the array lies.
        target: how it shall lie, on the same devices or on others.
        shape: its shape, of one dimension or more.
        processes: for each device of both, which process has it.
        senders: who sends what several devices have; one object for several arrays balances over
            all of them.
        itemsize: bytes of an element.

    Returns:
        The crossing.

    Source: H2, section 5 (topology-aware send/recv and all-gather); Hetu v2, section 4.3.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from hetjax.sharding import Network, Subgroup
        >>> from hetjax.sharding.resolution.senders import BestLink
        >>> one_device = HSharding((Subgroup((0,), (), P()),))
        >>> two_hosts = HSharding((Subgroup((1, 2), (("data", 2),), P()),))
        >>> senders = BestLink(Network.alike())
        >>> found = crossing(one_device, two_hosts, (8,), {0: 0, 1: 1, 2: 2}, senders)
        >>> [(part.receivers, part.bounds) for part in found.parts]
        [((1,), ((0, 4),)), ((2,), ((4, 8),))]
        >>> found.gatherings
        (Gathering(axis=0, widths=(4, 4)),)
    """
    before, held = source.shards(shape), _Held(source, shape, processes)
    gatherings: list[Gathering | None] = []
    landed: list[Shard] = []
    shards = iter(target.shards(shape))
    for group in target.subgroups:
        wanted = list(itertools.islice(shards, len(group.devices)))
        gathering = _gathering(wanted, processes, held)
        gatherings.append(gathering)
        landed += wanted if gathering is None else _sliced(wanted, gathering)
    phases = exchange(
        shape,
        before,
        held.landings(landed),
        network=senders.network,
        senders=_OwnProcessFirst(senders, processes),
        itemsize=itemsize,
        one_phase=True,
    )
    parts = tuple(_drawn_together(part for phase in phases for part in phase))
    return Crossing(parts, tuple(landed), tuple(gatherings))


class _Held:
    """What devices and processes have before anything is sent."""

    def __init__(self, source: HSharding, shape: Sequence[int], processes: Mapping[int, Hashable]):
        self._processes = processes
        self._of_device = {shard.device: shard for shard in source.shards(shape)}
        self._of_process: dict[Hashable, list[Shard]] = {}
        for shard in self._of_device.values():
            self._of_process.setdefault(processes[shard.device], []).append(shard)

    def by_process(self, process: Hashable, wanted: Shard) -> bool:
        """Whether a device of a process has what is wanted."""
        return any(_has(shard, wanted) for shard in self._of_process.get(process, ()))

    def landings(self, landed: Sequence[Shard]) -> list[Shard]:
        """The devices on which parts land: of those of a process that want the same, one.

        It is the one that has most of it. All of those land it that have the whole of it.
        """
        alike: dict[tuple[Hashable, Bounds, Summand | None], list[Shard]] = {}
        for shard in landed:
            key = self._processes[shard.device], shard.bounds, shard.summand
            alike.setdefault(key, []).append(shard)
        found: list[Shard] = []
        for shards in alike.values():
            keeping = [shard for shard in shards if _has(self._of_device.get(shard.device), shard)]
            found += keeping or [max(shards, key=self._common)]
        return found

    def _common(self, wanted: Shard) -> int:
        held = self._of_device.get(wanted.device)
        common = None if held is None else overlap(held.bounds, wanted.bounds)
        return 0 if common is None else volume(common)


def _has(held: Shard | None, wanted: Shard) -> bool:
    """Whether a device that holds a part has another one in it."""
    return (
        held is not None and held.summand == wanted.summand and contains(held.bounds, wanted.bounds)
    )


def _gathering(
    wanted: Sequence[Shard], processes: Mapping[int, Hashable], held: _Held
) -> Gathering | None:
    """How the parts of a member are sliced.

    None where no two of its processes want the same one, or each has already what it wants.
    """
    wanting: dict[tuple[Bounds, Summand | None], dict[Hashable, Shard]] = {}
    for shard in wanted:
        key = shard.bounds, shard.summand
        wanting.setdefault(key, {}).setdefault(processes[shard.device], shard)
    sizes = [stop - start for start, stop in wanted[0].bounds]
    shared = [each for each in wanting.values() if len(each) > 1]
    if 0 in sizes or all(
        held.by_process(process, shard) for each in shared for process, shard in each.items()
    ):
        return None
    devices = len(wanted) // len(wanting)
    # Slices along the first dimension lie in one piece in memory.
    even = [axis for axis, size in enumerate(sizes) if size % devices == 0]
    axis = even[0] if even else sizes.index(max(sizes))
    ends = itertools.pairwise(even_ends(sizes[axis], devices))
    return Gathering(axis, tuple(stop - start for start, stop in ends))


def _sliced(wanted: Sequence[Shard], gathering: Gathering) -> Iterator[Shard]:
    """The slice of every device; of those that want the same part, the first has the first."""
    ends = (0, *itertools.accumulate(gathering.widths))
    turns: Counter[tuple[Bounds, Summand | None]] = Counter()
    for shard in wanted:
        turn = turns[shard.bounds, shard.summand]
        turns[shard.bounds, shard.summand] += 1
        bounds = list(shard.bounds)
        first = bounds[gathering.axis][0]
        bounds[gathering.axis] = (first + ends[turn], first + ends[turn + 1])
        yield replace(shard, bounds=tuple(bounds))


class _OwnProcessFirst:
    """The senders of a policy, but for what another device of the receiver's process has."""

    relays: ClassVar[bool] = False

    def __init__(self, senders: BestLink, processes: Mapping[int, Hashable]):
        self._senders, self._processes = senders, processes

    def choose(self, owners: Sequence[int], receiver: int, num_bytes: int) -> int:
        own = self._own(owners, receiver)
        return self._senders.choose(owners, receiver, num_bytes) if own is None else own

    def shares(self, owners: Sequence[int], receiver: int, bounds: Bounds, itemsize: int) -> Shares:
        own = self._own(owners, receiver)
        if own is not None:
            return ((own, bounds),)
        return self._senders.shares(owners, receiver, bounds, itemsize)

    def _own(self, owners: Sequence[int], receiver: int) -> int | None:
        process = self._processes[receiver]
        return next((owner for owner in owners if self._processes[owner] == process), None)


def _drawn_together(parts: Iterator[Combination]) -> Iterator[Combination]:
    """Parts that go the same way, as one where they make up one part."""
    ways: dict[tuple[int, tuple[int, ...]], list[Bounds]] = {}
    for part in parts:
        for receiver in part.receivers:
            ways.setdefault((receiver, part.senders), []).append(part.bounds)
    takers: dict[tuple[Bounds, tuple[int, ...]], list[int]] = {}
    for (receiver, senders), found in ways.items():
        around = tuple(
            (min(ends[axis][0] for ends in found), max(ends[axis][1] for ends in found))
            for axis in range(len(found[0]))
        )
        whole = volume(around) == sum(map(volume, found))
        for bounds in [around] if whole else found:
            takers.setdefault((bounds, senders), []).append(receiver)
    for (bounds, senders), receivers in takers.items():
        yield Combination(bounds, senders, tuple(receivers))
