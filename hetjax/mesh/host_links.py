"""The link between a device and its host's memory, over which what is offloaded comes and goes.

Of a slot of sixteen lanes four fifths of the raw rate are taken to be reached, each way.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hetjax.mesh.links import Link
from hetjax.mesh.subcluster import Subcluster

PCIE_3 = Link(bandwidth=12.5e9, latency=10e-6)
"""Assumed of PCI Express 3.0, of 15.8 GB/s."""

PCIE_4 = Link(bandwidth=25e9, latency=10e-6)
"""Assumed of PCI Express 4.0, of 31.5 GB/s."""

PCIE_5 = Link(bandwidth=50e9, latency=10e-6)
"""Assumed of PCI Express 5.0, of 63 GB/s."""

SLOTS: Mapping[str, Link] = MappingProxyType(
    {
        **dict.fromkeys(("P100", "V100", "V100e", "T4", "RTX2080Ti"), PCIE_3),
        **dict.fromkeys(("H100", "H800", "H200", "H20", "RTX5090", "MI300X"), PCIE_5),
    }
)
"""The slots of kinds by their data sheets; those of all other accelerators are `PCIE_4`."""


def link_to_host(subcluster: Subcluster) -> Link:
    """The link between each device of a subcluster and its host's memory, one way.

    Args:
        subcluster: the subcluster.

    Returns:
        What the subcluster says; else of a processor a copy in its own memory, which is read and
        written, and of an accelerator its slot.

    Example:
        >>> from hetjax.mesh import kind
        >>> near = Link(25e9, 1e-5)
        >>> link_to_host(Subcluster("old", kind("V100"), 1, 4, near, near)).bandwidth
        12500000000.0
    """
    if subcluster.host_link is not None:
        return subcluster.host_link
    if subcluster.kind.is_processor:
        return Link(subcluster.kind.memory_bandwidth / 2, 20e-6)
    return SLOTS.get(subcluster.kind.name, PCIE_4)


def host_share(subcluster: Subcluster) -> float:
    """What of a node's memory each of its devices may keep arrays in, in bytes.

    Args:
        subcluster: the subcluster.
    """
    return (subcluster.host_memory_bytes or 0) / subcluster.devices_per_node
