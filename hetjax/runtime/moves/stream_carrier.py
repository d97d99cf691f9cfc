"""The stream carrier: pieces go from the memory of one host to that of another over TCP.

It is for devices that JAX's transfer server does not join, of unlike platforms among them. A worker
has one connection to each partner for what it gives, which a thread writes, and one for what it
takes, which another one reads; so what goes to a near host waits for nothing that goes far away.
Both ends of a connection show that they have the run's secret, and when all are connected nobody
listens any more.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from hetjax.errors import WorkerLostError
from hetjax.runtime.instructions.instruction import Route
from hetjax.runtime.moves.carriers import CONNECT_SECONDS, Coming, Delivery
from hetjax.runtime.moves.host_carrier import Bytes, HostCarrier, aligned_room
from hetjax.runtime.moves.peers import Peer

_PEER = struct.Struct("<2q")
_HEADER = struct.Struct("<2q?I")
"""Of a delivery: its step and number, whether it is why nothing comes, how many pieces it has."""

_Given = tuple[Delivery, bool, list[np.ndarray]]
"""A delivery, whether it is why nothing comes, and its bytes."""

_NONCE_BYTES = _PROOF_BYTES = 32

_MOST_BUFFERS = 512
"""Pieces that one call of the system is given; it takes no more than 1,024."""


class StreamCarrier:
    """Takes pieces from process to process over TCP connections of its own.

    Args:
        peer: this worker.
        names: what workers are called in messages.
        secret: what only the workers of the run have.
        deadline: seconds after which a worker that does not connect is lost, if that is soon.

    Attributes:
        if_late: what is told besides of pieces that do not come in time.
    """

    if_late = "; it hangs or is out of reach"

    def __init__(self, peer: Peer, names: Mapping[Peer, str], secret: bytes, deadline: float):
        self._peer, self._names, self._secret = peer, names, secret
        self._seconds = min(CONNECT_SECONDS, deadline)
        self._carrier = HostCarrier(self._post)
        self._outgoing: dict[Peer, queue.SimpleQueue[_Given | None]] = {}
        self._connected: dict[Peer, threading.Event] = {}
        self._connections: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self._closing = False

    # Connecting

    def listen(self, host: str, partners: Sequence[Peer]) -> dict[Peer, str]:
        """Let other workers connect.

        Args:
            host: the address to listen on, the worker's own.
            partners: who will connect.

        Returns:
            Where each of them reaches this one.
        """
        self._connected = {partner: threading.Event() for partner in partners}
        self._listener = socket.create_server(
            (host, 0), family=_family(host), backlog=2 * len(partners) + 1
        )
        threading.Thread(
            target=self._accept, args=(self._listener,), name="accept streams", daemon=True
        ).start()
        port = self._listener.getsockname()[1]
        return dict.fromkeys(partners, f"{host}:{port}")

    def connect(self, addresses: Mapping[Peer, str]) -> dict[Peer, WorkerLostError]:
        """Connect to other workers, and wait until each has connected to this one.

        Args:
            addresses: where each of them listens.

        Returns:
            Those that cannot be reached, or are none of the run, and why.
        """
        end, failed = time.monotonic() + self._seconds, dict[Peer, WorkerLostError]()
        for partner, address in sorted(addresses.items()):
            try:
                connection = self._connection(partner, address)
            except (OSError, EOFError) as error:
                reason = f"no connection to {address}: {str(error) or 'it is none of this run'}"
                failed[partner] = WorkerLostError(self._names[partner], reason)
                continue
            outgoing = self._outgoing[partner] = queue.SimpleQueue()
            self._keep(connection)
            threading.Thread(
                target=_write, args=(connection, outgoing), name="write stream", daemon=True
            ).start()
        for partner in addresses.keys() - failed.keys():
            if not self._connected[partner].wait(max(0.0, end - time.monotonic())):
                reason = f"it did not connect within {self._seconds:g} s"
                failed[partner] = WorkerLostError(self._names[partner], reason)
        return failed

    def stop_listening(self) -> None:
        """Refuse strangers from now on; to be called when all workers are connected."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                # A thread that waits in `accept` would keep it open.
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None

    def _connection(self, partner: Peer, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), self._seconds)
        try:
            nonce = secrets.token_bytes(_NONCE_BYTES)
            connection.sendall(_PEER.pack(*self._peer) + nonce)
            theirs, proof = _received(connection, _NONCE_BYTES), _received(connection, _PROOF_BYTES)
            if not hmac.compare_digest(proof, self._proof(b"taker", nonce, self._peer, partner)):
                raise EOFError
            connection.sendall(self._proof(b"giver", theirs, self._peer, partner))
        except BaseException:
            connection.close()
            raise
        return connection

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # It listens no more.
                return
            # Who connects and says nothing must not keep others waiting.
            threading.Thread(
                target=self._greet, args=(connection,), name="greet stream", daemon=True
            ).start()

    def _greet(self, connection: socket.socket) -> None:
        """Read what a worker of the run gives, once it has shown that it is one."""
        connection.settimeout(self._seconds)
        try:
            giver = self._known_giver(connection)
        except (OSError, EOFError):
            connection.close()
            return
        self._keep(connection)
        self._connected[giver].set()
        self._read(giver, connection)

    def _known_giver(self, connection: socket.socket) -> Peer:
        stage, place = _PEER.unpack(_received(connection, _PEER.size))
        giver = stage, place
        nonce, own = _received(connection, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(own + self._proof(b"taker", nonce, giver, self._peer))
        proof = _received(connection, _PROOF_BYTES)
        if not hmac.compare_digest(proof, self._proof(b"giver", own, giver, self._peer)):
            raise EOFError
        if giver not in self._connected or self._connected[giver].is_set():
            raise EOFError
        return giver

    def _proof(self, role: bytes, nonce: bytes, giver: Peer, taker: Peer) -> bytes:
        message = role + nonce + _PEER.pack(*giver) + _PEER.pack(*taker)
        return hmac.digest(self._secret, message, "sha256")

    def _keep(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.append(connection)

    # Giving and taking

    def offer(self, delivery: Delivery, pieces: Sequence[jax.Array]) -> None:
        """Give pieces, as soon as they are there.

        Raises:
            Exception: earlier ones could not be given.
        """
        self._carrier.offer(delivery, pieces)

    def ask(
        self, delivery: Delivery, shapes: Sequence[jax.ShapeDtypeStruct], route: Route
    ) -> Coming:
        """Ask for pieces; those that have come already are brought to their devices."""
        return self._carrier.ask(delivery, shapes, route)

    def _post(self, delivery: Delivery, pieces: Bytes | str) -> None:
        is_reason = isinstance(pieces, str)
        given = [np.frombuffer(pieces.encode(), np.uint8)] if is_reason else [*pieces]
        self._outgoing[delivery.receiver].put((delivery, is_reason, given))

    def _read(self, giver: Peer, connection: socket.socket) -> None:
        try:
            while True:
                step, number, is_reason, count = _HEADER.unpack(_received(connection, _HEADER.size))
                sizes = struct.unpack(f"<{count}Q", _received(connection, 8 * count))
                pieces = [_filled(connection, aligned_room(size)) for size in sizes]
                delivery = Delivery(step, number, giver, self._peer)
                if is_reason:
                    self._carrier.take(delivery, pieces[0].tobytes().decode())
                else:
                    self._carrier.take(delivery, pieces, for_good=True)
                # Until the next ones come, this thread would keep them.
                del pieces
        except (OSError, EOFError) as error:
            if not self._closing:
                reason = f"its connection ended: {error}" if str(error) else "its connection ended"
                self._carrier.lose(giver, reason)

    def close(self) -> None:
        """End all threads and connections, when all has been given."""
        self._closing = True
        self.stop_listening()
        self._carrier.close()
        for outgoing in self._outgoing.values():
            outgoing.put(None)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _write(connection: socket.socket, outgoing: queue.SimpleQueue[_Given | None]) -> None:
    """Write what is given, until there is no more or nobody reads."""
    while (item := outgoing.get()) is not None:
        delivery, is_reason, pieces = item
        header = _HEADER.pack(delivery.step, delivery.number, is_reason, len(pieces))
        sizes = struct.pack(f"<{len(pieces)}Q", *(each.nbytes for each in pieces))
        try:
            _send(connection, [memoryview(header + sizes), *(each.data for each in pieces)])
        except OSError:  # Who reads tells of its own end.
            return
        # Until the next ones come, this thread would keep them.
        del item, pieces


def _send(connection: socket.socket, parts: Sequence[memoryview]) -> None:
    """Send parts, one after another, with as few calls as there can be."""
    left = [part for part in parts if len(part)]
    while left:
        sent = connection.sendmsg(left[:_MOST_BUFFERS])
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


def _filled(connection: socket.socket, room: np.ndarray) -> np.ndarray:
    """Room with what comes next."""
    view = room.data
    while len(view):
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return room


def _received(connection: socket.socket, size: int) -> bytes:
    return _filled(connection, np.empty(size, np.uint8)).tobytes()
