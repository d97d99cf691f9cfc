"""Symbolic sizes: numbers that are known when an input comes.

Source: Hetu v2, section 5.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hetjax.errors import InputError

_FORM = re.compile(r"(?:([1-9][0-9]*)\*)?([A-Za-z_][A-Za-z_0-9]*)")


@dataclass(frozen=True)
class SymbolicSize:
    """A multiple of a number that is not known yet.

    Args:
        name: what stands for the number.
        factor: how many of it.

    Example:
        >>> str(SymbolicSize("batch", 4))
        '4*batch'
    """

    name: str
    factor: int = 1

    def bind(self, values: Mapping[str, int]) -> int:
        """The size, with numbers for symbols.

        Raises:
            InputError: the symbol has no number, or one below 1.
        """
        if self.name not in values:
            raise InputError(f"sizes: the symbol {self.name!r} has no number")
        if values[self.name] < 1:
            raise InputError(
                f"sizes: the symbol {self.name!r} is {values[self.name]}; it must be 1 or more"
            )
        return self.factor * values[self.name]

    def __str__(self) -> str:
        return self.name if self.factor == 1 else f"{self.factor}*{self.name}"


Size = int | SymbolicSize


def parse_size(size: Size | str) -> Size:
    """A size from what a person wrote: a number, ``"name"`` or ``"4*name"``.

    Raises:
        InputError: it is none of these.

    Example:
        >>> parse_size("4*batch")
        SymbolicSize(name='batch', factor=4)
    """
    if isinstance(size, SymbolicSize):
        return size
    if isinstance(size, str):
        found = _FORM.fullmatch(size.replace(" ", ""))
        if found is None:
            raise InputError(
                f"sizes: {size!r} is not allowed: a number, a symbol or its multiple ('4*batch')"
            )
        return SymbolicSize(found[2], int(found[1] or 1))
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise InputError(f"sizes: {size!r} is not allowed: whole numbers or symbols")
    return int(size)
