"""Fields of annotations as people give them, checked one by one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from hetjax.errors import InputError, shown
from hetjax.sharding.annotation.symbols import Size, parse_size


def checked_devices(devices: object) -> tuple[int, ...]:
    """Numbers of devices.

    Raises:
        InputError: they are none.

    Example:
        >>> checked_devices(range(2))
        (0, 1)
    """
    if not isinstance(devices, Iterable) or isinstance(devices, str):
        raise InputError(f"devices: {shown(devices)} is not allowed: numbers, such as (0, 1)")
    found = tuple(devices)
    for device in found:
        if not _is_whole(device):
            raise InputError(f"devices: {shown(device)} is not allowed: whole numbers from 0")
    return tuple(int(device) for device in found)


def checked_axes(axes: object) -> tuple[tuple[str, int], ...]:
    """Names and sizes of axes, as pairs or as a mapping.

    Raises:
        InputError: they are none.

    Example:
        >>> checked_axes({"data": 2})
        (('data', 2),)
    """
    pairs = axes.items() if isinstance(axes, Mapping) else axes
    if not isinstance(pairs, Iterable) or isinstance(pairs, str):
        raise _wrong_axes(axes)
    found: list[tuple[str, int]] = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _wrong_axes(pair)
        name, size = pair
        if not isinstance(name, str) or not _is_whole(size) or size < 1:
            raise _wrong_axes(pair)
        found.append((name, int(size)))
    return tuple(found)


def _wrong_axes(value: object) -> InputError:
    return InputError(
        f"axes: {shown(value)} is not allowed: names with sizes from 1, such as (('data', 2),) or "
        f"{{'data': 2}}"
    )


def checked_spec(spec: object) -> PartitionSpec:
    """A specification.

    Raises:
        InputError: it is none.
    """
    if isinstance(spec, PartitionSpec):
        return spec
    raise InputError(
        f"spec: {shown(spec)} is not allowed: a jax.sharding.PartitionSpec, such as P('data')"
    )


def checked_hdim(hdim: object) -> Any:
    """What submeshes share an array along.

    Raises:
        InputError: it is neither a dimension nor ``"duplicate"`` nor ``"partial"``.

    Example:
        >>> checked_hdim(1)
        1
    """
    if isinstance(hdim, str) and hdim in ("duplicate", "partial"):
        return hdim
    if not _is_whole(hdim):
        raise InputError(
            f"hdim: {shown(hdim)} is not allowed: a dimension, 'duplicate' or 'partial'"
        )
    number = int(hdim)  # pyright: ignore[reportArgumentType]
    if number < 0:
        raise InputError(f"hdim: {number} is not allowed: dimensions count from 0")
    return number


def checked_sizes(sizes: object) -> tuple[Size, ...]:
    """How much of a dimension each submesh has.

    Raises:
        InputError: one is neither a number nor a formula.

    Example:
        >>> checked_sizes([4, "batch"])
        (4, SymbolicSize(text='batch'))
    """
    if not isinstance(sizes, Iterable) or isinstance(sizes, str):
        raise InputError(
            f"sizes: {shown(sizes)} is not allowed: a number or formula for each submesh, such as "
            f"(4, 2)"
        )
    return tuple(parse_size(size) for size in sizes)


def _is_whole(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
