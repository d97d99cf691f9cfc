"""The hosts of a lab: how a process enters one, and what is done to all of one's processes."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from lab import names, network
from lab.cgroups import CpuGroups, send_signal
from lab.memory_groups import memory_groups
from lab.specification import Host
from lab.system import LabError, wait_until

KILL_SECONDS = 15.0
"""How long killed processes may take to end, and stopped ones to stop."""

# Not `ip netns exec`: it mounts /sys anew, and a process could not see its own quota there.
_ENTER = """groups=$0 cores=$1 namespace=$2; shift 2
for group in $groups; do echo 0 > "$group" || exit 1; done
exec taskset -c "$cores" nsenter --net="$namespace" -- "$@" """


def enter_command(groups: CpuGroups, lab: str, host: Host, arguments: Sequence[str]) -> list[str]:
    """The command that runs another one on a host.

    The process that it starts becomes that of the other command: its number, its signals and its
    exit code are the other's.

    Args:
        groups: where the host's cgroup is.
        lab: the lab.
        host: the host.
        arguments: the other command.

    Returns:
        The command.
    """
    name = names.group_name(lab, host.name)
    cores = ",".join(str(core) for core in host.cores)
    namespace = str(network.namespace_file(name))
    entries = [groups.entry(name)]
    if host.memory is not None:
        entries.append(memory_groups().entry(name))
    return ["sh", "-c", _ENTER, " ".join(map(str, entries)), cores, namespace, *arguments]


def set_speed(groups: CpuGroups, lab: str, host: Host, speed: float) -> None:
    """Set the fraction of its cores that a host may use."""
    quota = None if speed == 1 else speed * len(host.cores)
    groups.set_quota(names.group_name(lab, host.name), quota)


def speed(groups: CpuGroups, lab: str, host: Host) -> float:
    """The fraction of its cores that a host may use."""
    quota = groups.quota(names.group_name(lab, host.name))
    return 1.0 if quota is None else quota / len(host.cores)


def processes(groups: CpuGroups, group: str) -> list[int]:
    """The processes of a host: those in its cgroup or in its namespace, dead ones left out."""
    found = {*groups.processes(group), *network.processes(group)}
    return sorted(process for process in found if state(process) not in (None, "Z"))


def kill(groups: CpuGroups, members: Sequence[str]) -> None:
    """Kill all processes of hosts at once.

    Args:
        groups: where the hosts' cgroups are.
        members: the groups of the hosts.

    Raises:
        LabError: some do not end.
    """

    def none_left() -> bool:
        left = [process for group in members for process in processes(groups, group)]
        send_signal(left, signal.SIGKILL)
        return not left

    if not wait_until(none_left, KILL_SECONDS):
        raise LabError(f"processes of {', '.join(members)} do not end")


def stop(groups: CpuGroups, group: str) -> None:
    """Stop all processes of a host where they are, until `resume`.

    Raises:
        LabError: some do not stop.
    """

    def all_stopped() -> bool:
        moving = [process for process in processes(groups, group) if state(process) != "T"]
        send_signal(moving, signal.SIGSTOP)
        return not moving

    if not wait_until(all_stopped, KILL_SECONDS):
        raise LabError(f"processes of {group} do not stop")


def resume(groups: CpuGroups, group: str) -> None:
    """Let a stopped host go on."""
    send_signal(processes(groups, group), signal.SIGCONT)


def state(process: int) -> str | None:
    """The kernel's letter for what a process does: ``"T"`` stopped, ``"Z"`` dead; None: gone."""
    try:
        # The name before it, in brackets, may itself have brackets and spaces.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def program(process: int) -> str:
    """The name of the program that a process runs; empty if it is gone."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return ""
    return Path(command.split(b"\0")[0].decode(errors="replace")).name
