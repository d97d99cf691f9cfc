"""The transport between processes: asynchronous pulls by `jax.experimental.transfer`.

The sending worker offers the pieces that each receiving process needs of it; the receiving one asks
for them as early as its instructions allow, and a thread for each route notes when they are there.
A piece crosses once: what several hosts of the receiving stage want they gather among themselves.
JAX would wait for ever for a peer that does not answer; connecting, pulling and gathering have a
deadline here. Workers listen while they connect and no longer; see
`hetjax.runtime.moves.listening`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from hetjax._compat import ListeningServer
from hetjax.errors import WorkerLostError
from hetjax.runtime.instructions.instruction import Route, Tag
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.moves.crossing_arrays import alike, crossing_arrays
from hetjax.runtime.moves.listening import transfer_identifier
from hetjax.runtime.moves.peers import Peer, Processes, names_of
from hetjax.runtime.moves.transfer_ends import ReceivingEnd, SendingEnd, landed
from hetjax.runtime.moves.transport import Arrival
from hetjax.runtime.moves.watching import Watched, Watcher

CONNECT_SECONDS = 10.0
"""How long a worker may take to accept a connection, and then to greet."""

_GREETING_BYTES = 2**16

_NOT_COME = "; it hangs or is out of reach, or another has taken it (docs/security.md)"


@dataclass(frozen=True)
class _Pull:
    """What was asked of one sending process."""

    peer: Peer
    arrays: Sequence[jax.Array]
    watched: Watched


class TransferServerTransport:
    """Moves arrays between worker processes.

    Args:
        placement: annotations of all buffers of all stages.
        peer: this worker.
        mesh: the mesh of its member of the stage.
        processes: for each stage, for each of its processes, the numbers of its devices.
        tags: every transfer of a training or an evaluation step, the same on all workers.
        secret: what only the workers of the run have; transfers are named by it.
        deadline: seconds after which a transfer that does not come is an error.
    """

    def __init__(
        self,
        placement: Placement,
        peer: Peer,
        mesh: Mesh,
        processes: Processes,
        tags: Sequence[Tag],
        secret: bytes,
        deadline: float,
    ):
        self._peer, self._secret, self._deadline = peer, secret, deadline
        self._names = names_of(placement.plan)
        self._numbers = {tag: number for number, tag in enumerate(sorted(set(tags)))}
        self._sending: dict[Tag, SendingEnd] = {}
        self._receiving: dict[Tag, ReceivingEnd] = {}
        stage = peer[0]
        for tag in {alike(tag) for tag in self._numbers}:
            if stage in (tag.route.source, tag.route.target):
                arrays = crossing_arrays(placement, tag, processes)
                if stage == tag.route.source:
                    self._sending[tag] = SendingEnd(arrays, mesh, peer)
                if stage == tag.route.target:
                    self._receiving[tag] = ReceivingEnd(arrays, mesh, peer)
        self._places = {
            tag: end.places(peer, self._receiving[tag].requests[peer])
            for tag, end in self._sending.items()
            if peer in end.receivers
        }
        self._device = mesh.local_devices[0]
        self._listening: ListeningServer | None = None
        self._connections: dict[Peer, Any] = {}
        self._pulls: dict[tuple[int, Tag], list[_Pull]] = {}
        self._kept: dict[tuple[int, Tag], Sequence[jax.Array]] = {}
        self._arrivals: dict[tuple[int, Tag], Arrival] = {}
        self._watchers: dict[Route, Watcher] = {}
        self._gatherings = Watcher("watch gathering")

    @property
    def _server(self) -> Any:
        assert self._listening is not None, "nothing is sent or connected before it listens"
        return self._listening.server

    def listen(self, host: str) -> str:
        """Let other workers connect.

        Args:
            host: the address to listen on, the worker's own.

        Returns:
            Where they reach this one.
        """
        self._listening = ListeningServer(self._device.client, host)
        greeting = jax.device_put(np.zeros(_GREETING_BYTES, np.uint8), self._device)
        receivers = {peer for end in self._sending.values() for peer in end.receivers}
        for receiver in receivers - {self._peer}:
            self._server.await_pull(self._greeting(self._peer, receiver), [greeting])
        return self._server.address()

    def connect(self, addresses: Mapping[Peer, str]) -> None:
        """Connect to the workers that this one receives from, and hear a greeting from each.

        Args:
            addresses: the address of every worker.

        Raises:
            WorkerLostError: a worker cannot be reached, or is none of the run.
        """
        sources = {peer for end in self._receiving.values() for peer in end.requests}
        shape = jax.ShapeDtypeStruct(
            (_GREETING_BYTES,), np.uint8, sharding=SingleDeviceSharding(self._device)
        )
        greetings = {}
        for peer in sorted(sources - {self._peer}):
            _check_reachable(self._names[peer], addresses[peer])
            connection = self._connections[peer] = self._server.connect(addresses[peer])
            # A watcher each: one that stays away must not delay the others.
            watcher = Watcher(f"watch greeting of {self._names[peer]}")
            greetings[peer] = watcher.watch(
                connection.pull(self._greeting(peer, self._peer), [shape])
            )
            watcher.close()
        seconds = min(CONNECT_SECONDS, self._deadline)
        end = time.monotonic() + seconds
        for peer, watched in greetings.items():
            what = f"it accepts connections at {addresses[peer]}, and did not greet"
            self._wait(watched, self._names[peer], what, end, seconds)

    def stop_listening(self) -> None:
        """Refuse strangers from now on; to be called when all workers are connected."""
        assert self._listening is not None
        self._listening.stop_listening()

    def _greeting(self, sender: Peer, receiver: Peer) -> int:
        return transfer_identifier(self._secret, *sender, *receiver)

    def send(self, step: int, tag: Tag, arrays: Sequence[jax.Array]) -> None:
        """Offer the pieces that each receiving process needs of this one.

        The server keeps them until they are fetched, and forgets them then. What this process needs
        itself is kept here.
        """
        offers = self._sending[alike(tag)].offers(arrays)
        own = offers.pop(self._peer, None)
        for receiver, pieces in offers.items():
            self._server.await_pull(self._identifier(step, tag, self._peer, receiver), pieces)
        if own is not None:
            self._kept[step, tag] = landed(own, self._places[alike(tag)])

    def expect(self, step: int, tag: Tag) -> None:
        """Ask for the pieces of a transfer; they come while the worker computes."""
        pulls = []
        for sender, shapes in self._receiving[alike(tag)].requests.items():
            if sender == self._peer:
                continue
            identifier = self._identifier(step, tag, sender, self._peer)
            arrays = self._connections[sender].pull(identifier, shapes)
            pulls.append(_Pull(sender, arrays, self._watcher(tag.route).watch(arrays)))
        self._pulls[step, tag] = pulls

    def _identifier(self, step: int, tag: Tag, sender: Peer, receiver: Peer) -> int:
        number = self._numbers[tag]
        return transfer_identifier(self._secret, step, number, sender[1], receiver[1], 0)

    def _watcher(self, route: Route) -> Watcher:
        if route not in self._watchers:
            name = f"watch {route.kind} of stage {route.source}"
            self._watchers[route] = Watcher(name)
        return self._watchers[route]

    def ready(self, step: int, tag: Tag) -> bool:
        """Whether the pieces of a transfer are there, or will never be."""
        return all(pull.watched.done.is_set() for pull in self._pulls[step, tag])

    def receive(self, step: int, tag: Tag) -> list[jax.Array]:
        """Wait for the pieces of a transfer and put them together.

        All hosts of a member receive in the same order, since gathering is a collective.
        """
        end = time.monotonic() + self._deadline
        pulls = self._pulls[step, tag]
        for pull in pulls:
            what = f"its {_name(tag)} did not come"
            name = self._names[pull.peer]
            self._wait(pull.watched, name, what, end, self._deadline, _NOT_COME)
        del self._pulls[step, tag]
        receiving = self._receiving[alike(tag)]
        at = max((pull.watched.arrived for pull in pulls), default=time.time())
        self._arrivals[step, tag] = Arrival(at, receiving.num_bytes)
        pulled = {pull.peer: pull.arrays for pull in pulls}
        if (step, tag) in self._kept:
            pulled[self._peer] = self._kept.pop((step, tag))
        arrays = receiving.put_together(pulled)
        if receiving.gathers:
            what = f"it did not gather the {tag.route.kind} with us"
            # The other hosts may wait for their own pieces until the deadline.
            gathered = self._gatherings.watch(arrays)
            others = " or ".join(self._names[other] for other in receiving.others)
            self._wait(gathered, others, what, end + self._deadline, self._deadline)
        return arrays

    def _wait(
        self, watched: Watched, worker: str, what: str, end: float, seconds: float, hint: str = ""
    ) -> None:
        """Wait until a moment of `time.monotonic`.

        Raises:
            WorkerLostError: it has passed, or what is watched will never be there.
        """
        if not watched.done.wait(max(0.0, end - time.monotonic())):
            raise WorkerLostError(worker, f"{what} within {seconds:g} s{hint}")
        if watched.error is not None:
            raise WorkerLostError(worker, str(watched.error).partition("\n")[0])

    def arrival(self, step: int, tag: Tag) -> Arrival:
        """When a transfer that was received was there, and how many bytes this process pulled."""
        return self._arrivals.pop((step, tag))

    def close(self) -> None:
        """End the watching threads."""
        for watcher in (self._gatherings, *self._watchers.values()):
            watcher.close()
        self._pulls.clear()
        self._kept.clear()


def _name(tag: Tag) -> str:
    """What a transfer is called in messages."""
    move = f" in {tag.move.partition('/')[0]}" if tag.move else ""
    microbatch = f" of microbatch {tag.microbatch}" if tag.microbatch >= 0 else ""
    return f"{tag.route.kind}{move}{microbatch}"


def _check_reachable(worker: str, address: str) -> None:
    """Check that there is a server: JAX connects later, and waits for ever if there is none."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise WorkerLostError(worker, f"no connection to {address}: {error}") from None
