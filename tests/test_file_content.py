"""Dataclasses and what files say of them: one schema for reading and for writing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from hetjax.checked_files import FileForm, Record
from hetjax.errors import InputError
from hetjax.file_content import LAST, LEFT_OUT_EMPTY, check_fields, from_content, to_content
from hetjax.limits import Name


class Sums(Record):
    partial: list[int]


def read_total(record: Sums, before: Mapping[str, Any]) -> int:
    if len(record.partial) != before.get("count"):
        raise InputError(f"{len(record.partial)} sums are not {before.get('count')}")
    return sum(record.partial)


@dataclass(frozen=True)
class Side:
    length: float
    ends: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class Box:
    sides: Annotated[tuple[Side, ...], LAST]
    count: Annotated[int, Field(ge=1)]
    total: Annotated[int, FileForm(Sums, read_total, lambda total: {"partial": [total]})] = 0
    lid: Side | None = None
    labels: Annotated[Mapping[int, tuple[Name | None, ...]], LEFT_OUT_EMPTY] = field(
        default_factory=dict
    )


sides = st.builds(Side, st.floats(-1e300, 1e300), st.tuples(st.integers(), st.integers()))
labels = st.dictionaries(st.integers(0), st.lists(st.none() | st.just("a")).map(tuple))


@given(st.lists(sides).map(tuple), st.integers(), st.none() | sides, labels)
def test_what_is_written_is_read_as_it_was(several, total, lid, named):
    box = Box(several, 1, total, lid, named)
    content = to_content(box)
    assert list(content) == ["count", "total", "lid", *(["labels"] if named else []), "sides"]
    assert from_content(Box, json.loads(json.dumps(content))) == box


WIDE: Any = "wide"
GOOD = {"sides": [{"length": 1.0}], "count": 2, "total": {"partial": [3, 4]}}


def test_a_field_is_read_from_another_form_and_the_fields_before_it():
    assert from_content(Box, GOOD) == Box((Side(1.0),), 2, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cuont": 2}, "^unknown field 'cuont'; did you mean 'count'"),
        ({"lid": {"lenght": 1.0}}, "^lid: unknown field 'lenght'; .* Allowed: ends, length$"),
        ({"sides": [{}]}, r"^sides\[0\].length: the field is missing$"),
        ({"sides": [4]}, r"^sides\[0\]: 4 is not allowed: it must be a mapping$"),
        ({"sides": [{"length": "1"}]}, r"^sides\[0\].length: '1' is not allowed: .* number$"),
        ({"sides": [{"length": float("nan")}]}, "finite number"),
        ({"sides": [{"length": 1.0, "ends": [1]}]}, r"ends\[1\]: the field is missing"),
        ({"count": 0}, "^count: 0 is not allowed: .* greater than or equal to 1$"),
        ({"count": True}, "^count: True is not allowed: .* integer$"),
        ({"total": {"parts": []}}, "^total: unknown field 'parts'; .* Allowed: partial$"),
        ({"total": {"partial": [1]}}, "^total: 1 sums are not 2$"),
        ({"labels": {"one": []}}, r"^labels.one.\[key\]: 'one' is not allowed"),
        ({"labels": {"1": [""]}}, r"^labels.1\[0\]: '' is not allowed"),
        ({"labels": {"1": ["\ud800"]}}, r"half a character, U\+D800"),
    ],
)
def test_what_is_wrong_is_told_by_its_field(changes, message):
    with pytest.raises(InputError, match=message):
        from_content(Box, {**GOOD, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sides": Side(1.0)}, r"^sides: Side\(.* is not allowed: .* tuple$"),
        ({"sides": [Side(1.0), 4]}, r"^sides\[1\]: 4 is not allowed: .* instance of Side$"),
        ({"sides": (Side(WIDE),)}, r"^sides\[0\].length: 'wide' is not allowed: .* number$"),
        ({"count": 2.0}, "^count: 2.0 is not allowed: .* integer$"),
        ({"total": {"partial": [3, 4]}}, r"^total: {'partial': .* is not allowed: .* int$"),
        ({"labels": {"one": ()}}, r"^labels.one.\[key\]: 'one' is not allowed"),
    ],
)
def test_what_was_made_in_python_is_told_by_its_field(changes, message):
    box = Box((Side(1.0),), 2, 7)
    check_fields(box)
    check_fields(replace(box, sides=[Side(1.0)]))
    with pytest.raises(InputError, match=message):
        check_fields(replace(box, **changes))


@pytest.mark.parametrize("content", [None, [], 3, "box"])
def test_what_is_no_mapping(content):
    with pytest.raises(InputError, match=r"^the content: .* it must be a mapping"):
        from_content(Box, content)


def test_a_version_is_asked_for_before_all_else():
    assert from_content(Side, {"version": 1, "length": 2.0}, version=1) == Side(2.0)
    for content, message in (
        ({"length": 2.0}, "version: the field is missing"),
        ({"version": 2, "colour": "red"}, "version: 2 is not allowed: it must be 1"),
        ({"version": True, "length": 2.0}, "version: True is not allowed"),
    ):
        with pytest.raises(InputError, match=message):
            from_content(Side, content, version=1)
