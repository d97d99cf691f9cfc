"""Switching a training state from one plan to another, in memory.

What devices hold of parameters and optimizer state follows from a plan; so does what they shall
hold under another one. The messages between the two are planned for all arrays together, on shapes
alone, and then carried out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from hetjax.pipeline.program import path_names
from hetjax.pipeline.stages import ParameterPart
from hetjax.runtime.compilation import CompiledStage
from hetjax.runtime.placement import Placement
from hetjax.runtime.state import StageState
from hetjax.sharding.annotation import Shard, Subgroup
from hetjax.sharding.bounds import Bounds
from hetjax.sharding.rules import MESH_AXES
from hetjax.sharding.run_steps import Piece, cut_piece, join_pieces
from hetjax.sharding.switching import MovedArray, SwitchPlan

Held = tuple[ParameterPart, PartitionSpec]


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
    parts: tuple[Held | None, ...]


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
        if held is None:
            continue
        part, spec = held
        plan = placement.stage_plan(stage)
        axes = tuple(zip(MESH_AXES, plan.mesh_shape, strict=True))
        devices = placement.plan.cluster.device_ids(plan.submesh)
        for shard in Subgroup(devices, axes, spec).shards(_region(part, leaf.shape.shape)):
            yield stage, shard


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


Pieces = dict[tuple[int, int], list[Piece]]
"""For each leaf and device, parts of it on the device."""


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
    held = _held(source, states, devices)
    arrived: Pieces = {}
    for place, messages in enumerate(plan.phases):
        readable = held if place == 0 else dict(arrived)
        for (sender, receiver), slices in messages.items():
            cut = [cut_piece(readable[array, sender], bounds) for array, bounds in slices]
            for (array, bounds), piece in zip(
                slices, jax.device_put(cut, devices[receiver]), strict=True
            ):
                # A new list: what is read in this phase is what the one before has brought.
                before = arrived.get((array, receiver), [])
                arrived[array, receiver] = [*before, (bounds, piece)]
    return _assembled(destination, compiled, arrived, devices)


def _held(placement: Placement, states: Sequence[StageState], devices: Sequence[Any]) -> Pieces:
    """What devices hold, from the stages' arrays."""
    arrays = [_by_leaf(placement, stage, state) for stage, state in enumerate(states)]
    on_devices = [
        {leaf: {s.device: s.data for s in array.addressable_shards} for leaf, array in each.items()}
        for each in arrays
    ]
    return {
        (i, shard.device): [(shard.bounds, on_devices[stage][i][devices[shard.device]])]
        for i, leaf in enumerate(leaves_of(placement))
        for stage, shard in shards_of(leaf, placement)
    }


def _by_leaf(placement: Placement, stage: int, state: StageState) -> dict[int, jax.Array]:
    """A stage's arrays by the number of their leaf, as `leaves_of` counts them."""
    pipelines = placement.pipelines
    parameters = pipelines.stages[stage].parameters
    first = len(pipelines.parameter_shapes)
    found = {part.leaf: a for part, a in zip(parameters, state.parameters, strict=True)}
    optimizer = zip(pipelines.updates[stage].state, state.optimizer, strict=True)
    return found | {first + part.leaf: array for part, array in optimizer}


def _assembled(
    placement: Placement,
    compiled: Sequence[CompiledStage],
    arrived: Pieces,
    devices: Sequence[Any],
) -> list[StageState]:
    """The stages' arrays, from the parts that have arrived on their devices."""
    made: list[dict[int, list[jax.Array]]] = [{} for _ in compiled]
    for i, leaf in enumerate(leaves_of(placement)):
        for stage, shard in shards_of(leaf, placement):
            pieces = arrived.get((i, shard.device), [])
            array = join_pieces(shard.bounds, leaf.shape.dtype, pieces, devices[shard.device])
            made[stage].setdefault(i, []).append(array)
    first = len(placement.pipelines.parameter_shapes)
    states = []
    for stage, (arrays, shardings) in enumerate(zip(made, compiled, strict=True)):
        parts = placement.pipelines.stages[stage].parameters
        state_parts = placement.pipelines.updates[stage].state
        parameters = [
            _whole(placement.pipelines.part_shape(part), sharding, arrays[part.leaf])
            for part, sharding in zip(parts, shardings.parameters, strict=True)
        ]
        optimizer = [
            _whole(placement.pipelines.state_shape(part), sharding, arrays[first + part.leaf])
            for part, sharding in zip(state_parts, shardings.state, strict=True)
        ]
        states.append(StageState(parameters, optimizer))
    return states


def _whole(
    shape: jax.ShapeDtypeStruct, sharding: NamedSharding, shards: Sequence[jax.Array]
) -> jax.Array:
    return jax.make_array_from_single_device_arrays(shape.shape, sharding, list(shards))
