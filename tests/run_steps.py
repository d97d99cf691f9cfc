"""Communication steps carried out on arrays of one process, step by step: NumPy's or JAX's.

On NumPy arrays this is the dense simulator that every transport must reproduce; with JAX arrays,
each on its own device, the same steps move real shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hetjax.runtime.moves.pieces import ArrayPart, cut_piece, join_pieces
from hetjax.sharding.annotation.bounds import Bounds, contains, extent, within
from hetjax.sharding.resolution.steps import CommunicationStep, Resolution


@dataclass(frozen=True)
class Machine:
    """What holds the arrays.

    Args:
        move: from an array and a device's number to the array on that device.
        join: from the bounds of a part, its type, pieces of it on one device, and the device's
            number to the part there.
    """

    move: Callable[[Any, int], Any]
    join: Callable[[Bounds, Any, Sequence[ArrayPart], int], Any]


def numpy_machine() -> Machine:
    """All arrays in the memory of this process."""

    def join(bounds: Bounds, dtype: Any, pieces: Sequence[ArrayPart], device: int) -> np.ndarray:
        array = np.empty(extent(bounds), dtype)
        filled = np.zeros(array.shape, bool)
        for part, value in pieces:
            array[within(part, bounds)] = value
            filled[within(part, bounds)] = True
        assert filled.all(), f"device {device} lacks a part of {bounds}"
        return array

    return Machine(lambda array, device: array, join)


def jax_machine(devices: Mapping[int, Any]) -> Machine:
    """Each array on a device of JAX.

    Args:
        devices: the device behind each number.
    """

    def join(bounds: Bounds, dtype: Any, pieces: Sequence[ArrayPart], device: int) -> jax.Array:
        return join_pieces(bounds, dtype, pieces, devices[device])

    return Machine(lambda array, device: jax.device_put(array, devices[device]), join)


def run_resolution(
    resolution: Resolution, arrays: Mapping[int, Any], machine: Machine | None = None
) -> dict[int, Any]:
    """Carry out a resolution.

    Args:
        resolution: the steps.
        arrays: the shard of every device.
        machine: what holds them; None for `numpy_machine`.

    Returns:
        The shard of every device afterwards.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from hetjax.sharding import HSharding, Subgroup, resolve
        >>> two = Subgroup((0, 1), (("x", 2),), P("x"))
        >>> steps = resolve(HSharding((two,)), HSharding((two.with_spec(P()),)), (2,))
        >>> run_resolution(steps, {0: np.array([5]), 1: np.array([7])})
        {0: array([5, 7]), 1: array([5, 7])}
    """
    machine = machine or numpy_machine()
    held = {shard.device: (shard.bounds, arrays[shard.device]) for shard in resolution.source}
    for steps in resolution.rounds:
        made = [_run_step(step, held, machine) for step in steps]
        held = {device: shard for shards in made for device, shard in shards.items()}
    return {device: array for device, (_, array) in held.items()}


def _run_step(
    step: CommunicationStep, held: Mapping[int, ArrayPart], machine: Machine
) -> dict[int, ArrayPart]:
    dtype = next(iter(held.values()))[1].dtype
    arrived: dict[int, list[ArrayPart]] = {}
    for place, phase in enumerate(step.phases):
        readable = {d: [shard] for d, shard in held.items()} if place == 0 else dict(arrived)
        for part in phase:
            values = [cut_piece(readable[sender], part.bounds) for sender in part.senders]
            values = values or [np.zeros(extent(part.bounds), dtype)]
            for receiver in part.receivers:
                value, *others = (machine.move(each, receiver) for each in values)
                for other in others:
                    value = value + other
                # A new list: what is read in this phase is what the one before has brought.
                before = arrived.get(receiver, [])
                arrived[receiver] = [*before, (part.bounds, value)]
    made = {}
    for shard in step.after:
        pieces = _inside(shard.bounds, arrived.get(shard.device, []))
        made[shard.device] = machine.join(shard.bounds, dtype, pieces, shard.device)
    return {shard.device: (shard.bounds, made[shard.device]) for shard in step.after}


def _inside(bounds: Bounds, pieces: Sequence[ArrayPart]) -> list[ArrayPart]:
    """The pieces that a device keeps; others it has only passed on."""
    return [piece for piece in pieces if contains(bounds, piece[0])]
