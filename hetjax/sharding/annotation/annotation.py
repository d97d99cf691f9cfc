"""The HSPMD annotation: how one array lies on a union of unlike meshes.

Inside one submesh (the bottom tier) an array is sharded as JAX shards it, by a `PartitionSpec`,
partial sums included. Among the submeshes (the top tier) it is divided along one dimension, in
sizes of any kind, or along several in ranges of any kind, or is the same on each, or is the sum of
what each holds.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.errors import InputError, shown
from hetjax.sharding.annotation.annotation_file import annotation_record, spec_of, spec_to_json
from hetjax.sharding.annotation.bounds import Bounds
from hetjax.sharding.annotation.checked_fields import (
    checked_axes,
    checked_devices,
    checked_hdim,
    checked_ranges,
    checked_sizes,
    checked_spec,
)
from hetjax.sharding.annotation.symbols import Size, SymbolicSize

DUPLICATE: Literal["duplicate"] = "duplicate"
PARTIAL: Literal["partial"] = "partial"

HDim = int | tuple[int, ...] | Literal["duplicate", "partial"]
"""What the submeshes of a union share an array along: a dimension; or several, of which each has a
range; or each has the whole of it (`DUPLICATE`); or each has a summand of it (`PARTIAL`)."""


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
        return f"Subgroup({_ranges(self.devices)} as {axes or 'one device'}, {_spec(self.spec)})"


@functools.lru_cache(maxsize=16384)
def _subgroup_of(
    devices: tuple[int, ...], axes: tuple[tuple[str, int], ...], spec: PartitionSpec
) -> Subgroup:
    """A subgroup; deduction asks for the same ones again and again."""
    return Subgroup(devices, axes, spec)


@dataclass(frozen=True)
class HSharding:
    """An HSPMD annotation: a union of submeshes, each with a `PartitionSpec`.

    Args:
        subgroups: the submeshes and the sharding inside each; no two share a device.
        hdim: what the submeshes share the array along; of no meaning for one submesh.
        sizes: for a dimension, how much of it each submesh has, in order: numbers from 0, or
            symbols that stand for numbers until an input comes. Empty: all alike.
        ranges: for several dimensions, the range of each that each submesh has, in any order; what
            two submeshes have, both have the value of.

    Raises:
        InputError: a device is in two subgroups, or the sizes or ranges do not fit `hdim` or the
            subgroups.

    Source: Hetu v2, section 3.2.

    Example:
        >>> two = Subgroup((0, 1), (("tensor", 2),), PartitionSpec(None, "tensor"))
        >>> one = Subgroup((2,), (), PartitionSpec())
        >>> annotation = HSharding((two, one), hdim=0, sizes=(6, 2))
        >>> for shard in annotation.shards((8, 4)):
        ...     print(shard.device, shard.bounds)
        0 ((0, 6), (0, 2))
        1 ((0, 6), (2, 4))
        2 ((6, 8), (0, 4))
        >>> ranges = ((0, 8), (0, 2)), ((0, 8), (2, 4))
        >>> HSharding((two, one), hdim=(0, 1), ranges=ranges).shards((8, 4))[2].bounds
        ((0, 8), (2, 4))
    """

    subgroups: tuple[Subgroup, ...]
    hdim: HDim = DUPLICATE
    sizes: tuple[Size | str, ...] = ()
    ranges: tuple[Bounds, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "subgroups", _checked_subgroups(self.subgroups))
        object.__setattr__(self, "hdim", checked_hdim(self.hdim))
        object.__setattr__(self, "sizes", checked_sizes(self.sizes))
        object.__setattr__(self, "ranges", checked_ranges(self.ranges))
        if not self.subgroups:
            raise InputError("subgroups: none is given: an annotation has one or more")
        devices = self.devices
        twice = sorted({device for device in devices if devices.count(device) > 1})
        if twice:
            raise InputError(f"subgroups: devices {twice} are in two subgroups; they share none")
        self._check_top_tier()
        if len(self.subgroups) == 1 and not self.ranges:
            object.__setattr__(self, "hdim", DUPLICATE)

    def _check_top_tier(self) -> None:
        if isinstance(self.hdim, tuple) or self.ranges:
            self._check_ranges()
            return
        if isinstance(self.hdim, str):
            if self.sizes:
                raise InputError(f"sizes: given where hdim is {self.hdim!r}; only a dimension has")
            return
        if self.sizes and len(self.subgroups) == 1:
            raise InputError(f"sizes: {self.sizes} given for one subgroup, which has all")
        if self.sizes and len(self.sizes) != len(self.subgroups):
            raise InputError(
                f"sizes: {len(self.sizes)} are given for {len(self.subgroups)} subgroups"
            )
        for size in self.sizes:
            if isinstance(size, int) and size < 0:
                raise InputError(f"sizes: {size} is not allowed: each is 0 or more")

    def _check_ranges(self) -> None:
        if not isinstance(self.hdim, tuple):
            raise InputError(
                f"ranges: given where hdim is {self.hdim!r}; only several dimensions have"
            )
        if self.sizes:
            raise InputError(
                f"sizes: given where hdim is {self.hdim}; several dimensions have ranges"
            )
        if len(self.ranges) != len(self.subgroups):
            raise InputError(
                f"ranges: {len(self.ranges)} are given for {len(self.subgroups)} subgroups"
            )
        for each in self.ranges:
            if len(each) != len(self.hdim):
                raise InputError(
                    f"ranges: {each} is not allowed: a range of each of the dimensions {self.hdim}"
                )

    @classmethod
    def of(cls, sharding: NamedSharding) -> HSharding:
        """A JAX sharding as the annotation of one submesh."""
        return cls((Subgroup.of(sharding),))

    def on(self, mesh: Mesh) -> NamedSharding:
        """The annotation of one submesh as a JAX sharding.

        Args:
            mesh: the submesh's devices.

        Returns:
            The sharding.
        """
        assert len(self.subgroups) == 1, "no JAX sharding spans several submeshes"
        return NamedSharding(mesh, self.subgroups[0].spec)

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices, subgroup by subgroup."""
        return tuple(device for group in self.subgroups for device in group.devices)

    @property
    def is_partial(self) -> bool:
        """Whether any device holds a summand only."""
        return self.hdim == PARTIAL or any(group.num_summands > 1 for group in self.subgroups)

    @property
    def top_tier(self) -> tuple[HDim, tuple[Size | str, ...], tuple[Bounds, ...]]:
        """What the submeshes share the array along, and how much of it each has."""
        return self.hdim, self.sizes, self.ranges

    @property
    def symbols(self) -> frozenset[str]:
        """The symbols that have no number yet."""
        formulas = (size for size in self.sizes if isinstance(size, SymbolicSize))
        return frozenset(name for formula in formulas for name in formula.names)

    def bind(self, values: Mapping[str, int]) -> HSharding:
        """This annotation with numbers for symbols.

        Args:
            values: a number for each symbol; more may be given.

        Returns:
            The annotation without symbols.

        Raises:
            InputError: a symbol has no number, or one below 1.

        Source: Hetu v2, section 5.5.
        """
        if not self.symbols:
            return self
        sizes = (s.bind(values) if isinstance(s, SymbolicSize) else s for s in self.sizes)
        return replace(self, sizes=tuple(sizes))

    def regions(self, shape: Sequence[int]) -> tuple[Bounds, ...]:
        """The part of an array that each subgroup holds.

        Args:
            shape: the array's shape.

        Returns:
            One part a subgroup.

        Raises:
            InputError: the array has no such dimension, or the sizes do not make up the dimension.
        """
        everything = tuple((0, size) for size in shape)
        if isinstance(self.hdim, str):
            return (everything,) * len(self.subgroups)
        if isinstance(self.hdim, tuple):
            return tuple(self._region(shape, each) for each in self.ranges)
        ends = itertools.accumulate(self._widths(shape), initial=0)
        return tuple(
            (*everything[: self.hdim], part, *everything[self.hdim + 1 :])
            for part in itertools.pairwise(ends)
        )

    def _region(self, shape: Sequence[int], ranges: Bounds) -> Bounds:
        assert isinstance(self.hdim, tuple)
        found = [(0, size) for size in shape]
        for dimension, (start, stop) in zip(self.hdim, ranges, strict=True):
            if dimension >= len(shape):
                raise InputError(f"hdim: {dimension} is no dimension of shape {tuple(shape)}")
            if stop > shape[dimension]:
                raise InputError(
                    f"ranges: {start} to {stop} is not allowed: dimension {dimension} of shape "
                    f"{tuple(shape)} has {shape[dimension]}"
                )
            found[dimension] = (start, stop)
        return tuple(found)

    def _widths(self, shape: Sequence[int]) -> tuple[int, ...]:
        assert isinstance(self.hdim, int)
        if self.hdim >= len(shape):
            raise InputError(f"hdim: {self.hdim} is no dimension of shape {tuple(shape)}")
        if self.symbols:
            raise InputError(f"sizes: the symbols {sorted(self.symbols)} have no numbers yet")
        if self.sizes:
            widths = tuple(size for size in self.sizes if isinstance(size, int))
        else:
            widths = (shape[self.hdim] // len(self.subgroups),) * len(self.subgroups)
        if sum(widths) != shape[self.hdim]:
            raise InputError(
                f"sizes: {list(widths)} make {sum(widths)}, and dimension {self.hdim} of shape "
                f"{tuple(shape)} has {shape[self.hdim]}"
            )
        return widths

    def shards(self, shape: Sequence[int]) -> tuple[Shard, ...]:
        """What each device holds of an array, subgroup by subgroup.

        Args:
            shape: the array's shape.

        Returns:
            One shard a device.

        Raises:
            InputError: the annotation does not fit the shape; the message names the dimension.
        """
        return _shards(self, tuple(shape))

    def __str__(self) -> str:
        if len(self.subgroups) == 1:
            return f"HSharding({_subgroup(self.subgroups[0])})"
        if isinstance(self.hdim, tuple):
            dimensions = ", ".join(map(str, self.hdim))
            among = f"split on dimensions {dimensions}"
        else:
            among = f"split on dimension {self.hdim}" if isinstance(self.hdim, int) else self.hdim
        parts = (", ".join(f"{start}:{stop}" for start, stop in each) for each in self.ranges)
        sizes = self.sizes or tuple(parts) or ("",) * len(self.subgroups)
        rows = (
            f"\n  {_subgroup(group)}{f', {size} of it' if size != '' else ''}"
            for group, size in zip(self.subgroups, sizes, strict=True)
        )
        return f"HSharding({among} among {len(self.subgroups)} submeshes:{''.join(rows)})"

    def to_json_dict(self) -> dict[str, Any]:
        """The annotation as plain values.

        Example:
            >>> annotation = HSharding((Subgroup((3,), (), PartitionSpec()),))
            >>> HSharding.from_json_dict(annotation.to_json_dict()) == annotation
            True
        """
        return {
            "subgroups": [
                {
                    "devices": list(group.devices),
                    "axes": dict(group.axes),
                    **spec_to_json(group.spec),
                }
                for group in self.subgroups
            ],
            "hdim": list(self.hdim) if isinstance(self.hdim, tuple) else self.hdim,
            "sizes": [size if isinstance(size, int) else str(size) for size in self.sizes],
            **({"ranges": self.ranges} if self.ranges else {}),
        }

    @classmethod
    def from_json_dict(cls, data: object, source: str = "annotation") -> HSharding:
        """Reads what `to_json_dict` wrote.

        Args:
            data: the content, as `json` gives it.
            source: what errors name as the place.

        Raises:
            InputError: a field is missing, unknown or wrong.
        """
        record = annotation_record(data, source)
        try:
            groups = tuple(
                Subgroup(tuple(each.devices), tuple(each.axes.items()), spec_of(each))
                for each in record.subgroups
            )
            hdim: Any = tuple(record.hdim) if isinstance(record.hdim, list) else record.hdim
            return cls(groups, hdim, tuple(record.sizes), checked_ranges(record.ranges))
        except ValueError as error:  # JAX's own too: of a `PartitionSpec` that cannot be.
            raise InputError(f"{source}: {error}") from None


@functools.lru_cache(maxsize=16384)
def _shards(annotation: HSharding, shape: tuple[int, ...]) -> tuple[Shard, ...]:
    """What each device holds of an array; resolution asks for the same again and again."""
    found: list[Shard] = []
    summed = 0
    regions = annotation.regions(shape)
    for i, (group, region) in enumerate(zip(annotation.subgroups, regions, strict=True)):
        _check_divides(group, region)
        for shard in group.shards(region):
            if annotation.hdim == PARTIAL:
                inside = shard.summand.place if shard.summand else 0
                shard = replace(shard, summand=Summand(0, summed + inside))
            elif shard.summand:
                shard = replace(shard, summand=Summand(i, shard.summand.place))
            found.append(shard)
        summed += group.num_summands
    return tuple(found)


def _checked_subgroups(subgroups: object) -> tuple[Subgroup, ...]:
    found = tuple(subgroups) if isinstance(subgroups, Iterable) else (subgroups,)
    for place, each in enumerate(found):
        if not isinstance(each, Subgroup):
            raise InputError(f"subgroups[{place}]: {shown(each)} is not allowed: a Subgroup")
    return found  # pyright: ignore[reportReturnType]


def _check_divides(group: Subgroup, region: Bounds) -> None:
    if len(group.spec.partitions) > len(region):
        raise InputError(
            f"spec: {_spec(group.spec)} has more dimensions than the array, which has {len(region)}"
        )
    for dimension, parts in enumerate(group.divisions(len(region))):
        width = region[dimension][1] - region[dimension][0]
        if width % parts:
            raise InputError(
                f"spec: {_spec(group.spec)} divides dimension {dimension} into {parts} parts, and "
                f"devices {_ranges(group.devices)} have {width} of it: {parts} does not divide that"
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


def _subgroup(group: Subgroup) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in group.axes if size > 1)
    return f"devices {_ranges(group.devices)}{f' as {axes}' if axes else ''}: {_spec(group.spec)}"


def _spec(spec: PartitionSpec) -> str:
    entries = [repr(entry) for entry in spec.partitions]
    if spec.unreduced:
        entries.append("unreduced={" + ", ".join(map(repr, sorted(spec.unreduced))) + "}")
    return f"P({', '.join(entries)})"


def _ranges(devices: Sequence[int]) -> str:
    """Numbers of devices, neighbours drawn together.

    Example:
        >>> _ranges((0, 1, 2, 5))
        '[0-2, 5]'
    """
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return "[" + ", ".join(f"{r[0]}-{r[-1]}" if r[1:] else f"{r[0]}" for r in runs) + "]"
