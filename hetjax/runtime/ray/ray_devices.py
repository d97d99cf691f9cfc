"""The devices that Ray gave a worker, compared with those that are planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from hetjax.errors import InputError
from hetjax.mesh.jax_devices import is_of_kind, kind_name
from hetjax.mesh.subcluster import Subcluster


def given_devices(
    subcluster: Subcluster, count: int, who: str, process_name: Callable[[int], str]
) -> list[Any]:
    """The devices that JAX sees in the processes of a Ray worker.

    Ray counts accelerators, and does not tell the kinds of one node apart.

    Args:
        subcluster: where the worker is planned.
        count: how many devices it is to have.
        who: what wants them.
        process_name: what to call a process of `jax.distributed`, by its number.

    Returns:
        So many devices, those of a process beside each other.

    Raises:
        InputError: there are fewer, or they are of another platform or kind.
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    kind = subcluster.kind
    if len(devices) < count or devices[0].platform != kind.platform:
        raise InputError(
            f"{who} wants {count} {kind.platform} devices of subcluster {subcluster.name!r}, and "
            f"where Ray placed it JAX sees {len(devices)} {devices[0].platform} devices"
        )
    for device in devices[:count]:
        if not is_of_kind(device, kind):
            raise InputError(
                f"{process_name(device.process_index)}: the plan wants devices of kind "
                f"{kind.name!r} for subcluster {subcluster.name!r}, and Ray gave it one of kind "
                f"{kind_name(device)!r} ({device.device_kind}): give each kind a ray_resource of "
                "its own, and on a machine with cards of several kinds start a Ray node for each "
                "kind, with CUDA_VISIBLE_DEVICES set to its cards"
            )
    return devices[:count]
