"""A lab that is up, and how it comes up and down."""

from __future__ import annotations

import concurrent.futures
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetjax.errors import InputError, unknown_name
from lab import hosts, names, network, nodes
from lab.cgroups import CpuGroups, find_cpu_groups
from lab.specification import (
    Host,
    Specification,
    check_speed,
    parse_rate,
    read_specification,
    specification_from_content,
)
from lab.system import LabError, check_cores, check_machine, only_one, run_command, uninterrupted

LIFETIME_SECONDS = 4 * 3600.0
"""After how long a lab that nobody takes down goes down by itself, unless told."""

_SPECIFICATION = "specification.json"
_KEEP = """cd /; echo 0 > "$0" || exit 1
{ sleep "$1" && exec "$2" "$3" down "$4"; } < /dev/null > /dev/null 2>&1 &"""


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
        lab = cls(specification)
        with only_one(names.group_name(specification.name, "change")):
            lab._check_same()
            try:
                lab._bring_up(lifetime)
            except BaseException:
                with uninterrupted():
                    _take_down(specification.name)
                raise
        return lab

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
        name = choose(name)
        specification = _saved_specification(name)
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

    def _check_same(self) -> None:
        """Check that no other lab of this name is up."""
        name = self.specification.name
        saved = _saved_specification(name)
        if saved is not None and _shape(saved) != _shape(self.specification):
            raise InputError(
                f"lab {name!r} is up with other hosts or links; take it down first: lab down {name}"
            )

    def _bring_up(self, lifetime: float) -> None:
        spec = self.specification
        if not self._is_whole():
            _take_down(spec.name)
            self._save()
            for host in spec.hosts:
                self._groups.create(self._group(host))
            network.create(spec)
        self._save()
        nodes.make_token(spec.name)
        for host in spec.hosts:
            hosts.set_speed(self._groups, spec.name, host, host.speed)
        for link in spec.links:
            network.set_up(spec.name, link, up=True)
            network.set_rate(spec.name, link, link.bandwidth)
        self._keep(lifetime)
        self._start_nodes()

    def _is_whole(self) -> bool:
        groups = self._groups.groups(self.specification.name)
        wanted = {self._group(host) for host in self.specification.hosts}
        return wanted <= set(groups) and network.is_whole(self.specification)

    def _save(self) -> None:
        folder = names.state_folder(self.specification.name)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = self.specification.model_dump_json(indent=2)
        new = folder / f"{_SPECIFICATION}.new"
        new.write_text(content)
        new.rename(folder / _SPECIFICATION)

    def _keep(self, lifetime: float) -> None:
        """Start the process that takes the lab down after its time, in the place of another."""
        name = self.specification.name
        group = names.group_name(name, names.KEEPER)
        hosts.kill(self._groups, [group])
        self._groups.create(group)
        command = str(Path(__file__).resolve().parent)
        entry = str(self._groups.entry(group))
        run_command(["sh", "-c", _KEEP, entry, f"{lifetime:g}", sys.executable, command, name])

    def _start_nodes(self) -> None:
        """Start the Ray nodes that do not run; all of them where the head does not."""
        spec = self.specification
        alive = self._alive_nodes()
        if spec.head not in alive:
            alive = []
        missing = [host for host in spec.hosts if host not in alive]
        if not missing:
            return
        hosts.kill(self._groups, [self._group(host) for host in missing])
        for host in missing:
            shutil.rmtree(names.state_folder(spec.name) / host.name, ignore_errors=True)
        if spec.head in missing:
            self._start_node(missing.pop(0))
        with concurrent.futures.ThreadPoolExecutor(len(spec.hosts)) as pool:
            for _ in pool.map(self._start_node, missing):
                pass
        if spec.head in alive:
            # Until the head has noticed who is gone, it would send actors there.
            self._wait_settled()

    def _start_node(self, host: Host) -> None:
        run_command(
            self.command(host.name, nodes.start_command(self.specification, host)),
            environment=nodes.start_environment(self.specification),
            deadline=nodes.START_SECONDS,
        )

    def _alive_nodes(self) -> list[Host]:
        """The hosts whose Ray node runs, as the host itself and Ray's head say."""
        spec = self.specification
        running = [host for host in spec.hosts if self._ray_state(self._processes(host)) == "up"]
        if spec.head not in running:
            return []
        addresses = self._alive_addresses(0.0)
        return [host for host in running if names.address(spec, host.name) in addresses]

    def _wait_settled(self) -> None:
        """Wait until Ray's head counts every host once.

        Raises:
            LabError: it does not.
        """
        spec = self.specification
        found = sorted(self._alive_addresses(nodes.SETTLE_SECONDS))
        if found != sorted(names.address(spec, host.name) for host in spec.hosts):
            raise LabError(f"Ray's head counts other nodes than the hosts: {found}")

    def _alive_addresses(self, seconds: float) -> list[str]:
        """The addresses of the nodes that Ray's head takes for alive; none if it does not answer.

        Args:
            seconds: how long to wait until they are as many as the hosts.
        """
        spec = self.specification
        asked = run_command(
            self.command(spec.head.name, nodes.list_command(len(spec.hosts), seconds)),
            check=False,
            environment=nodes.environment(spec),
            deadline=nodes.ANSWER_SECONDS + seconds,
        )
        return [] if asked.returncode else json.loads(asked.stdout.splitlines()[-1])

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
            processes = self._processes(host)
            yield HostStatus(
                host.name,
                names.address(spec, host.name),
                tuple(host.cores),
                hosts.speed(self._groups, spec.name, host),
                len(processes),
                self._ray_state(processes),
            )

    def link_status(self) -> Iterator[LinkStatus]:
        """What each link is and does."""
        lab = self.specification.name
        for link in self.specification.links:
            yield LinkStatus(link.name, network.rate(lab, link), network.is_up(lab, link))

    def _group(self, host: Host) -> str:
        return names.group_name(self.specification.name, host.name)

    def _processes(self, host: Host) -> list[int]:
        return hosts.processes(self._groups, self._group(host))

    def _ray_state(self, processes: Sequence[int]) -> str:
        raylets = [process for process in processes if hosts.program(process) == "raylet"]
        if not raylets:
            return "down"
        return "stopped" if hosts.state(raylets[0]) == "T" else "up"


def present() -> list[str]:
    """The names of all labs of which anything is there, half built ones too."""
    groups = [*network.all_namespaces(), *find_cpu_groups().all_groups()]
    found = {names.lab_of_group(group) for group in groups}
    if names.STATE.is_dir():
        found |= {path.name for path in names.STATE.iterdir()}
    return sorted(name for name in found if name is not None)


def choose(name: str | None) -> str:
    """The name of a lab that is there.

    Args:
        name: what was asked for; None for the only one.

    Returns:
        The name.

    Raises:
        InputError: there is none of the name, none at all, or more than one.
    """
    found = present()
    if name is not None:
        if name not in found:
            raise InputError(unknown_name("lab", name, found))
        return name
    if len(found) != 1:
        names_of = f"more than one lab is up: {', '.join(found)}; say which" if found else ""
        raise InputError(names_of or "no lab is up; lab up SPEC makes one")
    return found[0]


def take_down(name: str) -> None:
    """Take a lab down, from what there is of it: it may be half built or half gone.

    Args:
        name: the lab.

    Raises:
        LabError: something of it cannot be removed.
    """
    with only_one(names.group_name(name, "change")), uninterrupted():
        _take_down(name)


def _take_down(name: str) -> None:
    groups: CpuGroups = find_cpu_groups()
    hosts.kill(groups, sorted({*groups.groups(name), *network.namespaces(name)}))
    network.delete(name)
    groups.remove(name)
    folder = names.state_folder(name)
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        raise LabError(f"the folder {folder} cannot be removed")
    if names.STATE.is_dir() and not any(names.STATE.iterdir()):
        names.STATE.rmdir()


def _saved_specification(name: str) -> Specification | None:
    path = names.state_folder(name) / _SPECIFICATION
    if not path.exists():
        return None
    return specification_from_content(json.loads(path.read_text()), str(path))


def _shape(specification: Specification) -> Any:
    """What cannot be changed while a lab is up."""
    return (
        [(host.name, host.cores) for host in specification.hosts],
        specification.switches,
        [link.between for link in specification.links],
    )
