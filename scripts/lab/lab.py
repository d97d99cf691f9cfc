"""A lab that is up: what is done to it and in it, and what it is."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetjax.errors import InputError
from lab import hosts, names, network, nodes, state
from lab.building import bring_up, take_down
from lab.cgroups import find_cpu_groups
from lab.memory_groups import memory_groups
from lab.specification import Host, Specification, check_speed, parse_rate, read_specification
from lab.system import check_cores, check_machine

LIFETIME_SECONDS = 4 * 3600.0
"""After how long a lab that nobody takes down goes down by itself, unless told."""


@dataclass(frozen=True)
class HostStatus:
    """What a host is and does.

    Args:
        name: the host.
        address: its address in the lab.
        cores: the processor cores that it runs on.
        speed: the fraction of them that it may use.
        processes: how many processes it has.
        ray: ``"up"``, ``"stopped"`` or ``"down"``.
    """

    name: str
    address: str
    cores: tuple[int, ...]
    speed: float
    processes: int
    ray: str


@dataclass(frozen=True)
class LinkStatus:
    """What a link is and does.

    Args:
        name: the link.
        rate: what it is limited to in either direction, in bytes/s; None for no limit.
        connected: whether it is connected.
    """

    name: str
    rate: float | None
    connected: bool


class Lab:
    """A lab. `Lab.up` makes one, and ``with`` takes it down at the end; `Lab.attach` finds one.

    Args:
        specification: what it consists of.
    """

    def __init__(self, specification: Specification):
        self.specification = specification
        self._groups = find_cpu_groups()

    # Up and down

    @classmethod
    def up(
        cls, specification: Specification | str | Path, lifetime: float = LIFETIME_SECONDS
    ) -> Lab:
        """Bring a lab up, or one that is up to the state that its specification says.

        Whatever stops this half way, an interrupt too, takes the lab down.

        Args:
            specification: what it consists of, a file with that, or its name in ``configs/lab``.
            lifetime: seconds after which it goes down by itself.

        Returns:
            The lab.

        Raises:
            InputError: this machine cannot hold it, or another lab of its name is up.
            LabError: the system did not do what was asked.
        """
        if not isinstance(specification, Specification):
            specification = read_specification(specification)
        check_machine()
        for index, host in enumerate(specification.hosts):
            check_cores(host.cores, f"hosts[{index}].cores")
        bring_up(specification, lifetime)
        return cls(specification)

    @classmethod
    def attach(cls, name: str | None = None) -> Lab:
        """The lab of a name, which is up.

        Args:
            name: its name; None for the only one.

        Returns:
            The lab.

        Raises:
            InputError: there is none of the name, none at all, or more than one.
        """
        check_machine()
        name = state.choose(name)
        specification = state.saved(name)
        if specification is None:
            raise InputError(f"lab {name!r} is not whole; take it down: lab down {name}")
        return cls(specification)

    def down(self) -> None:
        """Take the lab down; nothing of it remains."""
        take_down(self.specification.name)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # Processes

    def command(self, host: str, arguments: Sequence[str]) -> list[str]:
        """The command that runs another one on a host; its process becomes the other's.

        Args:
            host: the host.
            arguments: the other command.

        Returns:
            The command, to be run with `environment`.

        Raises:
            InputError: there is no such host.
        """
        name = self.specification.name
        return hosts.enter_command(self._groups, name, self.specification.host(host), arguments)

    def environment(self) -> dict[str, str]:
        """The environment of a process in the lab: this process's, and where the lab's Ray is."""
        return nodes.environment(self.specification)

    def start(self, host: str, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host.

        Args:
            host: the host.
            arguments: the command.
            options: what else `subprocess.Popen` takes.

        Returns:
            The command's process.
        """
        options = {"env": self.environment(), **options}
        return subprocess.Popen(self.command(host, arguments), **options)

    def run(
        self, host: str, arguments: Sequence[str], *, timeout: float, **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command on a host to its end.

        Args:
            host: the host.
            arguments: the command.
            timeout: seconds that it may take.
            options: what else `subprocess.run` takes.

        Returns:
            How it ended.

        Raises:
            subprocess.TimeoutExpired: it took longer, and was killed.
        """
        options = {"env": self.environment(), **options}
        return subprocess.run(self.command(host, arguments), timeout=timeout, **options)

    # Changes

    def set_link(self, link: str, rate: object) -> None:
        """Set the rate of a link, in both directions.

        Args:
            link: its name, e.g. ``"a-b"``.
            rate: bytes/s, a text such as ``"35mbit"``, or None for no limit.

        Raises:
            InputError: there is no such link, or the rate is not allowed.
        """
        network.set_rate(self.specification.name, self.specification.link(link), parse_rate(rate))

    def set_speed(self, host: str, speed: float) -> None:
        """Set the fraction of its cores that a host may use.

        Raises:
            InputError: there is no such host, or the speed is not allowed.
        """
        found = self.specification.host(host)
        hosts.set_speed(self._groups, self.specification.name, found, check_speed(speed))

    def cut(self, link: str) -> None:
        """Cut a link: what is sent over it is lost."""
        network.set_up(self.specification.name, self.specification.link(link), up=False)

    def mend(self, link: str) -> None:
        """Connect a link that was cut."""
        network.set_up(self.specification.name, self.specification.link(link), up=True)

    def kill(self, host: str) -> None:
        """Kill all processes of a host, as if it lost its power; `up` starts its Ray node again."""
        hosts.kill(self._groups, [self._group(self.specification.host(host))])

    def stop(self, host: str) -> None:
        """Stop all processes of a host where they are; it answers nothing until `resume`."""
        hosts.stop(self._groups, self._group(self.specification.host(host)))

    def resume(self, host: str) -> None:
        """Let a stopped host go on."""
        hosts.resume(self._groups, self._group(self.specification.host(host)))

    # What it is

    def host_status(self) -> Iterator[HostStatus]:
        """What each host is and does."""
        spec = self.specification
        for host in spec.hosts:
            processes = hosts.processes(self._groups, self._group(host))
            yield HostStatus(
                host.name,
                names.address(spec, host.name),
                tuple(host.cores),
                hosts.speed(self._groups, spec.name, host),
                len(processes),
                nodes.node_state(processes),
            )

    def most_memory(self, host: str) -> int:
        """The most bytes that a host has had, of its processes and of files that they read.

        Args:
            host: a host whose memory is limited.

        Raises:
            InputError: there is no such host, or it has no limit.
        """
        found = self.specification.host(host)
        if found.memory is None:
            raise InputError(f"host {host!r} has no limit of its memory, so nothing counts it")
        return memory_groups().most_used(self._group(found))

    def link_status(self) -> Iterator[LinkStatus]:
        """What each link is and does."""
        lab = self.specification.name
        for link in self.specification.links:
            yield LinkStatus(link.name, network.rate(lab, link), network.is_up(lab, link))

    def _group(self, host: Host) -> str:
        return names.group_name(self.specification.name, host.name)
