"""Gin files: read into a `Configuration`, and written from one.

The syntax is gin's (comments, blocks, macros, ``include``); its registry of global bindings is not
used, so that reading a configuration changes nothing and two can be read side by side. What gin
would look up by ``@reference``, ``import`` or scope does not exist here, and is refused.
"""

from __future__ import annotations

import ast
import io
import os
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gin import config_parser

from hetjax.checked_files import MAX_DEPTH, MAX_DIGITS
from hetjax.configuration.settings import (
    Configuration,
    check_name,
    make_configuration,
    settings,
)
from hetjax.errors import InputError, shown
from hetjax.reading import MAX_WRITTEN_BYTES, read_text, real_path

PATHS = (
    "cluster.file",
    "data.paths",
    "data.tokenizer",
    "planner.profile",
    "planner.published",
)
"""The settings that name files; relative ones are looked up where they are written."""

MAX_FILES = 64
"""How many files one configuration may be read from, each counted as often as it is included."""

MAX_INCLUDES = 16
"""How many files may include one another in a row."""

MAX_VALUES = 10_000
"""How many values a configuration may have, those that its macros repeat included."""

_COMMAND_LINE = "--gin"
_MAX_NESTED = 2 * MAX_DEPTH  # By macros as well as by brackets.
_MAX_PARTS = 1000  # Of a text in parts; gin puts them together anew for each.


def read_configuration(
    path: str | os.PathLike[str] | None = None, bindings: Sequence[str] = ()
) -> Configuration:
    """Reads a gin file, and bindings that override it.

    A relative path in the settings is looked up beside the file that it stands in, then in the
    working directory; ``~`` is the home folder; what is found is made absolute.

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
    files = _Files()
    found: list[_Binding] = []
    if path is not None:
        found += files.read(Path(path), ())
    for line in bindings:
        found += files.parse(line, f"{_COMMAND_LINE} {shown(line)}", Path(), ())
    macros = _Macros({each.name: each for each in found if "." not in each.name})
    _check_used(macros.bindings, [each.value for each in found])
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

    Raises:
        InputError: it would be too large to be read, as where relative paths are absolute in it.
    """
    lines: list[str] = []
    for name, value in settings(configuration):
        section = name.partition(".")[0]
        if lines and not lines[-1].startswith(f"{section}."):
            lines.append("")
        lines.append(f"{name} = {value!r}")
    text = "\n".join(lines) + "\n"
    if (size := len(text.encode())) > MAX_WRITTEN_BYTES:
        longest = max(lines, key=len).partition(" ")[0]
        raise InputError(
            f"the settings have {size} bytes where all are written out, and at most "
            f"{MAX_WRITTEN_BYTES} are read back; shorten {longest}, the longest (a folder is read "
            f"with all files in it)"
        )
    return text


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


class _Files:
    """Reads files and what they include, as far as there is room for."""

    def __init__(self) -> None:
        self._num_files = 0
        self._num_left = MAX_WRITTEN_BYTES

    def read(self, path: Path, including: tuple[Path, ...]) -> list[_Binding]:
        """The bindings of a file, in order."""
        real = real_path(path)
        if real in including:
            raise InputError(f"configuration {path} includes itself")
        self._num_files += 1
        if self._num_files > MAX_FILES or len(including) > MAX_INCLUDES:
            raise InputError(
                f"configuration {path} is one file too many: at most {MAX_FILES} are read, and "
                f"at most {MAX_INCLUDES} include one another in a row"
            )
        text = read_text(path, f"configuration {str(path)[:1000]}", self._num_left)
        return self.parse(text, str(path), path.parent, (*including, real))

    def parse(
        self, text: str, source: str, folder: Path, including: tuple[Path, ...]
    ) -> list[_Binding]:
        """The bindings of a text, in order."""
        self._num_left -= len(text)
        if self._num_left < 0:
            raise InputError(f"{source}: all settings are more than {MAX_WRITTEN_BYTES} characters")
        found: list[_Binding] = []
        bound: set[str] = set()
        for statement in _statements(text, source):
            place = _place(source, statement.location.line_num)
            if isinstance(statement, config_parser.IncludeStatement):
                found += self.read(Path(_look_up(statement.filename, folder)), including)
            elif isinstance(statement, config_parser.BindingStatement):
                binding = _binding(statement, place, folder)
                if binding.name in bound:
                    raise InputError(f"{place}: {binding.name} is given twice")
                bound.add(binding.name)
                found.append(binding)
            elif isinstance(statement, config_parser.ImportStatement):
                raise InputError(f"{place}: import is not allowed: only settings are read")
        return found


def _statements(text: str, source: str) -> Iterator[Any]:
    """What gin's parser makes of a text that it can parse in time."""
    line = 1
    try:
        _check_tokens(text, source)
        parser = config_parser.ConfigParser(text, _Delegate())
        for statement in parser:
            yield statement
            line = statement.location.line_num + 1
    except SyntaxError as error:
        raise InputError(
            f"{_place(source, error.lineno or 1)}: {shown((error.text or text).strip())} is not of "
            f"the form name = value, where texts are in quotes"
        ) from None
    except tokenize.TokenError as error:
        raise InputError(f"{_place(source, error.args[1][0])}: {error.args[0]}") from None
    except TypeError:
        raise InputError(f"{_place(source, line)}: a key of a mapping must be a text") from None


def _check_tokens(text: str, source: str) -> None:
    """Refuses what gin's parser would not come back from, or would not tell."""
    depth = parts = 0
    keys = _Keys()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.OP:
            depth += (token.string in ("(", "[", "{")) - (token.string in (")", "]", "}"))
        parts = parts + 1 if token.type == tokenize.STRING else 0
        place = _place(source, token.start[0])
        if depth > MAX_DEPTH:
            raise InputError(f"{place}: brackets are nested more than {MAX_DEPTH} levels deep")
        if parts > _MAX_PARTS:
            raise InputError(f"{place}: a text has more than {_MAX_PARTS} parts")
        if token.type == tokenize.NUMBER and len(token.string) > MAX_DIGITS:
            raise InputError(
                f"{place}: the number {shown(token.string, 12)} has {len(token.string)} digits, "
                f"{MAX_DIGITS} at most"
            )
        if (key := keys.repeated(token)) is not None:
            raise InputError(f"{place}: the key {shown(key)} is given twice")


class _Keys:
    """The keys of mappings, of which gin takes the last where one is given twice."""

    def __init__(self) -> None:
        self._brackets: list[tuple[str, set[str]]] = []
        self._words: list[str] = []

    def repeated(self, token: tokenize.TokenInfo) -> str | None:
        """The key that ends before a token, if its mapping has had it before."""
        if token.type == tokenize.STRING:
            self._words.append(token.string)
        if token.type != tokenize.OP:
            return None
        words, self._words = self._words, []
        if token.string in ("(", "[", "{"):
            self._brackets.append((token.string, set()))
        elif token.string in (")", "]", "}") and self._brackets:
            self._brackets.pop()
        elif token.string == ":" and words and self._brackets and self._brackets[-1][0] == "{":
            key, before = _text(words), self._brackets[-1][1]
            if key in before:
                return key
            before.add(key)
        return None


def _text(words: Sequence[str]) -> str:
    """What a text in parts stands for; as it is written where it is none, which gin says."""
    written = " ".join(words)
    try:
        return ast.literal_eval(written)
    except (SyntaxError, ValueError):
        return written


def _binding(statement: Any, place: str, folder: Path) -> _Binding:
    if statement.scope:
        scoped = f"{statement.scope}/{statement.selector}"
        raise InputError(f"{place}: {scoped} is not allowed: there are no scopes here")
    if not statement.arg_name:
        return _Binding(statement.selector, statement.value, place, folder)
    name = f"{statement.selector}.{statement.arg_name}"
    _check_known(name, place)
    return _Binding(name, statement.value, place, folder)


def _value(binding: _Binding, macros: _Macros) -> Any:
    """A binding's value, with macros filled in and paths looked up."""
    value = macros.fill(binding.value, binding.place)
    if binding.name not in PATHS:
        return value
    if isinstance(value, str):
        return _look_up(value, binding.folder)
    if isinstance(value, list | tuple):
        return [_look_up(v, binding.folder) if isinstance(v, str) else v for v in value]
    return value


class _Macros:
    """What macros stand for, which in all has an end.

    Args:
        bindings: the macros' own bindings, by their names.
    """

    def __init__(self, bindings: Mapping[str, _Binding]):
        self.bindings = bindings
        self._num_values = 0

    def fill(self, value: Any, place: str, inside: tuple[str, ...] = (), depth: int = 0) -> Any:
        """A value with macros filled in."""
        self._num_values += 1
        if self._num_values > MAX_VALUES or depth > _MAX_NESTED:
            raise InputError(
                f"{place}: with its macros, a configuration has at most {MAX_VALUES} values, "
                f"nested at most {_MAX_NESTED} deep"
            )
        if isinstance(value, _Name):
            if value.sign == "@":
                raise InputError(f"{place}: @{value.name} is not allowed: give a value")
            if value.name not in self.bindings or value.name in inside:
                raise InputError(f"{place}: the macro %{value.name} has no value")
            bound = self.bindings[value.name].value
            return self.fill(bound, place, (*inside, value.name), depth + 1)
        if isinstance(value, list | tuple):
            return type(value)(self.fill(each, place, inside, depth + 1) for each in value)
        if isinstance(value, dict):
            return {k: self.fill(each, place, inside, depth + 1) for k, each in value.items()}
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


def _look_up(name: str, folder: Path) -> str:
    """A path as seen from a folder, else from the working directory; absolute where it is there."""
    if name:
        for candidate in (folder / name, Path(name), Path(os.path.expanduser(name))):
            # Unlike `Path.exists` this is False, not an error, where there can be no such file.
            if os.path.exists(candidate):
                return str(real_path(candidate))
    return name


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
