"""Quantities as people read them: three digits and a decimal prefix, as in cluster files."""

from __future__ import annotations

import math

_LARGE = ("", "k", "M", "G", "T", "P", "E")
_SMALL = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def format_bytes(num_bytes: float) -> str:
    """Bytes, with decimal prefixes: 1 GB is 1e9 bytes.

    Args:
        num_bytes: bytes.

    Returns:
        Three significant digits, prefix and unit.

    Example:
        >>> format_bytes(16e9), format_bytes(1_536), format_bytes(12), format_bytes(0)
        ('16 GB', '1.54 kB', '12 B', '0 B')
    """
    return format_rate(num_bytes, "B")


def format_rate(value: float, unit: str) -> str:
    """A quantity with a decimal prefix and its unit.

    Args:
        value: the quantity in `unit`.
        unit: the unit without a prefix, e.g. ``"FLOP/s"``, ``"B/s"``, ``"tokens/s"``.

    Returns:
        Three significant digits, prefix and unit.

    Example:
        >>> format_rate(312e12, "FLOP/s"), format_rate(25e6, "B/s"), format_rate(999.9, "tokens/s")
        ('312 TFLOP/s', '25 MB/s', '1 ktokens/s')
    """
    if not math.isfinite(value):
        return f"{value} {unit}"
    value = float(f"{value:.3g}")
    power = 0
    while abs(value) >= 1000 and power < len(_LARGE) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {_LARGE[power]}{unit}"


def format_seconds(seconds: float) -> str:
    """A duration: hours and minutes where it is long, SI prefixes where it is short.

    Args:
        seconds: seconds.

    Returns:
        Text.

    Example:
        >>> format_seconds(0.0123), format_seconds(5e-7), format_seconds(0), format_seconds(12.34)
        ('12.3 ms', '500 ns', '0 s', '12.3 s')
        >>> format_seconds(83), format_seconds(7_384)
        ('1 min 23 s', '2 h 03 min')
    """
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if abs(seconds) >= 59.95:
        return _format_long(seconds)
    seconds = float(f"{seconds:.3g}")
    for unit, size in _SMALL:
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def _format_long(seconds: float) -> str:
    sign, whole = ("-" if seconds < 0 else ""), round(abs(seconds))
    if whole < 3600:
        return f"{sign}{whole // 60} min {whole % 60:02d} s"
    minutes = round(whole / 60)
    return f"{sign}{minutes // 60} h {minutes % 60:02d} min"
