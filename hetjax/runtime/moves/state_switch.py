"""Switching a training state from one plan to another, in memory.

What devices hold of parameters and optimizer state follows from a plan; so does what they shall
hold under another one. The messages between the two are planned for all arrays together, on shapes
alone, and then carried out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax

from hetjax.errors import InputError
from hetjax.pipeline.program.loss import path_names
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.planner.plan.plan import Plan
from hetjax.runtime.instructions.buffers import OptimizerState, Parameter
from hetjax.runtime.instructions.placement import Placement
from hetjax.sharding.annotation.annotation import HSharding, Shard
from hetjax.sharding.annotation.bounds import Bounds
from hetjax.sharding.resolution.switch_transfers import MovedArray

HeldLeaf = tuple[ParameterPart, HSharding]


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
            [
                (stage.parameters, placement.leaves(stage.index, Parameter))
                for stage in pipelines.stages
            ],
        ),
        (
            "optimizer",
            path_names(state),
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
            for shard in _shards_in(held, leaf.shape.shape):
                yield stage, shard


def _shards_in(held: HeldLeaf, shape: Sequence[int]) -> Iterator[Shard]:
    """What the devices of a stage hold, where the stage holds a part of a leaf."""
    part, annotation = held
    (subgroup,) = annotation.subgroups
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
    if len(plan.members) > 1:
        return plan, stage
    kind = placement.plan.cluster.subcluster(plan.submesh.subcluster).kind
    parts = placement.pipelines.stages[stage].parameters
    specs = [placement.leaves(stage, each).specs for each in (Parameter, OptimizerState)]
    return kind.name, plan.mesh_shape, parts, *specs


def shards_of_stage(placement: Placement, stage: int) -> Iterator[tuple[int, Shard]]:
    """What a stage's devices hold, each with the number of its leaf, as `leaves_of` counts them.

    Args:
        placement: the plan's programs and shardings.
        stage: which stage.

    Yields:
        A leaf, and a shard of it on one of the stage's devices.
    """
    pipelines = placement.pipelines
    first = len(pipelines.parameter_shapes)
    parameters, state = pipelines.stages[stage].parameters, pipelines.updates[stage].state
    annotations = placement.leaves(stage, Parameter).annotations
    for part, annotation in zip(parameters, annotations, strict=True):
        shape = pipelines.parameter_shapes[part.leaf].shape
        for shard in _shards_in((part, annotation), shape):
            yield part.leaf, shard
    annotations = placement.leaves(stage, OptimizerState).annotations
    for part, annotation in zip(state, annotations, strict=True):
        shape = pipelines.state_shapes[part.leaf].shape
        for shard in _shards_in((part, annotation), shape):
            yield first + part.leaf, shard
