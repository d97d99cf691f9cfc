"""The network of a lab: a namespace per host and switch, and the links between them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lab import names
from lab.specification import Link, Specification
from lab.system import run_command

QUEUE_SECONDS = 0.05
"""How long a packet may wait for its link; what would wait longer is dropped."""

_BURST_SECONDS = 0.002
_MIN_BURST_BYTES = 16 * 1024
_SEGMENTED_BYTES = 12_000
"""What the kernel hands to a link at once, below every burst: a limited link cuts more than a burst
into single frames, whose interrupts took a twentieth of the hosts' cores."""

_NAMESPACES = Path("/var/run/netns")


@dataclass(frozen=True)
class LinkEnd:
    """One end of a link.

    Args:
        namespace: where it is.
        device: its interface there.
    """

    namespace: str
    device: str


def ends(lab: str, link: Link) -> tuple[LinkEnd, LinkEnd]:
    """The two ends of a link."""
    a, b = link.between
    return (
        LinkEnd(names.group_name(lab, a), names.interface(b)),
        LinkEnd(names.group_name(lab, b), names.interface(a)),
    )


def namespaces(lab: str) -> list[str]:
    """The namespaces of a lab that there are."""
    return names.groups_of(lab, all_namespaces())


def all_namespaces() -> list[str]:
    """All namespaces that have a name."""
    return [path.name for path in _NAMESPACES.iterdir()] if _NAMESPACES.is_dir() else []


def namespace_file(namespace: str) -> Path:
    """The file that a process enters a namespace by."""
    return _NAMESPACES / namespace


def create(specification: Specification) -> None:
    """Make the namespaces and the links, all up, none limited; none of them may be there."""
    lab = specification.name
    for node in specification.nodes:
        namespace = names.group_name(lab, node)
        run_command(["ip", "netns", "add", namespace])
        _ip(namespace, "link set lo up")
        if node in specification.switches:
            _ip(namespace, "link add bridge type bridge")
            _ip(namespace, "link set bridge up")
    for link in specification.links:
        one, other = ends(lab, link)
        # Both ends are born where they belong: the machine's own namespace never has them.
        run_command(
            f"ip link add {one.device} netns {one.namespace} type veth "
            f"peer name {other.device} netns {other.namespace}".split()
        )
        for node, end in zip(link.between, (one, other), strict=True):
            if node in specification.switches:
                _ip(end.namespace, f"link set {end.device} master bridge")
            else:
                address = names.address(specification, node)
                _ip(end.namespace, f"addr add {address}/24 dev {end.device}")
            _ip(end.namespace, f"link set {end.device} gso_max_size {_SEGMENTED_BYTES}")
            _ip(end.namespace, f"link set {end.device} up")


def is_whole(specification: Specification) -> bool:
    """Whether all namespaces and links are there."""
    present = namespaces(specification.name)
    if present != sorted(names.group_name(specification.name, n) for n in specification.nodes):
        return False
    shown = [
        run_command(["ip", "-n", end.namespace, "link", "show", end.device], check=False)
        for link in specification.links
        for end in ends(specification.name, link)
    ]
    return all(each.returncode == 0 for each in shown)


def delete(lab: str) -> None:
    """Delete all namespaces of a lab, and with them its links."""
    for namespace in namespaces(lab):
        run_command(["ip", "netns", "delete", namespace])


def set_rate(lab: str, link: Link, rate: float | None) -> None:
    """Limit a link, the same in both directions.

    Args:
        lab: the lab.
        link: which link.
        rate: bytes/s; None for no limit.
    """
    for end in ends(lab, link):
        for command in rate_commands(end, rate, limited=_limit(end) is not None):
            run_command(command)


def rate_commands(end: LinkEnd, rate: float | None, *, limited: bool) -> list[list[str]]:
    """The commands that limit what leaves an end of a link.

    Args:
        end: the end.
        rate: bytes/s; None for no limit.
        limited: whether there is a limit now.

    Returns:
        The commands.

    Example:
        >>> [command] = rate_commands(LinkEnd("n", "to-b"), 25e6, limited=False)
        >>> " ".join(command)
        'tc -n n qdisc replace dev to-b root tbf rate 200000000bit burst 50000 latency 50ms'
    """
    tc = ["tc", "-n", end.namespace, "qdisc"]
    if rate is None:
        return [[*tc, "del", "dev", end.device, "root"]] if limited else []
    burst = max(_MIN_BURST_BYTES, round(rate * _BURST_SECONDS))
    limit = f"rate {round(8 * rate)}bit burst {burst} latency {1e3 * QUEUE_SECONDS:g}ms"
    return [[*tc, *f"replace dev {end.device} root tbf {limit}".split()]]


def rate(lab: str, link: Link) -> float | None:
    """What a link is limited to, in bytes/s; None for no limit."""
    return _limit(ends(lab, link)[0])


def set_up(lab: str, link: Link, *, up: bool) -> None:
    """Connect a link, or cut it."""
    for end in ends(lab, link):
        _ip(end.namespace, f"link set {end.device} {'up' if up else 'down'}")


def is_up(lab: str, link: Link) -> bool:
    """Whether a link is connected."""
    end = ends(lab, link)[0]
    shown = run_command(["ip", "-n", end.namespace, "-j", "link", "show", end.device])
    return json.loads(shown.stdout)[0]["operstate"] == "UP"


def processes(namespace: str) -> list[int]:
    """The processes in a namespace."""
    shown = run_command(["ip", "netns", "pids", namespace], check=False)
    return [int(line) for line in shown.stdout.split()]


def _limit(end: LinkEnd) -> float | None:
    shown = run_command(["tc", "-n", end.namespace, "-j", "qdisc", "show", "dev", end.device])
    found = [q["options"]["rate"] for q in json.loads(shown.stdout) if q["kind"] == "tbf"]
    return float(found[0]) if found else None


def _ip(namespace: str, arguments: str) -> None:
    run_command(["ip", "-n", namespace, *arguments.split()])
