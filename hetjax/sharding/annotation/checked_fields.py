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
        InputError: it is neither a dimension nor several nor ``"duplicate"`` nor ``"partial"``.

    Example:
        >>> checked_hdim(1), checked_hdim([1, 2])
        (1, (1, 2))
    """
    if isinstance(hdim, str) and hdim in ("duplicate", "partial"):
        return hdim
    if isinstance(hdim, tuple | list):
        found = tuple(map(_checked_dimension, hdim))
        if not found or list(found) != sorted(set(found)):
            raise InputError(
                f"hdim: {shown(hdim)} is not allowed: rising dimensions, such as (1, 2)"
            )
        return found
    return _checked_dimension(hdim)


def _checked_dimension(hdim: object) -> int:
    if not _is_whole(hdim):
        raise InputError(
            f"hdim: {shown(hdim)} is not allowed: a dimension, several, 'duplicate' or 'partial'"
        )
    number = int(hdim)  # pyright: ignore[reportArgumentType]
    if number < 0:
        raise InputError(f"hdim: {number} is not allowed: dimensions count from 0")
    return number


def checked_ranges(ranges: object) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The range of each of several dimensions that each submesh has.

    Raises:
        InputError: one is none.

    Example:
        >>> checked_ranges([[(0, 4), (0, 2)], [(0, 4), (2, 3)]])
        (((0, 4), (0, 2)), ((0, 4), (2, 3)))
    """
    if not isinstance(ranges, Iterable) or isinstance(ranges, str):
        raise _wrong_ranges(ranges)
    found = []
    for each in ranges:
        pairs = tuple(each) if isinstance(each, Iterable) and not isinstance(each, str) else ()
        for pair in pairs:
            ends = tuple(pair) if isinstance(pair, tuple | list) else ()
            if len(ends) != 2 or not all(map(_is_whole, ends)) or not 0 <= ends[0] <= ends[1]:
                raise _wrong_ranges(ranges)
        found.append(tuple((int(start), int(stop)) for start, stop in pairs))
    return tuple(found)


def _wrong_ranges(ranges: object) -> InputError:
    return InputError(
        f"ranges: {shown(ranges)} is not allowed: for each submesh a start and an end of each "
        f"dimension, such as (((0, 8), (0, 2)), ((0, 8), (2, 4)))"
    )


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
