"""The leaves that a member of a stage has of its state, which come and go during a switch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from hetjax.runtime.compilation.compiled_stage import CompiledStage
from hetjax.runtime.compilation.host_memory import DEVICE, to_devices
from hetjax.runtime.compilation.state import StageState
from hetjax.runtime.instructions.buffers import OptimizerState, Parameter
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.moves.pieces import ArrayPart, join_pieces
from hetjax.runtime.moves.state_switch import shards_of_member
from hetjax.sharding.annotation.bounds import Bounds

Pieces = dict[tuple[int, int], list[ArrayPart]]
"""For each leaf and device of the cluster, parts of it that are there."""

DevicesByNumber = Mapping[int, Any]
"""The devices of this process by their numbers in the cluster."""


class _HeldPart(NamedTuple):
    shape: jax.ShapeDtypeStruct
    sharding: NamedSharding
    devices: list[int]


class StageLeaves:
    """What a stage, or a member of it, holds of the leaves of the training state in this process.

    Leaves are numbered as `hetjax.runtime.moves.state_switch.leaves_of` counts them.

    Args:
        placement: the plan's programs and shardings.
        stage: which stage.
        compiled: its shardings, or its member's.
        devices: the devices of this process.
        member: which member of the stage.
    """

    def __init__(
        self,
        placement: Placement,
        stage: int,
        compiled: CompiledStage,
        devices: DevicesByNumber,
        member: int = 0,
    ):
        pipelines = placement.pipelines
        self._devices = devices
        first = len(pipelines.parameter_shapes)
        parameters = pipelines.stages[stage].parameters
        optimizer = pipelines.updates[stage].state
        self._order = [part.leaf for part in parameters], [first + part.leaf for part in optimizer]
        self._held: dict[int, _HeldPart] = {}
        self._bounds: dict[tuple[int, int], Bounds] = {}

        kinds = (Parameter, compiled.parameters), (OptimizerState, compiled.state)
        for order, (kind, shardings) in zip(self._order, kinds, strict=True):
            shapes = placement.leaves(stage, kind).of_member(member, compiled.mesh)
            for leaf, shape, sharding in zip(order, shapes, shardings, strict=True):
                self._held[leaf] = _HeldPart(shape, sharding, [])
        for leaf, shard in shards_of_member(placement, stage, member):
            if shard.device in devices:
                self._held[leaf].devices.append(shard.device)
                self._bounds[leaf, shard.device] = shard.bounds
        self._arrays: dict[int, jax.Array] = {}
        self._made: dict[int, dict[int, jax.Array]] = {}

    def fill(self, state: StageState) -> None:
        """Take over a whole state."""
        for leaves, arrays in zip(self._order, (state.parameters, state.optimizer), strict=True):
            self._arrays |= dict(zip(leaves, arrays, strict=True))

    def state(self) -> StageState:
        """The state, when every leaf is there."""
        parameters, optimizer = ([self._arrays[leaf] for leaf in each] for each in self._order)
        return StageState(parameters, optimizer)

    def pieces(self, leaf: int) -> Pieces:
        """What the devices hold of a leaf: a piece each, or none where the stage has none of it."""
        if leaf not in self._arrays:
            return {}
        (array,) = to_devices([self._arrays[leaf]])
        data = {shard.device: shard.data for shard in array.addressable_shards}
        return {
            (leaf, device): [(self._bounds[leaf, device], data[self._devices[device]])]
            for device in self._held[leaf].devices
        }

    def has_shard(self, leaf: int, device: int) -> bool:
        """Whether the stage wants a leaf on a device of this process."""
        return (leaf, device) in self._bounds

    def join(self, leaf: int, device: int, pieces: Sequence[ArrayPart]) -> None:
        """Make what a device shall hold of a leaf.

        Args:
            leaf: the leaf.
            device: the device, of this process.
            pieces: JAX arrays on the device, or NumPy's as `host_array` makes them, that make it
                up.
        """
        if len(pieces) == 1 and isinstance(pieces[0][1], np.ndarray):
            # JAX would take NumPy's memory over, which may be a part of something that is shared.
            pieces = [(pieces[0][0], np.array(pieces[0][1]))]
        bounds, dtype = self._bounds[leaf, device], self._held[leaf].shape.dtype
        joined = join_pieces(bounds, dtype, pieces, self._devices[device])
        self._made.setdefault(leaf, {})[device] = joined

    def finish(self, leaf: int) -> jax.Array | None:
        """Make a leaf of what was joined on the devices; None where the stage has none of it."""
        if leaf not in self._held:
            return None
        shape, sharding, devices = self._held[leaf]
        made = self._made.pop(leaf, {})
        for device in devices:
            if device not in made:  # Nothing comes of a leaf without elements.
                made[device] = join_pieces(
                    self._bounds[leaf, device], shape.dtype, [], self._devices[device]
                )
        shards = [made[device] for device in devices]
        lies = sharding.with_memory_kind(DEVICE)
        array = jax.make_array_from_single_device_arrays(shape.shape, lies, shards)
        array = jax.device_put(array, sharding)
        self._arrays[leaf] = array
        return array

    def drop(self, leaf: int) -> None:
        """Forget a leaf, and what was joined of it; its memory is free when nothing else has it."""
        self._arrays.pop(leaf, None)
        self._made.pop(leaf, None)
