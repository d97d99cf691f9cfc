"""What the model configurations check, each failure one sentence for the person who wrote it."""

from __future__ import annotations

from typing import Any

from hetjax.errors import InputError, is_whole

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


def positive_integers(config: object, *fields: str) -> None:
    """Require each of the named fields to be an integer of at least 1.

    Raises:
        InputError: naming the first field that is not, and its value.
    """
    for field in fields:
        value = getattr(config, field)
        if not _is_count(value):
            raise InputError(f"{_name(config, field)} is {value!r}; it must be an integer above 0")


def whole_number(config: object, field: str) -> None:
    """Require a field to be an integer of at least 0.

    Raises:
        InputError: naming the field and its value.
    """
    value = getattr(config, field)
    if not _is_count(value) and (value != 0 or isinstance(value, bool)):
        raise InputError(f"{_name(config, field)} is {value!r}; it must be an integer, 0 or above")


def several_positive_integers(config: object, field: str) -> None:
    """Require a field to be a tuple of one or more integers of at least 1.

    Raises:
        InputError: naming the field and its value.
    """
    values = getattr(config, field)
    if not isinstance(values, tuple) or not values or not all(map(_is_count, values)):
        raise InputError(
            f"{_name(config, field)} is {values!r}; it must be a tuple of integers above 0"
        )


def divides(config: object, divisor: str, dividend: str) -> None:
    """Require the field ``divisor`` to divide the field ``dividend``.

    Raises:
        InputError: naming both fields and their values.
    """
    small, large = getattr(config, divisor), getattr(config, dividend)
    if large % small:
        raise InputError(
            f"{_name(config, divisor)} is {small}; it must divide {dividend}, which is {large}"
        )


def compute_dtype(config: object) -> None:
    """Require the field ``compute_dtype`` to be one of `COMPUTE_DTYPES`.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """
    value = getattr(config, "compute_dtype")  # noqa: B009 - the config is any of several classes.
    if value not in COMPUTE_DTYPES:
        raise InputError(
            f"{_name(config, 'compute_dtype')} is {value!r}; "
            f"allowed: {', '.join(map(repr, COMPUTE_DTYPES))}"
        )


def unrolled(config: object) -> None:
    """Require ``scan_blocks`` to be False: a scan runs blocks of one kind.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """
    if getattr(config, "scan_blocks"):  # noqa: B009 - the config is any of several classes.
        raise InputError(
            f"{_name(config, 'scan_blocks')} is True, and every second block has experts; "
            f"allowed: False"
        )


def interval(config: object, field: str, low: float, high: float) -> None:
    """Require ``low <= field < high``.

    Raises:
        InputError: naming the field, its value and the interval.
    """
    value = getattr(config, field)
    if not isinstance(value, (int, float)) or not low <= value < high:
        raise InputError(
            f"{_name(config, field)} is {value!r}; it must be at least {low:g} and below {high:g}"
        )


def _is_count(value: Any) -> bool:
    return is_whole(value) and value > 0


def _name(config: object, field: str) -> str:
    return f"{type(config).__name__}.{field}"
