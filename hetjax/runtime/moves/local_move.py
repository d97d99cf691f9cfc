"""Moves among submeshes of one process, in one thread: what all give, and then what all take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from hetjax.runtime.instructions.instruction import Tag
from hetjax.runtime.moves.crossing_arrays import CrossingArray
from hetjax.runtime.moves.peers import Peer
from hetjax.runtime.moves.transfer_ends import ReceivingEnd, SendingEnd, landed
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.subgroup import Subgroup
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.senders import BestLink

_Offers = dict[Peer, dict[Peer, list[Any]]]
"""For each submesh that receives what each one that sends has for it."""


class LocalMove:
    """An array that comes to lie in another way on the devices of this process.

    Args:
        shape: its shape and dtype.
        source: how it lies.
        target: how it shall lie; the submeshes may share devices with those of the source.
        mesh: from a submesh, with no sharding inside it, to its mesh.
        network: the links, which decide who sends what several have; None: all alike.

    Raises:
        InputError: an annotation does not fit the shape, or the target has partial sums of what the
            source has the value of.
    """

    def __init__(
        self,
        shape: jax.ShapeDtypeStruct,
        source: HSharding,
        target: HSharding,
        mesh: Callable[[Subgroup], Mesh],
        network: Network | None = None,
    ):
        self._target = target
        givers, takers = (
            {device: (side, place) for place, each in enumerate(groups) for device in each.devices}
            for side, groups in enumerate((source.subgroups, target.subgroups))
        )
        senders = BestLink(network or Network.alike())
        arrays = [CrossingArray.between(shape, source, target, givers, takers, senders)]
        meshes = [[mesh(each.bare) for each in side.subgroups] for side in (source, target)]
        self._sending = {
            (0, place): SendingEnd(arrays, each, (0, place)) for place, each in enumerate(meshes[0])
        }
        self._receiving = {
            (1, place): ReceivingEnd(arrays, each, (1, place))
            for place, each in enumerate(meshes[1])
        }
        self._places = {
            (sender, receiver): end.places(receiver, self._receiving[receiver].requests[sender])
            for sender, end in self._sending.items()
            for receiver in end.receivers
        }

    def send(self, arrays: Sequence[jax.Array]) -> _Offers:
        """What every submesh gives the others.

        Args:
            arrays: what each submesh of the source has.
        """
        ends = zip(self._sending.values(), arrays, strict=True)
        return self._offered([end.shards([array]) for end, array in ends])

    def _offered(self, held: Sequence[Sequence[Mapping[int, jax.Array]]]) -> _Offers:
        found: _Offers = {receiver: {} for receiver in self._receiving}
        for (sender, end), shards in zip(self._sending.items(), held, strict=True):
            for receiver, pieces in end.offers_of(shards).items():
                found[receiver][sender] = landed(pieces, self._places[sender, receiver])
        return found

    def receive(self, offers: _Offers) -> list[jax.Array]:
        """What each submesh of the target has when it has all that it is given."""
        return [end.put_together(offers[peer])[0] for peer, end in self._receiving.items()]

    def of_shards(self, shards: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
        """The shard of every device of the target, of those of the source by their numbers."""
        offers = self._offered([[shards]] * len(self._sending))
        return {
            device: shard
            for group, (peer, end) in zip(
                self._target.subgroups, self._receiving.items(), strict=True
            )
            for device, shard in zip(group.devices, end.parts(offers[peer])[0], strict=True)
        }


class LocalMoves:
    """The carrier of a program on all devices of which it runs: both ends of every move are here.

    Args:
        moves: by their names in tags.
    """

    def __init__(self, moves: Mapping[str, LocalMove]):
        self._moves = moves
        self._sent: dict[Tag, _Offers] = {}

    def expect(self, step: int, tag: Tag) -> None:
        """Nothing to do: what is sent is already there."""

    def send(self, step: int, tag: Tag, arrays: Sequence[jax.Array]) -> None:
        """Cut what every submesh of the source gives."""
        self._sent[tag] = self._moves[tag.move].send(arrays)

    def receive(self, step: int, tag: Tag) -> list[jax.Array]:
        """Put together what every submesh of the target gets."""
        return self._moves[tag.move].receive(self._sent.pop(tag))
