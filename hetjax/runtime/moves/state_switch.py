"""Switching a training state from one plan to another, in memory.

What devices hold of parameters and optimizer state follows from a plan; so does what they shall
hold under another one. The messages between the two are planned for all arrays together, on shapes
alone, and then carried out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from hetjax.errors import InputError
from hetjax.pipeline.program.loss import path_names
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.planner.plan.plan import Plan
from hetjax.runtime.compilation.stage_programs import CompiledStage
from hetjax.runtime.compilation.state import StageState
from hetjax.runtime.instructions.placement import Placement
from hetjax.sharding.annotation.annotation import Shard
from hetjax.sharding.annotation.bounds import Bounds
from hetjax.sharding.resolution.run_steps import ArrayPart, cut_piece, join_pieces
from hetjax.sharding.resolution.switch_transfers import ArraySlice, MovedArray, SwitchPlan

HeldLeaf = tuple[ParameterPart, PartitionSpec]


@dataclass(frozen=True)
class Leaf:
    """A leaf of the training state under a plan.

    Args:
        name: its kind and path.
        shape: its shape and dtype.
        parts: for each stage, what it holds of it and how that is divided; None for nothing.
    """

    name: str
    shape: jax.ShapeDtypeStruct
    parts: tuple[HeldLeaf | None, ...]


def all_lost(lost: Set[int], destination: Plan) -> frozenset[int]:
    """The devices that give nothing in a switch: those that are named, and those of the plan.

    Args:
        lost: the devices that are named.
        destination: the plan that is switched to, which may name others.

    Returns:
        Both together.

    Raises:
        InputError: naming devices that are not in the cluster, or that the plan uses.
    """
    used = {
        device
        for stage in destination.stages
        for device in destination.cluster.device_ids(stage.submesh)
    }
    lost = frozenset(lost) | frozenset(destination.lost_devices)
    unknown = sorted(lost - set(range(destination.cluster.num_devices)))
    if unknown:
        raise InputError(
            f"lost: {unknown} are no devices of the cluster, which has 0 to "
            f"{destination.cluster.num_devices - 1}"
        )
    if lost & used:
        raise InputError(f"lost: the plan to switch to uses devices {sorted(lost & used)}")
    return lost


def leaves_of(placement: Placement) -> tuple[Leaf, ...]:
    """The leaves of the training state: parameters, then the optimizer's.

    Args:
        placement: the plan's programs and shardings.

    Returns:
        The leaves.
    """
    pipelines = placement.pipelines
    state = jax.tree.unflatten(pipelines.state_tree, pipelines.state_shapes)
    kinds = (
        (
            "parameters",
            pipelines.program.parameter_names,
            pipelines.parameter_shapes,
            [(stage.parameters, placement.parameters(stage.index)) for stage in pipelines.stages],
        ),
        (
            "optimizer",
            path_names(state),
            pipelines.state_shapes,
            [(each.state, placement.state(s)) for s, each in enumerate(pipelines.updates)],
        ),
    )
    found: list[Leaf] = []
    for kind, names, shapes, held in kinds:
        by_leaf = [
            {part.leaf: (part, spec) for part, spec in zip(parts, specs, strict=True)}
            for parts, specs in held
        ]
        found += [
            Leaf(f"{kind}/{name}", shape, tuple(each.get(leaf) for each in by_leaf))
            for leaf, (name, shape) in enumerate(zip(names, shapes, strict=True))
        ]
    return tuple(found)


def shards_of(leaf: Leaf, placement: Placement) -> Iterator[tuple[int, Shard]]:
    """What every device holds of a leaf, each with the stage that it is in.

    Args:
        leaf: the leaf.
        placement: the plan that it is of.

    Yields:
        A stage, and a shard on one of its devices, with the cluster's numbers.
    """
    for stage, held in enumerate(leaf.parts):
        if held is not None:
            for shard in _shards_in(held, leaf.shape.shape, placement, stage):
                yield stage, shard


def _shards_in(
    held: HeldLeaf, shape: Sequence[int], placement: Placement, stage: int
) -> Iterator[Shard]:
    """What the devices of a stage hold, where the stage holds a part of a leaf."""
    part, spec = held
    (subgroup,) = placement.annotation(stage, spec).subgroups
    yield from subgroup.shards(_region(part, shape))


def _region(part: ParameterPart, shape: Sequence[int]) -> Bounds:
    rows = tuple((0, size) for size in shape)
    return rows if part.stop is None else ((part.start, part.stop), *rows[1:])


def moved_arrays(source: Placement, destination: Placement) -> tuple[MovedArray, ...]:
    """Every leaf of the training state with what devices hold of it under two plans.

    Args:
        source: the plan that is left.
        destination: the plan that is switched to, on the same cluster.

    Returns:
        The leaves.
    """
    pairs = zip(leaves_of(source), leaves_of(destination), strict=True)
    alike = _alike_stages(source)
    return tuple(
        MovedArray(
            before.name,
            tuple(before.shape.shape),
            before.shape.dtype.itemsize,
            tuple(shard for _, shard in shards_of(before, source)),
            tuple(shard for _, shard in shards_of(after, destination)),
            _preference(before, source, alike),
        )
        for before, after in pairs
    )


def _preference(leaf: Leaf, placement: Placement, alike: Sequence[int]) -> dict[int, int] | None:
    """Whose copy counts: of parameters all are alike, of optimizer state the first stage's."""
    if leaf.name.startswith("parameters/"):
        return None
    return {shard.device: alike[stage] for stage, shard in shards_of(leaf, placement)}


def _alike_stages(placement: Placement) -> list[int]:
    """For each stage the first one that computes alike, so that both have alike copies.

    Stages that hold the same state update it each for itself, and round as their own programs do.
    """
    firsts: dict[Any, int] = {}
    return [
        firsts.setdefault(_computation(placement, stage), stage)
        for stage in range(placement.pipelines.num_stages)
    ]


def _computation(placement: Placement, stage: int) -> tuple[Any, ...]:
    """What two stages have in common whose updates compute the same bits."""
    plan = placement.stage_plan(stage)
    kind = placement.plan.cluster.subcluster(plan.submesh.subcluster).kind
    parts = placement.pipelines.stages[stage].parameters
    return kind.name, plan.mesh_shape, parts, placement.parameters(stage), placement.state(stage)


Pieces = dict[tuple[int, int], list[ArrayPart]]
"""For each leaf and device of the cluster, parts of it that are there."""

DevicesByNumber = Mapping[int, Any]
"""The devices of this process by their numbers in the cluster."""


def move_in_process(
    plan: SwitchPlan,
    source: Placement,
    states: Sequence[StageState],
    destination: Placement,
    compiled: Sequence[CompiledStage],
    devices: Sequence[Any],
) -> list[StageState]:
    """Carry out a switch on the devices of this process.

    Args:
        plan: the messages, for what `moved_arrays` gave.
        source: the plan that is left.
        states: the state of each of its stages.
        destination: the plan that is switched to.
        compiled: the shardings of each of its stages.
        devices: the device behind each device of the cluster.

    Returns:
        The state of each stage of the destination.
    """
    numbered = dict(enumerate(devices))
    held: Pieces = {}
    for stage, state in enumerate(states):
        held |= held_pieces(source, stage, state, numbered)
    arrived: Pieces = {}
    for place, messages in enumerate(plan.phases):
        readable = held if place == 0 else dict(arrived)
        for (sender, receiver), slices in messages.items():
            arrays = jax.device_put(cut_slices(readable, sender, slices), devices[receiver])
            add_slices(arrived, receiver, slices, arrays)
    return [
        assembled_state(destination, stage, each, arrived, numbered)
        for stage, each in enumerate(compiled)
    ]


def cut_slices(held: Pieces, device: int, slices: Sequence[ArraySlice]) -> list[Any]:
    """What a device gives of what it holds."""
    return [cut_piece(held[array, device], bounds) for array, bounds in slices]


def add_slices(
    arrived: Pieces, device: int, slices: Sequence[ArraySlice], arrays: Sequence[Any]
) -> None:
    """Note what a device has got; lists that were there stay as they are."""
    for (array, bounds), piece in zip(slices, arrays, strict=True):
        # A new list: what is read in this phase is what the one before has brought.
        arrived[array, device] = [*arrived.get((array, device), []), (bounds, piece)]


def held_pieces(
    placement: Placement, stage: int, state: StageState, devices: DevicesByNumber
) -> Pieces:
    """What devices of this process hold of a stage's state.

    Args:
        placement: the plan's programs and shardings.
        stage: which stage.
        state: its state.
        devices: the devices of this process.

    Returns:
        One piece for each leaf and device.
    """
    pipelines = placement.pipelines
    first = len(pipelines.parameter_shapes)
    parts = zip(pipelines.stages[stage].parameters, state.parameters, strict=True)
    arrays = {part.leaf: array for part, array in parts}
    optimizer = zip(pipelines.updates[stage].state, state.optimizer, strict=True)
    arrays |= {first + part.leaf: array for part, array in optimizer}
    on_devices = {
        leaf: {shard.device: shard.data for shard in array.addressable_shards}
        for leaf, array in arrays.items()
    }
    return {
        (i, shard.device): [(shard.bounds, on_devices[i][devices[shard.device]])]
        for i, shard in _shards_of_stage(placement, stage)
        if shard.device in devices
    }


def _shards_of_stage(placement: Placement, stage: int) -> Iterator[tuple[int, Shard]]:
    """What a stage's devices hold, each with the number of its leaf, as `leaves_of` counts them."""
    pipelines = placement.pipelines
    first = len(pipelines.parameter_shapes)
    parameters, state = pipelines.stages[stage].parameters, pipelines.updates[stage].state
    for part, spec in zip(parameters, placement.parameters(stage), strict=True):
        shape = pipelines.parameter_shapes[part.leaf].shape
        for shard in _shards_in((part, spec), shape, placement, stage):
            yield part.leaf, shard
    for part, spec in zip(state, placement.state(stage), strict=True):
        shape = pipelines.state_shapes[part.leaf].shape
        for shard in _shards_in((part, spec), shape, placement, stage):
            yield first + part.leaf, shard


def assembled_state(
    placement: Placement,
    stage: int,
    compiled: CompiledStage,
    arrived: Pieces,
    devices: DevicesByNumber,
) -> StageState:
    """A stage's state, of the parts that have arrived on devices of this process.

    Args:
        placement: the plan's programs and shardings.
        stage: which stage.
        compiled: its shardings.
        arrived: the parts, as JAX or NumPy arrays.
        devices: the devices of this process.

    Returns:
        The state.
    """
    pipelines = placement.pipelines
    shapes = (*pipelines.parameter_shapes, *pipelines.state_shapes)
    made: dict[int, list[jax.Array]] = {}
    for i, shard in _shards_of_stage(placement, stage):
        if shard.device in devices:
            pieces = arrived.get((i, shard.device), [])
            array = join_pieces(shard.bounds, shapes[i].dtype, pieces, devices[shard.device])
            made.setdefault(i, []).append(array)
    first = len(pipelines.parameter_shapes)
    parameters = [
        _whole(pipelines.part_shape(part), sharding, made[part.leaf])
        for part, sharding in zip(
            pipelines.stages[stage].parameters, compiled.parameters, strict=True
        )
    ]
    optimizer = [
        _whole(pipelines.state_shape(part), sharding, made[first + part.leaf])
        for part, sharding in zip(pipelines.updates[stage].state, compiled.state, strict=True)
    ]
    return StageState(parameters, optimizer)


def _whole(
    shape: jax.ShapeDtypeStruct, sharding: NamedSharding, shards: Sequence[jax.Array]
) -> jax.Array:
    return jax.make_array_from_single_device_arrays(shape.shape, sharding, list(shards))
