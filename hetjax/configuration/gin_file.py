"""Gin files: read into a `Configuration`, and written from one.

The syntax is gin's (comments, blocks, macros, ``include``); its registry of global bindings is not
used, so that reading a configuration changes nothing and two can be read side by side. What gin
would look up by ``@reference``, ``import`` or scope does not exist here, and is refused.
"""

from __future__ import annotations

import os
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gin import config_parser

from hetjax.configuration.settings import (
    Configuration,
    check_name,
    make_configuration,
    settings,
)
from hetjax.errors import InputError

PATHS = ("cluster.file", "data.paths", "data.tokenizer", "planner.published")
"""The settings that name files; relative ones are looked up where they are written."""

_COMMAND_LINE = "--gin"


def read_configuration(
    path: str | os.PathLike[str] | None = None, bindings: Sequence[str] = ()
) -> Configuration:
    """Reads a gin file, and bindings that override it.

    A relative path in the settings is looked up beside the file that it stands in, then in the
    working directory; what is found is made absolute.

    Args:
        path: the gin file; None for defaults alone.
        bindings: lines such as ``"train.steps = 20"``.

    Returns:
        The configuration.

    Raises:
        InputError: a file cannot be read, its syntax is wrong, a name is unknown or a value is
            wrong; one sentence names the place, the value and what is allowed.

    Example:
        >>> read_configuration(bindings=["train.steps = 20", "optimizer.name = 'sgd'"]).train.steps
        20
    """
    found: list[_Binding] = []
    if path is not None:
        found += _read_file(Path(path), ())
    for line in bindings:
        found += _parse(line, f"{_COMMAND_LINE} {line!r}", Path(), ())
    macros = {each.name: each for each in found if "." not in each.name}
    _check_used(macros, [each.value for each in found])
    values: dict[str, dict[str, Any]] = {}
    for binding in found:
        section, dot, field = binding.name.partition(".")
        if dot:
            values.setdefault(section, {})[field] = _value(binding, macros)
    return make_configuration(values)


def write_configuration(configuration: Configuration) -> str:
    """A configuration as the text of a gin file, every setting in it.

    Args:
        configuration: the configuration.

    Returns:
        The text; reading it gives an equal configuration.
    """
    lines: list[str] = []
    for name, value in settings(configuration):
        section = name.partition(".")[0]
        if lines and not lines[-1].startswith(f"{section}."):
            lines.append("")
        lines.append(f"{name} = {value!r}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Binding:
    """One statement: a setting's dotted name, or a macro's plain one, and its value."""

    name: str
    value: Any
    place: str
    folder: Path


@dataclass(frozen=True)
class _Name:
    """``%name`` or ``@name``: stands for what is bound elsewhere."""

    sign: str
    name: str


class _Delegate(config_parser.ParserDelegate):
    """Makes what the parser does not know itself."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        return _Name("@", scoped_configurable_name)

    def macro(self, macro_name: str) -> Any:
        return _Name("%", macro_name)


def _read_file(path: Path, including: tuple[Path, ...]) -> list[_Binding]:
    if path.resolve() in including:
        raise InputError(f"configuration {path} includes itself")
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"configuration {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"configuration {path} is not UTF-8, from byte {error.start} on") from None
    return _parse(text, str(path), path.parent, (*including, path.resolve()))


def _parse(text: str, source: str, folder: Path, including: tuple[Path, ...]) -> list[_Binding]:
    found: list[_Binding] = []
    parser = config_parser.ConfigParser(text, _Delegate())
    try:
        for statement in parser:
            place = _place(source, statement.location.line_num)
            if isinstance(statement, config_parser.IncludeStatement):
                found += _read_file(_look_up(statement.filename, folder), including)
            elif isinstance(statement, config_parser.BindingStatement):
                found.append(_binding(statement, place, folder))
            elif isinstance(statement, config_parser.ImportStatement):
                raise InputError(f"{place}: import is not allowed: only settings are read")
    except SyntaxError as error:
        raise InputError(
            f"{_place(source, error.lineno or 1)}: {(error.text or text).strip()!r} is not of the "
            f"form name = value, where texts are in quotes"
        ) from None
    except tokenize.TokenError as error:
        raise InputError(f"{_place(source, error.args[1][0])}: {error.args[0]}") from None
    return found


def _binding(statement: Any, place: str, folder: Path) -> _Binding:
    if statement.scope:
        scoped = f"{statement.scope}/{statement.selector}"
        raise InputError(f"{place}: {scoped} is not allowed: there are no scopes here")
    if not statement.arg_name:
        return _Binding(statement.selector, statement.value, place, folder)
    name = f"{statement.selector}.{statement.arg_name}"
    _check_known(name, place)
    return _Binding(name, statement.value, place, folder)


def _value(binding: _Binding, macros: Mapping[str, _Binding]) -> Any:
    """A binding's value, with macros filled in and paths looked up."""
    value = _filled(binding.value, binding.place, macros)
    if binding.name not in PATHS:
        return value
    if isinstance(value, str):
        return str(_look_up(value, binding.folder))
    if isinstance(value, list | tuple):
        return [str(_look_up(v, binding.folder)) if isinstance(v, str) else v for v in value]
    return value


def _filled(
    value: Any, place: str, macros: Mapping[str, _Binding], inside: tuple[str, ...] = ()
) -> Any:
    if isinstance(value, _Name):
        if value.sign == "@":
            raise InputError(f"{place}: @{value.name} is not allowed: give a value")
        if value.name not in macros or value.name in inside:
            raise InputError(f"{place}: the macro %{value.name} has no value")
        return _filled(macros[value.name].value, place, macros, (*inside, value.name))
    if isinstance(value, list | tuple):
        return type(value)(_filled(each, place, macros, inside) for each in value)
    if isinstance(value, dict):
        return {key: _filled(each, place, macros, inside) for key, each in value.items()}
    return value


def _check_used(macros: Mapping[str, _Binding], values: Sequence[Any]) -> None:
    """A plain name that nothing refers to is a setting whose section was forgotten."""
    used = set(_macro_names(values))
    for name, binding in macros.items():
        if name not in used:
            _check_known(name, binding.place)


def _macro_names(value: Any) -> Iterator[str]:
    if isinstance(value, _Name):
        yield value.name
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _macro_names(each)


def _check_known(name: str, place: str) -> None:
    try:
        check_name(name)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def _look_up(name: str, folder: Path) -> Path:
    """A path as seen from a folder, else from the working directory; absolute where it is there."""
    if not name:
        return Path(name)
    for candidate in (folder / name, Path(name)):
        if candidate.exists():
            return candidate.resolve()
    return Path(name)


def _place(source: str, line: int) -> str:
    return source if source.startswith(_COMMAND_LINE) else f"{source}, line {line}"


def changes(old: Configuration, new: Configuration) -> Iterator[str]:
    """What differs between two configurations, one line a setting.

    Args:
        old: the one before.
        new: the one after.

    Yields:
        Lines such as ``"train.steps = 20 (was 10)"``.
    """
    before = dict(settings(old))
    for name, value in settings(new):
        if value != before[name]:
            yield f"{name} = {value!r} (was {before[name]!r})"
