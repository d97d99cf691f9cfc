"""Workers' transports between processes, all of them in one process, with each of the carriers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from random_moves import Move, MovePlacement, member_meshes
from ray_jobs import BATCH, OPTIMIZER, Tokens, loss, make_cluster, make_plan, parameters

from hetjax.runtime.instructions.instruction import Tag
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.moves.carriers import BETWEEN_PROCESSES, CarrierName, Delivery
from hetjax.runtime.moves.host_carrier import Bytes, HostCarrier
from hetjax.runtime.moves.peers import Peer, Processes, names_of
from hetjax.runtime.moves.process_transport import ProcessTransport
from hetjax.runtime.moves.stream_carrier import StreamCarrier
from hetjax.runtime.moves.wire_carrier import WireCarrier
from hetjax.runtime.workers.job import Job, build, transfers
from hetjax.sharding.annotation.rules import MESH_AXES

HOST, SECRET = "127.0.0.1", b"of the tests"
PROCESSES = [[(0, 1)], [(2,)]]
DEVICES = {0: jax.devices()[:2], 1: jax.devices()[2:3]}


def mesh_of(stage: int) -> Mesh:
    """The mesh of a stage of the job in `ray_jobs`."""
    return Mesh(np.array(DEVICES[stage]).reshape(-1, 1), MESH_AXES)


def job_placement() -> Placement:
    """The placement of the job in `ray_jobs`."""
    batch = jax.eval_shape(lambda: Tokens().batch(0, BATCH))
    return build(Job(loss, parameters, batch, OPTIMIZER, make_plan(cluster=make_cluster(1))))


@dataclass
class Ends:
    """The transports of several workers, and what carries their pieces.

    Args:
        placement: annotations of all buffers.
        processes: the devices of every process.
        tags: the transfers.
        names: the carriers.
        deadline: in seconds.
        secret: by which the wire names what it carries.
    """

    placement: Any
    processes: Processes
    tags: Sequence[Tag]
    names: Sequence[CarrierName] = BETWEEN_PROCESSES
    deadline: float = 20.0
    secret: bytes = SECRET
    wires: dict[Peer, WireCarrier] = field(default_factory=dict)
    streams: dict[Peer, StreamCarrier] = field(default_factory=dict)
    hosts: dict[Peer, HostCarrier] = field(default_factory=dict)
    transports: dict[Peer, ProcessTransport] = field(default_factory=dict)

    def add(self, peer: Peer, mesh: Mesh) -> ProcessTransport:
        """Make the transport of a worker."""
        made: dict[CarrierName, Any] = {}
        called = names_of(self.placement.plan)
        if CarrierName.STREAM in self.names:
            stream = StreamCarrier(peer, called, self.secret, self.deadline)
            self.streams[peer] = made[CarrierName.STREAM] = stream
        if CarrierName.WIRE in self.names:
            device = mesh.local_devices[0]
            wire = WireCarrier(peer, device, called, self.secret, self.deadline)
            self.wires[peer] = made[CarrierName.WIRE] = wire
        if CarrierName.HOST in self.names:
            self.hosts[peer] = made[CarrierName.HOST] = HostCarrier(self.post)
        self.transports[peer] = ProcessTransport(
            self.placement, peer, {peer[0]: mesh}, self.processes, self.tags, made, self.deadline
        )
        return self.transports[peer]

    def post(self, delivery: Delivery, pieces: Bytes | str) -> None:
        """Bring bytes to their receiver, as Ray does: what it has cannot be written to."""
        if not isinstance(pieces, str):
            pieces = [each.copy() for each in pieces]
            for each in pieces:
                each.flags.writeable = False
        self.hosts[delivery.receiver].take(delivery, pieces)

    def connect(self) -> None:
        """Connect all by what connects."""
        partners = {peer: each.partners for peer, each in self.transports.items()}
        for carriers in (self.wires, self.streams):
            addresses = {peer: each.listen(HOST, partners[peer]) for peer, each in carriers.items()}
            # At the same time, since who connects by a stream waits for its partner to do so.
            with ThreadPoolExecutor(max(1, len(carriers))) as threads:
                calls = [
                    threads.submit(
                        each.connect, {other: addresses[other][peer] for other in partners[peer]}
                    )
                    for peer, each in carriers.items()
                ]
            assert [call.result() for call in calls] == [{}] * len(calls)

    def close(self) -> None:
        """Close all."""
        for each in self.transports.values():
            each.close()


@contextlib.contextmanager
def job_ends(
    placement: Placement, names: Sequence[CarrierName] = BETWEEN_PROCESSES, deadline: float = 1.0
) -> Iterator[Ends]:
    """The connected transports of both stages of the job in `ray_jobs`."""
    ends = Ends(placement, PROCESSES, transfers(placement), names, deadline)
    with contextlib.closing(ends):
        for stage in DEVICES:
            ends.add((stage, 0), mesh_of(stage))
        ends.connect()
        yield ends


@contextlib.contextmanager
def move_ends(
    move: Move, dtype: Any, tag: Tag, names: Sequence[CarrierName] = BETWEEN_PROCESSES
) -> Iterator[dict[Peer, ProcessTransport]]:
    """The connected transports of all members of a move of two arrays."""
    ends = Ends(MovePlacement.of(move, dtype, 2), move.members, [tag], names)
    with contextlib.closing(ends):
        for peer, mesh in member_meshes(move).items():
            ends.add(peer, mesh)
        ends.connect()
        yield ends.transports


def sent_arrays(placement: Placement, tag: Tag) -> list[jax.Array]:
    """What a stage of the job in `ray_jobs` has of a transfer."""
    source = tag.route.source
    held, _ = placement.ends(tag)
    rng = np.random.default_rng(abs(hash(tag)) % 2**32)
    return [
        jax.device_put(rng.normal(size=shape.shape).astype(shape.dtype), sharding)
        for shape, sharding in zip(held.shapes, held.on(mesh_of(source)), strict=True)
    ]
