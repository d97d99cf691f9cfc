"""Buffers and the instructions on them: what a worker's list is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Buffer(NamedTuple):
    """The name of an array that a worker holds.

    Args:
        kind: what it is: ``parameter``, ``state``, ``gradient``, ``batch``, ``value``,
            ``residual``, ``deferred``, ``cotangent``, ``total``, ``count``, ``loss``, ``message``,
            ``metric``, ``one``, ``updated_gradient`` and ``updated_parameter`` (rows of what is
            held), or ``shared_gradient`` and ``shared_parameter``, of which `place` is the leaf,
            `microbatch` the first row and `link` the stage that has it.
        place: which of that kind.
        microbatch: of which microbatch; -1 where of none.
        link: across which cut, counted by the stage before it, or of which sender; -1 for none.
    """

    kind: str
    place: int = 0
    microbatch: int = -1
    link: int = -1


Buffers = tuple[Buffer, ...]


class Route(NamedTuple):
    """A kind of transfer between two stages."""

    kind: str
    source: int
    target: int


class Tag(NamedTuple):
    """One transfer of a step; both ends name it alike."""

    route: Route
    microbatch: int = -1


@dataclass(frozen=True)
class Load:
    """Read a microbatch's examples."""

    microbatch: int
    buffers: Buffers


@dataclass(frozen=True)
class Expect:
    """Ask for a transfer ahead of its use, so that it can come while the worker computes."""

    tag: Tag


@dataclass(frozen=True)
class Receive:
    """Wait for a transfer and name its arrays."""

    tag: Tag
    buffers: Buffers


@dataclass(frozen=True)
class Send:
    """Hand arrays to a transfer; they stay alive until the other end has them."""

    tag: Tag
    buffers: Buffers


@dataclass(frozen=True)
class Run:
    """Run a compiled program.

    Args:
        program: its name.
        inputs: the buffers of each of its arguments, which are sequences of arrays.
        outputs: what to call its results, flattened.
        microbatch: of which microbatch; -1 for the update.
    """

    program: str
    inputs: tuple[Buffers, ...]
    outputs: Buffers
    microbatch: int = -1


@dataclass(frozen=True)
class Free:
    """Forget buffers."""

    buffers: Buffers


Instruction = Load | Expect | Receive | Send | Run | Free


def numbered(kind: str, count: int, microbatch: int = -1) -> Buffers:
    """Buffers of one kind, counted from 0."""
    return tuple(Buffer(kind, i, microbatch) for i in range(count))
