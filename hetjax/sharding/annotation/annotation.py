"""The HSPMD annotation: how one array lies on a union of unlike meshes.

Inside one submesh (the bottom tier) an array is sharded as JAX shards it, by a `PartitionSpec`,
partial sums included. Among the submeshes (the top tier) it is divided along one dimension, in
sizes of any kind, or along several in ranges of any kind, or is the same on each, or is the sum of
what each holds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jax.sharding import Mesh, NamedSharding

from hetjax.errors import InputError, shown
from hetjax.sharding.annotation.annotation_file import annotation_record, spec_of, spec_to_json
from hetjax.sharding.annotation.bounds import Bounds
from hetjax.sharding.annotation.checked_fields import (
    checked_hdim,
    checked_ranges,
    checked_sizes,
)
from hetjax.sharding.annotation.subgroup import (
    Shard,
    Subgroup,
    Summand,
    check_divides,
    shown_subgroup,
)
from hetjax.sharding.annotation.symbols import Size, SymbolicSize

DUPLICATE: Literal["duplicate"] = "duplicate"
PARTIAL: Literal["partial"] = "partial"

HDim = int | tuple[int, ...] | Literal["duplicate", "partial"]
"""What the submeshes of a union share an array along: a dimension; or several, of which each has a
range; or each has the whole of it (`DUPLICATE`); or each has a summand of it (`PARTIAL`)."""


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
        >>> from jax.sharding import PartitionSpec
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
            return f"HSharding({shown_subgroup(self.subgroups[0])})"
        if isinstance(self.hdim, tuple):
            dimensions = ", ".join(map(str, self.hdim))
            among = f"split on dimensions {dimensions}"
        else:
            among = f"split on dimension {self.hdim}" if isinstance(self.hdim, int) else self.hdim
        parts = (", ".join(f"{start}:{stop}" for start, stop in each) for each in self.ranges)
        sizes = self.sizes or tuple(parts) or ("",) * len(self.subgroups)
        rows = (
            f"\n  {shown_subgroup(group)}{f', {size} of it' if size != '' else ''}"
            for group, size in zip(self.subgroups, sizes, strict=True)
        )
        return f"HSharding({among} among {len(self.subgroups)} submeshes:{''.join(rows)})"

    def to_json_dict(self) -> dict[str, Any]:
        """The annotation as plain values.

        Example:
            >>> from jax.sharding import PartitionSpec
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
        check_divides(group, region)
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
