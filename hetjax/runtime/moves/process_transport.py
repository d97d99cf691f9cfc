"""The transport between processes: what each gives and takes of a transfer, and who carries it.

The sending worker offers the pieces that each receiving process needs of it; the receiving one asks
for them as early as its instructions allow. A piece crosses once: what several hosts of the
receiving stage want they gather among themselves. For every two processes and every transfer the
carrier takes the pieces that is the fastest for so many bytes, by what was measured of the link.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from hetjax.runtime.instructions.instruction import Route, RouteKind, Tag
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.moves.carriers import (
    BETWEEN_PROCESSES,
    CarrierLinks,
    CarrierName,
    Coming,
    Delivery,
    PieceCarrier,
    best_carrier,
)
from hetjax.runtime.moves.crossing_arrays import CrossingArray, alike, crossing_arrays
from hetjax.runtime.moves.peers import Peer, Processes, names_of
from hetjax.runtime.moves.transfer_ends import ReceivingEnd, SendingEnd, landed
from hetjax.runtime.moves.transport import Arrival
from hetjax.runtime.moves.watching import Watcher, wait_for


@dataclass(frozen=True)
class _Asked:
    """What was asked of one sending process."""

    peer: Peer
    carrier: CarrierName
    coming: Coming


class ProcessTransport:
    """Moves arrays between worker processes.

    Args:
        placement: annotations of all buffers of all stages.
        peer: this worker.
        meshes: for each of its stages the mesh of its member.
        processes: for each stage, for each of its processes, the numbers of its devices.
        tags: every transfer of a training or an evaluation step, the same on all workers.
        carriers: what can take pieces to other processes, the same on all workers.
        deadline: seconds after which a transfer that does not come is an error.
        leads: for each stage the one by which its processes are called; None: itself.

    Attributes:
        partners: the workers that this one gives something, or takes something from.
    """

    def __init__(
        self,
        placement: Placement,
        peer: Peer,
        meshes: Mapping[int, Mesh],
        processes: Processes,
        tags: Sequence[Tag],
        carriers: Mapping[CarrierName, PieceCarrier],
        deadline: float,
        leads: Mapping[int, int] | None = None,
    ):
        self._peer, self._carriers, self._deadline = peer, carriers, deadline
        self._names = names_of(placement.plan)
        self._numbers = {tag: number for number, tag in enumerate(sorted(set(tags)))}
        self._sending: dict[Tag, SendingEnd] = {}
        self._receiving: dict[Tag, ReceivingEnd] = {}
        self._sizes: dict[Tag, dict[tuple[Peer, Peer], int]] = {}
        for tag in {alike(tag) for tag in self._numbers}:
            _, source, target = tag.route
            if source in meshes or target in meshes:
                arrays = crossing_arrays(placement, tag, processes, leads)
                self._sizes[tag] = message_sizes(arrays)
                if source in meshes:
                    self._sending[tag] = SendingEnd(arrays, meshes[source], peer)
                if target in meshes:
                    self._receiving[tag] = ReceivingEnd(arrays, meshes[target], peer)
        self._places = {
            tag: end.places(peer, self._receiving[tag].requests[peer])
            for tag, end in self._sending.items()
            if peer in end.receivers
        }
        given = {peer for end in self._sending.values() for peer in end.receivers}
        taken = {peer for end in self._receiving.values() for peer in end.requests}
        self.partners = tuple(sorted((given | taken) - {peer}))
        self._device = meshes[peer[0]].local_devices[0]
        self._joined: Mapping[Peer, Sequence[CarrierName]] = {}
        self._links: Mapping[Peer, CarrierLinks] = {}
        self._chosen: dict[tuple[Tag, Peer, Peer], CarrierName] = {}
        self._asked: dict[tuple[int, Tag], list[_Asked]] = {}
        self._kept: dict[tuple[int, Tag], Sequence[jax.Array]] = {}
        self._arrivals: dict[tuple[int, Tag], Arrival] = {}
        self._gatherings = Watcher("watch gathering")

    def choose_by(
        self,
        links: Mapping[Peer, CarrierLinks],
        joined: Mapping[Peer, Sequence[CarrierName]] | None = None,
    ) -> None:
        """Choose carriers by what was measured; both ends of a link must be told the same.

        Args:
            links: for partners, what each carrier takes on the link to them. With others all goes
                by the first carrier.
            joined: for partners, the carriers that join this worker with them; None for all.
        """
        self._links, self._joined, self._chosen = links, joined or {}, {}

    def carrier(self, tag: Tag, sender: Peer, receiver: Peer) -> CarrierName:
        """What takes a process's pieces of a transfer to another one.

        Args:
            tag: the transfer.
            sender: who gives; this worker, or
            receiver: who takes.
        """
        key = alike(tag), sender, receiver
        if key not in self._chosen:
            partner = receiver if sender == self._peer else sender
            joined = self._joined.get(partner, tuple(self._carriers))
            links = self._links.get(partner, {})
            known = {name: links[name] for name in joined if name in links}
            first = next(name for name in BETWEEN_PROCESSES if name in joined)
            size = self._sizes[key[0]][sender, receiver]
            self._chosen[key] = best_carrier(known, size) if known else first
        return self._chosen[key]

    def send(self, step: int, tag: Tag, arrays: Sequence[jax.Array]) -> None:
        """Offer the pieces that each receiving process needs of this one.

        They are kept until they are fetched, and forgotten then. What this process needs itself is
        kept here.
        """
        offers = self._sending[alike(tag)].offers(arrays)
        own = offers.pop(self._peer, None)
        for receiver, pieces in offers.items():
            carrier = self._carriers[self.carrier(tag, self._peer, receiver)]
            carrier.offer(Delivery(step, self._numbers[tag], self._peer, receiver), pieces)
        if own is not None:
            # Another stage here, unlike another member, may write over what it is given.
            copies = tag.route.source != tag.route.target
            self._kept[step, tag] = landed(own, self._places[alike(tag)], copies=copies)

    def expect(self, step: int, tag: Tag) -> None:
        """Ask for the pieces of a transfer; they come while the worker computes."""
        asked = self._asked[step, tag] = []
        for sender, shapes in self._receiving[alike(tag)].requests.items():
            if sender != self._peer:
                name = self.carrier(tag, sender, self._peer)
                delivery = Delivery(step, self._numbers[tag], sender, self._peer)
                coming = self._carriers[name].ask(delivery, shapes, tag.route)
                asked.append(_Asked(sender, name, coming))

    def ready(self, step: int, tag: Tag) -> bool:
        """Whether the pieces of a transfer are there, or will never be."""
        return all(asked.coming.watched.done.is_set() for asked in self._asked[step, tag])

    def receive(self, step: int, tag: Tag) -> list[jax.Array]:
        """Wait for the pieces of a transfer and put them together.

        All hosts of a member receive in the same order, since gathering is a collective.
        """
        end = time.monotonic() + self._deadline
        waiting = self._asked[step, tag]
        for asked in waiting:
            self._wait(asked, f"its {_name(tag)} did not come", end, self._deadline)
        del self._asked[step, tag]
        receiving = self._receiving[alike(tag)]
        at = max((asked.coming.watched.arrived for asked in waiting), default=time.time())
        carriers = tuple(sorted({asked.carrier for asked in waiting}))
        self._arrivals[step, tag] = Arrival(at, receiving.num_bytes, carriers)
        pulled = {asked.peer: asked.coming.pieces for asked in waiting}
        if (step, tag) in self._kept:
            pulled[self._peer] = self._kept.pop((step, tag))
        arrays = receiving.put_together(pulled)
        if receiving.gathers:
            what = f"it did not gather the {tag.route.kind} with us"
            # The other hosts may wait for their own pieces until the deadline.
            gathered = self._gatherings.watch(arrays)
            others = " or ".join(self._names[other] for other in receiving.others)
            wait_for(gathered, others, what, end + self._deadline, self._deadline)
        return arrays

    def _wait(self, asked: _Asked, what: str, end: float, seconds: float) -> None:
        if_late = self._carriers[asked.carrier].if_late
        wait_for(asked.coming.watched, self._names[asked.peer], what, end, seconds, if_late)

    def arrival(self, step: int, tag: Tag) -> Arrival:
        """When a transfer that was received was there, and how many bytes this process pulled."""
        return self._arrivals.pop((step, tag))

    def exchange(
        self, partner: Peer, name: CarrierName, size: int, rounds: Sequence[int], deadline: float
    ) -> list[float]:
        """Send messages to another worker and take its answers, which does the same the other way.

        Of the two the one that comes first begins.

        Args:
            partner: the other one.
            name: what takes the messages and the answers.
            size: bytes of each.
            rounds: the numbers of the messages, which no others of this transport have.
            deadline: seconds after which the partner is lost.

        Returns:
            For each message the seconds until its answer was there; of the one that answers the
            time from one to the next.
        """
        carrier, begins = self._carriers[name], self._peer < partner
        message = jax.block_until_ready(jax.device_put(np.zeros(size, np.uint8), self._device))
        shape = jax.ShapeDtypeStruct(
            message.shape, message.dtype, sharding=SingleDeviceSharding(self._device)
        )
        route = Route(RouteKind.MESSAGE, partner[0], self._peer[0])
        end, seconds, number = time.monotonic() + deadline, [], len(self._numbers)
        for place in rounds:
            answer = Delivery(place, number, partner, self._peer)
            coming = carrier.ask(answer, [shape], route)
            offer = Delivery(place, number, self._peer, partner)
            start = time.perf_counter()
            if begins:
                carrier.offer(offer, [message])
            self._wait(_Asked(partner, name, coming), "its answer did not come", end, deadline)
            if not begins:
                carrier.offer(offer, [message])
            jax.block_until_ready(coming.pieces)
            seconds.append(time.perf_counter() - start)
        return seconds

    def close(self) -> None:
        """Let go of everything."""
        for carrier in self._carriers.values():
            carrier.close()
        self._gatherings.close()
        self._asked.clear()
        self._kept.clear()


def message_sizes(arrays: Sequence[CrossingArray]) -> dict[tuple[Peer, Peer], int]:
    """For each two processes, how many bytes the one gives the other of a transfer.

    Args:
        arrays: what crosses.

    Returns:
        Bytes by the sender and the receiver, which may be the same.
    """
    sizes: dict[tuple[Peer, Peer], int] = {}
    for place, array in enumerate(arrays):
        for piece in array.pieces(place):
            pair = array.givers[piece.sender], array.takers[piece.receiver]
            size = math.prod(array.extent(piece.bounds)) * array.shape.dtype.itemsize
            sizes[pair] = sizes.get(pair, 0) + size
    return sizes


def _name(tag: Tag) -> str:
    """What a transfer is called in messages."""
    move = f" in {tag.move.partition('/')[0]}" if tag.move else ""
    microbatch = f" of microbatch {tag.microbatch}" if tag.microbatch >= 0 else ""
    return f"{tag.route.kind}{move}{microbatch}"
