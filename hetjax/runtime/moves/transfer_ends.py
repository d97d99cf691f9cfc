"""The two ends of a transfer, which cut, add, put together and gather what crosses.

The ends are those of a transfer between stages, or of a move among the members of one; there a
process is both. Everything is compiled once. Where both annotations divide an array alike nothing
has to be computed at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from hetjax.runtime.compilation.compiled_stage import Compiled
from hetjax.runtime.moves.crossing_arrays import CrossingArray
from hetjax.runtime.moves.end_programs import (
    CutPart,
    JoinedPart,
    cutting_program,
    joining_program,
)
from hetjax.runtime.moves.landing import Landing, gatherer
from hetjax.runtime.moves.peers import Peer
from hetjax.sharding.annotation.bounds import Bounds, volume
from hetjax.sharding.annotation.subgroup import Shard
from hetjax.sharding.resolution.steps import SentPiece

Place = Sharding | jax.Device
"""Where an array lies: on one device, or divided among several."""


class _Cutting(NamedTuple):
    """What one device cuts out of its shards: parts of arrays, and the program that does it."""

    device: int
    parts: list[tuple[int, Bounds]]
    program: Compiled


class SendingEnd:
    """A process that sends a transfer.

    Args:
        arrays: what crosses; the process may have none of some.
        mesh: the mesh of its member of the stage.
        peer: the process.
    """

    def __init__(self, arrays: Sequence[CrossingArray], mesh: Mesh, peer: Peer):
        self._given = [i for i, array in enumerate(arrays) if array.is_given_by(peer)]
        self._offers: dict[Peer, list[SentPiece]] = {}
        self._numbers: dict[Any, int] = {}
        self._cuttings: list[_Cutting] = []
        self._only = None
        cut: dict[int, dict[tuple[int, Bounds], None]] = {}
        for i in self._given:
            array = arrays[i]
            group = array.source.subgroups[array.giving_member(peer)]
            self._numbers |= dict(zip(mesh.devices.flat, group.devices, strict=True))
            for piece in array.pieces(i):
                if array.givers[piece.sender] == peer:
                    self._offers.setdefault(array.takers[piece.receiver], []).append(piece)
                    if piece.bounds != array.held[piece.sender]:
                        cut.setdefault(piece.sender, {})[i, piece.bounds] = None
        if len(self._numbers) == 1:
            (self._only,) = self._numbers.values()
        devices = {number: device for device, number in self._numbers.items()}
        for number, parts in cut.items():
            wanted = tuple(
                CutPart(bounds, arrays[i].held[number], arrays[i].shape.dtype)
                for i, bounds in parts
            )
            program = cutting_program(wanted, devices[number])
            self._cuttings.append(_Cutting(number, [*parts], program))

    @property
    def receivers(self) -> tuple[Peer, ...]:
        """The processes that get something of this one; it may be among them."""
        return tuple(self._offers)

    def offers(self, arrays: Sequence[jax.Array]) -> dict[Peer, list[Any]]:
        """What each receiving process gets of this one.

        Args:
            arrays: those arrays that the process has some of, as the member divides them.

        Returns:
            For each receiving process the pieces for it, each on one device. What a device keeps
            whole is its shard, the memory of the array.
        """
        return self.offers_of(self.shards(arrays))

    def offers_of(self, shards: Sequence[Mapping[int, jax.Array]]) -> dict[Peer, list[Any]]:
        """What each receiving process gets of this one, as from `offers`.

        Args:
            shards: of each array the shards, by the numbers of their devices.
        """
        held = dict(zip(self._given, shards, strict=True))
        cut: dict[tuple[int, int, Bounds], jax.Array] = {}
        for device, parts, program in self._cuttings:
            made = program(*(held[i][device] for i, _ in parts))
            cut |= {
                (device, i, bounds): piece for (i, bounds), piece in zip(parts, made, strict=True)
            }
        return {
            receiver: [
                held[i][sender] if (piece := cut.get((sender, i, bounds))) is None else piece
                for i, bounds, sender, _ in offered
            ]
            for receiver, offered in self._offers.items()
        }

    def places(
        self, receiver: Peer, requests: Sequence[jax.ShapeDtypeStruct]
    ) -> list[Place | None]:
        """Where the pieces for a process land that has its devices here.

        Args:
            receiver: the process.
            requests: what it asks of this one, as in `ReceivingEnd.requests`.

        Returns:
            The place of each piece; None where it stays on its device.
        """
        return [
            None if piece.sender == piece.receiver else place_of(spec.sharding)
            for piece, spec in zip(self._offers[receiver], requests, strict=True)
        ]

    def shards(self, arrays: Sequence[jax.Array]) -> list[dict[int, jax.Array]]:
        """The process's shards of arrays by the numbers of their devices."""
        if self._only is not None:
            return [{self._only: array} for array in arrays]
        return [
            {self._numbers[shard.device]: shard.data for shard in array.addressable_shards}
            for array in arrays
        ]


def place_of(sharding: Sharding) -> Place:
    """Where an array comes to lie: JAX brings it to a device in two thirds of the time.

    Example:
        >>> (device,) = jax.devices()[:1]
        >>> place_of(SingleDeviceSharding(device)) == device
        True
    """
    if not isinstance(sharding, SingleDeviceSharding):
        return sharding
    (device,) = sharding.device_set
    return device


def landed(
    pieces: Sequence[jax.Array], places: Sequence[Place | None], *, copies: bool = False
) -> list[jax.Array]:
    """Bring pieces to where they land in this process.

    Nothing waits for them: the host has offered the next program when they come.

    Args:
        pieces: the pieces.
        places: where each lands; None where it stays on its device.
        copies: whether what stays on its device is copied, since who gives it may write over it.
    """
    found = list(pieces)
    if copies:
        kept = [
            piece.sharding if place is None else place
            for piece, place in zip(pieces, places, strict=True)
        ]
        return jax.device_put(found, kept, may_alias=False)
    leaving = [i for i, place in enumerate(places) if place is not None]
    match leaving:
        case []:
            pass
        case [i]:  # In three quarters of the time that a list of one takes.
            found[i] = jax.device_put(pieces[i], places[i])
        case _:
            moved = jax.device_put([pieces[i] for i in leaving], [places[i] for i in leaving])
            for i, piece in zip(leaving, moved, strict=True):
                found[i] = piece
    return found


class _Joining(NamedTuple):
    """What one device makes of pieces that land on it: parts of arrays, and what makes them.

    Args:
        device: the number of the device.
        pieces: what is put together.
        parts: for each result its array, and its place among the parts of the process.
        program: from the pieces to these parts.
    """

    device: int
    pieces: list[SentPiece]
    parts: list[tuple[int, int]]
    program: Compiled


class _Copy(NamedTuple):
    """A part of an array that is the same as another one of the same process."""

    array: int
    place: int
    like: int
    device: Any


class ReceivingEnd:
    """A process that receives a transfer.

    Args:
        arrays: what crosses; the process may get none of some.
        mesh: the mesh of its member of the stage.
        peer: the process.

    Attributes:
        requests: for each process that has a piece for this one, itself included, the shapes of
            these pieces and the shardings with which they land.
        num_bytes: the size of all pieces that others have.
        gathers: whether the processes of the member take part in a collective.
        others: these processes, but for this one.
    """

    def __init__(self, arrays: Sequence[CrossingArray], mesh: Mesh, peer: Peer):
        self._landings = {
            i: Landing(array, mesh, peer)
            for i, array in enumerate(arrays)
            if array.is_taken_by(peer)
        }
        self._pieces: dict[Peer, list[SentPiece]] = {}
        for i in self._landings:
            array = arrays[i]
            for piece in array.pieces(i):
                if array.takers[piece.receiver] == peer:
                    sender = array.givers[piece.sender]
                    self._pieces.setdefault(sender, []).append(piece)
        self._as_sent: list[tuple[int, int, SentPiece]] = []
        self._joinings: list[_Joining] = []
        self._copies: list[_Copy] = []
        self._plan(arrays)
        self.requests = {
            sender: [
                jax.ShapeDtypeStruct(
                    arrays[piece.array].extent(piece.bounds),
                    arrays[piece.array].shape.dtype,
                    sharding=SingleDeviceSharding(
                        self._landings[piece.array].device(piece.receiver)
                    ),
                )
                for piece in pieces
            ]
            for sender, pieces in self._pieces.items()
        }
        self.num_bytes = sum(
            math.prod(spec.shape) * spec.dtype.itemsize
            for sender, specs in self.requests.items()
            for spec in specs
            if sender != peer
        )
        landings = list(self._landings.values())
        self._sliced = [i for i, each in self._landings.items() if each.gathering is not None]
        self._gatherer = gatherer(landings, mesh)
        self.gathers = self._gatherer is not None
        self.others = tuple(sorted({p for each in landings for p in each.peers} - {peer}))

    def _plan(self, arrays: Sequence[CrossingArray]) -> None:
        """Find out what each part of each array is made of."""
        joined: dict[int, list[_MadePart]] = {}
        for i, landing in self._landings.items():
            array = arrays[i]
            landing_on = _by_receiver(array, i)
            made: dict[Shard, int] = {}
            copied: list[tuple[int, Shard]] = []
            for place, shard in enumerate(landing.shards):
                summed = landing_on.get(shard.device, [])
                if not summed and volume(shard.bounds):
                    copied.append((place, shard))
                    continue
                made.setdefault(replace(shard, device=-1), place)
                part = _MadePart(i, place, array, landing, shard, summed)
                if (piece := part.as_sent()) is not None:
                    self._as_sent.append((i, place, piece))
                else:
                    joined.setdefault(shard.device, []).append(part)
            for place, shard in copied:
                like = made[replace(shard, device=-1)]
                self._copies.append(_Copy(i, place, like, landing.device(shard.device)))
        self._joinings = [_joining(parts) for parts in joined.values()]

    def parts(self, pulled: Mapping[Peer, Sequence[Any]]) -> dict[int, list[Any]]:
        """What the process's devices hold of arrays, of their pieces; slices not yet gathered.

        Args:
            pulled: what each sending process was asked for, as in `requests`.

        Returns:
            By the place of each array that the process gets, for each of its devices the part.
        """
        landed = {
            piece: array
            for sender, pieces in self._pieces.items()
            for piece, array in zip(pieces, pulled[sender], strict=True)
        }
        made: dict[int, list[Any]] = {
            i: [None] * len(landing.shards) for i, landing in self._landings.items()
        }
        for i, place, piece in self._as_sent:
            made[i][place] = landed[piece]
        for joining in self._joinings:
            made_here = joining.program(*(landed[piece] for piece in joining.pieces))
            for (i, place), part in zip(joining.parts, made_here, strict=True):
                made[i][place] = part
        if self._copies:
            copied = jax.device_put(
                [made[copy.array][copy.like] for copy in self._copies],
                [copy.device for copy in self._copies],
            )
            for copy, part in zip(self._copies, copied, strict=True):
                made[copy.array][copy.place] = part
        return made

    def put_together(self, pulled: Mapping[Peer, Sequence[Any]]) -> list[jax.Array]:
        """Make arrays of the pieces; where the end gathers, all processes must call this alike.

        Args:
            pulled: what each sending process was asked for, as in `requests`.

        Returns:
            The arrays that the process gets some of, divided as the member wants them.
        """
        made = self.parts(pulled)
        arrays = {i: landing.array(made[i]) for i, landing in self._landings.items()}
        if self._gatherer is not None:
            gathered = self._gatherer([arrays[i] for i in self._sliced])
            for i, array in zip(self._sliced, gathered, strict=True):
                arrays[i] = array
        return list(arrays.values())


class _MadePart(NamedTuple):
    """What a device shall have of an array, and the sums of pieces that it is made of."""

    array: int
    place: int
    crossing: CrossingArray
    landing: Landing
    shard: Shard
    summed: list[tuple[Bounds, list[SentPiece]]]

    def as_sent(self) -> SentPiece | None:
        """The one piece that the part is, where it is one."""
        if len(self.summed) != 1 or len(self.summed[0][1]) != 1:
            return None
        bounds, (piece,) = self.summed[0]
        fits = self.crossing.extent(bounds) == self.landing.part_shape
        return piece if bounds == self.shard.bounds and fits else None

    def joined(self) -> JoinedPart:
        """What is told to the compiler of it."""
        return JoinedPart(
            self.shard.bounds,
            tuple((bounds, len(summands)) for bounds, summands in self.summed),
            self.landing.part_shape,
            not self.crossing.shape.shape,
            self.crossing.shape.dtype,
            self.landing.device(self.shard.device),
        )


def _by_receiver(
    array: CrossingArray, place: int
) -> dict[int, list[tuple[Bounds, list[SentPiece]]]]:
    """For each device the parts that land on it, each with its summands."""
    found: dict[int, list[tuple[Bounds, list[SentPiece]]]] = {}
    for part in array.crossing.parts:
        for receiver in part.receivers:
            pieces = [SentPiece(place, part.bounds, each, receiver) for each in part.senders]
            found.setdefault(receiver, []).append((part.bounds, pieces))
    return found


def _joining(parts: Sequence[_MadePart]) -> _Joining:
    """What makes parts of several arrays on one device."""
    pieces = [piece for part in parts for _, summands in part.summed for piece in summands]
    program = joining_program(tuple(part.joined() for part in parts))
    places = [(part.array, part.place) for part in parts]
    return _Joining(parts[0].shard.device, pieces, places, program)
