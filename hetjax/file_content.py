"""Dataclasses and what files say of them: the type hints of a dataclass are its file's schema.

Each field is checked by its hint: of its very type, its numbers finite, and as pydantic's metadata
in an `Annotated` hint ask. How a field stands in a file, where it does not do so as it is, is said
there too: `FileForm`, `LAST`, `LEFT_OUT_EMPTY`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import pydantic

from hetjax.checked_files import STRICT, FileForm, first_problem
from hetjax.errors import InputError, shown

Data = TypeVar("Data")

LAST = "stands last in a file"
"""In the hint of a field that is long: it is written after the others."""

LEFT_OUT_EMPTY = "is left out of a file where it is empty"
"""In the hint of a field that few have: it is not written where it is empty."""


def to_content(value: Any) -> Any:
    """What a file says of a value.

    Args:
        value: a dataclass, or what is in one: mappings, tuples, texts, numbers.

    Returns:
        Dicts, lists, texts and numbers only; of a dataclass its fields in order.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Box:
        ...     sides: tuple[float, ...]
        >>> to_content({"first": Box((1.0, 2.0))})
        {'first': {'sides': [1.0, 2.0]}}
    """
    if is_dataclass(value):
        return _fields_to_content(value)
    if isinstance(value, Mapping):
        return {str(key): to_content(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [to_content(each) for each in value]
    return value


def from_content(kind: type[Data], content: object, version: int | None = None) -> Data:
    """Reads what a file says of a dataclass, and checks every field.

    Args:
        kind: the dataclass.
        content: dicts, lists, texts and numbers, as `to_content` gave or a person edited them.
        version: what the content's field ``version`` must be, which is none of the dataclass; None
            where it has no such field.

    Returns:
        The value.

    Raises:
        InputError: a field is missing, unknown or wrong; the message names the field, its value and
            what is allowed.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Box:
        ...     sides: tuple[float, ...]
        >>> from_content(Box, {"sides": [1.0, 2.0]})
        Box(sides=(1.0, 2.0))
        >>> from_content(Box, {"sides": [1.0, "wide"]})
        Traceback (most recent call last):
        hetjax.errors.InputError: sides[1]: 'wide' is not allowed: Input should be a valid number
    """
    content = _checked_mapping(content)
    if version is not None:
        _, content = without_version(content, (version,))
    try:
        # As JSON, in which a list is a tuple as strictly as can be.
        return _adapter(kind).validate_json(json.dumps(content, ensure_ascii=False).encode())
    except pydantic.ValidationError as error:
        raise InputError(first_problem(error, kind)) from None
    except UnicodeEncodeError as error:
        raise InputError(f"it has half a character, U+{ord(error.object[error.start]):X}") from None


def check_fields(value: Any) -> None:
    """Checks every field of a dataclass that was made in Python, as `from_content` does a file's.

    A list is as good as a tuple, as it is in a file. What stands in a file in a form of its own
    (`FileForm`) is looked at for its class alone.

    Args:
        value: the dataclass.

    Raises:
        InputError: a field is wrong; the message names the field, its value and what is allowed.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Box:
        ...     sides: tuple[float, ...]
        >>> check_fields(Box((1.0, 2.0)))
        >>> check_fields(Box((1.0, "wide")))
        Traceback (most recent call last):
        hetjax.errors.InputError: sides[1]: 'wide' is not allowed: Input should be a valid number
    """
    try:
        _adapter(type(value)).validate_python(_with_tuples(value))
    except pydantic.ValidationError as error:
        raise InputError(first_problem(error, type(value))) from None


def _with_tuples(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_with_tuples, value))
    if isinstance(value, Mapping):
        return {key: _with_tuples(each) for key, each in value.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return value
    inside = {
        name: _with_tuples(getattr(value, name))
        for name, notes in _notes(type(value)).items()
        if not any(isinstance(note, FileForm) for note in notes)
    }
    return replace(value, **inside)


def without_version(content: object, versions: Sequence[int]) -> tuple[int, dict[str, Any]]:
    """Which version of a file its content is, and the rest of it.

    Args:
        content: dicts, lists, texts and numbers.
        versions: those that can be read.

    Returns:
        The version, and the content without its field ``version``.

    Raises:
        InputError: the field is missing, or is none of them.

    Example:
        >>> without_version({"version": 2, "length": 2.0}, (1, 2))
        (2, {'length': 2.0})
        >>> without_version({"version": 3}, (1, 2))
        Traceback (most recent call last):
        hetjax.errors.InputError: version: 3 is not allowed: it must be 1 or 2
    """
    content = _checked_mapping(content)
    if "version" not in content:
        raise InputError("version: the field is missing")
    found = content["version"]
    if type(found) is not int or found not in versions:
        allowed = " or ".join(map(str, versions))
        raise InputError(f"version: {shown(found)} is not allowed: it must be {allowed}")
    return found, {name: value for name, value in content.items() if name != "version"}


def _checked_mapping(content: object) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise InputError(f"the content: {shown(content)} is not allowed: it must be a mapping")
    return content


@functools.cache
def _adapter(kind: type) -> pydantic.TypeAdapter[Any]:
    # A dataclass alone takes no configuration; one that may be None does, and hands it down.
    optional: Any = kind | None
    asked: pydantic.ConfigDict = {**STRICT, "revalidate_instances": "always"}
    return pydantic.TypeAdapter(optional, config=asked)


def _fields_to_content(value: Any) -> dict[str, Any]:
    content, last = {}, {}
    for name, notes in _notes(type(value)).items():
        field = getattr(value, name)
        form = next((note for note in notes if isinstance(note, FileForm)), None)
        if LEFT_OUT_EMPTY not in notes or field:
            place = last if LAST in notes else content
            place[name] = form.write(field) if form else to_content(field)
    return {**content, **last}


@functools.cache
def _notes(kind: type) -> dict[str, tuple[Any, ...]]:
    """What the hint of each field says of it."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: get_args(hints[field.name])[1:]
        if get_origin(hints[field.name]) is Annotated
        else ()
        for field in fields(kind)
    }
