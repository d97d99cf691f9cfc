"""Which devices a command uses: the cluster that is configured, and how this process sees it."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections import Counter

from hetjax.configuration import ClusterSettings, RuntimeSettings
from hetjax.errors import InputError
from hetjax.mesh import Cluster
from hetjax.mesh.device_order import devices_in_order
from hetjax.mesh.host_cpu import HOST_DEVICES
from hetjax.mesh.ray_offers import connected_ray_nodes

_ANSWER_SECONDS = 1.0


def configured_cluster(settings: ClusterSettings, runtime: RuntimeSettings) -> Cluster:
    """The cluster of a file, or the devices that are there.

    Args:
        settings: a cluster file; or that this process's devices or Ray's nodes are to be
            discovered, and whether Ray's are to be measured.
        runtime: where the stages run.

    Returns:
        The cluster.

    Raises:
        InputError: the file cannot be used, what is found is of no known kind, or it is no Ray
            cluster that is to be measured.
        WorkerLostError: a node did not answer while it was measured.
    """
    if settings.file is not None:
        return Cluster.from_file(settings.file)
    if runtime.name == "local":
        if settings.measure:
            raise InputError(
                "cluster.measure is True and runtime.name is 'local'; it measures Ray's nodes: set "
                "runtime.name = 'ray', or leave it out"
            )
        return Cluster.local()
    from hetjax.runtime import RayOptions, measure_cluster
    from hetjax.runtime.ray.ray_executor import connect_to_ray

    connect_to_ray(RayOptions(runtime.ray_address))
    if settings.measure:
        # Not among the results: those of `hetjax.plan --json` are one JSON object.
        return measure_cluster(say=lambda text: print(text, file=sys.stderr))
    return Cluster.from_ray()


def has_changed(planned: Cluster, settings: ClusterSettings, runtime: RuntimeSettings) -> bool:
    """Whether there are other devices than a plan was made for.

    Devices that are found are seldom as fast twice, so their kinds and numbers count alone, and by
    what Ray finds them; of those that were measured, their number and that.

    Args:
        planned: the cluster that it was made for.
        settings: which cluster is configured.
        runtime: where the stages run.

    Raises:
        InputError: as `configured_cluster` does.
    """
    if settings.file is not None:
        # A file that has gone says nothing of the devices.
        return os.path.exists(settings.file) and Cluster.from_file(settings.file) != planned
    now = configured_cluster(settings.model_copy(update={"measure": False}), runtime)
    if settings.measure:
        return now.num_devices != planned.num_devices or not _are_there(planned)
    return _numbers(now) != _numbers(planned)


def _are_there(planned: Cluster) -> bool:
    """Whether the Ray nodes are there that subclusters are addressed by."""
    resources = {
        name for node in connected_ray_nodes() if node["Alive"] for name in node["Resources"]
    }
    return all(each.ray_resource in {None, *resources} for each in planned.subclusters)


def _numbers(cluster: Cluster) -> Counter[tuple[str, int, int, str | None]]:
    """How many devices of each kind there are, and where Ray finds them, in any order."""
    return Counter(
        (each.kind.name, each.nodes, each.devices_per_node, each.ray_resource)
        for each in cluster.subclusters
    )


def check_ray_address(runtime: RuntimeSettings) -> None:
    """Check in a second whether something answers where Ray should be.

    Args:
        runtime: where the stages run.

    Raises:
        InputError: the address is malformed, or nothing answers there.
    """
    address = runtime.ray_address or os.environ.get("RAY_ADDRESS")
    if runtime.name != "ray" or address in (None, "", "auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(
            f"runtime.ray_address is {address!r}; it must be 'auto', 'local' or host:port"
        )
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise InputError(
            f"runtime.ray_address is {address!r}; nothing answers there: {error.strerror or error}"
        ) from None


def use_devices(cluster: Cluster, runtime: RuntimeSettings, *, play: bool = False) -> None:
    """Make this process see the devices that it will use, where JAX has not started yet.

    Host CPU devices have to be asked for before JAX starts. A process that only drives Ray workers
    stays on the CPU: an accelerator is its worker's alone.

    Args:
        cluster: the cluster of the plan.
        runtime: where the stages run.
        play: whether the cluster is played, on host CPU devices whatever its own are.
    """
    import jax

    is_host = play or all(each.kind.is_processor for each in cluster.subclusters)
    if is_host and runtime.name == "local":
        # XLA has a thread for each of them. Stages whose collectives meet in one process need more
        # threads than they have devices, or they wait for one another.
        count = 2 * cluster.num_devices
        os.environ["XLA_FLAGS"] = host_device_flags(os.environ.get("XLA_FLAGS", ""), count)
    chosen = jax.config.values.get("jax_platforms")
    if (is_host or runtime.name == "ray") and not chosen:
        jax.config.update("jax_platforms", "cpu")


def check_devices(cluster: Cluster, runtime: RuntimeSettings, *, play: bool = False) -> None:
    """Check that this process has the devices that a run in it will use.

    Args:
        cluster: the cluster of the plan.
        runtime: where the stages run; on Ray its workers have them.
        play: whether the cluster is played.

    Raises:
        InputError: there are fewer devices than the cluster has, or they are of other kinds.
    """
    if runtime.name != "local":
        return
    use_devices(cluster, runtime, play=play)
    import jax

    devices_in_order(cluster, jax.devices())


def host_device_flags(flags: str, num_devices: int) -> str:
    """XLA's flags with as many host CPU devices as are needed, or as many as they had.

    Args:
        flags: the flags so far.
        num_devices: how many devices are needed at least.

    Returns:
        The flags.

    Example:
        >>> host_device_flags("--xla_a=1", 6)
        '--xla_a=1 --xla_force_host_platform_device_count=6'
    """
    pattern = rf"{HOST_DEVICES}=(\d+)"
    found = re.search(pattern, flags)
    if found is None:
        return f"{flags} {HOST_DEVICES}={num_devices}".strip()
    return re.sub(pattern, f"{HOST_DEVICES}={max(num_devices, int(found[1]))}", flags)
