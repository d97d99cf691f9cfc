"""Instructions on buffers, and the transfers that some of them name: what lists are made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from hetjax.runtime.instructions.buffers import (
    BatchLeaf,
    Buffers,
    Offloadable,
    Offloaded,
)


class RouteKind(StrEnum):
    """What a transfer between two stages moves.

    Attributes:
        VALUE: the values of a microbatch, to the stage after.
        COTANGENT: their cotangents, to the stage before.
        GRADIENT: gradients of rows that several stages hold, to who updates them.
        PARAMETER: new values of such rows, from who decides them.
        LOSS: the loss of a later pipeline, to the stage that adds up all.
        MESSAGE: what one stage's update tells another.
        MOVE: values that come to lie in another way among the members of one stage.
    """

    VALUE = "value"
    COTANGENT = "cotangent"
    GRADIENT = "gradient"
    PARAMETER = "parameter"
    LOSS = "loss"
    MESSAGE = "message"
    MOVE = "move"


class Route(NamedTuple):
    """All transfers of one kind from one stage to another.

    Args:
        kind: what they move.
        source: the stage that sends.
        target: the stage that receives; of moves the same one.
    """

    kind: RouteKind
    source: int
    target: int


class Tag(NamedTuple):
    """One transfer of a step; both ends name it alike.

    Args:
        route: its kind and its ends.
        microbatch: of which microbatch; -1 where of none.
        phase: of which phase of the update a message is; -1 of what is none.
        move: between which segments of a program a move is; empty of what is none.
    """

    route: Route
    microbatch: int = -1
    phase: int = -1
    move: str = ""


@dataclass(frozen=True)
class Load:
    """Read a microbatch's examples."""

    microbatch: int
    buffers: tuple[BatchLeaf, ...]


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
class Fetch:
    """Begin to bring buffers from the hosts' memory to the devices; they stay there, too.

    Args:
        buffers: what they are on the devices.
        microbatch: of which microbatch; -1 for optimizer state.
    """

    buffers: tuple[Offloadable, ...]
    microbatch: int = -1

    @property
    def sources(self) -> tuple[Offloaded, ...]:
        """What they are in the hosts' memory."""
        return tuple(map(Offloaded, self.buffers))


@dataclass(frozen=True)
class Store:
    """Begin to put buffers into the hosts' memory; they stay on the devices until they are freed.

    Args:
        buffers: what they are on the devices.
        microbatch: of which microbatch; -1 for optimizer state.
    """

    buffers: tuple[Offloadable, ...]
    microbatch: int = -1

    @property
    def targets(self) -> tuple[Offloaded, ...]:
        """What they are in the hosts' memory."""
        return tuple(map(Offloaded, self.buffers))


@dataclass(frozen=True)
class Await:
    """Wait until buffers are in the hosts' memory, so that the devices' has room for others."""

    buffers: tuple[Offloaded, ...]


@dataclass(frozen=True)
class Free:
    """Forget buffers."""

    buffers: Buffers


@dataclass(frozen=True)
class Turn:
    """The place before a task, where a stage that shares its devices may leave them to another."""


Instruction = Load | Expect | Receive | Send | Run | Fetch | Store | Await | Free | Turn
