"""What people say of data, checked where it is said."""

from __future__ import annotations

import os

from hetjax.errors import InputError, is_number, is_whole, shown
from hetjax.limits import MAX_QUANTITY, MIN_QUANTITY


def check_whole(name: str, value: object, least: int, most: int) -> None:
    """Check that a number is whole and in a range.

    Args:
        name: what it is called.
        value: what was given.
        least: the least that is allowed.
        most: the most.

    Raises:
        InputError: it is not; True is none either.

    Example:
        >>> check_whole("sequence", 8.0, 1, 99)
        Traceback (most recent call last):
        hetjax.errors.InputError: sequence is 8.0; it must be a whole number from 1 to 99
    """
    if not (is_whole(value) and least <= value <= most):
        raise InputError(
            f"{name} is {shown(value)}; it must be a whole number from {least} to {most}"
        )


def check_seed(seed: object) -> None:
    """Check the seed of a data set.

    Args:
        seed: what was given.

    Raises:
        InputError: it is none.
    """
    check_whole("seed", seed, 0, 2**32 - 1)


def check_fraction(fraction: object) -> None:
    """Check the share that is held out.

    Args:
        fraction: what was given.

    Raises:
        InputError: it is no number in [0, 1).
    """
    if not (is_number(fraction) and 0.0 <= fraction < 1.0):
        raise InputError(
            f"held_out_fraction is {shown(fraction)}; it must be at least 0 and below 1"
        )


def check_weight(name: str, weight: object) -> None:
    """Check the weight of a part of a mixture.

    Args:
        name: of the part.
        weight: what was given.

    Raises:
        InputError: it is no number, or so large or small that shares cannot be made of it.
    """
    if not (is_number(weight) and MIN_QUANTITY <= weight <= MAX_QUANTITY):
        raise InputError(
            f"the weight of {name} is {shown(weight)}; it must be a number from {MIN_QUANTITY:g} "
            f"to {MAX_QUANTITY:g}"
        )


def as_path(name: str, value: object) -> str:
    """What a person gave for a path, as text.

    Args:
        name: what it is called.
        value: what was given.

    Returns:
        The path.

    Raises:
        InputError: it is neither a text nor a path.

    Example:
        >>> from pathlib import Path
        >>> as_path("paths", Path("books") / "first.txt")
        'books/first.txt'
    """
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"{name} is {shown(value)}; it must be a path")
    return os.fsdecode(value)
