"""Crossings: who pulls which part of an array that one stage has and another one wants.

The link between two stages is slow, the links inside a stage are fast: so every byte crosses once.
Where several processes want the same part, each pulls a slice of it, and the stage gathers the
slices by itself. Both ends derive the same crossing from their layouts.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetjax.sharding.bounds import Bounds, even_ends, overlap
from hetjax.sharding.layout import Shard


@dataclass(frozen=True)
class Piece:
    """A part of an array that one process pulls from another.

    Args:
        sender: the process that has it, counted inside its stage.
        origin: the device that it is taken from, by its place in the sending stage's mesh.
        receiver: the process that pulls it.
        landing: the device that it lands on, by its place in the receiving stage's mesh.
        bounds: the part.
    """

    sender: int
    origin: int
    receiver: int
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

    pieces: tuple[Piece, ...]
    landed: tuple[Shard, ...]
    gathering: Gathering | None


def crossing(source: Sequence[Shard], target: Sequence[Shard]) -> Crossing:
    """Plan how an array crosses from one stage to another, every byte of it once.

    A part that one process wants is pulled by it, once for all its devices. Where processes want
    the same part, it is cut into even slices along one dimension, one for each device that wants
    it. What several devices have is taken from each of them in turn.

    Args:
        source: the sending stage's shards, as `hetjax.sharding.layout.shards` gives them.
        target: the receiving stage's shards, of the same array.

    Returns:
        The crossing.

    Source: H2, section 5 (topology-aware send/recv and all-gather).

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from hetjax.sharding.layout import shards
        >>> one_device = shards((8,), P(), (1, 1), 1)
        >>> two_hosts = shards((8,), P(), (2, 1), 1)
        >>> found = crossing(one_device, two_hosts)
        >>> [(piece.receiver, piece.bounds) for piece in found.pieces]
        [(0, ((0, 4),)), (1, ((4, 8),))]
        >>> found.gathering
        Gathering(axis=0, widths=(4, 4))
    """
    gathering = _gathering(target)
    landed = tuple(target) if gathering is None else tuple(_sliced(target, gathering))
    return Crossing(tuple(_pieces(source, landed)), landed, gathering)


def _gathering(target: Sequence[Shard]) -> Gathering | None:
    """How the parts of a stage are sliced; None where no two processes want the same one."""
    processes: dict[Bounds, set[int]] = {}
    for shard in target:
        processes.setdefault(shard.bounds, set()).add(shard.process)
    sizes = [stop - start for start, stop in target[0].bounds]
    if 0 in sizes or all(len(wanting) == 1 for wanting in processes.values()):
        return None
    devices = len(target) // len(processes)
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


def _pieces(source: Sequence[Shard], landed: Sequence[Shard]) -> Iterator[Piece]:
    """What is pulled, in the order of the devices that it lands on."""
    holders: dict[Bounds, list[Shard]] = {}
    for shard in source:
        holders.setdefault(shard.bounds, []).append(shard)
    turns = {bounds: itertools.cycle(shards) for bounds, shards in holders.items()}
    pulled: set[tuple[int, Bounds]] = set()
    for shard in landed:
        if (shard.process, shard.bounds) in pulled:
            continue
        pulled.add((shard.process, shard.bounds))
        for bounds, turn in turns.items():
            common = overlap(bounds, shard.bounds)
            if common is not None:
                holder = next(turn)
                yield Piece(holder.process, holder.device, shard.process, shard.device, common)
