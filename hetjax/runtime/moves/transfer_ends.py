"""What the two ends of a transfer do on their devices: cut, put together, gather.

Everything is compiled once, before the first step. Where both stages divide an array alike nothing
has to be computed at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from hetjax.runtime.compilation.compiled_stage import Compiled
from hetjax.runtime.instructions.instruction import Tag
from hetjax.runtime.instructions.placement import Placement
from hetjax.sharding.annotation.annotation import HSharding, axes_of
from hetjax.sharding.annotation.bounds import Bounds, within
from hetjax.sharding.resolution.crossing import Crossing, Gathering, PulledPart, crossing
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.senders import BestLink


@dataclass(frozen=True, eq=False)
class CrossingArray:
    """One array of a transfer.

    A scalar is divided as an array of one element.

    Args:
        shape: its shape and dtype.
        source: how it lies on the sending stage.
        target: how it shall lie on the receiving one.
        processes: for each device of both, which of its stage's processes has it.
        crossing: how the one becomes the other.
    """

    shape: jax.ShapeDtypeStruct
    source: HSharding
    target: HSharding
    processes: Mapping[int, int]
    crossing: Crossing

    @classmethod
    def between(
        cls,
        shape: jax.ShapeDtypeStruct,
        source: HSharding,
        target: HSharding,
        processes: Mapping[int, int],
        senders: BestLink,
    ) -> CrossingArray:
        """An array that crosses from one stage to another.

        Args:
            shape: its shape and dtype.
            source: how it lies.
            target: how it shall lie.
            processes: for each device of both, which of its stage's processes has it.
            senders: who sends what several devices have.

        Returns:
            The array with its crossing.
        """
        found = crossing(
            source, target, shape.shape or (1,), processes, senders, shape.dtype.itemsize
        )
        return cls(shape, source, target, processes, found)

    @property
    def spec(self) -> PartitionSpec:
        """How the receiving stage divides it."""
        return self.target.subgroups[0].spec

    def held(self, device: int) -> Bounds:
        """The part that a device of the sending stage has."""
        shards = self.source.shards(self.shape.shape or (1,))
        return next(shard.bounds for shard in shards if shard.device == device)

    def widths(self, bounds: Bounds) -> tuple[int, ...]:
        """The shape of a part of it."""
        return tuple(stop - start for start, stop in bounds) if self.shape.shape else ()


def crossing_arrays(
    placement: Placement, tag: Tag, devices_per_process: Sequence[int]
) -> tuple[CrossingArray, ...]:
    """The arrays of a transfer; both of its ends derive the same.

    Args:
        placement: annotations of all buffers of all stages.
        tag: the transfer.
        devices_per_process: for each stage, how many of its devices each process has.

    Returns:
        One entry an array.
    """
    ends = (tag.route.source, tag.route.target)
    sent, received = (placement.transfer(tag, stage) for stage in ends)
    cluster = placement.plan.cluster
    processes = {
        device: place // devices_per_process[stage]
        for stage in ends
        for place, device in enumerate(cluster.device_ids(placement.stage_plan(stage).submesh))
    }
    senders = BestLink(Network.of(cluster))
    return tuple(
        CrossingArray.between(shape, source, target, processes, senders)
        for shape, source, target in zip(
            sent.shapes, sent.annotations, received.annotations, strict=True
        )
    )


class SendingEnd:
    """A process that sends a transfer.

    Args:
        arrays: what crosses.
        mesh: the mesh of its stage.
        process: which of the stage's processes it is.
    """

    def __init__(self, arrays: Sequence[CrossingArray], mesh: Mesh, process: int):
        self._numbers: dict[Any, int] = {}
        self._offers: dict[int, list[tuple[int, PulledPart]]] = {}
        cut: dict[int, list[tuple[int, PulledPart]]] = {}
        for i, array in enumerate(arrays):
            self._numbers |= dict(zip(mesh.devices.flat, array.source.devices, strict=True))
            for piece in array.crossing.pieces:
                if array.processes[piece.origin] != process:
                    continue
                receiver = array.processes[piece.landing]
                self._offers.setdefault(receiver, []).append((i, piece))
                if piece.bounds != array.held(piece.origin):
                    cut.setdefault(piece.origin, []).append((i, piece))
        devices = {number: device for device, number in self._numbers.items()}
        self._cuts = {
            origin: (wanted, _cutter(arrays, wanted, devices[origin]))
            for origin, wanted in cut.items()
        }

    @property
    def receivers(self) -> tuple[int, ...]:
        """The receiving processes that pull from this one."""
        return tuple(self._offers)

    def offers(self, arrays: Sequence[jax.Array]) -> Iterator[tuple[int, list[jax.Array]]]:
        """What each receiving process pulls from this one.

        Args:
            arrays: the arrays, as the sending stage divides them.

        Yields:
            A receiving process, and the pieces for it, each on one device.
        """
        held = [
            {self._numbers[shard.device]: shard.data for shard in array.addressable_shards}
            for array in arrays
        ]
        cut: dict[tuple[int, PulledPart], jax.Array] = {}
        for origin, (wanted, program) in self._cuts.items():
            cut.update(zip(wanted, program(*(held[i][origin] for i, _ in wanted)), strict=True))
        for receiver, offered in self._offers.items():
            yield (
                receiver,
                [
                    cut[i, piece] if (i, piece) in cut else held[i][piece.origin]
                    for i, piece in offered
                ],
            )


class ReceivingEnd:
    """A process that receives a transfer.

    Args:
        arrays: what crosses.
        mesh: the mesh of its stage.
        process: which of the stage's processes it is.

    Attributes:
        requests: for each sending process that has a piece for this one, the shapes of these
            pieces and the devices that they land on.
        num_bytes: the size of all pieces.
        gathers: whether the processes of the stage take part in a collective.
    """

    def __init__(self, arrays: Sequence[CrossingArray], mesh: Mesh, process: int):
        self._pieces: dict[int, list[tuple[int, PulledPart]]] = {}
        for i, array in enumerate(arrays):
            for piece in array.crossing.pieces:
                if array.processes[piece.landing] == process:
                    sender = array.processes[piece.origin]
                    self._pieces.setdefault(sender, []).append((i, piece))
        self.requests = {
            sender: [
                jax.ShapeDtypeStruct(
                    arrays[i].widths(piece.bounds),
                    arrays[i].shape.dtype,
                    sharding=SingleDeviceSharding(_devices(arrays[i], mesh)[piece.landing]),
                )
                for i, piece in pieces
            ]
            for sender, pieces in self._pieces.items()
        }
        self.num_bytes = sum(
            math.prod(spec.shape) * spec.dtype.itemsize
            for specs in self.requests.values()
            for spec in specs
        )
        self._landings = [_Landing(array, mesh, process) for array in arrays]
        self._sliced = [i for i, each in enumerate(arrays) if each.crossing.gathering is not None]
        self._gatherer = _gatherer(arrays, self._landings, mesh)
        self.gathers = self._gatherer is not None

    def put_together(self, pulled: Mapping[int, Sequence[jax.Array]]) -> list[jax.Array]:
        """Make arrays of the pieces; where the end gathers, all processes must call this alike.

        Args:
            pulled: what each sending process was asked for, as in `requests`.

        Returns:
            The arrays, divided as the stage wants them.
        """
        landed: list[dict[PulledPart, jax.Array]] = [{} for _ in self._landings]
        for sender, pieces in self._pieces.items():
            for (i, piece), array in zip(pieces, pulled[sender], strict=True):
                landed[i][piece] = array
        arrays = [
            landing.array(landing.parts(pieces))
            for landing, pieces in zip(self._landings, landed, strict=True)
        ]
        if self._gatherer is not None:
            gathered = self._gatherer([arrays[i] for i in self._sliced])
            for i, array in zip(self._sliced, gathered, strict=True):
                arrays[i] = array
        return arrays


@dataclass(frozen=True, eq=False)
class _LandedPart:
    """What one device holds of an array that lands.

    Args:
        device: the device.
        pieces: what lands on it.
        program: what makes the part of the pieces; None where it is the one piece, as it is.
        like: the earlier part that it is a copy of, where nothing lands on it.
    """

    device: Any
    pieces: tuple[PulledPart, ...]
    program: Compiled | None = None
    like: int | None = None


class _Landing:
    """Makes an array on a stage's mesh of the pieces that land on the devices of a process.

    Where slices are to be gathered, the array is that of the slices: every device has its own, all
    of them padded to the same size.
    """

    def __init__(self, array: CrossingArray, mesh: Mesh, process: int):
        self.shape, spec = _landing(array, mesh)
        self.sharding = NamedSharding(mesh, spec)
        self._parts: list[_LandedPart] = []
        landing: dict[int, list[PulledPart]] = {}
        for piece in array.crossing.pieces:
            landing.setdefault(piece.landing, []).append(piece)
        made: dict[Bounds, int] = {}
        devices = _devices(array, mesh)
        for shard in array.crossing.landed:
            if array.processes[shard.device] != process:
                continue
            device, pieces = devices[shard.device], tuple(landing.get(shard.device, ()))
            if shard.bounds in made and not pieces:
                self._parts.append(_LandedPart(device, (), like=made[shard.bounds]))
                continue
            made[shard.bounds] = len(self._parts)
            program = None
            part = self.sharding.shard_shape(self.shape.shape)
            if len(pieces) != 1 or array.widths(pieces[0].bounds) != part:
                program = _joiner(array, shard.bounds, pieces, part, device)
            self._parts.append(_LandedPart(device, pieces, program))

    def array(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The array, of the parts that the process's devices hold."""
        return jax.make_array_from_single_device_arrays(self.shape.shape, self.sharding, parts)

    def parts(self, pieces: Mapping[PulledPart, jax.Array]) -> list[jax.Array]:
        """What the process's devices hold of the array, of its pieces."""
        made: list[jax.Array] = []
        for part in self._parts:
            if part.like is not None:
                made.append(jax.device_put(made[part.like], part.device))
            elif part.program is None:
                made.append(pieces[part.pieces[0]])
            else:
                made.append(part.program(*(pieces[piece] for piece in part.pieces)))
        return made


def _devices(array: CrossingArray, mesh: Mesh) -> dict[int, Any]:
    """The devices of the receiving stage by their numbers."""
    return dict(zip(array.target.devices, mesh.devices.flat, strict=True))


def _cutter(
    arrays: Sequence[CrossingArray], wanted: Sequence[tuple[int, PulledPart]], device: Any
) -> Compiled:
    """Compile what cuts pieces out of a device's shards; takes the shard of each piece."""
    wholes = [arrays[i].held(piece.origin) for i, piece in wanted]
    places = [within(piece.bounds, w) for (_, piece), w in zip(wanted, wholes, strict=True)]

    def cut(*shards: jax.Array) -> list[jax.Array]:
        return [shard[place] for shard, place in zip(shards, places, strict=True)]

    shapes = [
        jax.ShapeDtypeStruct(
            arrays[i].widths(whole), arrays[i].shape.dtype, sharding=SingleDeviceSharding(device)
        )
        for (i, _), whole in zip(wanted, wholes, strict=True)
    ]
    return jax.jit(cut).lower(*shapes).compile()


def _joiner(
    array: CrossingArray,
    bounds: Bounds,
    pieces: Sequence[PulledPart],
    shape: tuple[int, ...],
    device: Any,
) -> Compiled:
    """Compile what puts the pieces of a part together, and pads the part to a shape."""
    places = [within(piece.bounds, bounds) for piece in pieces]

    def join(*pieces: jax.Array) -> jax.Array:
        part = jnp.zeros(shape, array.shape.dtype)
        for piece, place in zip(pieces, places, strict=True):
            part = part.at[place].set(piece)
        return part

    sharding = SingleDeviceSharding(device)
    shapes = [
        jax.ShapeDtypeStruct(array.widths(p.bounds), array.shape.dtype, sharding=sharding)
        for p in pieces
    ]
    return jax.jit(join, out_shardings=sharding).lower(*shapes).compile()


def _landing(array: CrossingArray, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, PartitionSpec]:
    """The array that lands, and how it is divided: where slices are gathered, that of the slices.

    A slice of a part is for one of the devices that hold the part alike, which are those along the
    mesh axes that do not divide it.
    """
    gathering = array.crossing.gathering
    if gathering is None:
        return array.shape, array.spec
    axis, count = gathering.axis, len(gathering.widths) * max(gathering.widths)
    part = array.target.shards(array.shape.shape or (1,))[0].bounds[axis]
    shape: list[int] = list(array.shape.shape or (1,))
    shape[axis] = shape[axis] // (part[1] - part[0]) * count
    entries = [axes_of(entry) for entry in array.spec]
    entries += [()] * (len(shape) - len(entries))
    entries[axis] += _undivided(array.spec, mesh)
    return jax.ShapeDtypeStruct(tuple(shape), array.shape.dtype), PartitionSpec(*entries)


def _gatherer(
    arrays: Sequence[CrossingArray], landings: Sequence[_Landing], mesh: Mesh
) -> Compiled | None:
    """Compile what gathers the slices of arrays inside a stage; None where there are none."""
    sliced = [
        (array, array.crossing.gathering, landing)
        for array, landing in zip(arrays, landings, strict=True)
        if array.crossing.gathering is not None
    ]
    if not sliced:
        return None

    def gather(landed: Sequence[jax.Array]) -> list[jax.Array]:
        return [
            jax.shard_map(
                partial(_gathered, gathering, _undivided(array.spec, mesh)),
                mesh=mesh,
                in_specs=landing.sharding.spec,
                out_specs=array.spec,
                check_vma=False,
            )(slices).reshape(array.shape.shape)
            for (array, gathering, landing), slices in zip(sliced, landed, strict=True)
        ]

    shapes = [
        jax.ShapeDtypeStruct(landing.shape.shape, landing.shape.dtype, sharding=landing.sharding)
        for _, _, landing in sliced
    ]
    outputs = [NamedSharding(mesh, array.spec) for array, _, _ in sliced]
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
    """The axes of a mesh along which an array is held alike."""
    used = {axis for entry in spec for axis in axes_of(entry)}
    return tuple(axis for axis in mesh.axis_names if axis not in used)
