"""Files that people write: YAML and JSON without silent losses, and sentences for what is wrong.

What a file holds is bounded before it is built: how deep it is nested, how many values its aliases
stand for, how many digits a number has. What would be lost or guessed is refused: a key that is
given twice, a number that YAML reads as octal or in base 60.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import pydantic
import yaml
from pydantic_core import CoreSchema
from pydantic_core.core_schema import (
    is_instance_schema,
    json_or_python_schema,
    with_info_after_validator_function,
)

from hetjax.errors import InputError, shown, unknown_name
from hetjax.reading import MAX_MADE_BYTES, read_text

MAX_DEPTH = 32
"""How deep lists and mappings may be nested."""

MAX_YAML_VALUES = 30_000
"""How many values a YAML file may have, those that its aliases repeat included."""

MAX_DIGITS = 32
"""How many digits a whole number may have."""


STRICT = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
"""What is asked of a mapping: its fields are known, of their very types, its numbers finite."""


class Record(pydantic.BaseModel):
    """A mapping of a file, which is `STRICT`."""

    model_config = STRICT


@dataclass(frozen=True)
class FileForm:
    """How a value stands in a file, in the hint of a field of a dataclass; in Python it is itself.

    Args:
        record: what is in the file: a `Record`, or another type that pydantic checks.
        read: the value, from that and the fields that stand before it.
        write: what a file says of the value.
    """

    record: Any
    read: Callable[[Any, Mapping[str, Any]], Any]
    write: Callable[[Any], Any]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: pydantic.GetCoreSchemaHandler
    ) -> CoreSchema:
        return json_or_python_schema(
            with_info_after_validator_function(
                lambda record, info: self.read(record, info.data),
                handler.generate_schema(self.record),
            ),
            is_instance_schema(source),
        )


def read_yaml(path: str | Path, what: str) -> object:
    """Read a YAML file.

    Args:
        path: a file in UTF-8.
        what: what errors call it.

    Returns:
        Dicts, lists, texts and numbers.

    Raises:
        InputError: the file cannot be read, is not YAML, nested too deep or too large, has a key
            twice, or a tag.
    """
    text = read_text(path, f"{path}: the {what}")
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}" if mark else ""
        raise InputError(f"{path}{place}: this is not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: a scalar that looks like a date or a number and is none.
        raise InputError(f"{path}: this is not YAML: {str(error).splitlines()[0]}") from None


def read_json(path: str | Path, subject: str, max_bytes: int = MAX_MADE_BYTES) -> object:
    """Read a JSON file.

    Args:
        path: a file in UTF-8.
        subject: how the error's sentence begins, such as ``"plan file plan.json"``.
        max_bytes: the largest size that is allowed.

    Returns:
        Dicts, lists, texts and numbers.

    Raises:
        InputError: the file cannot be read, or is not JSON as `parse_json` reads it.
    """
    return parse_json(read_text(path, subject, max_bytes), subject)


def parse_json(text: str, subject: str) -> object:
    """Parse JSON.

    Args:
        text: one value.
        subject: how the error's sentence begins, such as ``"plan file plan.json"``.

    Returns:
        Dicts, lists, texts and numbers.

    Raises:
        InputError: it is not JSON, nested too deep, or has a key twice or a number of too many
            digits.

    Example:
        >>> parse_json('{"a": 1, "a": 2}', "plan file p.json")
        Traceback (most recent call last):
        hetjax.errors.InputError: plan file p.json is not JSON: the key 'a' is given twice
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_without_repetition,
            parse_int=_whole_number,
        )
    except json.JSONDecodeError as error:
        raise InputError(f"{subject} is not JSON: {error.msg} in line {error.lineno}") from None
    except InputError as error:
        raise InputError(f"{subject} is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep(f"{subject} is not JSON") from None
    if not _is_shallow(value):
        raise _too_deep(f"{subject} is not JSON")
    return value


def _too_deep(subject: str) -> InputError:
    return InputError(f"{subject}: it is nested more than {MAX_DEPTH} levels deep")


def _is_shallow(value: object) -> bool:
    """Whether lists and mappings are nested as deep as is allowed, or less."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _inside(outer)]
    return not level


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise InputError(f"the key {shown(twice)} is given twice")
    return found


def _whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise InputError(f"the number {text[:8]}... has {len(text)} digits, {MAX_DIGITS} at most")
    return int(text)


def first_problem(error: pydantic.ValidationError, root: type) -> str:
    """One line for one thing wrong: the field, its value and what is allowed.

    Args:
        error: what pydantic found.
        root: the model of the whole content, or its dataclass.

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
    unknown = (problem for problem in problems if problem["type"] in _UNKNOWN)
    problem = next(unknown, problems[0])
    location = problem["loc"]
    field, value = _field_path(location), shown(problem["input"])
    match problem["type"]:
        case each if each in _UNKNOWN:
            *parents, name = location
            message = unknown_name("field", str(name), _fields_at(parents, root))
            return f"{_field_path(parents)}: {message}" if parents else message
        case "missing":
            return f"{field}: the field is missing"
        case "value_error":
            reason = problem["msg"].removeprefix("Value error, ")
            return f"{field}: {reason}" if field else reason
        case "model_type" | "dataclass_type":
            return f"{field or 'the content'}: {value} is not allowed: it must be a mapping"
        case _:
            return f"{field}: {value} is not allowed: {problem['msg']}"


_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""What pydantic calls a field that a model, and that a dataclass does not have."""


class _Loader(yaml.SafeLoader):
    """YAML in which nothing is lost, guessed or endless; every such thing is an error."""

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = 0
        self._num_values = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "tag", None) is not None:
            _refuse(f"the tag {event.tag} is not allowed; give the plain value", event)
        is_alias = isinstance(event, yaml.AliasEvent)
        before, self._depth = self._num_values, self._depth + 1
        if self._depth > MAX_DEPTH:
            _refuse(f"it is nested more than {MAX_DEPTH} levels deep", event)
        node = super().compose_node(parent, index)
        assert node is not None
        if is_alias and node not in self._sizes:
            _refuse(f"the alias *{event.anchor} stands inside of what it stands for", event)
        self._num_values += self._sizes[node] if is_alias else 1
        if self._num_values > MAX_YAML_VALUES:
            _refuse(f"it has more than {MAX_YAML_VALUES} values", event)
        self._sizes.setdefault(node, self._num_values - before)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                _refuse("a key must be a text or a number", key_node)
            if key_node.value in seen:
                _refuse(f"the key {key_node.value!r} is given twice", key_node)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def construct_decimal(self, node: yaml.ScalarNode) -> int | float:
        if len(node.value) > MAX_DIGITS:
            _refuse(f"a number has {len(node.value)} digits, {MAX_DIGITS} at most", node)
        if not _DECIMAL.fullmatch(node.value):
            _refuse(f"the number {node.value!r} is not written in decimal alone", node)
        is_float = node.tag.endswith(":float")
        return self.construct_yaml_float(node) if is_float else self.construct_yaml_int(node)


# YAML 1.1 takes 010 for 8, 1_0 for 10 and 1:30 for 90; many who write them mean something else.
_DECIMAL = re.compile(
    r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|"
    r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_decimal)
# As in YAML 1.2; in 1.1 a power of ten needs a point and a sign.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def _refuse(problem: str, at: yaml.Event | yaml.Node) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, problem, at.start_mark)


def _field_path(location: Sequence[int | str]) -> str:
    """A path as a person writes it: ``subclusters[0].intra_node.bandwidth``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part[:100]}" for part in location)
    return "".join(parts).removeprefix(".")


def _fields_at(location: Sequence[int | str], root: type) -> list[str]:
    """The fields that are allowed at a place."""
    fields = _fields_of(root)
    for part in location:
        # List positions and the keys of mappings lead to no other fields than their parent does.
        if isinstance(part, str) and part in fields:
            fields = _fields_in(fields[part]) or fields
    return list(fields)


def _fields_of(kind: type) -> dict[str, Any]:
    """The fields of a model or a dataclass, with their hints; none of another type."""
    if issubclass(kind, pydantic.BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return {}


def _fields_in(hint: object) -> dict[str, Any]:
    """The fields of what a hint tells of: of a file's form before those of the value."""
    if isinstance(hint, FileForm):
        return _fields_in(hint.record)
    if isinstance(hint, type) and (found := _fields_of(hint)):
        return found
    return next((found for each in reversed(get_args(hint)) if (found := _fields_in(each))), {})
