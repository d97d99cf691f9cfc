"""The Ray executor: one actor a host of a submesh, and a driver that only starts and listens."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import PyTree

from hetjax.errors import InputError, WorkerLostError
from hetjax.mesh.cluster import Subcluster
from hetjax.pipeline.stages import ParameterPart
from hetjax.planner.plan import StagePlan
from hetjax.runtime.job import Job
from hetjax.runtime.placement import Placement
from hetjax.runtime.ray_worker import HostWorker
from hetjax.runtime.transfer_server import Peer, worker_name

PING_SECONDS = 2.0
SILENCE_SECONDS = 10.0
"""A worker whose process does not answer for so long is lost."""

START_SECONDS = 120.0
"""How long a worker's process may take to start."""


@dataclass(frozen=True)
class RayOptions:
    """How to use Ray.

    Args:
        address: ``"host:port"`` of a running cluster, or ``"auto"``; None for one that is running
            here if there is one, else a new one.
        cores: for each stage, the CPU core that its workers stay on; empty for no pinning.

    Example:
        >>> RayOptions(cores=(0, 1)).address is None
        True
    """

    address: str | None = None
    cores: tuple[int, ...] = ()


def connect_to_ray(options: RayOptions) -> None:
    """Connect to a Ray cluster, or start one.

    Args:
        options: which one.

    Raises:
        InputError: nothing answers at the address.
    """
    import ray

    if ray.is_initialized():
        return
    address = options.address or os.environ.get("RAY_ADDRESS")
    if address and address not in ("auto", "local"):
        _check_reachable(address)
    try:
        with warnings.catch_warnings():
            # Ray starts its processes by fork and exec at once, which JAX's threads do not mind.
            warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
            ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"ray address {address!r} cannot be used: {error}") from None


def _check_reachable(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"ray address {address!r} is not host:port or 'auto'")
    try:
        socket.create_connection((host, int(port)), timeout=1.5).close()
    except OSError as error:
        raise InputError(f"ray address {address!r} does not answer: {error}") from None


class RayExecutor:
    """Runs every stage of a pipeline in processes of their own, on a Ray cluster.

    Args:
        job: the job.
        placement: its programs and shardings.
        options: how to use Ray.

    Raises:
        InputError: the cluster cannot be reached, or lacks the devices.
        WorkerLostError: a worker died while it was set up.
    """

    def __init__(self, job: Job, placement: Placement, options: RayOptions):
        connect_to_ray(options)
        self._job, self._placement = job, placement
        self._actors: dict[Peer, Any] = {}
        self._pings: dict[Peer, tuple[Any, float]] = {}
        self._call = 0
        stages = job.pipeline_plan.stages
        self._hosts = [_hosts(stage) for stage in stages]
        try:
            self._create(stages, options)
            self._wait_created()
            self._join_worlds()
            per_process = [
                stage.submesh.num_devices // hosts
                for stage, hosts in zip(stages, self._hosts, strict=True)
            ]
            import ray

            reference = ray.put(job)
            addresses = self._all(lambda actor: actor.build.remote(reference, per_process))
            self._all(lambda actor: actor.connect.remote(addresses))
        except BaseException:
            self.close()
            raise

    def _create(self, stages: Sequence[StagePlan], options: RayOptions) -> None:
        import ray

        actor_class = ray.remote(HostWorker)
        for stage, (plan, hosts) in enumerate(zip(stages, self._hosts, strict=True)):
            subcluster = self._job.plan.cluster.subcluster(plan.submesh.subcluster)
            core = options.cores[stage] if options.cores else None
            for host in range(hosts):
                devices = plan.submesh.num_devices // hosts
                actor = actor_class.options(
                    **_resources(subcluster, devices),
                    max_concurrency=4,
                    runtime_env={"env_vars": _environment(subcluster, devices)},
                )
                self._actors[stage, host] = actor.remote((stage, host), core)

    def _wait_created(self) -> None:
        """Wait until every worker's process runs; from then on silence means loss.

        Raises:
            WorkerLostError: a process does not come up, as where the cluster lacks its devices.
        """
        import ray

        pings = {peer: actor.ping.remote() for peer, actor in self._actors.items()}
        ready, _ = ray.wait(list(pings.values()), num_returns=len(pings), timeout=START_SECONDS)
        for peer, reference in pings.items():
            if reference not in ready:
                raise WorkerLostError(
                    worker_name(peer),
                    f"it did not start within {START_SECONDS:g} s; has the Ray cluster its devices?",
                )
        self._wait(pings)

    def _join_worlds(self) -> None:
        """Make one `jax.distributed` world of each submesh that spans hosts."""
        import ray

        calls = {}
        for stage, hosts in enumerate(self._hosts):
            if hosts > 1:
                address, port = ray.get(self._actors[stage, 0].host.remote(), timeout=60)
                for host in range(hosts):
                    actor = self._actors[stage, host]
                    calls[stage, host] = actor.join_world.remote(f"{address}:{port}", hosts)
        self._wait(calls)

    def start(self) -> None:
        """Make the initial state on every stage."""
        self._all(lambda actor: actor.start.remote())

    def train_step(self, step: int, batch: PyTree | None = None, *, timed: bool = False) -> list:
        """Run one step on all stages: one call to each worker.

        Returns:
            The report of each stage's first host.
        """
        self._call += 1
        call = self._call
        reports = self._all(lambda actor: actor.train_step.remote(call, step, batch, timed))
        return [reports[stage, 0] for stage in range(len(self._hosts))]

    def num_held_out(self) -> int:
        """How many held-out batches there are."""
        return self._all_of([(0, 0)], lambda actor: actor.num_held_out.remote())[0, 0]

    def evaluate(self, index: int) -> tuple[float, float]:
        """The summed loss of a held-out batch, and the count."""
        self._call += 1
        call = self._call
        results = self._all(lambda actor: actor.evaluate.remote(call, index))
        return results[len(self._hosts) - 1, 0]

    def save(self, folder: str) -> None:
        """Start saving the state into a folder."""
        self._all(lambda actor: actor.save.remote(folder))

    def wait_saved(self) -> list[Any]:
        """Finish saving; what each stage's first host wrote."""
        records = self._all(lambda actor: actor.wait_saved.remote())
        return [records[stage, 0] for stage in range(len(self._hosts))]

    def load(self, folder: str) -> None:
        """Take over the state of a checkpoint."""
        self._all(lambda actor: actor.load.remote(folder))

    def parameters(self) -> list[tuple[ParameterPart, Any]]:
        """Every parameter part, as a NumPy array."""
        first = [(stage, 0) for stage in range(len(self._hosts))]
        held = self._all_of(first, lambda actor: actor.parameters.remote())
        return [
            (part, array)
            for stage in self._placement.pipeline.stages
            for part, array in zip(stage.parameters, held[stage.index, 0], strict=True)
        ]

    def close(self) -> None:
        """End all workers."""
        import ray

        for actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}

    def _all(self, call: Callable[[Any], Any]) -> dict[Peer, Any]:
        return self._all_of(list(self._actors), call)

    def _all_of(self, peers: Sequence[Peer], call: Callable[[Any], Any]) -> dict[Peer, Any]:
        return self._wait({peer: call(self._actors[peer]) for peer in peers})

    def _wait(self, calls: Mapping[Peer, Any]) -> dict[Peer, Any]:
        """Wait for calls, watching that every worker lives.

        Raises:
            WorkerLostError: a worker died or does not answer; all others are ended too.
        """
        import ray

        pending = {reference: peer for peer, reference in calls.items()}
        try:
            while pending:
                ready, _ = ray.wait(list(pending), timeout=PING_SECONDS)
                for reference in ready:
                    ray.get(reference)
                    del pending[reference]
                if pending and not ready:
                    self._check_alive()
            return {peer: ray.get(reference) for peer, reference in calls.items()}
        except (ray.exceptions.RayError, WorkerLostError) as error:
            lost = self._find_lost(error)
            self.close()
            raise lost from None

    def _check_alive(self) -> None:
        """Ask every worker for a sign of life, and look at the answers to the last question."""
        import ray

        now = time.monotonic()
        for peer, actor in self._actors.items():
            reference, asked = self._pings.get(peer, (None, now))
            if reference is not None and not ray.wait([reference], timeout=0)[0]:
                if now - asked > SILENCE_SECONDS:
                    raise WorkerLostError(
                        worker_name(peer), f"it has not answered for {SILENCE_SECONDS:g} s"
                    )
                continue
            if reference is not None:
                ray.get(reference)
            self._pings[peer] = (actor.ping.remote(), now)

    def _find_lost(self, error: Exception) -> Exception:
        """Which worker is to blame: one that is dead before one that saw another's death."""
        import ray

        if isinstance(error, WorkerLostError):
            return error
        pings = {peer: actor.ping.remote() for peer, actor in self._actors.items()}
        for peer, reference in pings.items():
            try:
                ray.get(reference, timeout=SILENCE_SECONDS / 2)
            except ray.exceptions.RayActorError:
                return WorkerLostError(worker_name(peer), "its process has died")
            except ray.exceptions.GetTimeoutError:
                return WorkerLostError(worker_name(peer), "it does not answer")
        cause = getattr(error, "cause", None)
        return cause if isinstance(cause, InputError | WorkerLostError) else error


def _hosts(stage: StagePlan) -> int:
    """How many hosts a stage's submesh spans."""
    return stage.submesh.shape[0]


def _resources(subcluster: Subcluster, devices: int) -> dict[str, Any]:
    """What a worker asks of Ray: its devices, where Ray counts them."""
    if subcluster.ray_resource:
        return {"num_cpus": 0, "resources": {subcluster.ray_resource: devices}}
    if subcluster.kind.platform == "gpu":
        return {"num_cpus": 0, "num_gpus": devices}
    if subcluster.kind.platform == "tpu":
        return {"num_cpus": 0, "resources": {"TPU": devices}}
    return {"num_cpus": 0}


def _environment(subcluster: Subcluster, devices: int) -> dict[str, str]:
    if subcluster.kind.platform != "cpu":
        return {}
    flags = f"--xla_force_host_platform_device_count={devices}"
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
