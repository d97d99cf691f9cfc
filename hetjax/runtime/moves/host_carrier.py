"""The host carrier: pieces go from the memory of one host to that of another, as plain bytes.

It needs nothing of JAX but copies between a device and its host, so it is for devices that have no
transfer server, and for links on which it is the faster one. What takes the bytes to the other
worker is given: on Ray a call from actor to actor. A sender gives when its pieces are there, so
that is a thread's work; a receiver brings them to its devices when they are asked for.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hetjax.runtime.instructions.instruction import Route
from hetjax.runtime.moves.carriers import Coming, Delivery
from hetjax.runtime.moves.peers import Peer
from hetjax.runtime.moves.watching import Watched

Bytes = Sequence[np.ndarray]
"""Pieces, each as bytes in one dimension."""

_ALIGNMENT = 64
"""Of memory that JAX takes over on CPUs, in bytes."""

Post = Callable[[Delivery, Bytes | str], None]
"""Has the receiver of a delivery `take` it, without waiting for that."""


class HostCarrier:
    """Takes pieces from process to process through the hosts' memory.

    Args:
        post: what brings bytes to other workers.

    Attributes:
        if_late: what is told besides of pieces that do not come in time.
    """

    if_late = "; it hangs or is out of reach"

    def __init__(self, post: Post):
        self._post = post
        self._changing = threading.Lock()
        self._asked: dict[Delivery, _Landing] = {}
        self._taken: dict[Delivery, tuple[Bytes | str, bool]] = {}
        self._lost: dict[Peer, str] = {}
        self._failure: Exception | None = None
        self._offered: queue.SimpleQueue[tuple[Delivery, Sequence[jax.Array]] | None]
        self._offered = queue.SimpleQueue()
        threading.Thread(target=self._give, name="give pieces", daemon=True).start()

    def offer(self, delivery: Delivery, pieces: Sequence[jax.Array]) -> None:
        """Give pieces, as soon as they are there.

        Raises:
            Exception: earlier ones could not be given.
        """
        if self._failure is not None:
            raise self._failure
        self._offered.put((delivery, tuple(pieces)))

    def _give(self) -> None:
        while (item := self._offered.get()) is not None:
            delivery, pieces = item
            try:
                self._post(delivery, [_bytes_of(piece) for piece in pieces])
            except Exception as error:  # Whatever it is, both ends must hear of it.
                self._failure = error
                with contextlib.suppress(Exception):
                    self._post(delivery, str(error).partition("\n")[0])
            # Until the next ones come, this thread would keep them alive.
            del item, pieces

    def take(self, delivery: Delivery, pieces: Bytes | str, *, for_good: bool = False) -> None:
        """Take what another worker gives; it may be called in any thread.

        Args:
            delivery: what it is.
            pieces: its bytes, or why they will never come.
            for_good: whether the memory that they are in is given, too.
        """
        with self._changing:
            landing = self._asked.pop(delivery, None)
            if landing is None:
                self._taken[delivery] = pieces, for_good
        if landing is not None:
            landing.land(pieces, for_good)

    def lose(self, giver: Peer, reason: str) -> None:
        """Know that nothing comes from a worker any more; it may be called in any thread."""
        with self._changing:
            self._lost[giver] = reason
            asked = [delivery for delivery in self._asked if delivery.sender == giver]
            landings = [self._asked.pop(delivery) for delivery in asked]
        for landing in landings:
            landing.land(reason, for_good=False)

    def ask(
        self, delivery: Delivery, shapes: Sequence[jax.ShapeDtypeStruct], route: Route
    ) -> Coming:
        """Ask for pieces; those that have been taken already are brought to their devices."""
        landing = _Landing(shapes)
        with self._changing:
            taken = self._taken.pop(delivery, None)
            if taken is None and delivery.sender in self._lost:
                taken = self._lost[delivery.sender], False
            if taken is None:
                self._asked[delivery] = landing
        if taken is not None:
            landing.land(*taken)
        return landing.coming

    def close(self) -> None:
        """End the thread, when all has been given."""
        self._offered.put(None)


class _Landing:
    """Where the pieces of a delivery land."""

    def __init__(self, shapes: Sequence[jax.ShapeDtypeStruct]):
        self._shapes = shapes
        self.coming = Coming(Watched())

    def land(self, pieces: Bytes | str, for_good: bool) -> None:
        """Bring bytes to the devices, and tell who waits."""
        watched = self.coming.watched
        try:
            self.coming.pieces = _on_devices(pieces, self._shapes, for_good)
        except Exception as error:  # Whatever it is, who waits must hear of it.
            watched.error = error
        watched.arrived = time.time()
        watched.done.set()


def _on_devices(
    pieces: Bytes | str, shapes: Sequence[jax.ShapeDtypeStruct], for_good: bool
) -> Sequence[jax.Array]:
    if isinstance(pieces, str):
        raise RuntimeError(pieces)
    arrays = [
        (each if for_good else _for_device(each, shape)).view(shape.dtype).reshape(shape.shape)
        for each, shape in zip(pieces, shapes, strict=True)
    ]
    return jax.device_put(arrays, [shape.sharding for shape in shapes])


def _for_device(piece: np.ndarray, shape: jax.ShapeDtypeStruct) -> np.ndarray:
    """Bytes that JAX may keep: of what brings them here nothing is to stay in use.

    On CPUs JAX takes over memory that is aligned as it wants it, and copies other memory, so this
    copy is the only one there.
    """
    assert shape.sharding is not None
    if any(device.platform != "cpu" for device in shape.sharding.device_set):
        return piece
    copy = aligned_room(piece.size)
    copy[:] = piece
    return copy


def aligned_room(size: int) -> np.ndarray:
    """Memory that JAX takes over on CPUs instead of copying it: uint8 [size], with any content."""
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size]


def _bytes_of(piece: Any) -> np.ndarray:
    """What a piece is on the host, once it is there, without its type, which its receiver knows."""
    return np.ascontiguousarray(np.asarray(piece)).reshape(-1).view(np.uint8)
