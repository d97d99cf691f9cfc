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

from hetjax.errors import InputError, check_numbers
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.planner.plan.plan import Plan
from hetjax.runtime.instructions.buffers import OptimizerState, Parameter
from hetjax.runtime.instructions.placement import Placement
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.subgroup import Shard
from hetjax.sharding.resolution.switch_transfers import MovedArray

HeldLeaf = tuple[ParameterPart, HSharding]

StageMember = tuple[int, int]
"""A stage and a member of it."""


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
    check_numbers("lost", lost)
    cluster = destination.cluster
    used = {device for stage in destination.stages for device in stage.device_ids(cluster)}
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
    kinds = (
        (
            "parameters",
            pipelines.program.parameter_names,
            pipelines.parameter_shapes,
            [
                (stage.parameters, placement.leaves(stage.index, Parameter))
                for stage in pipelines.stages
            ],
        ),
        (
            "optimizer",
            pipelines.state_names,
            pipelines.state_shapes,
            [
                (each.state, placement.leaves(s, OptimizerState))
                for s, each in enumerate(pipelines.updates)
            ],
        ),
    )
    found: list[Leaf] = []
    for kind, names, shapes, held in kinds:
        by_leaf = [
            {
                part.leaf: (part, annotation)
                for part, annotation in zip(parts, leaves.annotations, strict=True)
            }
            for parts, leaves in held
        ]
        found += [
            Leaf(f"{kind}/{name}", shape, tuple(each.get(leaf) for each in by_leaf))
            for leaf, (name, shape) in enumerate(zip(names, shapes, strict=True))
        ]
    return tuple(found)


def shards_of(leaf: Leaf) -> Iterator[tuple[StageMember, Shard]]:
    """What every device holds of a leaf, each with the member of a stage that it is in.

    Args:
        leaf: the leaf.

    Yields:
        A stage and a member of it, and a shard on one of its devices, with the cluster's numbers.
    """
    for stage, held in enumerate(leaf.parts):
        if held is not None:
            for member in range(len(held[1].subgroups)):
                for shard in _shards_in(held, member, leaf.shape.shape):
                    yield (stage, member), shard


def _shards_in(held: HeldLeaf, member: int, shape: Sequence[int]) -> Iterator[Shard]:
    """What the devices of a member hold, where its stage holds a part of a leaf."""
    part, annotation = held
    if part.stop is None:
        region = annotation.regions(shape)[member]
    else:
        rows, *others = annotation.regions((part.stop - part.start, *shape[1:]))[member]
        region = ((part.start + rows[0], part.start + rows[1]), *others)
    yield from annotation.subgroups[member].shards(region)


def moved_arrays(source: Placement, destination: Placement) -> tuple[MovedArray, ...]:
    """Every leaf of the training state with what devices hold of it under two plans.

    Args:
        source: the plan that is left.
        destination: the plan that is switched to, on the same cluster.

    Returns:
        The leaves.
    """
    pairs = zip(leaves_of(source), leaves_of(destination), strict=True)
    alike = _alike_members(source)
    return tuple(
        MovedArray(
            before.name,
            tuple(before.shape.shape),
            before.shape.dtype.itemsize,
            tuple(shard for _, shard in shards_of(before)),
            tuple(shard for _, shard in shards_of(after)),
            _preference(before, alike),
        )
        for before, after in pairs
    )


def _preference(leaf: Leaf, alike: Mapping[StageMember, int]) -> dict[int, int] | None:
    """Whose copy counts: of parameters all are alike, of optimizer state the first stage's."""
    if leaf.name.startswith("parameters/"):
        return None
    return {shard.device: alike[member] for member, shard in shards_of(leaf)}


def _alike_members(placement: Placement) -> dict[StageMember, int]:
    """For each member of each stage the first one that computes alike: both have alike copies.

    Stages that hold the same state update it each for itself, and round as their own programs do.
    So do the members of a stage, where several of them have the same.
    """
    members = [
        (stage, member)
        for stage, plan in enumerate(placement.plan.stages)
        for member in range(len(plan.members))
    ]
    firsts: dict[Any, int] = {}
    return {
        member: firsts.setdefault(_computation(placement, *member), place)
        for place, member in enumerate(members)
    }


def _computation(placement: Placement, stage: int, member: int) -> tuple[Any, ...]:
    """What two stages have in common whose updates compute the same bits."""
    plan = placement.stage_plan(stage)
    if len(plan.members) > 1:
        # A program of its own, of segments as they come between moves.
        return stage, member
    kind = placement.plan.cluster.subcluster(plan.submesh.subcluster).kind
    parts = placement.pipelines.stages[stage].parameters
    specs = [placement.leaves(stage, each).specs for each in (Parameter, OptimizerState)]
    return kind.name, plan.mesh_shape, parts, *specs


def shards_of_member(placement: Placement, stage: int, member: int) -> Iterator[tuple[int, Shard]]:
    """What a member's devices hold, each with the number of its leaf, as `leaves_of` counts them.

    Args:
        placement: the plan's programs and shardings.
        stage: which stage.
        member: which member of it.

    Yields:
        A leaf, and a shard of it on one of the member's devices.
    """
    pipelines = placement.pipelines
    first = len(pipelines.parameter_shapes)
    parameters, state = pipelines.stages[stage].parameters, pipelines.updates[stage].state
    annotations = placement.leaves(stage, Parameter).annotations
    for part, annotation in zip(parameters, annotations, strict=True):
        shape = pipelines.parameter_shapes[part.leaf].shape
        for shard in _shards_in((part, annotation), member, shape):
            yield part.leaf, shard
    annotations = placement.leaves(stage, OptimizerState).annotations
    for part, annotation in zip(state, annotations, strict=True):
        shape = pipelines.state_shapes[part.leaf].shape
        for shard in _shards_in((part, annotation), member, shape):
            yield first + part.leaf, shard
