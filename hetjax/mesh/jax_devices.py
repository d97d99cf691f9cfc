"""JAX's devices: which kind each one says it is."""

from __future__ import annotations

import re
from typing import Protocol

from hetjax.mesh.host_cpu import HOST_CPU
from hetjax.mesh.kinds import DeviceKind


class JaxDevice(Protocol):
    """What is read of a `jax.Device`, which has no type of its own for a type checker."""

    @property
    def platform(self) -> str:
        """The backend: ``"cpu"``, ``"gpu"`` or ``"tpu"``."""
        ...

    @property
    def device_kind(self) -> str:
        """The maker's name of the device, such as ``"NVIDIA A100-SXM4-40GB"``."""
        ...


_JAX_NAMES = (
    (r"Tesla P100.*-16GB", "P100"),
    (r"Tesla V100.*-16GB", "V100"),
    (r"Tesla V100.*-32GB", "V100e"),
    (r"(NVIDIA |Tesla )T4", "T4"),
    (r"(NVIDIA )?A100-(SXM4|PCIE)-40GB", "A100-40"),
    (r"(NVIDIA )?A100(-SXM4-80GB|-SXM-80GB| 80GB PCIe)", "A100-80"),
    (r"(NVIDIA )?A800(-SXM4-80GB| 80GB PCIe)", "A800"),
    (r"NVIDIA H100( 80GB HBM3)?", "H100"),
    (r"NVIDIA H800", "H800"),
    (r"NVIDIA H200", "H200"),
    (r"NVIDIA H20", "H20"),
    (r"NVIDIA L4", "L4"),
    (r"NVIDIA L40S", "L40S"),
    (r"(NVIDIA )?RTX A6000", "A6000"),
    (r"(NVIDIA )?GeForce RTX 2080 Ti", "RTX2080Ti"),
    (r"(NVIDIA )?GeForce RTX 3080", "RTX3080"),
    (r"(NVIDIA )?GeForce RTX 3090", "RTX3090"),
    (r"(NVIDIA )?GeForce RTX 4090", "RTX4090"),
    (r"(NVIDIA )?GeForce RTX 5090", "RTX5090"),
    (r"AMD Instinct MI250(X ?/ ?MI250)?", "MI250"),
    (r"AMD Instinct MI300X.*", "MI300X"),
    (r"TPU v4", "TPUv4"),
    (r"TPU (v5 lite|v5e)", "TPUv5e"),
    (r"TPU v5p?", "TPUv5p"),
    (r"TPU (v6 lite|v6e)", "TPUv6e"),
)
"""What JAX calls the device kinds (`jax.Device.device_kind`), as patterns, and what we do."""

_TOLD = frozenset(name for _, name in _JAX_NAMES)
"""The kinds that a device says it is. One of another kind, such as a cluster file's own, does not
say so."""

_SMALLER_CARD = {"A100-80": "A100-40", "V100e": "V100"}
"""Cards that stand in for the same with less memory, which is what Ray's accelerator types are
taken for: a plan that fits the smaller one fits the larger one."""


def kind_name(device: JaxDevice) -> str | None:
    """The name of the kind that a device says it is.

    Args:
        device: a device of JAX's, or what says the same of itself.

    Returns:
        A name in `KINDS`, or ``"host-cpu"``; None where the device is of no known kind.

    Example:
        >>> import jax
        >>> kind_name(jax.devices("cpu")[0])
        'host-cpu'
    """
    if device.platform == "cpu":
        return HOST_CPU
    for pattern, name in _JAX_NAMES:
        if re.fullmatch(pattern, device.device_kind):
            return name
    return None


def is_of_kind(device: JaxDevice, kind: DeviceKind) -> bool:
    """Whether a device can be one of a kind, as far as it says what it is.

    A kind that no device says it is, and a device of no known kind, are compared by platform alone.
    A card with more memory stands in for the same card with less.

    Args:
        device: the device.
        kind: the kind that is planned.

    Returns:
        False where the device is another one.

    Example:
        >>> import jax
        >>> from hetjax.mesh import kind
        >>> is_of_kind(jax.devices("cpu")[0], kind("T4"))
        False
    """
    if device.platform != kind.platform:
        return False
    name = kind_name(device)
    if name in (None, HOST_CPU) or kind.name not in _TOLD:
        return True
    return kind.name in (name, _SMALLER_CARD.get(name))
