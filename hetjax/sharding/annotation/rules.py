"""Sharding rules: which dimensions of a stage's arrays are divided inside its submesh.

A submesh is seen as a logical mesh of two axes: ``data``, which divides the examples, and
``tensor``, which divides parameters. A rule gives every array of a stage its `PartitionSpec`; a
plan may override those of single parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.sharding import PartitionSpec

from hetjax.sharding.annotation.subgroup import axes_of

DATA, TENSOR = "data", "tensor"
MESH_AXES = (DATA, TENSOR)
"""The axes of a stage's logical mesh, in the order of a plan's ``mesh_shape``."""

RULES = {
    "data": "parameters whole on every device of the data axis",
    "state_sharded": "optimizer state and its update divided over the data axis (ZeRO-1)",
    "fully_sharded": "parameters and their gradients divided over it, too (ZeRO-3)",
}
"""The names of the rules, and what each does with parameters along the data axis."""


REDUCTION_GROUPS = 8
"""Under ``state_sharded``, in how many groups of about equal bytes gradients are scattered: the
whole sums and the divided ones of one group at a time are in memory together."""


def parameter_spec(rule: str, shape: Sequence[int], mesh_shape: tuple[int, int]) -> PartitionSpec:
    """How a parameter and its gradient are divided.

    The last dimension that divides evenly goes to the ``tensor`` axis; under ``fully_sharded`` the
    largest other one goes to the ``data`` axis. What divides nowhere stays whole.

    Args:
        rule: a name in `RULES`.
        shape: the array's shape.
        mesh_shape: sizes of the data and the tensor axis.

    Returns:
        The specification.

    Example:
        >>> parameter_spec("fully_sharded", (512, 128), (4, 2))
        P('data', 'tensor')
    """
    data, tensor = mesh_shape
    axes: list[str | None] = [None] * len(shape)
    if tensor > 1 and len(shape) > 1:
        places = [i for i, size in enumerate(shape) if size % tensor == 0]
        if places:
            axes[places[-1]] = TENSOR
    spec = PartitionSpec(*axes)
    return _over_data(spec, shape, data) if rule == "fully_sharded" else spec


def state_spec(
    rule: str, spec: PartitionSpec, shape: Sequence[int], mesh_shape: tuple[int, int]
) -> PartitionSpec:
    """How the optimizer's state of a parameter is divided, and its gradient when it is summed.

    Args:
        rule: a name in `RULES`.
        spec: how the parameter is divided.
        shape: its shape.
        mesh_shape: sizes of the data and the tensor axis.

    Returns:
        As the parameter; under ``state_sharded`` also over the ``data`` axis, along the largest
        dimension that it divides.

    Source: ZeRO (Rajbhandari et al., 2020), section 5.1.

    Example:
        >>> state_spec("state_sharded", PartitionSpec(None, "tensor"), (512, 128), (4, 2))
        P('data', 'tensor')
    """
    return _over_data(spec, shape, mesh_shape[0]) if rule == "state_sharded" else spec


def _over_data(spec: PartitionSpec, shape: Sequence[int], data: int) -> PartitionSpec:
    """The specification with the largest dimension that divides evenly on the data axis."""
    axes = [*spec, *[None] * (len(shape) - len(spec))]
    used = any(DATA in axes_of(entry) for entry in spec)
    places = [i for i, n in enumerate(shape) if n and n % data == 0 and axes[i] is None]
    if data == 1 or used or not places:
        return spec
    axes[max(places, key=lambda i: shape[i])] = DATA
    return PartitionSpec(*axes)


def example_spec(shape: Sequence[int], examples: int, mesh_shape: tuple[int, int]) -> PartitionSpec:
    """How an array of a microbatch is divided: along its examples, where it leads with them.

    Args:
        shape: the array's shape.
        examples: the microbatch's size.
        mesh_shape: sizes of the data and the tensor axis.

    Returns:
        The specification.

    Example:
        >>> example_spec((8, 128, 64), 8, (4, 1))
        P('data', None, None)
    """
    divided = bool(shape) and shape[0] == examples and mesh_shape[0] > 1
    if not divided or examples % mesh_shape[0]:
        return PartitionSpec()
    return PartitionSpec(DATA, *[None] * (len(shape) - 1))


def divides(spec: PartitionSpec, shape: Sequence[int], mesh_shape: tuple[int, int]) -> bool:
    """Whether a specification cuts every dimension of a shape evenly.

    Example:
        >>> divides(PartitionSpec("data"), (6, 4), (4, 1))
        False
    """
    return all(
        size % division(PartitionSpec(entry), mesh_shape) == 0
        for size, entry in zip(shape, spec, strict=False)
    )


def division(spec: PartitionSpec, mesh_shape: tuple[int, int]) -> int:
    """Into how many pieces a specification divides an array."""
    sizes: dict[object, int] = dict(zip(MESH_AXES, mesh_shape, strict=True))
    return math.prod(sizes.get(axis, 1) for entry in spec for axis in axes_of(entry))
