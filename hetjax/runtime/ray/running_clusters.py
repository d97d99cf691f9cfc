"""Which Ray clusters have a node on this machine, and whom they are for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from hetjax.errors import InputError
from hetjax.processes import Process, has_driver, running

_GCS_ADDRESS = re.compile(rb"--gcs-address=([^\s\0]+)")


class RunningCluster(NamedTuple):
    """A Ray cluster that has a node on this machine.

    Args:
        address: ``"host:port"``.
        raylet: its process on this machine.
        is_private: whether a run has started it for itself, and will end it.
    """

    address: str
    raylet: Process
    is_private: bool


def running_clusters() -> list[RunningCluster]:
    """The Ray clusters that have a node on this machine, the latest first.

    Returns:
        Those of users whose processes this one may read; none where there is no ``/proc``.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:  # It has ended meanwhile.
            continue
        if Path(command.partition(b"\0")[0].decode(errors="replace")).name != "raylet":
            continue
        address, raylet = _GCS_ADDRESS.search(command), running(int(folder.name))
        if address is not None and raylet is not None:
            told = address[1].decode(errors="replace")
            found.append(RunningCluster(told, raylet, has_driver(raylet.number)))
    return sorted(found, key=lambda each: each.raylet.began, reverse=True)


def shared_address(address: str | None) -> str | None:
    """Where to connect, so that it is no cluster that another run has started for itself.

    Such a cluster ends with its run, whoever else is using it.

    Args:
        address: None or ``"auto"`` for any cluster here, or another address.

    Returns:
        The address as given where no such cluster is here; else that of another cluster here;
        ``"local"`` where there is none, and None was given.

    Raises:
        InputError: there is none, and ``"auto"`` was given.
    """
    clusters = running_clusters() if address in (None, "auto") else []
    if not any(each.is_private for each in clusters):
        return address
    shared = [each.address for each in clusters if not each.is_private]
    if not shared and address == "auto":
        raise InputError(
            "ray address is 'auto', and all Ray clusters that run here are of other runs, which "
            "end them; start one by ray start --head, or give 'local' or None"
        )
    return shared[0] if shared else "local"
