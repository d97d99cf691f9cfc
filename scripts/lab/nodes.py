"""The Ray nodes of a lab, one a host, and what a process needs to use them."""

from __future__ import annotations

import concurrent.futures
import json
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab import hosts, names
from lab.cgroups import CpuGroups
from lab.specification import Host, Specification
from lab.system import LabError, run_command

START_SECONDS = 90.0
"""How long a Ray node may take to start."""

ANSWER_SECONDS = 30.0
"""How long Ray's head may take to say which nodes it has."""

OBJECT_STORE_BYTES = 100 * 10**6
"""What a node holds of objects: activations do not go through Ray."""

RESOURCE_AMOUNT = 1000
"""How much a node has of its own resource: several jobs may hold workers there at once."""

SETTLE_SECONDS = 60.0
"""How long Ray's head may take to notice that a node which was killed is gone."""

_LIST_ALIVE = """import json, ray, sys, time
wanted, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
ray.init(log_to_driver=False, logging_level="ERROR")
while True:
    alive = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    if len(alive) == wanted or time.monotonic() > end:
        break
    time.sleep(0.2)
print(json.dumps(alive))"""


def make_token(lab: str) -> None:
    """Make the token of a lab's Ray cluster, readable by root alone, if there is none."""
    path = _token_file(lab)
    if not path.exists():
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        new.rename(path)


def environment(specification: Specification) -> dict[str, str]:
    """The environment of a process in the lab: it finds the lab's Ray cluster, and no other.

    Args:
        specification: the lab.

    Returns:
        This process's environment, with the cluster's address and token.
    """
    return {
        **_clean(os.environ),
        "RAY_ADDRESS": names.ray_address(specification),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(_token_file(specification.name)),
    }


def start_environment(specification: Specification) -> dict[str, str]:
    """The environment of ``ray start`` in the lab."""
    variables = {
        **environment(specification),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray gives way to every other process, which a stage of a pipeline must not.
        "RAY_worker_niceness": "0",
    }
    del variables["RAY_ADDRESS"]
    return variables


def start_command(specification: Specification, host: Host) -> list[str]:
    """The command that starts a host's Ray node.

    Args:
        specification: the lab.
        host: the host.

    Returns:
        The command.
    """
    if host == specification.head:
        role = ["--head", f"--port={names.RAY_PORT}", "--include-dashboard=false", "--no-monitor"]
    else:
        role = [f"--address={names.ray_address(specification)}"]
    return [
        *_ray(),
        "start",
        *role,
        f"--node-ip-address={names.address(specification, host.name)}",
        f"--temp-dir={names.state_folder(specification.name) / host.name}",
        f"--num-cpus={len(host.cores)}",
        f"--resources={json.dumps({names.ray_resource(host.name): RESOURCE_AMOUNT})}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--include-log-monitor=false",
        "--disable-usage-stats",
    ]


def list_command(wanted: int, seconds: float) -> list[str]:
    """The command that prints the addresses of the nodes that are alive, as JSON.

    Args:
        wanted: how many there should be.
        seconds: how long to wait until there are so many.

    Returns:
        The command.
    """
    return [sys.executable, "-c", _LIST_ALIVE, str(wanted), f"{seconds:g}"]


def start_missing(groups: CpuGroups, specification: Specification) -> None:
    """Start the Ray nodes that do not run; all of them where the head does not.

    Args:
        groups: where the hosts' cgroups are.
        specification: the lab.

    Raises:
        LabError: one does not start.
    """
    lab, head = specification.name, specification.head
    alive = _alive_nodes(groups, specification)
    if head not in alive:
        alive = []
    missing = [host for host in specification.hosts if host not in alive]
    if not missing:
        return
    hosts.kill(groups, [names.group_name(lab, host.name) for host in missing])
    for host in missing:
        shutil.rmtree(names.state_folder(lab) / host.name, ignore_errors=True)

    def start(host: Host) -> None:
        _start(groups, specification, host)

    if head in missing:
        start(missing.pop(0))
    with concurrent.futures.ThreadPoolExecutor(len(specification.hosts)) as pool:
        for _ in pool.map(start, missing):
            pass
    if head in alive:
        # Until the head has noticed who is gone, it would send actors there.
        _wait_settled(groups, specification)


def _start(groups: CpuGroups, specification: Specification, host: Host) -> None:
    command = start_command(specification, host)
    run_command(
        hosts.enter_command(groups, specification.name, host, command),
        environment=start_environment(specification),
        deadline=START_SECONDS,
    )


def node_state(processes: Sequence[int]) -> str:
    """What the Ray node of a host does.

    Args:
        processes: the host's.

    Returns:
        ``"up"``, ``"stopped"`` or ``"down"``.
    """
    raylets = [process for process in processes if hosts.program(process) == "raylet"]
    if not raylets:
        return "down"
    return "stopped" if hosts.state(raylets[0]) == "T" else "up"


def _alive_nodes(groups: CpuGroups, specification: Specification) -> list[Host]:
    """The hosts whose Ray node runs, as the host itself and Ray's head say."""

    def runs(host: Host) -> bool:
        group = names.group_name(specification.name, host.name)
        return node_state(hosts.processes(groups, group)) == "up"

    running = [host for host in specification.hosts if runs(host)]
    if specification.head not in running:
        return []
    addresses = _alive_addresses(groups, specification, 0.0)
    return [host for host in running if names.address(specification, host.name) in addresses]


def _wait_settled(groups: CpuGroups, specification: Specification) -> None:
    """Wait until Ray's head counts every host once.

    Raises:
        LabError: it does not.
    """
    found = sorted(_alive_addresses(groups, specification, SETTLE_SECONDS))
    if found != sorted(names.address(specification, host.name) for host in specification.hosts):
        raise LabError(f"Ray's head counts other nodes than the hosts: {found}")


def _alive_addresses(groups: CpuGroups, specification: Specification, seconds: float) -> list[str]:
    """The addresses of the nodes that Ray's head takes for alive; none if it does not answer.

    Args:
        groups: where the hosts' cgroups are.
        specification: the lab.
        seconds: how long to wait until they are as many as the hosts.
    """
    command = list_command(len(specification.hosts), seconds)
    asked = run_command(
        hosts.enter_command(groups, specification.name, specification.head, command),
        check=False,
        environment=environment(specification),
        deadline=ANSWER_SECONDS + seconds,
    )
    return [] if asked.returncode else json.loads(asked.stdout.splitlines()[-1])


def _ray() -> list[str]:
    return [sys.executable, "-m", "ray.scripts.scripts"]


def _token_file(lab: str) -> Path:
    return names.state_folder(lab) / "token"


def _clean(variables: Mapping[str, str]) -> dict[str, str]:
    """An environment without other Ray clusters, and without proxies: none is in reach."""
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith("RAY_") and not name.lower().endswith("_proxy")
    }
