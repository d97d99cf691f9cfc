"""What the two ends of a transfer do on their devices: cut, add, put together, gather.

The ends are those of a transfer between stages, or of a move among the members of one; there a
process is both. Everything is compiled once. Where both annotations divide an array alike nothing
has to be computed at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from hetjax.runtime.compilation.compiled_stage import Compiled
from hetjax.runtime.instructions.instruction import Tag
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.moves.peers import Peer, Processes
from hetjax.sharding.annotation.annotation import HSharding, Shard, axes_of
from hetjax.sharding.annotation.bounds import Bounds, extent, volume, within
from hetjax.sharding.resolution.crossing import Crossing, Gathering, crossing
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.senders import BestLink


class SentPiece(NamedTuple):
    """A piece of an array that one device gives another one, or keeps.

    Args:
        array: the place of the array among those of the transfer.
        bounds: the part of it.
        sender: the number of the device that gives it.
        receiver: the number of the device that it lands on.
    """

    array: int
    bounds: Bounds
    sender: int
    receiver: int


@dataclass(frozen=True, eq=False)
class CrossingArray:
    """One array of a transfer.

    A scalar is divided as an array of one element.

    Args:
        shape: its shape and dtype.
        source: how it lies as it is sent.
        target: how it shall lie when it is received.
        processes: for each device of both, which process has it.
        crossing: how the one becomes the other.
        held: for each device of the source, the part that it has.
    """

    shape: jax.ShapeDtypeStruct
    source: HSharding
    target: HSharding
    processes: Mapping[int, Peer]
    crossing: Crossing
    held: Mapping[int, Bounds]

    @classmethod
    def between(
        cls,
        shape: jax.ShapeDtypeStruct,
        source: HSharding,
        target: HSharding,
        processes: Mapping[int, Peer],
        senders: BestLink,
    ) -> CrossingArray:
        """An array that comes to lie in another way.

        Args:
            shape: its shape and dtype.
            source: how it lies.
            target: how it shall lie.
            processes: for each device of both, which process has it.
            senders: who sends what several devices have.

        Returns:
            The array with its crossing.
        """
        whole, itemsize = shape.shape or (1,), shape.dtype.itemsize
        found = crossing(source, target, whole, processes, senders, itemsize)
        held = {shard.device: shard.bounds for shard in source.shards(whole)}
        return cls(shape, source, target, processes, found, held)

    def extent(self, bounds: Bounds) -> tuple[int, ...]:
        """The shape of a part of it."""
        return extent(bounds) if self.shape.shape else ()

    def pieces(self, place: int) -> Iterator[SentPiece]:
        """Everything that is sent of it, in the order that both ends know.

        Args:
            place: its place among the arrays of the transfer.
        """
        for part in self.crossing.parts:
            for receiver in part.receivers:
                for sender in part.senders:
                    yield SentPiece(place, part.bounds, sender, receiver)

    def member(self, annotation: HSharding, peer: Peer) -> int:
        """Which subgroup of the source or the target a process has devices of."""
        return next(
            place
            for place, group in enumerate(annotation.subgroups)
            if any(self.processes[device] == peer for device in group.devices)
        )


def crossing_arrays(
    placement: Placement, tag: Tag, processes: Processes
) -> tuple[CrossingArray, ...]:
    """The arrays of a transfer; all of its ends derive the same.

    Args:
        placement: annotations of all buffers of all stages.
        tag: the transfer.
        processes: the devices of every process of every stage.

    Returns:
        One entry an array.
    """
    sent, received = placement.ends(tag)
    of_device = {
        device: (stage, place)
        for stage in (tag.route.source, tag.route.target)
        for place, devices in enumerate(processes[stage])
        for device in devices
    }
    senders = BestLink(Network.of(placement.plan.cluster))
    return tuple(
        CrossingArray.between(shape, source, target, of_device, senders)
        for shape, source, target in zip(
            sent.shapes, sent.annotations, received.annotations, strict=True
        )
    )


def alike(tag: Tag) -> Tag:
    """One transfer for all that move arrays of the same shapes: those of other microbatches."""
    return Tag(tag.route, phase=tag.phase, move=tag.move)


class _Cutting(NamedTuple):
    """What one device cuts out of its shards: parts of arrays, and the program that does it."""

    device: int
    parts: list[tuple[int, Bounds]]
    program: Compiled


class SendingEnd:
    """A process that sends a transfer.

    Args:
        arrays: what crosses.
        mesh: the mesh of its member of the stage.
        peer: the process.
        on_host: whether pieces are cut by the host, which can read the devices' memory, and travel
            as NumPy arrays.
    """

    def __init__(
        self, arrays: Sequence[CrossingArray], mesh: Mesh, peer: Peer, *, on_host: bool = False
    ):
        self._arrays, self._on_host = arrays, on_host
        self._offers: dict[Peer, list[SentPiece]] = {}
        self._numbers: dict[Any, int] = {}
        self._only = None
        cut: dict[int, dict[tuple[int, Bounds], None]] = {}
        for i, array in enumerate(arrays):
            group = array.source.subgroups[array.member(array.source, peer)]
            self._numbers |= dict(zip(mesh.devices.flat, group.devices, strict=True))
            for piece in array.pieces(i):
                if array.processes[piece.sender] == peer:
                    self._offers.setdefault(array.processes[piece.receiver], []).append(piece)
                    if piece.bounds != array.held[piece.sender] and not on_host:
                        cut.setdefault(piece.sender, {})[i, piece.bounds] = None
        if len(self._numbers) == 1:
            (self._only,) = self._numbers.values()
        devices = {number: device for device, number in self._numbers.items()}
        self._cuttings = [
            _Cutting(number, [*parts], _cutter(arrays, number, [*parts], devices[number]))
            for number, parts in cut.items()
        ]

    @property
    def receivers(self) -> tuple[Peer, ...]:
        """The processes that get something of this one; it may be among them."""
        return tuple(self._offers)

    def offers(self, arrays: Sequence[jax.Array]) -> dict[Peer, list[Any]]:
        """What each receiving process gets of this one.

        Args:
            arrays: the arrays, as the member divides them.

        Returns:
            For each receiving process the pieces for it, each on one device; they may be the memory
            of the arrays. Where the host cuts them, copies as NumPy arrays: it waits until the
            arrays are there. What a device keeps whole is its shard.
        """
        held = [self._shards(array) for array in arrays]
        if self._on_host:
            return self._host_offers(held)
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

    def _host_offers(self, held: Sequence[Mapping[int, jax.Array]]) -> dict[Peer, list[Any]]:
        made: dict[tuple[int, Bounds, int], np.ndarray] = {}
        found: dict[Peer, list[Any]] = {}
        for receiver, offered in self._offers.items():
            found[receiver] = pieces = []
            for i, bounds, sender, landing in offered:
                array, key = self._arrays[i], (i, bounds, sender)
                if sender == landing and bounds == array.held[sender]:
                    pieces.append(held[i][sender])
                    continue
                if key not in made:
                    shard = np.asarray(held[i][sender])
                    place = within(bounds, array.held[sender]) if array.shape.shape else ()
                    # A copy: the worker may give its array away to a program that writes over it.
                    made[key] = np.array(shard[place])
                pieces.append(made[key])
        return found

    def _shards(self, array: jax.Array) -> dict[int, jax.Array]:
        """The process's shards of an array by the numbers of their devices."""
        if self._only is not None:
            return {self._only: array}
        return {self._numbers[shard.device]: shard.data for shard in array.addressable_shards}


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

    def run(self, landed: Mapping[SentPiece, Any]) -> Sequence[jax.Array]:
        """Make the parts; what another device of the process keeps is read on the host."""
        return self.program(
            *(
                landed[piece] if piece.receiver == self.device else np.asarray(landed[piece])
                for piece in self.pieces
            )
        )


class _Copy(NamedTuple):
    """A part of an array that is the same as another one of the same process."""

    array: int
    place: int
    like: int
    sharding: Sharding


class ReceivingEnd:
    """A process that receives a transfer.

    Args:
        arrays: what crosses.
        mesh: the mesh of its member of the stage.
        peer: the process.
        on_host: whether pieces come as NumPy arrays, from ends that cut on the host.

    Attributes:
        requests: for each process that has a piece for this one, itself included, the shapes of
            these pieces and the shardings with which they land.
        num_bytes: the size of all pieces that others have.
        gathers: whether the processes of the member take part in a collective.
        others: these processes, but for this one.
    """

    def __init__(
        self, arrays: Sequence[CrossingArray], mesh: Mesh, peer: Peer, *, on_host: bool = False
    ):
        self._on_host = on_host
        self._landings = [Landing(array, mesh, peer) for array in arrays]
        self._pieces: dict[Peer, list[SentPiece]] = {}
        for i, array in enumerate(arrays):
            for piece in array.pieces(i):
                if array.processes[piece.receiver] == peer:
                    sender = array.processes[piece.sender]
                    self._pieces.setdefault(sender, []).append(piece)
        self.requests = {
            sender: [
                jax.ShapeDtypeStruct(
                    arrays[piece.array].extent(piece.bounds),
                    arrays[piece.array].shape.dtype,
                    sharding=self._landings[piece.array].part_sharding(piece.receiver),
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
        self._as_sent: list[tuple[int, int, SentPiece]] = []
        self._joinings: list[_Joining] = []
        self._copies: list[_Copy] = []
        self._plan(arrays)
        self._sliced = [i for i, each in enumerate(self._landings) if each.gathering is not None]
        self._gatherer = gatherer(self._landings, mesh)
        self.gathers = self._gatherer is not None
        self.others = tuple(sorted({p for each in self._landings for p in each.peers} - {peer}))

    def _plan(self, arrays: Sequence[CrossingArray]) -> None:
        """Find out what each part of each array is made of."""
        joined: dict[int, list[_JoinedPart]] = {}
        for i, (array, landing) in enumerate(zip(arrays, self._landings, strict=True)):
            landing_on = _by_receiver(array, i)
            made: dict[Shard, int] = {}
            copied: list[tuple[int, Shard]] = []
            for place, shard in enumerate(landing.shards):
                summed = landing_on.get(shard.device, [])
                if not summed and volume(shard.bounds):
                    copied.append((place, shard))
                    continue
                made.setdefault(replace(shard, device=-1), place)
                part = _JoinedPart(i, place, array, landing, shard, summed)
                if (piece := self._as_it_comes(part)) is not None:
                    self._as_sent.append((i, place, piece))
                else:
                    joined.setdefault(shard.device, []).append(part)
            kept = {place for j, place, _ in self._as_sent if j == i}
            for place, shard in copied:
                like = made[replace(shard, device=-1)]
                if self._on_host and like not in kept:
                    # NumPy arrays are of no device: they are put together once more.
                    summed = landing_on[landing.shards[like].device]
                    part = _JoinedPart(i, place, array, landing, shard, summed)
                    joined.setdefault(shard.device, []).append(part)
                    continue
                sharding = landing.part_sharding(shard.device)
                self._copies.append(_Copy(i, place, like, sharding))
        self._joinings = [_joining(parts) for parts in joined.values()]

    def _as_it_comes(self, part: _JoinedPart) -> SentPiece | None:
        """The piece that a part is, if it is one that lies on the device when it has come."""
        piece = part.as_sent()
        if piece is None or not self._on_host:
            return piece
        keeps = piece.sender == piece.receiver and piece.bounds == part.crossing.held[piece.sender]
        return piece if keeps else None

    def parts(self, pulled: Mapping[Peer, Sequence[Any]]) -> list[list[Any]]:
        """What the process's devices hold of each array, of its pieces; slices not yet gathered.

        Args:
            pulled: what each sending process was asked for, as in `requests`.
        """
        landed = {
            piece: array
            for sender, pieces in self._pieces.items()
            for piece, array in zip(pieces, pulled[sender], strict=True)
        }
        made: list[list[Any]] = [[None] * len(landing.shards) for landing in self._landings]
        for i, place, piece in self._as_sent:
            made[i][place] = landed[piece]
        for joining in self._joinings:
            for (i, place), part in zip(joining.parts, joining.run(landed), strict=True):
                made[i][place] = part
        if self._copies:
            copied = jax.device_put(
                [made[copy.array][copy.like] for copy in self._copies],
                [copy.sharding for copy in self._copies],
            )
            for copy, part in zip(self._copies, copied, strict=True):
                made[copy.array][copy.place] = part
        return made

    def put_together(self, pulled: Mapping[Peer, Sequence[Any]]) -> list[jax.Array]:
        """Make arrays of the pieces; where the end gathers, all processes must call this alike.

        Args:
            pulled: what each sending process was asked for, as in `requests`.

        Returns:
            The arrays, divided as the member wants them.
        """
        arrays = [
            landing.array(parts)
            for landing, parts in zip(self._landings, self.parts(pulled), strict=True)
        ]
        if self._gatherer is not None:
            gathered = self._gatherer([arrays[i] for i in self._sliced])
            for i, array in zip(self._sliced, gathered, strict=True):
                arrays[i] = array
        return arrays


class Landing:
    """An array on the mesh of a member, as it is when all pieces have landed.

    Where slices are to be gathered, it is the array of the slices: every device has its own, all of
    them padded to the same size.

    Args:
        array: what crosses.
        mesh: the member's mesh.
        peer: a process of the member.

    Attributes:
        peers: the processes of the member.
        shards: what the devices of the process have of it.
        gathering: how slices are gathered; None where there are none.
        wanted: how the member wants the array.
        shape: the shape of the array that lands.
        sharding: how it is divided.
    """

    def __init__(self, array: CrossingArray, mesh: Mesh, peer: Peer):
        member = array.member(array.target, peer)
        group, whole = array.target.subgroups[member], array.shape.shape or (1,)
        region = array.target.regions(whole)[member]
        first = sum(len(each.devices) for each in array.target.subgroups[:member])
        landed = array.crossing.landed[first : first + len(group.devices)]
        self.peers = frozenset(array.processes[device] for device in group.devices)
        self.shards = [shard for shard in landed if array.processes[shard.device] == peer]
        self.gathering = array.crossing.gatherings[member]
        self.wanted = jax.ShapeDtypeStruct(
            array.extent(region), array.shape.dtype, sharding=NamedSharding(mesh, group.spec)
        )
        self.along = _undivided(group.spec, mesh)
        self.shape, spec = self.wanted.shape, group.spec
        if self.gathering is not None:
            axis, widths = self.gathering.axis, self.gathering.widths
            divisions = group.divisions(len(whole))
            shape = list(extent(region))
            shape[axis] = divisions[axis] * len(widths) * max(widths)
            entries = [axes_of(entry) for entry in spec]
            entries += [()] * (len(shape) - len(entries))
            entries[axis] += self.along
            self.shape, spec = tuple(shape), PartitionSpec(*entries)
        self.sharding = NamedSharding(mesh, spec)
        self._devices = dict(zip(group.devices, mesh.devices.flat, strict=True))

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of what each device has of it."""
        return self.sharding.shard_shape(self.shape)

    def part_sharding(self, device: int) -> Sharding:
        """With what sharding the pieces and the part of a device lie on it."""
        if len(self._devices) == 1:
            return self.sharding
        return SingleDeviceSharding(self._devices[device])

    def array(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The array, of the parts that devices hold."""
        if len(self._devices) == 1:
            return parts[0]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)


class _JoinedPart(NamedTuple):
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


def _joining(parts: Sequence[_JoinedPart]) -> _Joining:
    """Compile what makes parts of several arrays on one device."""
    pieces = [piece for part in parts for _, summands in part.summed for piece in summands]

    def join(*arrays: jax.Array) -> list[jax.Array]:
        rest = iter(arrays)
        return [
            _joined(part, [(b, [next(rest) for _ in each]) for b, each in part.summed])
            for part in parts
        ]

    shapes = [
        jax.ShapeDtypeStruct(
            part.crossing.extent(bounds),
            part.crossing.shape.dtype,
            sharding=part.landing.part_sharding(part.shard.device),
        )
        for part in parts
        for bounds, summands in part.summed
        for _ in summands
    ]
    outputs = [part.landing.part_sharding(part.shard.device) for part in parts]
    program = jax.jit(join, out_shardings=outputs).lower(*shapes).compile()
    device = parts[0].shard.device
    return _Joining(device, pieces, [(part.array, part.place) for part in parts], program)


def _joined(part: _JoinedPart, summed: Sequence[tuple[Bounds, Sequence[jax.Array]]]) -> jax.Array:
    """A part of an array, of the summands of its pieces; padded where slices are unlike."""
    shape, dtype = part.landing.part_shape, part.crossing.shape.dtype
    sums = [
        (bounds, _sum(summands) if summands else jnp.zeros(part.crossing.extent(bounds), dtype))
        for bounds, summands in summed
    ]
    around = part.shard.bounds
    if part.crossing.extent(around) == shape and sums:
        if len(sums) == 1 and sums[0][0] == around:
            return sums[0][1]
        ways = [axis for axis in range(len(shape)) if _in_a_row(around, sums, axis)]
        if ways:
            in_order = sorted(sums, key=lambda each: each[0][ways[0]])
            return jnp.concatenate([piece for _, piece in in_order], ways[0])
    whole = jnp.zeros(shape, dtype)
    for bounds, piece in sums:
        whole = whole.at[within(bounds, around)].set(piece)
    return whole


def _in_a_row(around: Bounds, pieces: Sequence[tuple[Bounds, Any]], axis: int) -> bool:
    """Whether pieces of a part lie one after the other along a dimension."""
    return all(
        (*bounds[:axis], *bounds[axis + 1 :]) == (*around[:axis], *around[axis + 1 :])
        for bounds, _ in pieces
    )


def _sum(summands: Sequence[jax.Array]) -> jax.Array:
    """The sum of summands, rounded after each addition, on whatever device it is made.

    Without a word, a compiler may keep more digits of short floats in between: receivers of unlike
    kinds would then have unlike sums.
    """
    total, *others = summands
    is_short = jnp.issubdtype(total.dtype, jnp.floating) and total.dtype.itemsize < 4
    for other in others:
        total = total + other
        if is_short:
            digits = jnp.finfo(total.dtype)
            total = jax.lax.reduce_precision(total, digits.nexp, digits.nmant)
    return total


def _cutter(
    arrays: Sequence[CrossingArray],
    number: int,
    parts: Sequence[tuple[int, Bounds]],
    device: Any,
) -> Compiled:
    """Compile what cuts parts out of a device's shards; takes the shard of each part."""
    places = [within(bounds, arrays[i].held[number]) for i, bounds in parts]

    def cut(*shards: jax.Array) -> list[jax.Array]:
        return [shard[place] for shard, place in zip(shards, places, strict=True)]

    shapes = [
        jax.ShapeDtypeStruct(
            arrays[i].extent(arrays[i].held[number]),
            arrays[i].shape.dtype,
            sharding=SingleDeviceSharding(device),
        )
        for i, _ in parts
    ]
    return jax.jit(cut).lower(*shapes).compile()


def gatherer(landings: Sequence[Landing], mesh: Mesh) -> Compiled | None:
    """Compile what gathers the slices of arrays inside a member; None where there are none.

    Args:
        landings: the arrays, as they land.
        mesh: the member's mesh.

    Returns:
        The program, on those of the arrays that have slices.
    """
    sliced = [(landing, landing.gathering) for landing in landings if landing.gathering is not None]
    if not sliced:
        return None

    def gather(landed: Sequence[jax.Array]) -> list[jax.Array]:
        return [
            jax.shard_map(
                partial(_gathered, gathering, landing.along),
                mesh=mesh,
                in_specs=landing.sharding.spec,
                out_specs=landing.wanted.sharding.spec,
                check_vma=False,
            )(slices).reshape(landing.wanted.shape)
            for (landing, gathering), slices in zip(sliced, landed, strict=True)
        ]

    shapes = [
        jax.ShapeDtypeStruct(landing.shape, landing.wanted.dtype, sharding=landing.sharding)
        for landing, _ in sliced
    ]
    outputs = [landing.wanted.sharding for landing, _ in sliced]
    return jax.jit(gather, out_shardings=outputs).lower(shapes).compile()


def _gathered(gathering: Gathering, axes: tuple[str, ...], mine: jax.Array) -> jax.Array:
    """A device's whole part, of its slice and those of the others along some mesh axes."""
    axis, widths = gathering.axis, gathering.widths
    padded = jax.lax.all_gather(mine, axes, axis=axis, tiled=True)
    if len(set(widths)) == 1:
        return padded
    slices = [
        jax.lax.slice_in_dim(padded, place * max(widths), place * max(widths) + width, axis=axis)
        for place, width in enumerate(widths)
    ]
    return jax.lax.concatenate(slices, axis)


def _undivided(spec: PartitionSpec, mesh: Mesh) -> tuple[str, ...]:
    """The axes of a mesh along which an array is held alike.

    A slice of a part is for one of the devices that hold the part alike.
    """
    used = {axis for entry in spec for axis in axes_of(entry)}
    return tuple(axis for axis in mesh.axis_names if axis not in used)
