"""Random layouts of arrays on the mesh of a stage."""

from __future__ import annotations

import math
from typing import NamedTuple

from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from hetjax.sharding import HSharding, Subgroup
from hetjax.sharding.annotation.rules import MESH_AXES

_ENTRIES: tuple[tuple[str, ...], ...] = (
    (),
    ("data",),
    ("tensor",),
    ("data", "tensor"),
    ("tensor", "data"),
)
_MESH_SHAPES = [(d, t) for d in (1, 2, 4, 8) for t in (1, 2, 4, 8) if d * t <= 8]

array_shapes = st.lists(st.sampled_from([0, 1, 2, 4, 8, 24]), max_size=3).map(tuple)


class Layout(NamedTuple):
    """How an array lies on a mesh of up to eight devices."""

    shape: tuple[int, ...]
    spec: PartitionSpec
    mesh_shape: tuple[int, int]
    devices_per_process: int

    @property
    def num_processes(self) -> int:
        return math.prod(self.mesh_shape) // self.devices_per_process

    def annotation(self, first: int = 0) -> HSharding:
        """The same on devices that are numbered from another first one."""
        devices = tuple(range(first, first + math.prod(self.mesh_shape)))
        axes = tuple(zip(MESH_AXES, self.mesh_shape, strict=True))
        return HSharding((Subgroup(devices, axes, self.spec),))

    def processes(self, first: int = 0) -> dict[int, int]:
        """The process of each device."""
        return {
            first + place: place // self.devices_per_process
            for place in range(math.prod(self.mesh_shape))
        }


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """Any layout of an array that divides it evenly."""
    mesh_shape = draw(st.sampled_from(_MESH_SHAPES))
    sizes: dict[str, int] = dict(zip(MESH_AXES, mesh_shape, strict=True))
    free, entries = set(sizes), []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        allowed = [
            entry
            for entry in _ENTRIES
            if free.issuperset(entry) and size % math.prod(sizes[axis] for axis in entry) == 0
        ]
        entries.append(draw(st.sampled_from(allowed)))
        free.difference_update(entries[-1])
    count = math.prod(mesh_shape)
    per_process = draw(st.sampled_from([n for n in (1, 2, 4, 8) if count % n == 0]))
    return Layout(shape, PartitionSpec(*entries), mesh_shape, per_process)
