"""The wire: asynchronous pulls from process to process by `jax.experimental.transfer`.

A sender offers pieces under a name that only the workers of the run can know; a receiver pulls
them, and a thread for each route notes when they are there. JAX would wait for ever for a peer that
does not answer: connecting has a deadline here, and who waits for pieces has one of his own.
Workers listen while they connect and no longer; see `hetjax.runtime.moves.listening`.

A server pulls one array after another, from whomever they come: what comes over a fast link would
wait for what is coming over a slow one (measured: 286 ms in place of 2, beside 4 MB at 100 Mbit/s).
So each partner has a server of its own.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from hetjax._compat import ListeningServer
from hetjax.errors import InputError, WorkerLostError
from hetjax.runtime.instructions.instruction import Route
from hetjax.runtime.moves.carriers import CONNECT_SECONDS, CarrierName, Coming, Delivery
from hetjax.runtime.moves.listening import transfer_identifier
from hetjax.runtime.moves.peers import Peer
from hetjax.runtime.moves.watching import Watcher, wait_for

_GREETING_BYTES = 2**16


class WireCarrier:
    """Takes pieces from process to process by JAX's transfer server.

    Args:
        peer: this worker.
        device: one of its devices.
        names: what workers are called in messages.
        secret: what only the workers of the run have; deliveries are named by it.
        deadline: seconds after which a worker that does not greet is lost, if that is soon.

    Attributes:
        if_late: what is told besides of pieces that do not come in time.
    """

    if_late = "; it hangs or is out of reach, or another has taken it (docs/security.md)"

    def __init__(
        self, peer: Peer, device: Any, names: Mapping[Peer, str], secret: bytes, deadline: float
    ):
        self._peer, self._device, self._names = peer, device, names
        self._secret, self._deadline = secret, deadline
        self._servers: dict[Peer, ListeningServer] = {}
        self._connections: dict[Peer, Any] = {}
        self._watchers: dict[Route, Watcher] = {}

    def _server(self, partner: Peer) -> Any:
        assert partner in self._servers, "nothing is sent or connected before it listens"
        return self._servers[partner].server

    def listen(self, host: str, partners: Sequence[Peer]) -> dict[Peer, str]:
        """Let other workers connect.

        Args:
            host: the address to listen on, the worker's own.
            partners: who will connect.

        Returns:
            Where each of them reaches this one.

        Raises:
            InputError: JAX has no transfer server for the worker's devices.
        """
        try:
            for partner in partners:
                self._servers[partner] = ListeningServer(self._device.client, host)
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"{self._names[self._peer]}: JAX has no transfer server on {self._device.platform} "
                f"({reason}); set runtime.carrier = {str(CarrierName.STREAM)!r}, or leave it out"
            ) from None
        greeting = jax.device_put(np.zeros(_GREETING_BYTES, np.uint8), self._device)
        for receiver in partners:
            self._server(receiver).await_pull(self._greeting(self._peer, receiver), [greeting])
        return {partner: self._server(partner).address() for partner in partners}

    def connect(self, addresses: Mapping[Peer, str]) -> dict[Peer, WorkerLostError]:
        """Connect to other workers, and hear a greeting from each.

        Args:
            addresses: where each of them listens to this one.

        Returns:
            Those that cannot be reached, or are none of the run, and why.
        """
        shape = jax.ShapeDtypeStruct(
            (_GREETING_BYTES,), np.uint8, sharding=SingleDeviceSharding(self._device)
        )
        greetings, failed = {}, dict[Peer, WorkerLostError]()
        for peer, address in sorted(addresses.items()):
            try:
                _check_reachable(self._names[peer], address)
            except WorkerLostError as error:
                failed[peer] = error
                continue
            connection = self._connections[peer] = self._server(peer).connect(address)
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
            try:
                wait_for(watched, self._names[peer], what, end, seconds)
            except WorkerLostError as error:
                failed[peer] = error
        return failed

    def stop_listening(self) -> None:
        """Refuse strangers from now on; to be called when all workers are connected."""
        for server in self._servers.values():
            server.stop_listening()

    def _greeting(self, sender: Peer, receiver: Peer) -> int:
        return transfer_identifier(self._secret, *sender, *receiver)

    def offer(self, delivery: Delivery, pieces: Sequence[jax.Array]) -> None:
        """Offer pieces: the server keeps them until they are fetched, and forgets them then."""
        self._server(delivery.receiver).await_pull(self._identifier(delivery), pieces)

    def ask(
        self, delivery: Delivery, shapes: Sequence[jax.ShapeDtypeStruct], route: Route
    ) -> Coming:
        """Ask for pieces; they come while the worker computes."""
        pieces = self._connections[delivery.sender].pull(self._identifier(delivery), shapes)
        return Coming(self._watcher(route).watch(pieces), pieces)

    def _identifier(self, delivery: Delivery) -> int:
        step, number, sender, receiver = delivery
        return transfer_identifier(self._secret, step, number, *sender, *receiver)

    def _watcher(self, route: Route) -> Watcher:
        if route not in self._watchers:
            name = f"watch {route.kind} of stage {route.source}"
            self._watchers[route] = Watcher(name)
        return self._watchers[route]

    def close(self) -> None:
        """End the watching threads."""
        for watcher in self._watchers.values():
            watcher.close()


def _check_reachable(worker: str, address: str) -> None:
    """Check that there is a server: JAX connects later, and waits for ever if there is none."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise WorkerLostError(worker, f"no connection to {address}: {error}") from None
