"""Crossings: who pulls which part of an array that one stage has and another one wants.

The link between two stages is slow, the links inside a stage are fast: so every byte crosses once.
Where several processes want the same part, each pulls a slice of it, and the stage gathers the
slices by itself. Both ends derive the same crossing from the annotations of both stages.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetjax.sharding.annotation.annotation import HSharding, Shard
from hetjax.sharding.annotation.bounds import Bounds, even_ends
from hetjax.sharding.resolution.exchange import exchange
from hetjax.sharding.resolution.senders import BestLink


@dataclass(frozen=True)
class PulledPart:
    """A part of an array that one process pulls from another.

    Args:
        origin: the device that it is taken from.
        landing: the device that it lands on.
        bounds: the part.
    """

    origin: int
    landing: int
    bounds: Bounds


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
    """How an array gets from the devices of one stage to those of another.

    Args:
        pieces: what is pulled; no two overlap.
        landed: what every device of the receiving stage has when the pieces are there, before the
            slices are gathered. One that gets no piece has it from another device of its process,
            unless it is empty.
        gathering: how the slices are gathered; None where each device then has what it wants.
    """

    pieces: tuple[PulledPart, ...]
    landed: tuple[Shard, ...]
    gathering: Gathering | None


def crossing(
    source: HSharding,
    target: HSharding,
    shape: Sequence[int],
    processes: Mapping[int, int],
    senders: BestLink,
    itemsize: int = 4,
) -> Crossing:
    """Plan how an array crosses from one stage to another, every byte of it once.

    A part that one process wants is pulled by it, once for all its devices. Where processes want
    the same part, it is cut into even slices along one dimension, one for each device that wants
    it: a batched send-receive to a finer sharding of the receiving submesh, and an all-gather
    inside it.

    Args:
        source: how the array lies on the sending stage.
        target: how it shall lie on the receiving one, which has other devices.
        shape: its shape, of one dimension or more.
        processes: for each device of the receiving stage, which of the stage's processes has it.
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
        >>> found = crossing(one_device, two_hosts, (8,), {1: 0, 2: 1}, senders)
        >>> [(piece.landing, piece.bounds) for piece in found.pieces]
        [(1, ((0, 4),)), (2, ((4, 8),))]
        >>> found.gathering
        Gathering(axis=0, widths=(4, 4))
    """
    wanted = target.shards(shape)
    gathering = _gathering(wanted, processes)
    landed = wanted if gathering is None else tuple(_sliced(wanted, gathering))
    phases = exchange(
        shape,
        source.shards(shape),
        _once_a_process(landed, processes),
        network=senders.network,
        senders=senders,
        itemsize=itemsize,
        relay=False,
    )
    pieces = tuple(
        PulledPart(part.senders[0], receiver, part.bounds)
        for phase in phases
        for part in phase
        for receiver in part.receivers
    )
    return Crossing(pieces, landed, gathering)


def _once_a_process(landed: Sequence[Shard], processes: Mapping[int, int]) -> list[Shard]:
    """Of the devices of a process that shall have the same part, the first one."""
    firsts: dict[tuple[int, Bounds], Shard] = {}
    for shard in landed:
        firsts.setdefault((processes[shard.device], shard.bounds), shard)
    return list(firsts.values())


def _gathering(target: Sequence[Shard], processes: Mapping[int, int]) -> Gathering | None:
    """How the parts of a stage are sliced; None where no two processes want the same one."""
    wanting: dict[Bounds, set[int]] = {}
    for shard in target:
        wanting.setdefault(shard.bounds, set()).add(processes[shard.device])
    sizes = [stop - start for start, stop in target[0].bounds]
    if 0 in sizes or all(len(found) == 1 for found in wanting.values()):
        return None
    devices = len(target) // len(wanting)
    # Slices along the first dimension lie in one piece in memory.
    even = [axis for axis, size in enumerate(sizes) if size % devices == 0]
    axis = even[0] if even else sizes.index(max(sizes))
    ends = itertools.pairwise(even_ends(sizes[axis], devices))
    return Gathering(axis, tuple(stop - start for start, stop in ends))


def _sliced(target: Sequence[Shard], gathering: Gathering) -> Iterator[Shard]:
    """The slice of every device; of those that want the same part, the first has the first."""
    ends = (0, *itertools.accumulate(gathering.widths))
    turns: Counter[Bounds] = Counter()
    for shard in target:
        turn = turns[shard.bounds]
        turns[shard.bounds] += 1
        bounds = list(shard.bounds)
        first = bounds[gathering.axis][0]
        bounds[gathering.axis] = (first + ends[turn], first + ends[turn + 1])
        yield replace(shard, bounds=tuple(bounds))
