"""The transport between processes: asynchronous pulls by `jax.experimental.transfer`.

The sending worker offers single-device shards; the receiving one asks for those it needs as early
as its instructions allow, and a thread for each route notes when they are there. JAX would wait for
ever for a peer that does not answer; connections and receives here have a deadline.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import Mesh, SingleDeviceSharding

from hetjax.errors import WorkerLostError
from hetjax.runtime.instructions import Route, Tag
from hetjax.runtime.placement import Placement, named
from hetjax.sharding.layout import Bounds, Shard, overlap, shards, wanted, within

CONNECT_SECONDS = 10.0
"""How long a worker may take to accept a connection."""

Peer = tuple[int, int]
"""A worker: its stage, and its process inside the stage."""


def worker_name(peer: Peer) -> str:
    """What a worker is called in messages.

    Example:
        >>> worker_name((1, 0))
        'stage 1, host 0'
    """
    return f"stage {peer[0]}, host {peer[1]}"


@dataclass
class _Pull:
    """A transfer on its way: the shards asked for, and whether they are there."""

    arrays: list[tuple[Peer, list[list[Shard]], list[list[jax.Array]]]]
    awaited: Peer
    done: threading.Event = field(default_factory=threading.Event)
    arrived: float = 0.0
    error: WorkerLostError | None = None


class TransferServerTransport:
    """Moves arrays between worker processes.

    Args:
        placement: shardings of all buffers of all stages.
        peer: this worker.
        mesh: the mesh of its stage.
        devices_per_process: for each stage, how many of its devices each process has.
        tags: every transfer of a training or an evaluation step, the same on all workers.
        host: the address to listen on, the worker's own.
        deadline: seconds after which a transfer that does not come is an error.
    """

    def __init__(
        self,
        placement: Placement,
        peer: Peer,
        mesh: Mesh,
        devices_per_process: Sequence[int],
        tags: Sequence[Tag],
        host: str,
        deadline: float,
    ):
        self._placement, self._peer, self._mesh = placement, peer, mesh
        self._per_process, self._deadline = devices_per_process, deadline
        self._devices = list(mesh.devices.flat)
        self._local = [d for d in self._devices if d.process_index == jax.process_index()]
        self._processes = [
            stage.submesh.num_devices // count
            for stage, count in zip(placement.plan.stages, devices_per_process, strict=True)
        ]
        self._numbers = {tag: number for number, tag in enumerate(sorted(set(tags)))}
        client = self._local[0].client
        self._server = transfer.start_transfer_server(client, f"{host}:0", [f"{host}:0"])
        self._connections: dict[Peer, Any] = {}
        self._pulls: dict[tuple[int, Tag], _Pull] = {}
        self._arrivals: dict[tuple[int, Tag], float] = {}
        self._watchers: dict[Route, queue.SimpleQueue[_Pull | None]] = {}
        self._layouts: dict[tuple[Tag, int], list[tuple[Shard, ...]]] = {}

    @property
    def address(self) -> str:
        """Where other workers reach this one."""
        return self._server.address()

    def connect(self, addresses: Mapping[Peer, str]) -> None:
        """Connect to the workers that this one receives from.

        Args:
            addresses: the address of every worker.

        Raises:
            WorkerLostError: a worker cannot be reached.
        """
        stage = self._peer[0]
        sources = {tag.route.source for tag in self._numbers if tag.route.target == stage}
        for peer, address in addresses.items():
            if peer[0] in sources:
                _check_reachable(peer, address)
                self._connections[peer] = self._server.connect(address)

    def _sides(self, tag: Tag) -> tuple[list[tuple[Shard, ...]], list[tuple[Shard, ...]]]:
        return self._layout(tag, tag.route.source), self._layout(tag, tag.route.target)

    def _layout(self, tag: Tag, stage: int) -> list[tuple[Shard, ...]]:
        if (tag, stage) not in self._layouts:
            shapes = self._placement.route_shapes(tag.route, tag.microbatch)
            specs = self._placement.route_specs(tag.route, tag.microbatch, stage)
            mesh_shape = self._placement.plan.stages[stage].mesh_shape
            self._layouts[tag, stage] = [
                shards(shape.shape, spec, mesh_shape, self._per_process[stage])
                for shape, spec in zip(shapes, specs, strict=True)
            ]
        return self._layouts[tag, stage]

    def _uuid(self, step: int, tag: Tag, source: int, target: int) -> int:
        width = max(self._processes)
        number = self._numbers[tag] * width * width + source * width + target
        return (step * len(self._numbers)) * width * width + number

    def send(self, step: int, tag: Tag, arrays: Sequence[jax.Array]) -> None:
        """Offer the shards that each receiving process needs of this one."""
        sources, targets = self._sides(tag)
        held = [{s.device: s.data for s in array.addressable_shards} for array in arrays]
        by_place = {device: place for place, device in enumerate(self._devices)}
        held = [{by_place[device]: data for device, data in parts.items()} for parts in held]
        for process in range(self._processes[tag.route.target]):
            offered = [
                parts[shard.device]
                for parts, source, target in zip(held, sources, targets, strict=True)
                for shard in wanted(source, target, process)
                if shard.process == self._peer[1]
            ]
            if offered:
                uuid = self._uuid(step, tag, self._peer[1], process)
                self._server.await_pull(uuid, offered)

    def expect(self, step: int, tag: Tag) -> None:
        """Ask for the shards of a transfer; they come while the worker computes."""
        sources, targets = self._sides(tag)
        shapes = self._placement.route_shapes(tag.route, tag.microbatch)
        process = self._peer[1]
        needed = [wanted(s, t, process) for s, t in zip(sources, targets, strict=True)]
        arrays = []
        for sender in range(self._processes[tag.route.source]):
            groups = [[shard for shard in group if shard.process == sender] for group in needed]
            specs = [
                [
                    jax.ShapeDtypeStruct(
                        tuple(stop - start for start, stop in shard.bounds),
                        shape.dtype,
                        sharding=SingleDeviceSharding(self._landing(shard.bounds, target)),
                    )
                    for shard in group
                ]
                for group, shape, target in zip(groups, shapes, targets, strict=True)
            ]
            flat = [spec for group in specs for spec in group]
            if flat:
                peer = (tag.route.source, sender)
                uuid = self._uuid(step, tag, sender, process)
                pulled = iter(self._connections[peer].pull(uuid, flat))
                arrays.append((peer, groups, [[next(pulled) for _ in group] for group in specs]))
        pull = _Pull(arrays, awaited=(tag.route.source, 0))
        self._pulls[step, tag] = pull
        self._watcher(tag.route).put(pull)

    def _landing(self, bounds: Bounds, target: Sequence[Shard]) -> Any:
        """The device that a pulled shard lands on: one that wants just this part, if any does."""
        for shard in target:
            if shard.process == self._peer[1] and shard.bounds == bounds:
                return self._devices[shard.device]
        return self._local[0]

    def _watcher(self, route: Route) -> queue.SimpleQueue[_Pull | None]:
        if route not in self._watchers:
            pulls: queue.SimpleQueue[_Pull | None] = queue.SimpleQueue()
            self._watchers[route] = pulls
            name = f"watch {route.kind} of stage {route.source}"
            threading.Thread(target=_watch, args=(pulls,), name=name, daemon=True).start()
        return self._watchers[route]

    def ready(self, step: int, tag: Tag) -> bool:
        """Whether the shards of a transfer are there, or will never be."""
        return self._pulls[step, tag].done.is_set()

    def receive(self, step: int, tag: Tag) -> list[jax.Array]:
        """Wait for the shards of a transfer and put them together."""
        pull = self._pulls[step, tag]
        if not pull.done.wait(self._deadline):
            raise WorkerLostError(
                worker_name(pull.awaited),
                f"its {tag.route.kind} did not come within {self._deadline:g} s",
            )
        del self._pulls[step, tag]
        if pull.error is not None:
            raise pull.error
        self._arrivals[step, tag] = pull.arrived
        _, targets = self._sides(tag)
        shapes = self._placement.route_shapes(tag.route, tag.microbatch)
        specs = self._placement.route_specs(tag.route, tag.microbatch, self._peer[0])
        shardings = named(self._mesh, specs)
        return [
            self._assemble(i, shape, sharding, target, pull)
            for i, (shape, sharding, target) in enumerate(
                zip(shapes, shardings, targets, strict=True)
            )
        ]

    def _assemble(
        self, place: int, shape: Any, sharding: Any, target: Sequence[Shard], pull: _Pull
    ) -> jax.Array:
        pieces = {
            shard.bounds: array
            for _, groups, arrays in pull.arrays
            for shard, array in zip(groups[place], arrays[place], strict=True)
        }
        parts = [
            jax.device_put(_part(shard.bounds, pieces, shape.dtype), self._devices[shard.device])
            for shard in target
            if shard.process == self._peer[1]
        ]
        return jax.make_array_from_single_device_arrays(shape.shape, sharding, parts)

    def arrival(self, step: int, tag: Tag) -> float:
        """When a transfer that was received was there, in seconds of `time.time`."""
        return self._arrivals.pop((step, tag))

    def close(self) -> None:
        """End the watching threads."""
        for pulls in self._watchers.values():
            pulls.put(None)
        self._pulls.clear()


def _check_reachable(peer: Peer, address: str) -> None:
    """Check that there is a server: JAX connects later, and waits for ever if there is none."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise WorkerLostError(worker_name(peer), f"no connection to {address}: {error}") from None


def _watch(pulls: queue.SimpleQueue[_Pull | None]) -> None:
    while (pull := pulls.get()) is not None:
        for peer, _, arrays in pull.arrays:
            pull.awaited = peer
            try:
                jax.block_until_ready(arrays)
            except Exception as error:  # Whatever it is, the receiver must hear of it.
                reason = str(error).partition("\n")[0]
                pull.error = WorkerLostError(worker_name(peer), reason)
                break
        pull.arrived = time.time()
        pull.done.set()


def _part(bounds: Bounds, pieces: Mapping[Bounds, jax.Array], dtype: Any) -> Any:
    """One shard, from the pieces that it overlaps."""
    if bounds in pieces:
        return pieces[bounds]
    for around, array in pieces.items():
        if overlap(bounds, around) == bounds:
            return array[within(bounds, around)]
    whole = np.empty([stop - start for start, stop in bounds], dtype)
    for around, array in pieces.items():
        common = overlap(bounds, around)
        if common is not None:
            whole[within(common, bounds)] = np.asarray(array)[within(common, around)]
    return whole
