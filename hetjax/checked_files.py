"""Files that people write: YAML without silent losses, and sentences for what is wrong in them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, get_args

import pydantic
import yaml

from hetjax.errors import InputError, unknown_name


def read_yaml(path: str | Path, what: str) -> object:
    """Read a YAML file.

    Args:
        path: a file in UTF-8.
        what: what errors call it.

    Returns:
        Dicts, lists, texts and numbers.

    Raises:
        InputError: there is no such file, it is not UTF-8 or not YAML, or a key is given twice.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: the {what} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: the text is not UTF-8, from byte {error.start} on") from None
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}" if mark else ""
        raise InputError(f"{path}{place}: this is not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: a scalar that looks like a date or a number and is none.
        raise InputError(f"{path}: this is not YAML: {str(error).splitlines()[0]}") from None


def first_problem(error: pydantic.ValidationError, root: type[pydantic.BaseModel]) -> str:
    """One line for one thing wrong: the field, its value and what is allowed.

    Args:
        error: what pydantic found.
        root: the model of the whole content.

    Returns:
        The line.

    Example:
        >>> class Pair(pydantic.BaseModel):
        ...     first: int
        >>> try:
        ...     Pair.model_validate({"first": "one"}, strict=True)
        ... except pydantic.ValidationError as error:
        ...     first_problem(error, Pair)
        "first: 'one' is not allowed: Input should be a valid integer"
    """
    problems = error.errors(include_url=False)
    # A misspelt field is missing too; the name that was written is the better thing to tell.
    unknown = (problem for problem in problems if problem["type"] == "extra_forbidden")
    problem = next(unknown, problems[0])
    location = problem["loc"]
    field, value = _field_path(location), _short(problem["input"])
    match problem["type"]:
        case "extra_forbidden":
            *parents, name = location
            message = unknown_name("field", str(name), _fields_at(parents, root))
            return f"{_field_path(parents)}: {message}" if parents else message
        case "missing":
            return f"{field}: the field is missing"
        case "value_error":
            reason = problem["msg"].removeprefix("Value error, ")
            return f"{field}: {reason}" if field else reason
        case "model_type":
            return f"{field or 'the content'}: {value} is not allowed: it must be a mapping"
        case _:
            return f"{field}: {value} is not allowed: {problem['msg']}"


class _Loader(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error, not a silent loss."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else key_node
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _field_path(location: Sequence[int | str]) -> str:
    """A path as a person writes it: ``subclusters[0].intra_node.bandwidth``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).removeprefix(".")


def _fields_at(location: Sequence[int | str], root: type[pydantic.BaseModel]) -> list[str]:
    """The fields that are allowed at a place."""
    entry = root
    for part in location:
        # List positions and the keys of mappings lead to no other entry than their parent does.
        if isinstance(part, str) and part in entry.model_fields:
            entry = _entry_in(entry.model_fields[part].annotation) or entry
    return list(entry.model_fields)


def _entry_in(annotation: object) -> type[pydantic.BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    found = (_entry_in(part) for part in get_args(annotation))
    return next((entry for entry in found if entry is not None), None)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
