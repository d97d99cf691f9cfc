"""Measuring runs of layers on a Ray cluster: workers of every kind at once, one a node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from hetjax.errors import InputError, WorkerLostError
from hetjax.mesh.cluster import Cluster
from hetjax.mesh.subcluster import Subcluster
from hetjax.planner.profiler.measurement import ROUNDS, Measured, Measurement, Request
from hetjax.planner.profiler.profiler import Wanted
from hetjax.runtime.local.profiling import StageMeasurer
from hetjax.runtime.ray.ray_cluster import check_resources, worker_options, worker_resources
from hetjax.runtime.ray.ray_devices import given_devices
from hetjax.runtime.ray.ray_worker import computation_settings
from hetjax.runtime.workers.waiting import tell_of_late

START_SECONDS = 120.0
"""How long a worker may take to start and to trace the program."""

MEASURE_SECONDS = 600.0
"""How long one measurement may take, compilation and all."""


class ProfilingWorker:
    """Measures on one node; runs in an actor of its own.

    Args:
        subcluster: where the node is.
    """

    def __init__(self, subcluster: Subcluster):
        self._subcluster = subcluster

    def prepare(self, settings: Mapping[str, Any], measured: Measured) -> int:
        """Take over the driver's JAX settings and trace the program.

        Args:
            settings: what `computation_settings` returned in the driver.
            measured: the program.

        Returns:
            How many devices there are.

        Raises:
            InputError: they are fewer than a node of the subcluster has, or of another kind.
        """
        for name, value in settings.items():
            jax.config.update(name, value)
        name = f"the profiling worker on {self._subcluster.name}"
        devices = given_devices(
            self._subcluster, self._subcluster.devices_per_node, name, lambda _: name
        )
        self._measurer = StageMeasurer(measured, devices)
        return len(devices)

    def measure(self, request: Request) -> Measurement:
        """Make one measurement."""
        return self._measurer.measure(request)


def measure_on_ray(
    cluster: Cluster, measured: Measured, wanted: Sequence[Wanted]
) -> Iterator[tuple[Wanted, Measurement]]:
    """Measure on the Ray cluster that this process is connected to.

    Every node of a subcluster has a worker, and all of them measure at once, in `ROUNDS`. Nothing
    else should run there meanwhile.

    Args:
        cluster: the cluster, whose subclusters Ray has.
        measured: the program.
        wanted: what to measure.

    Yields:
        What was measured, as it comes: of each, a measurement in every round.

    Raises:
        InputError: the Ray cluster lacks the devices.
        WorkerLostError: a worker died or took too long.
    """
    queues: dict[str, list[Wanted]] = defaultdict(list)
    # The longest first, so that no worker is left with one of them at the end.
    for each in sorted(wanted, key=lambda each: each.request.layers[0] - each.request.layers[1]):
        queues[each.way.subcluster].append(each)
    with _workers(cluster, queues) as workers:
        yield from _measure(workers, measured, _shares(workers, queues))


def _shares(
    workers: Mapping[Any, str], queues: Mapping[str, Sequence[Wanted]]
) -> dict[Any, list[Wanted]]:
    """What each worker measures, in order: its share of its subcluster's, again in every round."""
    shares = {}
    for name, queue in queues.items():
        alike = [actor for actor, of in workers.items() if of == name]
        for place, actor in enumerate(alike):
            shares[actor] = ROUNDS * list(queue[place :: len(alike)])
    return shares


@contextmanager
def _workers(cluster: Cluster, queues: Mapping[str, Sequence[Wanted]]) -> Iterator[dict[Any, str]]:
    """A worker on every node that has something to measure, with its subcluster."""
    import ray

    actor_class = ray.remote(ProfilingWorker)
    workers: dict[Any, str] = {}
    places = [
        (subcluster, subcluster.devices_per_node)
        for subcluster in cluster.subclusters
        for _ in range(min(subcluster.nodes, len(queues.get(subcluster.name, ()))))
    ]
    check_resources(
        [(subcluster.name, worker_resources(subcluster, count)) for subcluster, count in places]
    )
    try:
        for subcluster, count in places:
            actor = actor_class.options(**worker_options(subcluster, count)).remote(subcluster)
            workers[actor] = subcluster.name
        yield workers
    finally:
        for actor in workers:
            ray.kill(actor)


def _measure(
    workers: Mapping[Any, str], measured: Measured, shares: Mapping[Any, list[Wanted]]
) -> Iterator[tuple[Wanted, Measurement]]:
    import ray

    reference = ray.put(measured)
    settings = computation_settings()
    started = {actor: actor.prepare.remote(settings, reference) for actor in workers}
    names = [f"{name} ({place})" for place, name in enumerate(workers.values(), start=1)]
    late = dict(zip(names, started.values(), strict=True))
    tell_of_late(late, "to start a process that measures", START_SECONDS)
    for actor, name in workers.items():
        _result(started[actor], name, START_SECONDS)
    running: dict[Any, tuple[Any, Wanted]] = {}

    def give(actor: Any) -> None:
        if shares[actor]:
            each = shares[actor].pop(0)
            running[actor.measure.remote(each.request)] = actor, each

    for actor in workers:
        give(actor)
    while running:
        done, _ = ray.wait(list(running), timeout=MEASURE_SECONDS)
        if not done:
            names = ", ".join(sorted({workers[actor] for actor, _ in running.values()}))
            raise WorkerLostError(
                f"the profiling worker on {names}", f"it took longer than {MEASURE_SECONDS:g} s"
            )
        for reference in done:
            actor, each = running.pop(reference)
            measurement = _result(reference, workers[actor], MEASURE_SECONDS)
            give(actor)
            yield each, measurement


def _result(reference: Any, name: str, deadline: float) -> Any:
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    worker = f"the profiling worker on {name}"
    try:
        return ray.get(reference, timeout=deadline)
    except GetTimeoutError:
        raise WorkerLostError(worker, f"it took longer than {deadline:g} s") from None
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, InputError):
            raise cause from None
        reason = str(cause or error).strip().splitlines()[-1]
        raise WorkerLostError(worker, reason) from None
