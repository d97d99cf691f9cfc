import contextlib
import gc
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cases import examples
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from random_moves import (
    Move,
    MovePlacement,
    check_arrived,
    member_arrays,
    member_meshes,
    moves,
    random_summands,
)
from ray_jobs import BATCH, OPTIMIZER, Tokens, loss, make_cluster, make_plan, parameters

from hetjax.errors import WorkerLostError
from hetjax.runtime.instructions.annotation_table import AnnotatedLeaves
from hetjax.runtime.instructions.buffers import PipelineLoss, ReceivedValue, SentValue
from hetjax.runtime.instructions.instruction import Route, RouteKind, Tag
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.moves.listening import transfer_identifier
from hetjax.runtime.moves.peers import Peer
from hetjax.runtime.moves.transfer_server import TransferServerTransport
from hetjax.runtime.workers.job import Job, build, transfers
from hetjax.sharding import HSharding, Subgroup
from hetjax.sharding.annotation.rules import MESH_AXES

PROCESSES = [[(0, 1)], [(2,)]]
HOST, SECRET = "127.0.0.1", b"of the tests"
DEVICES = {0: jax.devices()[:2], 1: jax.devices()[2:3]}


@pytest.fixture(scope="module", autouse=True)
def no_watcher_is_left() -> Iterator[None]:
    """A thread that waits inside XLA when the interpreter ends would abort the process."""
    yield
    waiting = [each for each in threading.enumerate() if each.name.startswith("watch ")]
    for each in waiting:
        each.join(timeout=5)
    assert not [each.name for each in waiting if each.is_alive()]


@pytest.fixture(scope="module")
def placement() -> Placement:
    batch = jax.eval_shape(lambda: Tokens().batch(0, BATCH))
    return build(Job(loss, parameters, batch, OPTIMIZER, make_plan(cluster=make_cluster(1))))


@pytest.fixture
def ends(placement: Placement) -> Iterator[dict[int, TransferServerTransport]]:
    """The transports of both stages, in one process, with a deadline of a second."""
    tags = transfers(placement)
    transports = {
        stage: TransferServerTransport(
            placement, (stage, 0), mesh_of(stage), PROCESSES, tags, SECRET, deadline=1.0
        )
        for stage in DEVICES
    }
    addresses = {(stage, 0): transport.listen(HOST) for stage, transport in transports.items()}
    for transport in transports.values():
        transport.connect(addresses)
    yield transports
    for transport in transports.values():
        transport.close()


def mesh_of(stage: int) -> Mesh:
    return Mesh(np.array(DEVICES[stage]).reshape(-1, 1), MESH_AXES)


def sent_arrays(placement: Placement, tag: Tag) -> list[jax.Array]:
    source = tag.route.source
    held, _ = placement.ends(tag)
    rng = np.random.default_rng(abs(hash(tag)) % 2**32)
    return [
        jax.device_put(rng.normal(size=shape.shape).astype(shape.dtype), sharding)
        for shape, sharding in zip(held.shapes, held.on(mesh_of(source)), strict=True)
    ]


def test_every_transfer_of_a_step_arrives_as_its_receiver_wants_it(
    placement: Placement, ends: dict[int, TransferServerTransport]
):
    tags = transfers(placement)
    assert {tag.route.kind for tag in tags} >= {
        RouteKind.VALUE,
        RouteKind.COTANGENT,
        RouteKind.GRADIENT,
        RouteKind.MESSAGE,
    }
    for step in range(2):
        for tag in tags:
            ends[tag.route.target].expect(step, tag)
        sent = {tag: sent_arrays(placement, tag) for tag in tags}
        for tag in tags:
            ends[tag.route.source].send(step, tag, sent[tag])
        for tag in reversed(tags):
            target = tag.route.target
            shardings = placement.ends(tag)[1].on(mesh_of(target))
            received = ends[target].receive(step, tag)
            arrival = ends[target].arrival(step, tag)
            assert arrival.at > 0
            assert arrival.num_bytes == sum(array.nbytes for array in sent[tag])
            for ours, theirs, sharding in zip(received, sent[tag], shardings, strict=True):
                np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
                assert ours.sharding.is_equivalent_to(sharding, ours.ndim)


@contextlib.contextmanager
def connected(move: Move, dtype: Any, tag: Tag) -> Iterator[dict[Peer, TransferServerTransport]]:
    """The transports of all members of a move, in one process."""
    placement, meshes = MovePlacement.of(move, dtype, 2), member_meshes(move)
    with contextlib.ExitStack() as ends:
        transports = {
            peer: ends.enter_context(
                contextlib.closing(
                    TransferServerTransport(
                        placement, peer, mesh, move.members, [tag], SECRET, deadline=20.0
                    )
                )
            )
            for peer, mesh in meshes.items()
        }
        addresses = {peer: each.listen(HOST) for peer, each in transports.items()}
        for each in transports.values():
            each.connect(addresses)
        yield transports


@examples(usual=8, full=80)
@given(move=moves(one_process=True), dtype=st.sampled_from([np.int32, np.float32]))
def test_members_of_stages_move_arrays(move: Move, dtype: Any):
    value, held = random_summands(move, dtype)
    tag = Tag(Route(RouteKind.VALUE, *move.stages), 3)
    with connected(move, dtype, tag) as workers:
        receivers = [(move.stages[1], place) for place in range(len(move.target.subgroups))]
        for peer in receivers:
            workers[peer].expect(7, tag)
        for place, array in enumerate(member_arrays(move, held)):
            workers[0, place].send(7, tag, [array, array])
        found = [workers[peer].receive(7, tag) for peer in receivers]
        for each in range(2):
            check_arrived(move, value, [arrays[each] for arrays in found], dtype)


def test_what_a_member_keeps_of_a_move_crosses_no_wire():
    """Rows of two members, of which each wants all: it takes in what it lacks."""
    members = tuple(Subgroup((d,), (("data", 1),), PartitionSpec()) for d in range(2))
    processes = {0: (0, 0), 1: (0, 1)}
    move = Move((8,), HSharding(members, 0, (6, 2)), HSharding(members), processes)
    tag = Tag(Route(RouteKind.VALUE, 0, 0), 0)
    value, held = random_summands(move, np.float32)
    with connected(move, np.float32, tag) as workers:
        for place, array in enumerate(member_arrays(move, held)):
            workers[0, place].expect(0, tag)
            workers[0, place].send(0, tag, [array, array])
        found = [worker.receive(0, tag) for worker in workers.values()]
        taken = [worker.arrival(0, tag).num_bytes for worker in workers.values()]
    assert taken == [2 * 2 * 4, 2 * 6 * 4]
    check_arrived(move, value, [arrays[0] for arrays in found], np.float32)


def test_a_transfer_that_does_not_come_names_the_worker(
    placement: Placement, ends: dict[int, TransferServerTransport]
):
    tag = next(t for t in transfers(placement) if t.route.target == 1)
    ends[1].expect(0, tag)
    with pytest.raises(WorkerLostError, match=r"stage 0, host 0 .* did not come within 1 s"):
        ends[1].receive(0, tag)
    ends[0].send(0, tag, sent_arrays(placement, tag))


def test_a_server_that_does_not_answer_names_the_worker(placement: Placement):
    tags = transfers(placement)
    transport = TransferServerTransport(placement, (1, 0), mesh_of(1), PROCESSES, tags, SECRET, 1.0)
    with (
        contextlib.closing(transport),
        pytest.raises(WorkerLostError, match=r"stage 0, host 0 is lost: no connection to .*:1: "),
    ):
        transport.connect({(0, 0): f"{HOST}:1"})


def test_a_server_that_accepts_and_then_says_nothing_names_the_worker(placement: Placement):
    tags = transfers(placement)
    transport = TransferServerTransport(placement, (1, 0), mesh_of(1), PROCESSES, tags, SECRET, 1.0)
    transport.listen(HOST)
    with (
        contextlib.closing(transport),
        socket.create_server((HOST, 0)) as silent,
        pytest.raises(WorkerLostError, match=r"stage 0, host 0 .* did not greet within 1 s"),
    ):
        transport.connect({(0, 0): f"{HOST}:{silent.getsockname()[1]}"})


def test_a_server_of_another_run_does_not_greet(placement: Placement):
    tags = transfers(placement)
    other = TransferServerTransport(placement, (0, 0), mesh_of(0), PROCESSES, tags, b"another", 1.0)
    ours = TransferServerTransport(placement, (1, 0), mesh_of(1), PROCESSES, tags, SECRET, 1.0)
    ours.listen(HOST)
    with (
        contextlib.closing(other),
        contextlib.closing(ours),
        pytest.raises(WorkerLostError, match=r"stage 0, host 0 .* did not greet within 1 s"),
    ):
        ours.connect({(0, 0): other.listen(HOST)})
    late = jax.device_put(np.zeros(2**16, np.uint8), DEVICES[0][0])
    other._server.await_pull(ours._greeting((0, 0), (1, 0)), [late])


def test_identifiers_differ_from_run_to_run_and_use_all_bits():
    numbers = [(step, place) for step in range(200) for place in range(5)]
    found = [{transfer_identifier(secret, *each) for each in numbers} for secret in (b"a", b"b")]
    assert len(found[0] | found[1]) == 2 * len(numbers)
    for bit in range(64):
        assert 400 < sum(identifier >> bit & 1 for identifier in found[0]) < 600


def test_what_a_stranger_has_taken_is_missed_within_the_deadline(
    placement: Placement, ends: dict[int, TransferServerTransport]
):
    """The stranger is connected, and knows the identifier."""
    tag = next(t for t in transfers(placement) if t.route.kind == RouteKind.VALUE)
    ends[0].send(0, tag, sent_arrays(placement, tag))
    stranger = ends[1]._connections[0, 0]
    identifier = ends[1]._identifier(0, tag, (0, 0), (1, 0))
    shapes = ends[1]._receiving[Tag(tag.route)].requests[0, 0]
    jax.block_until_ready(stranger.pull(identifier, shapes))
    ends[1].expect(0, tag)
    with pytest.raises(
        WorkerLostError,
        match=r"^stage 0, host 0 is lost: its value of microbatch \d did not come within 1 s; "
        r"it hangs or is out of reach, or another has taken it",
    ):
        ends[1].receive(0, tag)
    ends[0].send(0, tag, sent_arrays(placement, tag))


def test_strangers_are_refused_once_all_are_connected(
    placement: Placement, ends: dict[int, TransferServerTransport]
):
    addresses = [end._server.address().rpartition(":") for end in ends.values()]
    for end in ends.values():
        end.stop_listening()
        end.stop_listening()
    for host, _, port in addresses:
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection((host, int(port)), timeout=5) as stranger,
        ):
            stranger.sendall(bytes(4096))  # It would end the process if it were read.
    tag = next(t for t in transfers(placement) if t.route.target == 1)
    for step in range(3):
        ends[1].expect(step, tag)
        ends[0].send(step, tag, sent_arrays(placement, tag))
        ends[1].receive(step, tag)
    for host, _, port in addresses:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=5)


class NeverGathers:
    """A receiving end that pulls nothing, and whose other hosts do not gather."""

    requests: dict[int, Sequence[Any]] = {}  # noqa: RUF012
    num_bytes, gathers, others = 0, True, ((0, 0), (1, 0))

    def __init__(self, pulled: Sequence[jax.Array]):
        self._pulled = pulled

    def put_together(self, _: dict[int, Sequence[jax.Array]]) -> Sequence[jax.Array]:
        return self._pulled


def test_a_gathering_that_does_not_end_names_the_other_hosts(
    placement: Placement, ends: dict[int, TransferServerTransport], monkeypatch: Any
):
    tag = next(t for t in transfers(placement) if t.route.target == 1)
    ends[1].expect(7, tag)
    (pull,) = ends[1]._pulls.pop((7, tag))
    receiving = NeverGathers(pull.arrays)
    monkeypatch.setattr(ends[1], "_receiving", dict.fromkeys(ends[1]._receiving, receiving))
    ends[1].expect(8, tag)
    with pytest.raises(WorkerLostError, match="stage 0, host 0 or stage 1, host 0 is lost: it did"):
        ends[1].receive(8, tag)
    ends[0].send(7, tag, sent_arrays(placement, tag))


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it reads Linux's tables")
def test_both_ends_forget_what_has_been_received(placement: Placement):
    """Transfers of 4 MB: the server's own references are not among JAX's live arrays."""
    big = jax.ShapeDtypeStruct((1 << 20,), np.dtype(np.float32))
    tag = Tag(Route(RouteKind.VALUE, 0, 1), 0)
    for stage, kind in ((0, SentValue), (1, ReceivedValue)):
        whole = placement.leaves(stage, PipelineLoss).annotations[0]
        leaves = AnnotatedLeaves(("big",), (big,), (whole,))
        table = list(placement.table)
        table[stage] = {**table[stage], kind: leaves}
        placement = replace(placement, table=tuple(table))
    tags = transfers(placement)
    source, target = (
        TransferServerTransport(
            placement, (stage, 0), mesh_of(stage), PROCESSES, tags, SECRET, 60.0
        )
        for stage in DEVICES
    )
    target.listen(HOST)
    target.connect({(0, 0): source.listen(HOST)})
    before, resident = len(jax.live_arrays()), 0
    for step in range(60):
        if step == 20:
            resident = resident_bytes()
        target.expect(step, tag)
        source.send(step, tag, sent_arrays(placement, tag))
        jax.block_until_ready(target.receive(step, tag))
        gc.collect()
        assert len(jax.live_arrays()) <= before, "arrays of a step outlive it"
    assert resident_bytes() - resident < 40 << 20, "40 transfers are 160 MB"
    source.close()
    target.close()


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
    assert {int(end._server.address().rpartition(":")[2]) for end in ends.values()} <= ports
    assert {address.rpartition(":")[0] for address in listening_addresses()} == {"0100007F"}
