"""What devices and links reach of their figures, wherever nothing was measured."""

from __future__ import annotations

from typing import TypeVar

from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.mesh.links import Link
from hetjax.pipeline.program.work_classes import is_product
from hetjax.planner.work.arrays import FloatArray

Size = TypeVar("Size", float, FloatArray)

TRAFFIC_SHARE = 0.3
"""Share of the unfused memory traffic that is left once XLA has fused what it can."""

TASK_SECONDS = 50e-6
"""What it costs to start one program, whatever it computes."""

USABLE_MEMORY = 0.9
"""Share of a device's memory that a plan may fill; the rest is the runtime's."""


def expected_rate(name: str, flops: float, bandwidth: float) -> float:
    """What a class takes by a device's figures alone, in seconds of a FLOP or a byte.

    Args:
        name: the class.
        flops: the device's FLOP/s of products.
        bandwidth: its memory's bytes/s.
    """
    return 1 / flops if is_product(name) else TRAFFIC_SHARE / bandwidth


def ring_seconds(link: Link, size: Size, devices: int) -> Size:
    """One pass of a ring, an all-gather or a reduce-scatter; an all-reduce is two.

    Args:
        link: the link between neighbours.
        size: bytes of the whole array.
        devices: how many devices form the ring; with one there is nothing to do.

    Returns:
        Seconds: n - 1 messages of size / n bytes, one after another.
    """
    return (devices - 1) * (link.latency + size / devices / link.bandwidth)


def data_axis_link(link: Link, shape: tuple[int, int], mesh_shape: tuple[int, int]) -> Link:
    """What one ring along a data axis has of the link that carries a submesh's collectives.

    The devices of each place on the tensor axis form a ring, and all rings go at once. Between
    nodes they go over the same network cards.

    Args:
        link: the link, with all cards that the devices of a node have.
        shape: the submesh's nodes, and devices in each.
        mesh_shape: sizes of the data and the tensor axis.

    Example:
        >>> data_axis_link(Link(1e9, 1e-6), (2, 4), (4, 2)).bandwidth
        500000000.0
    """
    nodes, devices = shape
    if nodes == 1:
        return link
    # Where the tensor axis is longer than a node, a node has some of its places.
    return Link(link.bandwidth / min(mesh_shape[1], devices), link.latency)


def transfer_seconds(link: Link, size: float) -> float:
    """Seconds to move one microbatch's values between stages; nothing to move takes none."""
    return link.seconds(size) if size else 0.0


def collective_link(cluster: Cluster, submesh: SubMesh) -> Link:
    """The link that carries a submesh's own collectives."""
    return cluster.link_between(submesh, submesh)
