"""What the parts of a lab are called on the system: by their names alone it can be taken down."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lab.specification import Specification

PREFIX = "hetlab"
STATE = Path("/run") / PREFIX
"""Where every lab has a folder: its specification, its token and what Ray writes."""

KEEPER = "KEEPER"
"""The group of the process that ends a lab which nobody has ended in time."""

RAY_PORT = 6379
_SUBNET = "10.77.0"


def group_name(lab: str, node: str) -> str:
    """What the namespace and the cgroup of a host or a switch are called.

    Example:
        >>> group_name("two_hosts", "a")
        'hetlab-two_hosts-a'
    """
    return f"{PREFIX}-{lab}-{node}"


def lab_of_group(name: str) -> str | None:
    """The lab that a namespace or a cgroup belongs to; None if it belongs to none.

    Example:
        >>> lab_of_group("hetlab-two_hosts-a"), lab_of_group("other-a-b")
        ('two_hosts', None)
    """
    parts = name.split("-")
    return parts[1] if len(parts) == 3 and parts[0] == PREFIX else None


def groups_of(lab: str, names: Iterable[str]) -> list[str]:
    """Those of some namespaces or cgroups that belong to a lab."""
    return sorted(name for name in names if lab_of_group(name) == lab)


def interface(towards: str) -> str:
    """What the end of a link is called in its namespace, by the link's other end."""
    return f"to-{towards}"


def address(specification: Specification, host: str) -> str:
    """The address of a host. Labs may have the same addresses: none sees another."""
    names = [each.name for each in specification.hosts]
    return f"{_SUBNET}.{names.index(host) + 1}"


def ray_address(specification: Specification) -> str:
    """Where the lab's Ray cluster answers, inside the lab."""
    return f"{address(specification, specification.head.name)}:{RAY_PORT}"


def ray_resource(host: str) -> str:
    """The Ray resource that only this host has: a subcluster's ``ray_resource``."""
    return f"host:{host}"


def state_folder(lab: str) -> Path:
    """The folder of a lab."""
    return STATE / lab
