import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from layouts import Layout, array_shapes, layouts
from ray_jobs import BATCH, OPTIMIZER, Tokens, loss, make_cluster, make_plan, parameters

from hetjax.errors import WorkerLostError
from hetjax.runtime.instructions import Tag
from hetjax.runtime.job import Job, build, transfers
from hetjax.runtime.placement import Placement, named
from hetjax.runtime.transfer_server import TransferServerTransport, _part
from hetjax.sharding.layout import Bounds, overlap, wanted
from hetjax.sharding.rules import MESH_AXES

HOST = "127.0.0.1"
DEVICES = {0: jax.devices()[:2], 1: jax.devices()[2:3]}

pairs_of_layouts = array_shapes.flatmap(lambda shape: st.tuples(layouts(shape), layouts(shape)))


def piece(array: np.ndarray, bounds: Bounds) -> np.ndarray:
    return array[tuple(slice(*span) for span in bounds)]


@given(pairs_of_layouts)
def test_every_process_rebuilds_its_shards_from_what_it_pulls(pair: tuple[Layout, Layout]):
    source, target = pair
    whole = np.arange(np.prod(source.shape), dtype=np.float32).reshape(source.shape)
    for process in range(target.num_processes):
        mine = [shard for shard in target.shards() if shard.process == process]
        pulled = wanted(source.shards(), target.shards(), process)
        for shard in pulled:
            assert any(not shard.bounds or overlap(shard.bounds, other.bounds) for other in mine), (
                "it pulls what it has no use for"
            )
        pieces: dict[Bounds, Any] = {s.bounds: piece(whole, s.bounds) for s in pulled}
        assert sum(array.nbytes for array in pieces.values()) <= whole.nbytes
        assert len(pieces) == len(pulled)
        for shard in mine:
            rebuilt = _part(shard.bounds, pieces, whole.dtype)
            np.testing.assert_array_equal(rebuilt, piece(whole, shard.bounds))


@pytest.fixture(scope="module")
def placement() -> Placement:
    batch = jax.eval_shape(lambda: Tokens().batch(0, BATCH))
    return build(Job(loss, parameters, batch, OPTIMIZER, make_plan(cluster=make_cluster(1))))


@pytest.fixture
def ends(placement: Placement) -> Iterator[dict[int, TransferServerTransport]]:
    """The transports of both stages, in one process, with a deadline of a second."""
    tags = transfers(placement.pipeline, placement.plan)
    transports = {
        stage: TransferServerTransport(
            placement, (stage, 0), mesh_of(stage), [2, 1], tags, HOST, deadline=1.0
        )
        for stage in DEVICES
    }
    addresses = {(stage, 0): transport.address for stage, transport in transports.items()}
    for transport in transports.values():
        transport.connect(addresses)
    yield transports
    for transport in transports.values():
        transport.close()


def mesh_of(stage: int) -> Mesh:
    return Mesh(np.array(DEVICES[stage]).reshape(-1, 1), MESH_AXES)


def sent_arrays(placement: Placement, tag: Tag) -> list[jax.Array]:
    source = tag.route.source
    shardings = named(mesh_of(source), placement.route_specs(tag.route, tag.microbatch, source))
    rng = np.random.default_rng(abs(hash(tag)) % 2**32)
    return [
        jax.device_put(rng.normal(size=shape.shape).astype(shape.dtype), sharding)
        for shape, sharding in zip(
            placement.route_shapes(tag.route, tag.microbatch), shardings, strict=True
        )
    ]


def test_every_transfer_of_a_step_arrives_as_its_receiver_wants_it(
    placement: Placement, ends: dict[int, TransferServerTransport]
):
    tags = transfers(placement.pipeline, placement.plan)
    assert {tag.route.kind for tag in tags} >= {"value", "cotangent", "gradient", "message"}
    for step in range(2):
        for tag in tags:
            ends[tag.route.target].expect(step, tag)
        sent = {tag: sent_arrays(placement, tag) for tag in tags}
        for tag in tags:
            ends[tag.route.source].send(step, tag, sent[tag])
        for tag in reversed(tags):
            target = tag.route.target
            specs = placement.route_specs(tag.route, tag.microbatch, target)
            received = ends[target].receive(step, tag)
            assert ends[target].arrival(step, tag) > 0
            for ours, theirs, sharding in zip(
                received, sent[tag], named(mesh_of(target), specs), strict=True
            ):
                np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
                assert ours.sharding == sharding


def test_a_transfer_that_does_not_come_names_the_worker(
    placement: Placement, ends: dict[int, TransferServerTransport]
):
    tag = next(t for t in transfers(placement.pipeline, placement.plan) if t.route.target == 1)
    ends[1].expect(0, tag)
    with pytest.raises(WorkerLostError, match=r"stage 0, host 0 .* did not come within 1 s"):
        ends[1].receive(0, tag)
    ends[0].send(0, tag, sent_arrays(placement, tag))


def test_a_server_that_does_not_answer_names_the_worker(placement: Placement):
    tags = transfers(placement.pipeline, placement.plan)
    transport = TransferServerTransport(placement, (1, 0), mesh_of(1), [2, 1], tags, HOST, 1.0)
    with pytest.raises(WorkerLostError, match=r"stage 0, host 0 is lost: no connection to .*:1: "):
        transport.connect({(0, 0): f"{HOST}:1"})


def listening_addresses() -> set[str]:
    """The local addresses of this process's listening sockets, as the kernel writes them."""
    mine = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.add(fields[1])
    return found


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="it reads Linux's tables")
def test_servers_listen_on_their_own_address_only(ends: dict[int, TransferServerTransport]):
    ports = {int(address.rpartition(":")[2], 16) for address in listening_addresses()}
    assert {int(end.address.rpartition(":")[2]) for end in ends.values()} <= ports
    assert {address.rpartition(":")[0] for address in listening_addresses()} == {"0100007F"}
