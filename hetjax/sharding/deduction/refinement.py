"""Refinement: an annotation over few submeshes, written over more and smaller ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from hetjax.sharding.annotation.annotation import (
    DUPLICATE,
    PARTIAL,
    HDim,
    HSharding,
    Subgroup,
    axes_of,
    spec_from,
)
from hetjax.sharding.annotation.bounds import extent
from hetjax.sharding.deduction.annotated_program import Union


def refined(annotation: HSharding, union: Union, shape: Sequence[int]) -> HSharding | None:
    """The same layout over a finer union.

    Submeshes of the finer union are what is left of a coarser one when its first axis is taken
    apart; what that axis divided, the submeshes then share.

    Args:
        annotation: over the coarser union.
        union: the finer one.
        shape: the array's shape.

    Returns:
        The annotation over the finer union; None where it cannot be written so.

    Source: Hetu v2, section 5.2 (figure 10).

    Example:
        >>> whole = Subgroup((0, 1, 2), (("data", 3),), PartitionSpec("data"))
        >>> parts = tuple(Subgroup((i,), (), PartitionSpec()) for i in range(3))
        >>> found = refined(HSharding((whole,)), parts, (6,))
        >>> found.hdim, found.sizes
        (0, (2, 2, 2))
    """
    found: list[Subgroup] = []
    widths: list[int] = []
    kinds: set[HDim] = set() if len(annotation.subgroups) == 1 else {annotation.hdim}
    rest = list(union)
    for group, region in zip(annotation.subgroups, annotation.regions(shape), strict=True):
        pieces = []
        while rest and set(rest[0].devices) <= set(group.devices):
            pieces.append(rest.pop(0))
        if tuple(device for piece in pieces for device in piece.devices) != group.devices:
            return None
        spec: PartitionSpec = group.spec
        hdim: HDim | None = None
        if len(pieces) > 1:
            (name, size), *axes = group.axes
            if size != len(pieces) or any(piece.axes != tuple(axes) for piece in pieces):
                return None
            taken = _without(spec, name)
            if taken is None:
                return None
            hdim, spec = taken
            kinds.add(hdim)
        elif pieces[0].axes != group.axes:
            return None
        found += [piece.with_spec(spec) for piece in pieces]
        sizes: Any = extent(region)
        dimension = next((kind for kind in kinds if isinstance(kind, int)), None)
        if dimension is not None:
            own = sizes[dimension]
            split = len(pieces) if hdim == dimension else 1
            widths += [own // split] * len(pieces)
    if rest or len(kinds) != 1:
        return None
    (kind,) = kinds
    return HSharding(tuple(found), kind, tuple(widths) if isinstance(kind, int) else ())


def _without(spec: PartitionSpec, name: str) -> tuple[HDim, PartitionSpec] | None:
    """What an axis divides, and the specification without it; None where it is not outermost."""
    entries = [axes_of(entry) for entry in spec.partitions]
    others = [tuple(axis for axis in entry if axis != name) for entry in entries]
    left = spec_from(others, spec.unreduced - {name})
    if name in spec.unreduced:
        return PARTIAL, left
    for dimension, entry in enumerate(entries):
        if name in entry:
            return (dimension, left) if entry[0] == name else None
    return DUPLICATE, left
