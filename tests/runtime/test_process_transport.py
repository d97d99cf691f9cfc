"""Transfers between processes: by the wire, through hosts, and by the faster one of them."""

import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import examples
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from process_ends import (
    DEVICES,
    PROCESSES,
    Ends,
    job_ends,
    job_placement,
    mesh_of,
    move_ends,
    sent_arrays,
)
from random_moves import Move, check_arrived, member_arrays, moves, random_summands

from hetjax.errors import WorkerLostError
from hetjax.runtime.instructions.annotation_table import AnnotatedLeaves
from hetjax.runtime.instructions.buffers import PipelineLoss, ReceivedValue, SentValue
from hetjax.runtime.instructions.instruction import Route, RouteKind, Tag
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.moves.carriers import BETWEEN_PROCESSES, CarrierName, Curve
from hetjax.runtime.moves.peers import Peer
from hetjax.runtime.moves.process_transport import ProcessTransport
from hetjax.runtime.workers.job import transfers
from hetjax.sharding import HSharding, Subgroup

WIRE, STREAM, HOST = BETWEEN_PROCESSES
BY_SIZE = {WIRE: Curve((1, 101), (1e-6, 1.01e-4)), HOST: Curve((1, 101), (1e-4, 1.0001e-4))}
"""Curves by which messages of up to 100 bytes go by wire, and larger ones through hosts."""


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
    return job_placement()


@pytest.fixture(params=BETWEEN_PROCESSES)
def name(request: pytest.FixtureRequest) -> CarrierName:
    return request.param


@pytest.fixture
def ends(placement: Placement, name: CarrierName) -> Iterator[dict[int, ProcessTransport]]:
    """The transports of both stages, by one carrier, with a deadline of a second."""
    with job_ends(placement, [name]) as made:
        yield {stage: made.transports[stage, 0] for stage in DEVICES}


def check_steps(
    placement: Placement, ends: dict[int, ProcessTransport], tags: Sequence[Tag]
) -> set[tuple[CarrierName, ...]]:
    """Two steps of all transfers, each as its receiver wants it; which carriers took them."""
    found = set()
    for step in range(2):
        # Some are asked for before they are sent, and some after it.
        early = tags[step::2]
        for tag in early:
            ends[tag.route.target].expect(step, tag)
        sent = {tag: sent_arrays(placement, tag) for tag in tags}
        for tag in tags:
            ends[tag.route.source].send(step, tag, sent[tag])
        for tag in reversed(tags):
            target = tag.route.target
            if tag not in early:
                ends[target].expect(step, tag)
            shardings = placement.ends(tag)[1].on(mesh_of(target))
            received = ends[target].receive(step, tag)
            arrival = ends[target].arrival(step, tag)
            assert arrival.at > 0
            assert arrival.num_bytes == sum(array.nbytes for array in sent[tag])
            found.add(arrival.carriers)
            for ours, theirs, sharding in zip(received, sent[tag], shardings, strict=True):
                np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
                assert ours.sharding.is_equivalent_to(sharding, ours.ndim)
    return found


def test_every_transfer_of_a_step_arrives_as_its_receiver_wants_it(
    placement: Placement, ends: dict[int, ProcessTransport], name: CarrierName
):
    tags = transfers(placement)
    assert {tag.route.kind for tag in tags} >= {
        RouteKind.VALUE,
        RouteKind.COTANGENT,
        RouteKind.GRADIENT,
        RouteKind.MESSAGE,
    }
    assert check_steps(placement, ends, tags) == {(name,)}


def test_every_message_has_the_faster_carrier_and_both_ends_know_it(placement: Placement):
    tags = transfers(placement)
    with job_ends(placement) as made:
        ends = {stage: made.transports[stage, 0] for stage in DEVICES}
        first = {tag: each.carrier(tag, *pair_of(tag)) for each in ends.values() for tag in tags}
        assert set(first.values()) == {WIRE}, "where nothing was measured"
        for stage, each in ends.items():
            each.choose_by({}, {(1 - stage, 0): (STREAM, HOST)})
        joined = {each.carrier(tag, *pair_of(tag)) for each in ends.values() for tag in tags}
        assert joined == {STREAM}, "where there is no wire"
        for stage, each in ends.items():
            each.choose_by({(1 - stage, 0): BY_SIZE})
        assert check_steps(placement, ends, tags) == {(WIRE,), (HOST,)}
        for tag in tags:
            size = sum(s.size * s.dtype.itemsize for s in placement.ends(tag)[1].shapes)
            chosen = {each.carrier(tag, *pair_of(tag)) for each in ends.values()}
            assert chosen == {WIRE if size <= 100 else HOST}


def pair_of(tag: Tag) -> tuple[Peer, Peer]:
    return (tag.route.source, 0), (tag.route.target, 0)


@examples(usual=8, full=80)
@given(
    move=moves(one_process=True),
    dtype=st.sampled_from([np.int32, np.float32, jnp.bfloat16]),
)
def test_members_of_stages_move_arrays_to_the_same_bits_by_every_carrier(move: Move, dtype: Any):
    value, held = random_summands(move, dtype)
    tag = Tag(Route(RouteKind.VALUE, *move.stages), 3)
    receivers = [(move.stages[1], place) for place in range(len(move.target.subgroups))]
    moved = {}
    for name in BETWEEN_PROCESSES:
        with move_ends(move, dtype, tag, [name]) as workers:
            for peer in receivers:
                workers[peer].expect(7, tag)
            for place, array in enumerate(member_arrays(move, held)):
                workers[0, place].send(7, tag, [array, array])
            found = [workers[peer].receive(7, tag) for peer in receivers]
            for each in range(2):
                check_arrived(move, value, [arrays[each] for arrays in found], dtype)
            moved[name] = [bits(array) for arrays in found for array in arrays]
    assert moved[WIRE] == moved[STREAM] == moved[HOST]


def bits(array: jax.Array) -> list[bytes]:
    return [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]


def test_what_a_member_keeps_of_a_move_is_given_to_no_carrier(name: CarrierName):
    """Rows of two members, of which each wants all: it takes in what it lacks."""
    members = tuple(Subgroup((d,), (("data", 1),), PartitionSpec()) for d in range(2))
    processes = {0: (0, 0), 1: (0, 1)}
    move = Move((8,), HSharding(members, 0, (6, 2)), HSharding(members), processes)
    tag = Tag(Route(RouteKind.VALUE, 0, 0), 0)
    value, held = random_summands(move, np.float32)
    with move_ends(move, np.float32, tag, [name]) as workers:
        assert [worker.partners for worker in workers.values()] == [((0, 1),), ((0, 0),)]
        for place, array in enumerate(member_arrays(move, held)):
            workers[0, place].expect(0, tag)
            workers[0, place].send(0, tag, [array, array])
        found = [worker.receive(0, tag) for worker in workers.values()]
        taken = [worker.arrival(0, tag).num_bytes for worker in workers.values()]
    assert taken == [2 * 2 * 4, 2 * 6 * 4]
    check_arrived(move, value, [arrays[0] for arrays in found], np.float32)


def test_a_transfer_that_does_not_come_names_the_worker(
    placement: Placement, ends: dict[int, ProcessTransport]
):
    tag = next(t for t in transfers(placement) if t.route.target == 1)
    ends[1].expect(0, tag)
    assert not ends[1].ready(0, tag)
    late = r"stage 0, host 0 .* did not come within 1 s; it hangs or is out of reach"
    with pytest.raises(WorkerLostError, match=late):
        ends[1].receive(0, tag)
    ends[0].send(0, tag, sent_arrays(placement, tag))


def test_messages_and_answers_are_timed_by_the_one_that_comes_first(
    ends: dict[int, ProcessTransport], name: CarrierName
):
    answers: list[float] = []

    def answer() -> None:
        answers.extend(ends[1].exchange((0, 0), name, 4096, range(3), 20.0))

    thread = threading.Thread(target=answer)
    thread.start()
    seconds = ends[0].exchange((1, 0), name, 4096, range(3), 20.0)
    thread.join()
    assert len(seconds) == len(answers) == 3
    assert all(each > 0 for each in seconds)
    with pytest.raises(WorkerLostError, match=r"stage 1, host 0 .* its answer did not come"):
        ends[0].exchange((1, 0), name, 4096, [3], 0.2)
    ends[1].exchange((0, 0), name, 4096, [3], 20.0)


class NeverGathers:
    """A receiving end that pulls nothing, and whose other hosts do not gather."""

    requests: dict[int, Sequence[Any]] = {}  # noqa: RUF012
    num_bytes, gathers, others = 0, True, ((0, 0), (1, 0))

    def __init__(self, pieces: Sequence[jax.Array]):
        self._pieces = pieces

    def put_together(self, _: dict[int, Sequence[jax.Array]]) -> Sequence[jax.Array]:
        return self._pieces


def test_a_gathering_that_does_not_end_names_the_other_hosts(
    placement: Placement, monkeypatch: Any
):
    tag = next(t for t in transfers(placement) if t.route.target == 1)
    with job_ends(placement, [WIRE]) as made:
        ends = {stage: made.transports[stage, 0] for stage in DEVICES}
        ends[1].expect(7, tag)
        (asked,) = ends[1]._asked.pop((7, tag))
        receiving = NeverGathers(asked.coming.pieces)
        monkeypatch.setattr(ends[1], "_receiving", dict.fromkeys(ends[1]._receiving, receiving))
        ends[1].expect(8, tag)
        lost = "stage 0, host 0 or stage 1, host 0 is lost: it did"
        with pytest.raises(WorkerLostError, match=lost):
            ends[1].receive(8, tag)
        ends[0].send(7, tag, sent_arrays(placement, tag))


def live_arrays_end_at(most: int) -> bool:
    """Whether no more are left, once the threads that sent or took them have gone on."""
    end = time.monotonic() + 10
    while True:
        gc.collect()
        if len(jax.live_arrays()) <= most:
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.001)


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it reads Linux's tables")
def test_both_ends_forget_what_has_been_received(placement: Placement, name: CarrierName):
    """Transfers of 4 MB: the server's own references are not among JAX's live arrays."""
    big = jax.ShapeDtypeStruct((1 << 20,), np.dtype(np.float32))
    tag = Tag(Route(RouteKind.VALUE, 0, 1), 0)
    for stage, kind in ((0, SentValue), (1, ReceivedValue)):
        whole = placement.leaves(stage, PipelineLoss).annotations[0]
        leaves = AnnotatedLeaves(("big",), (big,), (whole,))
        table = list(placement.table)
        table[stage] = {**table[stage], kind: leaves}
        placement = replace(placement, table=tuple(table))
    with job_ends(placement, [name], deadline=60.0) as made:
        source, target = made.transports[0, 0], made.transports[1, 0]
        before, resident = len(jax.live_arrays()), 0
        for step in range(60):
            if step == 20:
                resident = resident_bytes()
            target.expect(step, tag)
            source.send(step, tag, sent_arrays(placement, tag))
            jax.block_until_ready(target.receive(step, tag))
            assert live_arrays_end_at(before), "arrays of a step outlive it"
        assert resident_bytes() - resident < 40 << 20, "40 transfers are 160 MB"


def test_workers_of_which_only_one_gives_are_partners_of_each_other(placement: Placement):
    tags = [tag for tag in transfers(placement) if tag.route.kind == RouteKind.VALUE]
    ends = Ends(placement, PROCESSES, tags, [HOST])
    partners = [ends.add((stage, 0), mesh_of(stage)).partners for stage in DEVICES]
    assert partners == [((1, 0),), ((0, 0),)]
    ends.close()
