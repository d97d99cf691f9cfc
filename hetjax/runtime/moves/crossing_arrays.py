"""The arrays of a transfer: how each comes to lie in another way, which all of its ends derive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import jax

from hetjax.runtime.instructions.instruction import Tag
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.moves.peers import Peer, Processes
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.bounds import Bounds, extent
from hetjax.sharding.resolution.crossing import Crossing, crossing
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.senders import BestLink
from hetjax.sharding.resolution.steps import SentPiece


@dataclass(frozen=True, eq=False)
class CrossingArray:
    """One array of a transfer.

    A scalar is divided as an array of one element.

    Args:
        shape: its shape and dtype.
        source: how it lies as it is sent.
        target: how it shall lie when it is received.
        givers: for each device of the source, which process has it.
        takers: for each device of the target, which process has it; another one than gives, where a
            device is in two submeshes.
        crossing: how the one becomes the other.
        held: for each device of the source, the part that it has.
    """

    shape: jax.ShapeDtypeStruct
    source: HSharding
    target: HSharding
    givers: Mapping[int, Peer]
    takers: Mapping[int, Peer]
    crossing: Crossing
    held: Mapping[int, Bounds]

    @classmethod
    def between(
        cls,
        shape: jax.ShapeDtypeStruct,
        source: HSharding,
        target: HSharding,
        givers: Mapping[int, Peer],
        takers: Mapping[int, Peer],
        senders: BestLink,
    ) -> CrossingArray:
        """An array that comes to lie in another way.

        Args:
            shape: its shape and dtype.
            source: how it lies.
            target: how it shall lie.
            givers: for each device of the source, which process has it.
            takers: for each device of the target, which process has it.
            senders: who sends what several devices have.

        Returns:
            The array with its crossing.
        """
        whole, itemsize = shape.shape or (1,), shape.dtype.itemsize
        found = crossing(source, target, whole, {**givers, **takers}, senders, itemsize)
        held = {shard.device: shard.bounds for shard in source.shards(whole)}
        return cls(shape, source, target, givers, takers, found, held)

    def extent(self, bounds: Bounds) -> tuple[int, ...]:
        """The shape of a part of it."""
        return extent(bounds) if self.shape.shape else ()

    def pieces(self, place: int) -> Iterator[SentPiece]:
        """Everything that is sent of it, in the order that both ends know.

        Args:
            place: its place among the arrays of the transfer.
        """
        for part in self.crossing.parts:
            yield from part.pieces(place)

    def is_given_by(self, peer: Peer) -> bool:
        """Whether a process has some of it before."""
        return any(self.givers[device] == peer for device in self.source.devices)

    def is_taken_by(self, peer: Peer) -> bool:
        """Whether a process has some of it afterwards."""
        return any(self.takers[device] == peer for device in self.target.devices)

    def giving_member(self, peer: Peer) -> int:
        """Which subgroup of the source a process has devices of."""
        return _member(self.source, self.givers, peer)

    def taking_member(self, peer: Peer) -> int:
        """Which subgroup of the target a process has devices of."""
        return _member(self.target, self.takers, peer)


def _member(annotation: HSharding, processes: Mapping[int, Peer], peer: Peer) -> int:
    return next(
        place
        for place, group in enumerate(annotation.subgroups)
        if any(processes[device] == peer for device in group.devices)
    )


def crossing_arrays(
    placement: Placement, tag: Tag, processes: Processes, leads: Mapping[int, int] | None = None
) -> tuple[CrossingArray, ...]:
    """The arrays of a transfer; all of its ends derive the same.

    Args:
        placement: annotations of all buffers of all stages.
        tag: the transfer.
        processes: the devices of every process of every stage.
        leads: for each stage the one by which its processes are called; None: itself.

    Returns:
        One entry an array.
    """
    sent, received = placement.ends(tag)
    givers, takers = (
        {
            device: (stage if leads is None else leads[stage], place)
            for place, each in enumerate(processes[stage])
            for device in each
        }
        for stage in (tag.route.source, tag.route.target)
    )
    senders = BestLink(Network.of(placement.plan.cluster))
    return tuple(
        CrossingArray.between(shape, source, target, givers, takers, senders)
        for shape, source, target in zip(
            sent.shapes, sent.annotations, received.annotations, strict=True
        )
    )


@lru_cache(2**16)
def alike(tag: Tag) -> Tag:
    """One transfer for all that move arrays of the same shapes: those of other microbatches."""
    return tag._replace(microbatch=-1)
