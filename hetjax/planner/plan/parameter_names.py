"""Names of parameters in a plan: of one, or of a leaf for all of its rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TypeVar

Told = TypeVar("Told")

_ROW = re.compile(r"\[\d+\]$")


def leaf_name(name: str) -> str:
    """The leaf that a parameter is a row of, or the parameter itself.

    Args:
        name: the parameter's name in the program.

    Example:
        >>> leaf_name("blocks/w[3]"), leaf_name("head")
        ('blocks/w', 'head')
    """
    return _ROW.sub("", name)


def told_of(told: Mapping[str, Told], name: str) -> Told | None:
    """What a plan says of a parameter, by its own name or by that of the leaf that it is a row of.

    Args:
        told: what the plan says, by names.
        name: the parameter's name in the program.

    Returns:
        What is said; None where nothing is. What is said of one row goes before that of all.

    Example:
        >>> told = {"blocks/w": "all", "blocks/w[2]": "the third"}
        >>> [told_of(told, f"blocks/w[{row}]") for row in (1, 2)], told_of(told, "head")
        (['all', 'the third'], None)
    """
    return told[name] if name in told else told.get(leaf_name(name))


def is_told(told: Mapping[str, object], name: str) -> bool:
    """Whether a plan says anything of a parameter; also that it is None.

    Args:
        told: what the plan says, by names.
        name: the parameter's name in the program.

    Example:
        >>> is_told({"blocks/w": None}, "blocks/w[1]")
        True
    """
    return name in told or leaf_name(name) in told


def parameters_meant(name: str, names: Collection[str]) -> list[str]:
    """The parameters that a plan means by a name: one, or the rows of a leaf.

    Args:
        name: in the plan.
        names: of all parameters of the program.

    Returns:
        Their names; none where the program has no such parameter.

    Example:
        >>> parameters_meant("blocks/w", ["head", "blocks/w[0]", "blocks/w[1]"])
        ['blocks/w[0]', 'blocks/w[1]']
    """
    return [each for each in names if name in (each, leaf_name(each))]
