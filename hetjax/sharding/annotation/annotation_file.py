"""Annotations as plain values: what a file may say of one, checked field by field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pydantic
from jax.sharding import PartitionSpec

from hetjax.checked_files import Record, first_problem
from hetjax.errors import InputError
from hetjax.limits import Name


class SubgroupRecord(Record):
    """What a file says of one submesh of an annotation."""

    devices: list[int]
    axes: dict[Name, int]
    spec: list[Name | list[Name] | None]
    unreduced: list[Name] = pydantic.Field(default=[])


class AnnotationRecord(Record):
    """What a file says of an annotation."""

    subgroups: list[SubgroupRecord]
    hdim: int | Name | list[int]
    sizes: list[int | Name] = pydantic.Field(default=[])
    ranges: list[list[list[int]]] = pydantic.Field(default=[])


def annotation_record(data: object, source: str) -> AnnotationRecord:
    """What a file says of an annotation.

    Args:
        data: dicts, lists, texts and numbers, as `json` gives them.
        source: what errors name as the place.

    Raises:
        InputError: naming the place and the field.
    """
    if not isinstance(data, Mapping):
        raise InputError(f"{source}: a table is wanted, not {type(data).__name__}")
    try:
        return AnnotationRecord.model_validate(data)
    except pydantic.ValidationError as error:
        raise InputError(f"{source}: {first_problem(error, AnnotationRecord)}") from None


def spec_to_json(spec: PartitionSpec) -> dict[str, Any]:
    """A specification as the fields of a record."""
    entries = [list(e) if isinstance(e, tuple) else e for e in spec.partitions]
    return {"spec": entries, "unreduced": sorted(spec.unreduced)}


def spec_of(record: SubgroupRecord) -> PartitionSpec:
    """The specification that a record's fields say.

    Raises:
        ValueError: there is none.
    """
    entries = [tuple(e) if isinstance(e, list) else e for e in record.spec]
    return PartitionSpec(*entries, unreduced=frozenset(record.unreduced))
