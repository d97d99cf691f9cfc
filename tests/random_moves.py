"""Random moves of an array: from one union of submeshes to another one, or among the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from cases import CLUSTER
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from random_annotations import an_annotation, groups_of_devices, summands

from hetjax.mesh import SubMesh
from hetjax.planner import Member
from hetjax.runtime.instructions.annotation_table import AnnotatedLeaves
from hetjax.runtime.instructions.instruction import Tag
from hetjax.sharding import HSharding, Subgroup
from hetjax.sharding.annotation.bounds import extent

Processes = dict[int, tuple[int, int]]

FIRST = 100
"""The first device of a receiving stage that is another one."""


@dataclass(frozen=True)
class Move:
    """An array that comes to lie in another way.

    Args:
        shape: its shape.
        source: how it lies.
        target: how it shall lie; on the same submeshes, or on others.
        processes: for each device its stage, and the process of the stage.
    """

    shape: tuple[int, ...]
    source: HSharding
    target: HSharding
    processes: Processes

    @property
    def stages(self) -> tuple[int, int]:
        """The sending and the receiving stage."""
        return 0, int(self.target.devices[0] >= FIRST)

    @property
    def members(self) -> list[list[tuple[int, ...]]]:
        """The devices of each member of each stage."""
        sides = [self.source, self.target][: 1 + self.stages[1]]
        return [[group.devices for group in side.subgroups] for side in sides]

    @property
    def ends(self) -> tuple[HSharding, HSharding, Processes, Processes]:
        """The source, the target, and the processes of each."""
        return self.source, self.target, self.processes, self.processes

    def peers(self, side: HSharding) -> list[tuple[int, int]]:
        """The processes of the source, or of the target."""
        return list(dict.fromkeys(self.processes[device] for device in side.devices))


@st.composite
def moves(draw: st.DrawFn, *, one_process: bool = False) -> Move:
    """A move of an array of up to two dimensions among up to eight devices, or to eight others.

    Args:
        one_process: whether each submesh has one process only, and one mesh.
    """
    shape = tuple(draw(st.sampled_from((1, 4, 6, 12))) for _ in range(draw(st.integers(1, 2))))
    groups = draw(groups_of_devices(max_groups=3, max_devices=8))
    source = draw(an_annotation(shape, groups, partial=draw(st.booleans())))
    sides = [groups]
    if draw(st.booleans()):
        others = draw(groups_of_devices(max_groups=3, max_devices=8))
        groups = [tuple(device + FIRST for device in group) for group in others]
        sides.append(groups)
    like = source if one_process and len(sides) == 1 else None
    target = draw(an_annotation(shape, groups, partial=False, like=like))
    processes: dict[int, tuple[int, int]] = {}
    for stage, members in enumerate(sides):
        count = 0
        for devices in members:
            allowed = [n for n in (1, 2, 4) if len(devices) % n == 0 and not one_process]
            size = draw(st.sampled_from([len(devices), *allowed]))
            processes |= {
                device: (stage, count + place // size) for place, device in enumerate(devices)
            }
            count += len(devices) // size
    return Move(shape, source, target, processes)


def member_mesh(group: Subgroup, *, typed: bool = False) -> Mesh:
    names, sizes = group.named_axes
    devices = np.array([jax.devices()[d % FIRST] for d in group.devices]).reshape(sizes)
    types = (AxisType.Explicit,) * len(names) if typed else None
    return Mesh(devices, names, axis_types=types)


def member_arrays(move: Move, held: Mapping[int, np.ndarray]) -> list[jax.Array]:
    """What each member of the source has, of what its devices hold."""
    found = []
    for group, region in zip(move.source.subgroups, move.source.regions(move.shape), strict=True):
        mesh = member_mesh(group, typed=bool(group.spec.unreduced))
        sharding = NamedSharding(mesh, group.spec)
        shards = [
            jax.device_put(held[number], device)
            for number, device in zip(group.devices, mesh.devices.flat, strict=True)
        ]
        found.append(jax.make_array_from_single_device_arrays(extent(region), sharding, shards))
    return found


TOLERANCES = {np.int32: 0.0, np.float32: 1e-6, jax.numpy.bfloat16: 0.05}
"""How far a sum of a few numbers below 3 may be off."""


def check_arrived(move: Move, value: np.ndarray, arrays: Sequence[jax.Array], dtype: Any) -> None:
    """Every member has what it wants; and each element is the same to the bit, wherever it is."""
    first = np.full(value.shape, np.nan)
    groups = zip(move.target.subgroups, move.target.regions(move.shape), arrays, strict=True)
    shards = {shard.device: shard for shard in move.target.shards(move.shape)}
    for group, region, array in groups:
        mesh = member_mesh(group)
        assert array.shape == extent(region)
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, group.spec), array.ndim)
        found = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
        for number, device in zip(group.devices, mesh.devices.flat, strict=True):
            index = tuple(slice(*ends) for ends in shards[number].bounds)
            here = found[device].astype(float)
            np.testing.assert_allclose(here, value[index], rtol=0, atol=TOLERANCES[dtype])
            known = ~np.isnan(first[index])
            np.testing.assert_array_equal(here[known], first[index][known])
            first[index] = here


def random_summands(move: Move, dtype: Any) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    value, held = summands(move.source, move.shape, np.random.default_rng(0))
    if dtype == np.int32:
        return value, {device: array.astype(dtype) for device, array in held.items()}
    # Thirds: the order of additions, and how each is rounded, can be seen.
    return value / 3 / 100, {device: (a / 3 / 100).astype(dtype) for device, a in held.items()}


class MovePlacement:
    """What a transport needs to know of a placement, for one transfer of arrays of a move."""

    def __init__(self, move: Move, dtype: Any, count: int):
        shapes = (jax.ShapeDtypeStruct(move.shape, dtype),) * count
        names = tuple(range(count))
        self.both = tuple(
            AnnotatedLeaves(names, shapes, (side,) * count) for side in (move.source, move.target)
        )
        # Only what members are called is read of them.
        member = Member(SubMesh("first", 0, (1, 1)), (1, 1))
        stages = [SimpleNamespace(members=(member,) * len(each)) for each in move.members]
        sharing = [(stage,) for stage in range(len(stages))]
        self.plan = SimpleNamespace(cluster=CLUSTER, stages=stages, sharing=sharing)

    @classmethod
    def of(cls, move: Move, dtype: Any, count: int) -> Any:
        """As any placement, for transports."""
        return cls(move, dtype, count)

    def ends(self, tag: Tag) -> tuple[AnnotatedLeaves, ...]:
        return self.both


def member_meshes(move: Move) -> dict[tuple[int, int], Mesh]:
    """The mesh of each member, by its stage and its place, where each has one process."""
    sides = [move.source, move.target][: 1 + move.stages[1]]
    return {
        (stage, place): member_mesh(group)
        for stage, side in enumerate(sides)
        for place, group in enumerate(side.subgroups)
    }
