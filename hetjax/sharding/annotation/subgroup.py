"""The bottom tier of an annotation: how an array lies on the mesh of one submesh."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.errors import InputError
from hetjax.sharding.annotation.bounds import Bounds
from hetjax.sharding.annotation.checked_fields import (
    checked_axes,
    checked_devices,
    checked_spec,
)


class Summand(NamedTuple):
    """One of several summands: those of one group add up to the value."""

    group: int
    place: int


@dataclass(frozen=True)
class Shard:
    """What one device holds of an array.

    Args:
        device: the device's number.
        bounds: the part.
        summand: which summand of the part; None where the device has the value itself.
    """

    device: int
    bounds: Bounds
    summand: Summand | None = None


@dataclass(frozen=True)
class Subgroup:
    """One submesh of a union, and how an array lies inside it.

    Args:
        devices: numbers of its devices, row-major over the axes.
        axes: name and size of each axis of its logical mesh.
        spec: the sharding inside it; axes in ``unreduced`` hold summands.

    Raises:
        InputError: the axes hold another number of devices, a device or an axis is given twice, or
            the specification names an axis that is not there or uses one twice.

    Example:
        >>> Subgroup((0, 1), (("tensor", 2),), PartitionSpec(None, "tensor"))
        Subgroup([0-1] as tensor=2, P(None, 'tensor'))
    """

    devices: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]
    spec: PartitionSpec

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", checked_devices(self.devices))
        object.__setattr__(self, "axes", checked_axes(self.axes))
        object.__setattr__(self, "spec", _shortest(checked_spec(self.spec)))
        if not self.devices:
            raise InputError("devices: none is given: a subgroup has one or more")
        if len(set(self.devices)) < len(self.devices) or min(self.devices) < 0:
            raise InputError(
                f"devices: {list(self.devices)} is not allowed: numbers from 0, each once"
            )
        names = [name for name, _ in self.axes]
        if len(set(names)) < len(names):
            raise InputError(f"axes: {names} is not allowed: each name once")
        if math.prod(size for _, size in self.axes) != len(self.devices):
            raise InputError(
                f"axes: {dict(self.axes)} holds {math.prod(size for _, size in self.axes)} "
                f"devices, and {len(self.devices)} are given"
            )
        self._check_spec(names)

    def _check_spec(self, names: Sequence[str]) -> None:
        if self.spec.reduced:
            raise InputError(f"spec: {self.spec} is not allowed: reduced axes are for gradients")
        used = [axis for entry in self.spec.partitions for axis in axes_of(entry)]
        used += sorted(self.spec.unreduced)
        for axis in used:
            if axis not in names:
                raise InputError(
                    f"spec: {self.spec} names the axis {axis!r}; this subgroup has {names}"
                )
        if len(set(used)) < len(used):
            raise InputError(f"spec: {self.spec} uses an axis twice")

    @classmethod
    def of(cls, sharding: NamedSharding) -> Subgroup:
        """The subgroup of a JAX sharding, with its devices' own numbers.

        Args:
            sharding: on a mesh of real devices.

        Returns:
            The subgroup.
        """
        mesh = sharding.mesh
        assert isinstance(mesh, Mesh), "a sharding on real devices"
        axes = tuple((str(name), int(size)) for name, size in mesh.shape.items())
        return cls(tuple(device.id for device in mesh.devices.flat), axes, sharding.spec)

    def with_spec(self, spec: PartitionSpec) -> Subgroup:
        """This subgroup with another sharding inside it."""
        return _subgroup_of(self.devices, self.axes, spec)

    @functools.cached_property
    def bare(self) -> Subgroup:
        """The submesh alone, without a sharding inside it."""
        return self if self.spec == PartitionSpec() else self.with_spec(PartitionSpec())

    @property
    def num_devices(self) -> int:
        """How many devices it has."""
        return len(self.devices)

    @property
    def named_axes(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Names and sizes of the axes of its mesh, which has one also where none is named."""
        axes = self.axes or (("device", 1),)
        return tuple(name for name, _ in axes), tuple(size for _, size in axes)

    def divisions(self, num_dimensions: int) -> tuple[int, ...]:
        """Into how many parts each dimension of an array is divided."""
        sizes = dict(self.axes)
        entries = entries_of(self.spec, num_dimensions)
        return tuple(math.prod(sizes[axis] for axis in axes_of(entry)) for entry in entries)

    @property
    def num_summands(self) -> int:
        """How many summands the subgroup holds of each part; 1 where it holds no partial sums."""
        sizes = dict(self.axes)
        return math.prod(sizes[axis] for axis in self.spec.unreduced)

    def shards(self, region: Bounds) -> Iterator[Shard]:
        """What each of its devices holds, where the subgroup holds a region of an array."""
        sizes = dict(self.axes)
        entries = entries_of(self.spec, len(region))
        summing = [name for name, size in self.axes if name in self.spec.unreduced and size > 1]
        places = itertools.product(*(range(size) for _, size in self.axes))
        for device, place in zip(self.devices, places, strict=True):
            at = dict(zip(sizes, place, strict=True))
            bounds = []
            for (start, stop), entry in zip(region, entries, strict=True):
                axes = axes_of(entry)
                index = _index(axes, at, sizes)
                width = (stop - start) // math.prod(sizes[axis] for axis in axes)
                bounds.append((start + index * width, start + (index + 1) * width))
            summand = Summand(0, _index(summing, at, sizes)) if summing else None
            yield Shard(device, tuple(bounds), summand)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.axes)
        devices, spec = shown_devices(self.devices), shown_spec(self.spec)
        return f"Subgroup({devices} as {axes or 'one device'}, {spec})"


@functools.lru_cache(maxsize=16384)
def _subgroup_of(
    devices: tuple[int, ...], axes: tuple[tuple[str, int], ...], spec: PartitionSpec
) -> Subgroup:
    """A subgroup; deduction asks for the same ones again and again."""
    return Subgroup(devices, axes, spec)


def check_divides(group: Subgroup, region: Bounds) -> None:
    """Checks that a submesh can divide its part of an array as it says.

    Args:
        group: the submesh.
        region: its part.

    Raises:
        InputError: the part has fewer dimensions, or one that is not divided without a rest.
    """
    spec = shown_spec(group.spec)
    if len(group.spec.partitions) > len(region):
        raise InputError(
            f"spec: {spec} has more dimensions than the array, which has {len(region)}"
        )
    for dimension, parts in enumerate(group.divisions(len(region))):
        width = region[dimension][1] - region[dimension][0]
        if width % parts:
            raise InputError(
                f"spec: {spec} divides dimension {dimension} into {parts} parts, and devices "
                f"{shown_devices(group.devices)} have {width} of it: {parts} does not divide that"
            )


def entries_of(spec: PartitionSpec, rank: int) -> list[Any]:
    """The entry of each dimension of an array; a specification may leave out the last ones."""
    return [*spec.partitions, *[None] * (rank - len(spec.partitions))]


def spec_from(
    axes: Sequence[tuple[str, ...]], unreduced: frozenset[str] = frozenset()
) -> PartitionSpec:
    """The specification that divides each dimension over some axes."""
    entries = (None if not each else each[0] if len(each) == 1 else each for each in axes)
    return PartitionSpec(*entries, unreduced=unreduced)


def _shortest(spec: PartitionSpec) -> PartitionSpec:
    """The same specification without dimensions at its end that it does not divide."""
    entries = list(spec.partitions)
    while entries and not axes_of(entries[-1]):
        entries.pop()
    return PartitionSpec(*entries, unreduced=spec.unreduced, reduced=spec.reduced)


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a `PartitionSpec`."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _index(axes: Sequence[str], at: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    index = 0
    for axis in axes:
        index = index * sizes[axis] + at[axis]
    return index


def shown_subgroup(group: Subgroup) -> str:
    """A submesh's devices, mesh and specification, for a person.

    Args:
        group: the submesh.
    """
    axes = ", ".join(f"{name}={size}" for name, size in group.axes if size > 1)
    mesh = f" as {axes}" if axes else ""
    return f"devices {shown_devices(group.devices)}{mesh}: {shown_spec(group.spec)}"


def shown_spec(spec: PartitionSpec) -> str:
    """A specification, for a person.

    Args:
        spec: the specification.
    """
    entries = [repr(entry) for entry in spec.partitions]
    if spec.unreduced:
        entries.append("unreduced={" + ", ".join(map(repr, sorted(spec.unreduced))) + "}")
    return f"P({', '.join(entries)})"


def shown_devices(devices: Sequence[int]) -> str:
    """Numbers of devices, neighbours drawn together.

    Example:
        >>> shown_devices((0, 1, 2, 5))
        '[0-2, 5]'
    """
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return "[" + ", ".join(f"{r[0]}-{r[-1]}" if r[1:] else f"{r[0]}" for r in runs) + "]"
