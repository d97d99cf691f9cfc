"""Ray clusters: connecting to one, and what the workers of a plan ask of it."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hetjax.errors import InputError, check_numbers, check_seconds, shown, unknown_name
from hetjax.mesh.host_cpu import HOST_DEVICES
from hetjax.mesh.ray_offers import NODE_RESOURCE
from hetjax.mesh.subcluster import Subcluster
from hetjax.processes import Guard, ending_with_this_process
from hetjax.runtime.moves.carrier_curves import CarrierCurves
from hetjax.runtime.moves.carriers import BETWEEN_PROCESSES, CarrierName
from hetjax.runtime.ray.running_clusters import shared_address

_PROBE_SECONDS = 1.5

# A client's first words in HTTP/2, which gRPC speaks: the preface and an empty SETTINGS frame. A
# server answers with a SETTINGS frame, whose fourth byte is 4.
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HTTP2_SETTINGS = 4

_WHERE_RESOURCES = ("accelerator_type:", NODE_RESOURCE)
"""What resources begin with that say which nodes, and of which a node has 1."""

# XLA's CPU client takes its temporary memory from malloc anew at every call, and glibc has the
# kernel map and clear what is large each time: a tenth of a GPT's step, half of it with large
# pages. So the worker keeps what it has had: no mmap, one heap, never trimmed.
KEPT_MEMORY = ":".join(
    f"glibc.malloc.{name}"
    for name in ("hugetlb=1", "mmap_max=0", "arena_max=1", f"trim_threshold={2**40}")
)
"""What `GLIBC_TUNABLES` is for a worker on host CPU devices."""


@dataclass(frozen=True)
class RayOptions:
    """That a plan runs on Ray, and how.

    Args:
        address: ``"host:port"`` of a running cluster; ``"auto"`` for one that is running here,
            ``"local"`` for a new one; None for what the environment variable ``RAY_ADDRESS`` says,
            else one that is running here if there is one, else a new one. One that another run has
            started for itself counts for none. Where this process is connected already, that
            cluster is used, and another ``"host:port"`` is refused.
        cores: for each stage, the CPU core that its workers stay on; empty for no pinning.
        deadline: seconds after which a worker that waits for another gives up.
        carrier: what takes arrays from worker to worker: ``"wire"``, JAX's transfer server,
            ``"stream"``, TCP connections between the hosts, or ``"host"``, calls from actor to
            actor; None for the one that is the fastest for a message of its size, as it is measured
            of each link when the workers are connected.
        curves: what was measured of links before, which is not measured again; a trainer tells all
            that it knows as `Trainer.carrier_curves`.

    Raises:
        InputError: there is no such carrier, the deadline is no time to wait, or something is of
            another type.

    Example:
        >>> RayOptions(cores=(0, 1)).address is None
        True
    """

    address: str | None = None
    cores: tuple[int, ...] = ()
    deadline: float = 300.0
    carrier: str | None = None
    curves: CarrierCurves = field(default_factory=CarrierCurves)

    def __post_init__(self) -> None:
        check_seconds("deadline", self.deadline)
        if self.address is not None and not isinstance(self.address, str):
            raise InputError(
                f"address is {shown(self.address)}; give 'host:port', 'auto', 'local', or None"
            )
        check_numbers("cores", self.cores)
        object.__setattr__(self, "cores", tuple(self.cores))
        if self.carrier is not None and self.carrier not in BETWEEN_PROCESSES:
            raise InputError(unknown_name("carrier", self.carrier, BETWEEN_PROCESSES))
        if not isinstance(self.curves, CarrierCurves):
            raise InputError(f"curves is {shown(self.curves)}; give hetjax.runtime.CarrierCurves")

    @property
    def carriers(self) -> tuple[CarrierName, ...]:
        """What may take arrays from worker to worker."""
        return tuple(name for name in BETWEEN_PROCESSES if self.carrier in (None, name))


def connect_to_ray(options: RayOptions) -> bool:
    """Connect to a Ray cluster, or start one, unless this process is connected already.

    Args:
        options: which one.

    Returns:
        Whether this call connected; then its caller disconnects, by `ray.shutdown`, which also ends
        a cluster that was started.

    Raises:
        InputError: the address is none, or nothing that could be Ray answers there, or this process
            is connected to another cluster.
    """
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        if options.address not in (None, "auto", "local"):
            _check_connected_to(options.address)
        return False
    address = options.address or None
    if address in (None, "auto"):  # Ray would follow the variable for both.
        address = os.environ.get("RAY_ADDRESS") or address
    address = shared_address(address)
    if address not in (None, "auto", "local"):
        _check_reachable(address)
    try:
        _initialize(address)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"ray address {address or 'auto'!r} cannot be used: {reason} (if the cluster wants a "
            f"token, set RAY_AUTH_MODE=token)"
        ) from None
    return True


class RaySession(NamedTuple):
    """A connection of this process to Ray: no two have the same job on the same node.

    Args:
        job: Ray's name of what runs by this connection.
        node: Ray's name of this host, another one in each cluster.
    """

    job: str
    node: str


def current_session() -> RaySession | None:
    """The connection that this process has; None without one: Ray's calls would make one."""
    import ray

    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return RaySession(context.get_job_id(), context.get_node_id())


class RayUsers:
    """Who of this process needs a connection to Ray that one of them has made.

    Several trainers may train side by side; the last to go disconnects.
    """

    def __init__(self) -> None:
        self._count = 0
        self._session: RaySession | None = None
        self._lock = threading.Lock()

    def join(self, options: RayOptions) -> RaySession | None:
        """Connect to a Ray cluster, or use the connection that there is.

        Args:
            options: which cluster.

        Returns:
            What to `leave`; None where somebody else has connected.

        Raises:
            InputError: as `connect_to_ray` does.
        """
        with self._lock:
            if connect_to_ray(options):
                self._count, self._session = 0, current_session()
            if self._session is None or current_session() != self._session:
                return None
            self._count += 1
            return self._session

    def leave(self, session: RaySession) -> None:
        """Disconnect, where nobody else needs the connection.

        Args:
            session: what was joined; whoever uses Ray too may have closed it, and made another one.
        """
        import ray

        with self._lock:
            if session != self._session:
                return
            self._count -= 1
            if not self._count:
                self._session = None
                if current_session() in (session, None):
                    ray.shutdown()
                    _dismiss_guards()


RAY_USERS = RayUsers()
"""Those of this process."""


_GUARDS: list[Guard] = []
"""What guards the cluster that this process has started: one, or none."""


def _dismiss_guards() -> None:
    while _GUARDS:
        _GUARDS.pop().dismiss()


def _initialize(address: str | None) -> None:
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    with warnings.catch_warnings():
        # Ray starts its processes by fork and exec at once, which JAX's threads do not mind.
        warnings.filterwarnings("ignore", message=r".*fork\(\)")
        if address not in (None, "local"):
            ray.init(address=address, **quiet)
            return
        if address is None:
            try:
                ray.init(address="auto", **quiet)
                return
            except ConnectionError:  # None is running here.
                pass
        # Ray gives way to every other process, which a stage of a pipeline must not.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Whoever has connected by itself has only disconnected.
        _dismiss_guards()
        with ending_with_this_process(Path(ray.__file__).parent) as guard:
            _GUARDS.append(guard)
            ray.init(address="local", include_dashboard=False, **quiet)


def _check_connected_to(address: str) -> None:
    """Check that an address is that of the cluster to which this process is connected."""
    import ray

    connected = ray.get_runtime_context().gcs_address
    (host, port), (there, known) = _place_of(address), _place_of(connected)
    hosts = _addresses_of(host)
    if hosts & _addresses_of("localhost"):
        hosts.add(ray.util.get_node_ip_address())
    if port != known or hosts.isdisjoint(_addresses_of(there)):
        raise InputError(
            f"ray address is {address!r}, and this process is connected to {connected!r}; give "
            f"that, or None, or disconnect before by ray.shutdown()"
        )


def _addresses_of(host: str) -> set[str]:
    """What a host's name stands for; nothing where it is not known."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def _place_of(address: str) -> tuple[str, int]:
    """The host and the port of an address."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:/\s]+):(\d{1,5})", address)
    if match is None or not 0 < int(match[2]) < 2**16:
        raise InputError(f"ray address {address!r} is not 'host:port', 'auto' or 'local'")
    return match[1].strip("[]"), int(match[2])


def _check_reachable(address: str) -> None:
    """Check that an address is one where a gRPC server answers: Ray would wait for it for ever."""
    place = _place_of(address)
    try:
        with socket.create_connection(place, timeout=_PROBE_SECONDS / 2) as connection:
            connection.settimeout(_PROBE_SECONDS / 2)
            connection.sendall(_HTTP2_GREETING)
            answer = connection.recv(9)
    except OSError as error:
        raise InputError(f"ray address {address!r} does not answer: {error}") from None
    if len(answer) < 4 or answer[3] != _HTTP2_SETTINGS:
        raise InputError(f"ray address {address!r} is answered by something that is not Ray")


def worker_resources(subcluster: Subcluster, devices: int) -> dict[str, float]:
    """What a worker asks of Ray: its devices, where Ray counts them.

    Args:
        subcluster: where it runs.
        devices: how many devices it holds.

    Returns:
        Amounts by Ray's names.

    Example:
        >>> from hetjax.mesh import KINDS, Link
        >>> link = Link(bandwidth=1e9, latency=1e-5)
        >>> old = Subcluster("old", KINDS["V100"], 1, 4, link, link, "accelerator_type:V100")
        >>> worker_resources(old, 4)
        {'GPU': 4, 'accelerator_type:V100': 0.001}
    """
    counted = {"gpu": "GPU", "tpu": "TPU"}.get(subcluster.kind.platform)
    wanted: dict[str, float] = {} if counted is None else {counted: devices}
    mark = subcluster.ray_resource
    if mark is not None:
        wanted[mark] = 0.001 if mark.startswith(_WHERE_RESOURCES) else devices
    return wanted


def worker_options(subcluster: Subcluster, devices: int) -> dict[str, Any]:
    """The options of a worker's actor.

    Args:
        subcluster: where it runs.
        devices: how many devices it holds.

    Returns:
        What `ray.actor.ActorClass.options` takes.
    """
    resources = worker_resources(subcluster, devices)
    gpus = resources.pop("GPU", 0)
    variables = {"JAX_PLATFORMS": ""}
    if subcluster.kind.is_processor:
        variables = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": _flags(os.environ.get("XLA_FLAGS", ""), devices),
            "GLIBC_TUNABLES": KEPT_MEMORY,
        }
    return {
        "num_cpus": 0,
        "num_gpus": gpus,
        "resources": resources,
        "runtime_env": {"env_vars": variables},
    }


def _flags(flags: str, devices: int) -> str:
    """XLA's flags of a worker: those of the driver, but for the number of host devices."""
    own = [each for each in flags.split() if not each.startswith(HOST_DEVICES)]
    return " ".join([*own, f"{HOST_DEVICES}={devices}"])


def check_resources(workers: Sequence[tuple[str, Mapping[str, float]]]) -> None:
    """Check that the connected Ray cluster has what workers ask of it, whether free now or not.

    Args:
        workers: for each worker the name of its subcluster, and what it asks.

    Raises:
        InputError: naming the subclusters, the resource, how much is wanted and how much there is.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for resource in dict.fromkeys(name for _, wanted in workers for name in wanted):
        asked = {i: wanted[resource] for i, (_, wanted) in enumerate(workers) if resource in wanted}
        names = ", ".join(dict.fromkeys(repr(workers[i][0]) for i in asked))
        offered = [node.get(resource, 0) for node in nodes]
        if sum(asked.values()) > sum(offered):
            raise InputError(
                f"subcluster {names}: the plan wants {sum(asked.values()):g} of the Ray resource "
                f"{resource!r}, and the Ray cluster has {sum(offered):g}"
            )
        if max(asked.values()) > max(offered):
            raise InputError(
                f"subcluster {names}: a worker wants {max(asked.values()):g} of the Ray resource "
                f"{resource!r} on its node, and no node of the Ray cluster has more than "
                f"{max(offered):g}"
            )
