"""Symbolic sizes: numbers that are known when an input comes.

Source: Hetu v2, section 5.5.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from hetjax.errors import InputError

MAX_LENGTH = 200
"""Of what a person may write as a size, in characters."""

_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_FORMS = "a whole number, or symbols and numbers with +, -, *, // and brackets ('4*batch + rest')"


@dataclass(frozen=True)
class SymbolicSize:
    """Sums, differences, products and whole quotients of numbers that are not known yet.

    Args:
        text: the formula.

    Raises:
        InputError: it is no such formula.

    Example:
        >>> size = SymbolicSize("4*batch + rest//2")
        >>> sorted(size.names), size.bind({"batch": 2, "rest": 5})
        (['batch', 'rest'], 10)
    """

    text: str

    def __post_init__(self) -> None:
        if len(self.text) > MAX_LENGTH:
            raise InputError(
                f"sizes: a formula has {len(self.text)} characters; at most {MAX_LENGTH}"
            )
        # One formula has one text, however it is spaced.
        text = ast.unparse(_parsed(self.text))
        object.__setattr__(self, "text", text.replace(" * ", "*").replace(" // ", "//"))

    @cached_property
    def _tree(self) -> ast.expr:
        return _parsed(self.text)

    @cached_property
    def names(self) -> frozenset[str]:
        """The symbols in it."""
        return frozenset(n.id for n in ast.walk(self._tree) if isinstance(n, ast.Name))

    def bind(self, values: Mapping[str, int]) -> int:
        """The size, with numbers for symbols.

        Raises:
            InputError: a symbol has no number, or one below 1; or the size is below 0.
        """
        for name in sorted(self.names):
            if name not in values:
                raise InputError(f"sizes: the symbol {name!r} has no number")
            if values[name] < 1:
                raise InputError(
                    f"sizes: the symbol {name!r} is {values[name]}; it must be 1 or more"
                )
        try:
            size = _value(self._tree, values)
        except ZeroDivisionError:
            raise InputError(f"sizes: {self.text!r} divides by 0 where {dict(values)}") from None
        if size < 0:
            raise InputError(
                f"sizes: {self.text!r} is {size} where {dict(values)}; it must be 0 or more"
            )
        return size

    def __str__(self) -> str:
        return self.text


def _parsed(text: str) -> ast.expr:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _wrong(text) from None
    for node in ast.walk(tree):
        is_number = isinstance(node, ast.Constant) and type(node.value) is int
        is_operation = isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS
        is_part = isinstance(node, ast.Name | ast.Load | ast.operator)
        if not (is_number or is_operation or is_part):
            raise _wrong(text)
    return tree


def _wrong(text: object) -> InputError:
    return InputError(f"sizes: {text!r} is not allowed: {_FORMS}")


def _value(tree: ast.expr, values: Mapping[str, int]) -> int:
    match tree:
        case ast.Name(id=name):
            return values[name]
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATIONS[type(op)](_value(left, values), _value(right, values))
    raise AssertionError(f"no formula has {tree}")


Size = int | SymbolicSize


def parse_size(size: Size | str) -> Size:
    """A size from what a person wrote: a number, or a formula with symbols.

    Raises:
        InputError: it is none of these.

    Example:
        >>> parse_size("4*batch")
        SymbolicSize(text='4*batch')
        >>> parse_size(4)
        4
    """
    if isinstance(size, SymbolicSize):
        return size
    if isinstance(size, str):
        found = SymbolicSize(size)
        return found if found.names else found.bind({})
    if isinstance(size, bool):
        raise _wrong(size)
    try:
        return operator.index(size)
    except TypeError:
        raise _wrong(size) from None
