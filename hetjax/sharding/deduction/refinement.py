"""Refinement: annotations over unlike unions of the same devices, written over one finer union.

Whether two unions can meet is decided by what each device holds, not by the names of axes or the
order in which submeshes are given: an axis of four meets two submeshes of two, and submeshes that
cross are cut where either is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import PartitionSpec

from hetjax.errors import InputError
from hetjax.sharding.annotation.annotation import DUPLICATE, PARTIAL, HDim, HSharding
from hetjax.sharding.annotation.bounds import Bounds, extent
from hetjax.sharding.annotation.subgroup import Shard, Subgroup, Summand, spec_from
from hetjax.sharding.deduction.annotated_program import Union, union_of

Shape = tuple[int, ...]
Layout = Mapping[int, Shard]
"""What each device holds."""


def refined_together(
    annotations: Sequence[HSharding], shapes: Sequence[Shape]
) -> list[HSharding] | None:
    """Annotations written over one union, which no device has to send anything for.

    One of their own unions is taken where the others can be written over it; else their submeshes
    are cut wherever one of them is, and where their axes cannot be brought together, into devices.

    Args:
        annotations: of several arrays.
        shapes: their shapes.

    Returns:
        The annotations over one union; None where there is none.

    Source: Hetu v2, section 5.2 (figure 10).

    Example:
        >>> four = Subgroup((0, 1, 2, 3), (("x", 4),), PartitionSpec("x"))
        >>> pairs = [Subgroup((i, i + 1), (("y", 2),), PartitionSpec("y")) for i in (0, 2)]
        >>> halves = HSharding(tuple(pairs), 0, (4, 4))
        >>> found = refined_together([HSharding((four,)), halves], [(8,), (8,)])
        >>> print(found[0] == halves, found[0])
        True HSharding(split on dimension 0 among 2 submeshes:
          devices [0-1] as y=2: P('y'), 4 of it
          devices [2-3] as y=2: P('y'), 4 of it)
    """
    if len({frozenset(annotation.devices) for annotation in annotations}) > 1:
        return None
    layouts = [layout_of(*pair) for pair in zip(annotations, shapes, strict=True)]
    for union in _unions(annotations, layouts):
        found = [
            annotation if union_of(annotation) == union else written_over(layout, union, shape)
            for annotation, layout, shape in zip(annotations, layouts, shapes, strict=True)
        ]
        written = [each for each in found if each is not None]
        if len(written) == len(found):
            return written
    return None


def layout_of(annotation: HSharding, shape: Shape) -> Layout:
    """What each device holds of an array that lies as an annotation says."""
    return {shard.device: shard for shard in annotation.shards(shape)}


def _unions(annotations: Sequence[HSharding], layouts: Sequence[Layout]) -> Iterator[Union]:
    """Unions that may do, the annotations' own first."""
    blocks = _blocks(annotations, layouts)
    finest = {frozenset(block) for block in blocks}
    for union in {union_of(each): None for each in annotations}:
        if {frozenset(group.devices) for group in union} == finest:
            yield union
    yield tuple(each for block in blocks for each in _submeshes(block, annotations, layouts))
    yield tuple(Subgroup((device,), (), PartitionSpec()) for block in blocks for device in block)


def _blocks(annotations: Sequence[HSharding], layouts: Sequence[Layout]) -> list[tuple[int, ...]]:
    """The devices that lie in one submesh by every annotation, in the order of what they hold."""
    places: dict[int, list[int]] = {}
    for annotation in annotations:
        for place, group in enumerate(annotation.subgroups):
            for device in group.devices:
                places.setdefault(device, []).append(place)
    blocks: dict[tuple[int, ...], list[int]] = {}
    for device, key in places.items():
        blocks.setdefault(tuple(key), []).append(device)

    def order(devices: Sequence[int]) -> tuple[list[tuple[int, ...]], list[Summand | None]]:
        starts = [_starts(_region([layout[d] for d in devices])) for layout in layouts]
        return starts, [layouts[0][device].summand or Summand(-1, 0) for device in devices]

    found = [tuple(sorted(block, key=lambda device: order([device]))) for block in blocks.values()]
    return sorted(found, key=order)


def _starts(bounds: Bounds) -> tuple[int, ...]:
    return tuple(start for start, _ in bounds)


def _region(shards: Sequence[Shard]) -> Bounds:
    """The part of an array that some devices hold together."""
    sides = zip(*(shard.bounds for shard in shards), strict=True)
    return tuple((min(a for a, _ in ends), max(b for _, b in ends)) for ends in sides)


def _submeshes(
    block: tuple[int, ...], annotations: Sequence[HSharding], layouts: Sequence[Layout]
) -> Iterator[Subgroup]:
    """A submesh of a block by whose axes all annotations can be written; or each device alone."""
    for submesh in _candidates(block, annotations):
        if all(spec_over(submesh, layout) is not None for layout in layouts):
            yield submesh
            return
    yield from (Subgroup((device,), (), PartitionSpec()) for device in block)


def _candidates(block: tuple[int, ...], annotations: Sequence[HSharding]) -> Iterator[Subgroup]:
    """Submeshes of a block's devices: as annotations have them, by finer axes, in a row."""
    whole: list[Subgroup] = []
    for annotation in annotations:
        for group in annotation.subgroups:
            if set(block) <= set(group.devices):
                whole += _restricted(group, block)
    yield from whole
    for submesh in whole:
        axes = [
            (f"{name}_{place}", factor)
            for name, size in submesh.axes
            for place, factor in enumerate(_factors(size))
        ]
        yield Subgroup(submesh.devices, tuple(axes), PartitionSpec())
    # Of what is whole, or divided by one axis alone, any order of the devices will do.
    yield Subgroup(block, (("device", len(block)),), PartitionSpec())


def _restricted(group: Subgroup, block: tuple[int, ...]) -> Iterator[Subgroup]:
    """What is left of a submesh with some of its devices, where these are a mesh of its axes."""
    coordinates = {
        device: place
        for device, place in zip(
            group.devices,
            itertools.product(*(range(size) for _, size in group.axes)),
            strict=True,
        )
        if device in block
    }
    ranges = [sorted(set(each)) for each in zip(*coordinates.values(), strict=True)]
    if math.prod(len(each) for each in ranges) != len(block):
        # An axis is cut in its middle, which shows when it is taken in factors.
        finer = [
            (f"{name}_{place}", factor)
            for name, size in group.axes
            for place, factor in enumerate(_factors(size))
        ]
        if len(finer) > len(group.axes):
            yield from _restricted(Subgroup(group.devices, tuple(finer), PartitionSpec()), block)
        return
    pairs = zip(group.axes, ranges, strict=True)
    axes = tuple((name, len(kept)) for (name, _), kept in pairs if len(kept) > 1)
    devices = tuple(device for device in group.devices if device in block)
    yield Subgroup(devices, axes, PartitionSpec())


def _factors(size: int) -> list[int]:
    """The prime factors of the size of an axis; of 1, itself."""
    found, divisor = [], 2
    while size > 1:
        if size % divisor:
            divisor += 1
            continue
        found.append(divisor)
        size //= divisor
    return found or [1]


def spec_over(submesh: Subgroup, layout: Layout) -> PartitionSpec | None:
    """The sharding inside a submesh by which its devices hold what they do.

    Args:
        submesh: the submesh, whose own sharding is of no meaning.
        layout: what each of its devices holds, and maybe others.

    Returns:
        The specification; None where there is none.

    Example:
        >>> layout = {device: Shard(device, ((device, device + 1),)) for device in (0, 1)}
        >>> spec_over(Subgroup((0, 1), (("x", 2),), PartitionSpec()), layout)
        P('x',)
    """
    shards = [layout[device] for device in submesh.devices]
    region, first = _region(shards), shards[0]
    sizes = [size for _, size in submesh.axes]
    entries: list[list[tuple[int, str]]] = [[] for _ in region]
    unreduced = set()
    for place, (name, size) in enumerate(submesh.axes):
        if size == 1:
            continue
        # What changes where one goes a step along the axis from the first device.
        other = shards[math.prod(sizes[place + 1 :])]
        dimensions = [d for d, ends in enumerate(first.bounds) if ends != other.bounds[d]]
        if len(dimensions) > 1:
            return None
        if dimensions:
            (dimension,) = dimensions
            step = other.bounds[dimension][0] - first.bounds[dimension][0]
            entries[dimension].append((-step, name))
        elif first.summand != other.summand:
            unreduced.add(name)
    named = [tuple(name for _, name in sorted(each)) for each in entries]
    spec = spec_from(named, frozenset(unreduced))
    found = submesh.with_spec(spec).shards(region)
    return spec if _alike(list(found), shards) else None


def _alike(a: Sequence[Shard], b: Sequence[Shard]) -> bool:
    """Whether devices hold the same parts, and summands that differ where theirs do."""
    names: dict[Summand | None, Summand | None] = {}
    for one, other in zip(a, b, strict=True):
        if (one.device, one.bounds) != (other.device, other.bounds):
            return False
        if names.setdefault(one.summand, other.summand) != other.summand:
            return False
    return len(set(names.values())) == len(names)


def _same_sums(a: Sequence[Shard], b: Sequence[Shard]) -> bool:
    """Whether the summands that devices hold add up in the same groups."""
    pairs = {
        (one.summand and one.summand.group, other.summand and other.summand.group)
        for one, other in zip(a, b, strict=True)
    }
    sides = [{pair[side] for pair in pairs} for side in (0, 1)]
    unlike = any((x is None) != (y is None) for x, y in pairs)
    return not unlike and len(sides[0]) == len(sides[1]) == len(pairs)


def written_over(layout: Layout, union: Union, shape: Shape) -> HSharding | None:
    """The annotation over a union by which its devices hold what they do.

    Args:
        layout: what each device holds of an array.
        union: the union, of these devices.
        shape: the array's shape.

    Returns:
        The annotation; None where there is none.
    """
    specs = [spec_over(submesh, layout) for submesh in union]
    groups = [
        submesh.with_spec(spec)
        for submesh, spec in zip(union, specs, strict=True)
        if spec is not None
    ]
    if len(groups) < len(union):
        return None
    regions = [_region([layout[device] for device in group.devices]) for group in groups]
    for hdim in _divided(regions, layout, shape):
        sizes = [extent(region)[hdim] for region in regions] if isinstance(hdim, int) else []
        found = HSharding(tuple(groups), hdim, tuple(sizes) if len(groups) > 1 else ())
        try:
            shards = found.shards(shape)
        except InputError:
            continue
        before = [layout[shard.device] for shard in shards]
        if _alike(shards, before) and _same_sums(shards, before):
            return found
    return None


def _divided(regions: Sequence[Bounds], layout: Layout, shape: Shape) -> Iterator[HDim]:
    """What submeshes may share an array along that hold some parts of it."""
    everything = tuple((0, size) for size in shape)
    dimensions = {
        dimension
        for region in regions
        for dimension, ends in enumerate(region)
        if ends != everything[dimension]
    }
    if len(dimensions) == 1:
        yield from dimensions
    elif not dimensions:
        yield DUPLICATE
        if any(shard.summand for shard in layout.values()):
            yield PARTIAL
