"""How a lab comes up, and how it is taken down."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path

from lab import hosts, names, network, nodes, state
from lab.cgroups import CpuGroups, find_cpu_groups
from lab.memory_groups import find_memory_groups, memory_groups
from lab.specification import Specification
from lab.system import LabError, only_one, run_command, uninterrupted

_KEEP = """cd /; echo 0 > "$0" || exit 1
{ sleep "$1" && exec "$2" "$3" down "$4"; } < /dev/null > /dev/null 2>&1 &"""


def bring_up(specification: Specification, lifetime: float) -> None:
    """Bring a lab up, or one that is up to the state that its specification says.

    Whatever stops this half way, an interrupt too, takes the lab down.

    Args:
        specification: what it consists of.
        lifetime: seconds after which it goes down by itself.

    Raises:
        InputError: another lab of its name is up.
        LabError: the system did not do what was asked.
    """
    with _changing(specification.name):
        state.check_same(specification)
        try:
            _bring_up(specification, lifetime)
        except BaseException:
            with uninterrupted():
                _take_down(specification.name)
            raise


def take_down(name: str) -> None:
    """Take a lab down, from what there is of it: it may be half built or half gone.

    Args:
        name: the lab.

    Raises:
        LabError: something of it cannot be removed.
    """
    with _changing(name), uninterrupted():
        _take_down(name)


def _changing(name: str) -> contextlib.AbstractContextManager[None]:
    """Hold the right to change a lab."""
    return only_one(names.group_name(name, "change"))


def _bring_up(specification: Specification, lifetime: float) -> None:
    groups, lab = find_cpu_groups(), specification.name
    if not _is_whole(groups, specification):
        _take_down(lab)
        for host in specification.hosts:
            groups.create(names.group_name(lab, host.name))
        network.create(specification)
    # Written down only now: what a crash has left half built is not.
    state.save(specification)
    nodes.make_token(lab)
    for host in specification.hosts:
        hosts.set_speed(groups, lab, host, host.speed)
        if host.memory is not None:
            memory_groups().create(names.group_name(lab, host.name), host.memory)
    for link in specification.links:
        network.set_up(lab, link, up=True)
        network.set_rate(lab, link, link.bandwidth)
    _keep(groups, lab, lifetime)
    nodes.start_missing(groups, specification)


def _is_whole(groups: CpuGroups, specification: Specification) -> bool:
    lab = specification.name
    wanted = {names.group_name(lab, host.name) for host in specification.hosts}
    built = state.saved(lab) is not None
    return built and wanted <= set(groups.groups(lab)) and network.is_whole(specification)


def _keep(groups: CpuGroups, lab: str, lifetime: float) -> None:
    """Start the process that takes a lab down after its time, in the place of another."""
    group = names.group_name(lab, names.KEEPER)
    hosts.kill(groups, [group])
    groups.create(group)
    command = str(Path(__file__).resolve().parent)
    entry = str(groups.entry(group))
    run_command(["sh", "-c", _KEEP, entry, f"{lifetime:g}", sys.executable, command, lab])


def _take_down(name: str) -> None:
    groups = find_cpu_groups()
    hosts.kill(groups, sorted({*groups.groups(name), *network.namespaces(name)}))
    network.delete(name)
    groups.remove(name)
    if (limited := find_memory_groups()) is not None:
        limited.remove(name)
    folder = names.state_folder(name)
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        raise LabError(f"the folder {folder} cannot be removed")
    if names.STATE.is_dir() and not any(names.STATE.iterdir()):
        names.STATE.rmdir()
