"""Which of JAX's devices becomes which device of a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from hetjax.errors import InputError
from hetjax.mesh.cluster import Cluster
from hetjax.mesh.jax_devices import JaxDevice, is_of_kind, kind_name
from hetjax.mesh.kinds import DeviceKind


def devices_in_order(cluster: Cluster, devices: Sequence[JaxDevice]) -> list[JaxDevice]:
    """The device behind each device of a cluster.

    JAX may count cards of two kinds by turns; a cluster counts one kind after the other. As many
    places as can be are given devices that say they are of the place's kind; the others keep as
    near as can be to the order given. Host CPU devices alone may play any kind, in the order given.

    Args:
        cluster: the cluster.
        devices: as many devices as it has or more, in any order.

    Returns:
        As many as it has, in the cluster's order (that of `Cluster.device_ids`); these again are
        the same.

    Raises:
        InputError: there are fewer devices than the cluster has, or they are of other kinds.

    Example:
        >>> import hetjax
        >>> import jax
        >>> devices = jax.devices("cpu")
        >>> devices_in_order(hetjax.Cluster.local(devices), devices) == devices
        True
    """
    if len(devices) < cluster.num_devices:
        raise InputError(
            f"devices: cluster {cluster.name!r} has {cluster.num_devices} devices, and "
            f"{len(devices)} are given (host CPU devices are made before JAX starts, by "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={cluster.num_devices})"
        )
    if all(device.platform == "cpu" for device in devices):
        return list(devices[: cluster.num_devices])
    kinds = [each.kind for each in cluster.subclusters for _ in range(each.num_devices)]
    chosen = _assigned(kinds, devices)
    if chosen is None:
        raise InputError(
            f"devices: cluster {cluster.name!r} wants {_counted(each.name for each in kinds)}, and "
            f"{_counted(kind_name(each) or each.device_kind for each in devices)} are given; plan "
            "for the devices that are there (Cluster.local()), or give host CPU devices "
            "(jax.devices('cpu')), which play any kind"
        )
    return [devices[number] for number in chosen]


def _assigned(kinds: Sequence[DeviceKind], devices: Sequence[JaxDevice]) -> list[int] | None:
    """For each kind the number of the device that is it; None where they are of other kinds."""
    # Not at the top: whoever only reads cluster files does not wait for it.
    from scipy.optimize import linear_sum_assignment

    # A square grows faster than its root: what is alike keeps its order.
    moved = np.subtract.outer(np.arange(len(kinds)), np.arange(len(devices))) ** 2.0
    names = [kind_name(device) for device in devices]
    unsaid = np.array([[kind.name != name for name in names] for kind in kinds])
    possible = np.array([[is_of_kind(device, kind) for device in devices] for kind in kinds])
    worst = 1.0 + len(kinds) * len(devices) ** 2.0
    try:
        _, chosen = linear_sum_assignment(np.where(possible, moved + worst * unsaid, np.inf))
    except ValueError:  # Infinity cannot be avoided.
        return None
    return [int(number) for number in chosen]


def _counted(names: Iterable[str]) -> str:
    return " and ".join(f"{count} {name}" for name, count in Counter(names).items())
