"""The memory of the devices' hosts, where arrays are that no device works on at the moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from hetjax.errors import InputError

HOST, DEVICE = "pinned_host", "device"
"""JAX's names for the two kinds of memory. Of the host's, devices read and write by themselves."""


def in_host_memory(sharding: NamedSharding) -> NamedSharding:
    """The sharding of the same parts in the memory of the devices' hosts."""
    return sharding.with_memory_kind(HOST)


def to_host(arrays: Sequence[Any]) -> list[jax.Array]:
    """Begin to copy arrays from the devices to their hosts' memory."""
    return jax.device_put(list(arrays), [in_host_memory(array.sharding) for array in arrays])


def to_devices(arrays: Sequence[Any]) -> list[jax.Array]:
    """Begin to copy arrays from hosts' memory to the devices."""
    return jax.device_put(
        list(arrays), [array.sharding.with_memory_kind(DEVICE) for array in arrays]
    )


def check_host_memory(devices: Sequence[Any], where: str) -> None:
    """Check that devices can keep arrays in their hosts' memory.

    Args:
        devices: devices of this process.
        where: what asks for it.

    Raises:
        InputError: a device's platform has no such memory.
    """
    for device in devices:
        kinds = sorted(memory.kind for memory in device.addressable_memories())
        if HOST not in kinds:
            raise InputError(
                f"{where} is given, and device {device} of platform {device.platform!r} has no "
                f"memory of kind {HOST!r}, but {', '.join(kinds)}; allowed there: nothing"
            )
