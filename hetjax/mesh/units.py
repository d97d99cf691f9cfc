"""Quantities as people write them ("200 Mbit/s", "5 us", "24 GB"), read into SI numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from hetjax.errors import InputError, shown

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

BYTES: Mapping[str, float] = {f"{p}B": f for p, f in (_DECIMAL | _BINARY).items()}
"""Units of memory, in bytes: ``GB`` is 1e9 bytes, ``GiB`` is 2**30."""

BYTES_PER_SECOND: Mapping[str, float] = (
    {f"{unit}/s": factor for unit, factor in BYTES.items()}
    | {f"{p}bit/s": f / 8 for p, f in _DECIMAL.items()}
    | {f"{p}bps": f / 8 for p, f in _DECIMAL.items()}
)
"""Units of bandwidth, in bytes/s. ``Gb/s`` is left out: half of its readers take it for bytes."""

SECONDS: Mapping[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
"""Units of time, in seconds."""

FLOPS_PER_SECOND: Mapping[str, float] = {f"{p}FLOP/s": f for p, f in _DECIMAL.items()} | {
    f"{p}FLOPS": f for p, f in _DECIMAL.items()
}
"""Units of speed, in FLOP/s."""

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*")


def parse_quantity(value: object, units: Mapping[str, float], *, allow_zero: bool = False) -> float:
    """Reads a number, or a text of a number and a unit, into the SI unit.

    Args:
        value: an int or float (already in the SI unit), or a text such as ``"25 GB/s"``.
        units: the factor to the SI unit of each unit allowed.
        allow_zero: whether 0 is a value; a latency can be 0, a bandwidth cannot.

    Returns:
        The quantity in the SI unit.

    Raises:
        InputError: the value is no quantity, has another unit, or is not positive and finite.

    Example:
        >>> parse_quantity("200 Mbit/s", BYTES_PER_SECOND)
        25000000.0
        >>> parse_quantity(0.5, SECONDS)
        0.5
    """
    number = _in_si(value, units)
    if not math.isfinite(number) or number < 0 or (number == 0 and not allow_zero):
        least = "0 or more" if allow_zero else "more than 0"
        raise InputError(f"{shown(value)} is not allowed: it must be {least} and finite")
    return number


def _in_si(value: object, units: Mapping[str, float]) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # YAML and JSON know whole numbers that no float can hold.
        return float(value) if abs(value) < 1e300 else math.inf
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise InputError(f"{shown(value)} is not a number with a unit, such as {_samples(units)}")
    number, unit = match.groups()
    if unit and unit not in units:
        raise InputError(
            f"{shown(value)} has an unknown unit {shown(unit)}. Allowed: {', '.join(units)}"
        )
    # To 15 digits, so that "10 us" is 1e-05 and not 9.999999999999999e-06.
    return float(f"{float(number) * units.get(unit, 1.0):.15g}")


def _samples(units: Mapping[str, float]) -> str:
    return ", ".join(f"'2 {unit}'" for unit in list(units)[:3])
