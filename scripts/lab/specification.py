"""What a lab consists of: YAML that people write, checked field by field.

    name: two_islands
    hosts:                            # the first is the head of the Ray cluster
      - {name: a, cores: [0]}
      - {name: b, cores: [1], speed: 0.5}
      - {name: c, cores: [1]}
    switches: [west]                  # where more than two meet
    links:
      - {between: [a, west], bandwidth: 1 Gbit/s}
      - {between: [b, west], bandwidth: unlimited}
      - {between: [c, west], bandwidth: 200 Mbit/s}

Every host has one link, to another host or to a switch, and from every host there is exactly one
way to every other.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import pydantic

from hetjax.checked_files import Record, first_problem, read_yaml
from hetjax.errors import InputError, unknown_name
from hetjax.mesh.units import BYTES, BYTES_PER_SECOND, parse_quantity

SPECIFICATIONS = Path(__file__).resolve().parents[2] / "configs" / "lab"
"""Where the specifications that have a name alone lie."""

MAX_HOSTS = 8
MAX_SWITCHES = 4
MIN_RATE, MAX_RATE = 1e6 / 8, 10e9 / 8
"""The rates that can be set, in bytes/s: from 1 Mbit/s to 10 Gbit/s."""

MIN_SPEED = 0.1
"""The smallest speed: with less the kernel's quota is too coarse."""

MIN_MEMORY = 5e8
"""The least memory of a host in bytes: its Ray node and a worker need about as much."""

UNLIMITED = "unlimited"

_TC_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)bit", re.IGNORECASE)


def parse_rate(value: object) -> float | None:
    """Read the rate of a link.

    Args:
        value: a number in bytes/s, or a text such as ``"200 Mbit/s"``, ``"35mbit"`` (as `tc` has
            it) or ``"unlimited"``.

    Returns:
        The rate in bytes/s; None for no limit.

    Raises:
        InputError: it is none of these, or outside of what can be set.

    Example:
        >>> parse_rate("35mbit"), parse_rate("25 MB/s"), parse_rate("unlimited")
        (4375000.0, 25000000.0, None)
    """
    if value is None or value == UNLIMITED:
        return None
    if isinstance(value, str) and (match := _TC_RATE.fullmatch(value.strip())):
        prefix = {"k": "k", "m": "M", "g": "G", "": ""}[match[2].lower()]
        rate = parse_quantity(f"{match[1]} {prefix}bit/s", BYTES_PER_SECOND)
    else:
        rate = parse_quantity(value, BYTES_PER_SECOND)
    if not MIN_RATE <= rate <= MAX_RATE:
        raise InputError(
            f"{value!r} is not allowed: it must be from 1 Mbit/s to 10 Gbit/s, or {UNLIMITED!r}"
        )
    return rate


def parse_memory(value: object) -> float | None:
    """Read the memory of a host.

    Args:
        value: a number in bytes, or a text such as ``"2 GB"``; None for no limit.

    Returns:
        The bytes; None for no limit.

    Raises:
        InputError: it is none of these, or too little.

    Example:
        >>> parse_memory("1.5 GB"), parse_memory(None)
        (1500000000.0, None)
    """
    if value is None:
        return None
    memory = parse_quantity(value, BYTES)
    if memory < MIN_MEMORY:
        raise InputError(f"{value!r} is not allowed: it must be 500 MB or more")
    return memory


def check_speed(value: float) -> float:
    """Check the speed of a host.

    Args:
        value: the fraction of its cores that it may use.

    Returns:
        The same.

    Raises:
        InputError: it is outside of what can be set.
    """
    if not MIN_SPEED <= value <= 1:
        raise InputError(f"{value!r} is not allowed: it must be from {MIN_SPEED} to 1")
    return value


_LabName = Annotated[str, pydantic.Field(pattern=r"^[a-z][a-z0-9_]{0,19}$")]
# What an interface is called has at most 15 characters, and names one of these.
_NodeName = Annotated[str, pydantic.Field(pattern=r"^[a-z][a-z0-9_]{0,8}$")]


class Host(Record):
    """A host.

    Args:
        name: what it is called.
        cores: the processor cores of the machine that it runs on.
        speed: the fraction of these cores that it may use.
        memory: bytes that its processes may have together; None for no limit.
    """

    name: _NodeName
    cores: Annotated[list[Annotated[int, pydantic.Field(ge=0)]], pydantic.Field(min_length=1)]
    speed: Annotated[float, pydantic.AfterValidator(check_speed)] = 1.0
    memory: Annotated[float | None, pydantic.BeforeValidator(parse_memory)] = None


class Link(Record):
    """A link between two hosts, a host and a switch, or two switches.

    Args:
        between: what it joins.
        bandwidth: its rate in either direction, in bytes/s; None for no limit.
    """

    between: Annotated[list[_NodeName], pydantic.Field(min_length=2, max_length=2)]
    bandwidth: Annotated[float | None, pydantic.BeforeValidator(parse_rate)]

    @property
    def name(self) -> str:
        """What it is called, e.g. ``"a-b"``."""
        return "-".join(self.between)


class Specification(Record):
    """A lab.

    Args:
        name: what it is called; there is one lab of a name on a machine.
        hosts: the hosts; the first is the head of the Ray cluster.
        links: the links.
        switches: the switches.
    """

    name: _LabName
    hosts: Annotated[list[Host], pydantic.Field(min_length=2, max_length=MAX_HOSTS)]
    links: Annotated[list[Link], pydantic.Field(min_length=1)]
    switches: list[_NodeName] = pydantic.Field(default=[], max_length=MAX_SWITCHES)

    @property
    def nodes(self) -> list[str]:
        """The names of all hosts and switches."""
        return [host.name for host in self.hosts] + self.switches

    @property
    def head(self) -> Host:
        """The host where Ray's head and the drivers run."""
        return self.hosts[0]

    def host(self, name: str) -> Host:
        """The host of a name.

        Raises:
            InputError: there is none; the message has the nearest name.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        raise InputError(unknown_name("host", name, [host.name for host in self.hosts]))

    def link(self, name: str) -> Link:
        """The link of a name; ``"b-a"`` is ``"a-b"``.

        Raises:
            InputError: there is none; the message has the nearest name.
        """
        for link in self.links:
            if sorted(name.split("-")) == sorted(link.between):
                return link
        raise InputError(unknown_name("link", name, [link.name for link in self.links]))

    def with_memory(self, memory: Mapping[str, float]) -> Specification:
        """The same, where some hosts may have so much memory.

        Args:
            memory: bytes by host.
        """
        hosts = [
            host.model_copy(update={"memory": memory.get(host.name, host.memory)})
            for host in self.hosts
        ]
        return self.model_copy(update={"hosts": hosts})

    @pydantic.model_validator(mode="after")
    def _check_shape(self) -> Specification:
        nodes = self.nodes
        twice = [name for name in nodes if nodes.count(name) > 1]
        if twice:
            raise InputError(f"the name {twice[0]!r} is given twice")
        for index, link in enumerate(self.links):
            for name in link.between:
                if name not in nodes:
                    what = unknown_name("host or switch", name, nodes)
                    raise InputError(f"links[{index}].between: {what}")
        for host in self.hosts:
            count = sum(host.name in link.between for link in self.links)
            if count != 1:
                raise InputError(
                    f"host {host.name!r} has {count} links; a host has one, and what joins more "
                    f"is a switch"
                )
        reached = _reached(self.links, nodes[0])
        if len(reached) < len(nodes) or len(self.links) != len(nodes) - 1:
            raise InputError(
                f"from {nodes[0]!r} there must be one way to every host and switch; "
                f"{len(self.links)} links join {len(reached)} of the {len(nodes)}, and "
                f"{len(nodes) - 1} are wanted"
            )
        return self


def _reached(links: list[Link], start: str) -> set[str]:
    """What links lead to from a node."""
    reached = {start}
    for _ in links:
        for link in links:
            if reached & set(link.between):
                reached |= set(link.between)
    return reached


def read_specification(name: str | Path) -> Specification:
    """Read the specification of a lab.

    Args:
        name: a YAML file, or the name of one in ``configs/lab``.

    Returns:
        The specification.

    Raises:
        InputError: there is no such file, it is not YAML, or a field is missing, unknown or wrong;
            the message names the file, the field, its value and what is allowed.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        ours = sorted(_our_specifications())
        if str(name) not in ours:
            raise InputError(f"{unknown_name('lab', str(name), ours)}, or a .yaml file")
        path = SPECIFICATIONS / f"{name}.yaml"
    return specification_from_content(read_yaml(path, "file"), str(path))


def specification_from_content(content: object, source: str) -> Specification:
    """Make a specification of what YAML or JSON gave.

    Args:
        content: dicts, lists, texts and numbers.
        source: what errors name as the place.

    Returns:
        The specification.

    Raises:
        InputError: a field is missing, unknown or wrong.
    """
    try:
        return Specification.model_validate(content)
    except pydantic.ValidationError as error:
        raise InputError(f"{source}: {first_problem(error, Specification)}") from None


@functools.cache
def _our_specifications() -> tuple[str, ...]:
    return tuple(path.stem for path in SPECIFICATIONS.glob("*.yaml"))
