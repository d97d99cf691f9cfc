"""Carriers: what they are called, what one between processes is, and which one takes a message.

A carrier takes pieces of arrays from one process to another, and knows nothing of annotations.
Which one takes a message follows from what was measured of each on the link between the two
processes, so both ends know it without a word.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

import jax

from hetjax.errors import InputError
from hetjax.runtime.instructions.instruction import Route
from hetjax.runtime.moves.peers import Peer
from hetjax.runtime.moves.watching import Watched


class CarrierName(StrEnum):
    """What a carrier is called.

    Attributes:
        IN_PROCESS: from device to device of one process, `hetjax.runtime.moves.transport`.
        WIRE: JAX's transfer server, `hetjax.runtime.moves.wire_carrier`.
        STREAM: a TCP connection between hosts, `hetjax.runtime.moves.stream_carrier`.
        HOST: calls from worker to worker, `hetjax.runtime.moves.host_carrier`.
    """

    IN_PROCESS = "in process"
    WIRE = "wire"
    STREAM = "stream"
    HOST = "host"


BETWEEN_PROCESSES = (CarrierName.WIRE, CarrierName.STREAM, CarrierName.HOST)
"""The carriers between processes; the first one where nothing tells them apart."""

CONNECT_SECONDS = 10.0
"""How long a worker may take to accept a connection, and then to greet."""


@dataclass(frozen=True)
class Curve:
    """What a carrier was measured to take for messages of some sizes, and takes for others.

    Between two sizes it is a straight line. Beyond the largest one the last line goes on, or, where
    that is steeper, the line from the smallest one to the largest one. A message that is smaller
    than all takes what the smallest one took.

    Args:
        sizes: bytes, ascending; two or more.
        seconds: what a message of each took.

    Raises:
        InputError: there are too few sizes, they do not ascend, or there is not one time for each.

    Example:
        >>> Curve((1000, 2000), (1e-3, 3e-3)).at(1500)
        0.002
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or any(a >= b for a, b in itertools.pairwise((0, *self.sizes))):
            raise InputError(
                f"sizes: {list(self.sizes)} is not allowed: it must be two or more, ascending"
            )
        if len(self.seconds) != len(self.sizes):
            raise InputError(
                f"seconds: there are {len(self.seconds)}, and sizes has {len(self.sizes)}"
            )
        for each in self.seconds:
            if not (math.isfinite(each) and each > 0):
                raise InputError(
                    f"seconds: {each!r} is not allowed: it must be more than 0 and finite"
                )

    def at(self, num_bytes: float) -> float:
        """The seconds that a message takes.

        Args:
            num_bytes: its size in bytes.
        """
        if num_bytes <= self.sizes[0]:
            return self.seconds[0]
        if num_bytes > self.sizes[-1]:
            # Of two times that are off a little, a line may be flat by chance.
            slope = max(0.0, self._slope(-2, -1), self._slope(0, -1))
            return self.seconds[-1] + slope * (num_bytes - self.sizes[-1])
        place = bisect.bisect_left(self.sizes, num_bytes)
        after = num_bytes - self.sizes[place - 1]
        return self.seconds[place - 1] + self._slope(place - 1, place) * after

    def _slope(self, start: int, end: int) -> float:
        seconds, size = (each[end] - each[start] for each in (self.seconds, self.sizes))
        return seconds / size


CarrierLinks = Mapping[CarrierName, Curve]
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
        >>> wire, stream = Curve((1000, 5000), (1e-3, 5e-3)), Curve((1000, 5000), (2e-3, 4e-3))
        >>> links = {CarrierName.WIRE: wire, CarrierName.STREAM: stream}
        >>> [str(best_carrier(links, size)) for size in (1000, 2900, 3100, 9000)]
        ['wire', 'wire', 'stream', 'stream']
    """
    return min(
        (name for name in BETWEEN_PROCESSES if name in links),
        key=lambda name: links[name].at(num_bytes),
    )


def taken_sizes(links: CarrierLinks) -> list[tuple[CarrierName, float]]:
    """Which carrier takes messages of which sizes.

    Args:
        links: what each carrier was measured to take; at least one.

    Returns:
        Carriers in the order of sizes, each with the bytes from which it takes messages; one may
        take several ranges of them.

    Example:
        >>> wire, stream = Curve((1000, 5000), (1e-3, 5e-3)), Curve((1000, 5000), (2e-3, 4e-3))
        >>> links = {CarrierName.WIRE: wire, CarrierName.STREAM: stream}
        >>> [(str(name), round(size)) for name, size in taken_sizes(links)]
        [('wire', 0), ('stream', 3000)]
    """
    knots = sorted({0, *(size for curve in links.values() for size in curve.sizes)})
    starts = sorted({*map(float, knots), *_crossings(links, knots)})
    taken: list[tuple[CarrierName, float]] = []
    for start, end in itertools.zip_longest(starts, starts[1:], fillvalue=2 * starts[-1] + 1):
        name = best_carrier(links, (start + end) / 2)
        if not taken or taken[-1][0] != name:
            taken.append((name, start))
    return taken


def _crossings(links: CarrierLinks, knots: Sequence[float]) -> Iterator[float]:
    """Sizes at which two carriers take the same, between which all curves are straight lines."""
    for start, end in itertools.pairwise((*knots, math.inf)):
        for one, other in itertools.combinations(links.values(), 2):
            ahead = one.at(start) - other.at(start)
            step = end - start if end < math.inf else start
            change = one.at(start + step) - other.at(start + step) - ahead
            if change and (part := -ahead / change) > 0 and start + part * step < end:
                yield start + part * step
