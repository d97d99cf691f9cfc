"""Carriers: what they are called, what one between processes is, and which one takes a message.

A carrier takes pieces of arrays from one process to another, and knows nothing of annotations.
Which one takes a message follows from what was measured of each on the link between the two
processes, so both ends know it without a word.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

import jax

from hetjax.mesh.links import Link
from hetjax.runtime.instructions.instruction import Route
from hetjax.runtime.moves.peers import Peer
from hetjax.runtime.moves.watching import Watched


class CarrierName(StrEnum):
    """What a carrier is called.

    Attributes:
        IN_PROCESS: from device to device of one process, `hetjax.runtime.moves.transport`.
        WIRE: JAX's transfer server, `hetjax.runtime.moves.wire_carrier`.
        HOST: calls from worker to worker, `hetjax.runtime.moves.host_carrier`.
    """

    IN_PROCESS = "in process"
    WIRE = "wire"
    HOST = "host"


BETWEEN_PROCESSES = (CarrierName.WIRE, CarrierName.HOST)
"""The carriers between processes; the first one where nothing tells them apart."""


CarrierLinks = Mapping[CarrierName, Link]
"""What each carrier was measured to take on one link."""


class Delivery(NamedTuple):
    """What one process gives another of a transfer; both name it alike.

    Args:
        step: the step.
        number: of the transfer within the step.
        sender: who gives.
        receiver: who takes.
    """

    step: int
    number: int
    sender: Peer
    receiver: Peer


class Coming:
    """Pieces that were asked for.

    Attributes:
        watched: tells when they are there.
        pieces: where they land, from then on.
    """

    def __init__(self, watched: Watched, pieces: Sequence[jax.Array] = ()):
        self.watched, self.pieces = watched, pieces


class PieceCarrier(Protocol):
    """Takes pieces from one process to another; nothing in it waits for another process."""

    @property
    def if_late(self) -> str:
        """What is told besides of pieces that do not come in time."""
        ...

    def offer(self, delivery: Delivery, pieces: Sequence[jax.Array]) -> None:
        """Give pieces; they may be forgotten by the caller at once, and may not be there yet."""
        ...

    def ask(
        self, delivery: Delivery, shapes: Sequence[jax.ShapeDtypeStruct], route: Route
    ) -> Coming:
        """Ask for pieces, whether they have been given or not.

        Args:
            delivery: which.
            shapes: their shapes, and the shardings with which they land.
            route: those of one route come in the order in which they are asked for.
        """
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


def best_carrier(links: CarrierLinks, num_bytes: float) -> CarrierName:
    """The carrier that takes least time for a message.

    Args:
        links: what each carrier was measured to take; at least one.
        num_bytes: the size of the message.

    Returns:
        The carrier; the first of `BETWEEN_PROCESSES` where several take the same.

    Example:
        >>> links = {CarrierName.WIRE: Link(1e9, 1e-4), CarrierName.HOST: Link(4e9, 1e-3)}
        >>> [str(best_carrier(links, size)) for size in (1000, 1_000_000, 2_000_000)]
        ['wire', 'wire', 'host']
    """
    return min(
        (name for name in BETWEEN_PROCESSES if name in links),
        key=lambda name: links[name].seconds(num_bytes),
    )


def taken_sizes(links: CarrierLinks) -> list[tuple[CarrierName, float]]:
    """Which carrier takes messages of which sizes.

    Args:
        links: what each carrier was measured to take; at least one.

    Returns:
        Carriers in the order of sizes, each with the bytes from which it takes messages.

    Example:
        >>> links = {CarrierName.WIRE: Link(1e9, 1e-4), CarrierName.HOST: Link(4e9, 1e-3)}
        >>> [(str(name), round(size)) for name, size in taken_sizes(links)]
        [('wire', 0), ('host', 1200000)]
    """
    crossings = {0.0}
    for one, other in itertools.combinations(links.values(), 2):
        slopes = 1 / one.bandwidth - 1 / other.bandwidth
        if slopes and (size := (other.latency - one.latency) / slopes) > 0:
            crossings.add(size)
    starts = sorted(crossings)
    taken: list[tuple[CarrierName, float]] = []
    for start, end in itertools.zip_longest(starts, starts[1:], fillvalue=2 * starts[-1] + 1):
        name = best_carrier(links, (start + end) / 2)
        if not taken or taken[-1][0] != name:
            taken.append((name, start))
    return taken
