"""Annotations as plain values, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pydantic
from jax.sharding import PartitionSpec

from hetjax.checked_files import Record, first_problem
from hetjax.errors import InputError
from hetjax.limits import Name
from hetjax.sharding.annotation.annotation import HSharding, Subgroup


class _SubgroupRecord(Record):
    devices: list[int]
    axes: dict[Name, int]
    spec: list[Name | list[Name] | None]
    unreduced: list[Name] = pydantic.Field(default=[])


class _AnnotationRecord(Record):
    subgroups: list[_SubgroupRecord]
    hdim: int | Name
    sizes: list[int | Name] = pydantic.Field(default=[])


def annotation_to_json(annotation: HSharding) -> dict[str, Any]:
    """An annotation as dicts, lists, texts and numbers."""
    return {
        "subgroups": [_subgroup_to_json(group) for group in annotation.subgroups],
        "hdim": annotation.hdim,
        "sizes": [size if isinstance(size, int) else str(size) for size in annotation.sizes],
    }


def annotation_from_json(data: object, source: str) -> HSharding:
    """What `annotation_to_json` wrote.

    Raises:
        InputError: naming the place and the field.
    """
    if not isinstance(data, Mapping):
        raise InputError(f"{source}: a table is wanted, not {type(data).__name__}")
    try:
        record = _AnnotationRecord.model_validate(data)
    except pydantic.ValidationError as error:
        raise InputError(f"{source}: {first_problem(error, _AnnotationRecord)}") from None
    try:
        groups = tuple(_subgroup_from(each) for each in record.subgroups)
        return HSharding(groups, record.hdim, tuple(record.sizes))  # pyright: ignore[reportArgumentType]
    except ValueError as error:  # JAX's own too: of a `PartitionSpec` that cannot be.
        raise InputError(f"{source}: {error}") from None


def _subgroup_to_json(group: Subgroup) -> dict[str, Any]:
    entries = [list(e) if isinstance(e, tuple) else e for e in group.spec.partitions]
    return {
        "devices": list(group.devices),
        "axes": dict(group.axes),
        "spec": entries,
        "unreduced": sorted(group.spec.unreduced),
    }


def _subgroup_from(record: _SubgroupRecord) -> Subgroup:
    entries = [tuple(e) if isinstance(e, list) else e for e in record.spec]
    spec = PartitionSpec(*entries, unreduced=frozenset(record.unreduced))
    return Subgroup(tuple(record.devices), tuple(record.axes.items()), spec)
