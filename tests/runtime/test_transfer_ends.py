"""What both ends of a transfer do on devices, for any two layouts.

The processes of a stage are played by one process, which has the devices of all of them.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from cases import examples
from compilations import counted_compilations
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from layouts import Layout, array_shapes, layouts
from random_moves import (
    FIRST,
    Move,
    MovePlacement,
    check_arrived,
    member_arrays,
    member_mesh,
    member_meshes,
    moves,
    random_summands,
)

from hetjax.errors import WorkerLostError
from hetjax.runtime.instructions.instruction import Route, RouteKind, Tag
from hetjax.runtime.moves.crossing_arrays import CrossingArray
from hetjax.runtime.moves.landing import Landing, gatherer
from hetjax.runtime.moves.peers import Peer
from hetjax.runtime.moves.transfer_ends import ReceivingEnd, SendingEnd
from hetjax.runtime.moves.transport import InProcessTransport
from hetjax.sharding import HSharding, Network, Subgroup
from hetjax.sharding.annotation.rules import MESH_AXES
from hetjax.sharding.resolution.senders import BestLink

pairs_of_layouts = array_shapes.flatmap(lambda shape: st.tuples(layouts(shape), layouts(shape)))
dtypes = st.sampled_from([np.float32, jax.numpy.bfloat16, np.int32, np.bool_])


def mesh_of(layout: Layout) -> Mesh:
    devices = jax.devices()[: int(np.prod(layout.mesh_shape))]
    return Mesh(np.array(devices).reshape(layout.mesh_shape), MESH_AXES)


def crossing_array(source: Layout, target: Layout, dtype: Any) -> CrossingArray:
    givers = {device: (0, place) for device, place in source.processes().items()}
    takers = {device: (1, place) for device, place in target.processes(FIRST).items()}
    return CrossingArray.between(
        jax.ShapeDtypeStruct(source.shape, dtype),
        source.annotation(),
        target.annotation(FIRST),
        givers,
        takers,
        BestLink(Network.alike()),
    )


def sent(
    crossing_array: CrossingArray, source: Layout, array: jax.Array
) -> dict[Peer, dict[Peer, list[jax.Array]]]:
    """For each receiving process, what each sending one offers it."""
    offers: dict[Peer, dict[Peer, list[jax.Array]]] = defaultdict(dict)
    for place in range(source.num_processes):
        end = SendingEnd([crossing_array], mesh_of(source), (0, place))
        for receiver, pieces in end.offers([array]).items():
            offers[receiver][0, place] = pieces
    return offers


def pulled(end: ReceivingEnd, offered: dict[Peer, list[Any]]) -> dict[Peer, Sequence[Any]]:
    """What a carrier brings of the pieces that are offered."""
    assert end.requests.keys() == offered.keys()
    found: dict[Peer, Sequence[Any]] = {}
    for sender, wanted in end.requests.items():
        assert [(p.shape, p.dtype) for p in offered[sender]] == [(w.shape, w.dtype) for w in wanted]
        shardings = [want.sharding for want in wanted]
        found[sender] = jax.device_put(offered[sender], shardings)
    return found


@settings(max_examples=40)
@given(pair=pairs_of_layouts, dtype=dtypes)
def test_an_array_arrives_as_its_receiver_wants_it(pair: tuple[Layout, Layout], dtype: Any):
    source, target = pair
    whole = np.arange(np.prod(source.shape)).reshape(source.shape).astype(dtype)
    crossed = crossing_array(source, target, dtype)
    array = jax.device_put(whole, NamedSharding(mesh_of(source), source.spec))
    offers = sent(crossed, source, array)

    mesh, num_bytes, parts = mesh_of(target), 0, []
    for place in range(target.num_processes):
        end = ReceivingEnd([crossed], mesh, (1, place))
        num_bytes += end.num_bytes
        parts += end.parts(pulled(end, offers.get((1, place), {})))[0]
    assert num_bytes == whole.nbytes, "every byte crosses once"

    landing = Landing(crossed, mesh, (1, 0))
    found = landing.array(parts)
    gather = gatherer([landing], mesh)
    if gather is not None:
        (found,) = gather([found])
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, target.spec), found.ndim)
    np.testing.assert_array_equal(np.asarray(found), whole)


def test_nothing_is_computed_where_both_ends_divide_alike():
    layout = Layout((8, 4), PartitionSpec("data"), (2, 1), 1)
    crossed, mesh = crossing_array(layout, layout, np.float32), mesh_of(layout)
    array = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, layout.spec))
    with counted_compilations() as compiled:
        end = SendingEnd([crossed], mesh, (0, 0))
        ((piece,),) = end.offers([array]).values()
        ReceivingEnd([crossed], mesh, (1, 0))
    assert piece.unsafe_buffer_pointer() == array.addressable_data(0).unsafe_buffer_pointer()
    assert not compiled.seen


@examples(usual=40, full=400)
@given(
    move=moves(),
    dtype=st.sampled_from([np.int32, np.float32, jax.numpy.bfloat16]),
)
def test_a_move_among_members_brings_everyone_what_it_wants(move: Move, dtype: Any):
    """Members of one or several processes; all that they play is played by one process."""
    value, held = random_summands(move, dtype)
    shape = jax.ShapeDtypeStruct(move.shape, dtype)
    senders = BestLink(Network.alike())
    crossed = CrossingArray.between(shape, *move.ends, senders)
    sources = member_arrays(move, held)
    offers: dict[Peer, dict[Peer, list[jax.Array]]] = defaultdict(dict)
    for peer in move.peers(move.source):
        member = crossed.giving_member(peer)
        group = move.source.subgroups[member]
        end = SendingEnd([crossed], member_mesh(group), peer)
        for receiver, pieces in end.offers([sources[member]]).items():
            offers[receiver][peer] = pieces
    arrived = []
    for member, group in enumerate(move.target.subgroups):
        mesh, parts = member_mesh(group), []
        peers = dict.fromkeys(move.processes[device] for device in group.devices)
        for peer in peers:
            end = ReceivingEnd([crossed], mesh, peer)
            assert end.others == tuple(each for each in sorted(peers) if each != peer)
            parts += end.parts(pulled(end, offers.get(peer, {})))[0]
        landing = Landing(crossed, mesh, next(iter(peers)))
        array = landing.array(parts)
        if (gather := gatherer([landing], mesh)) is not None:
            (array,) = gather([array])
        assert crossed.taking_member(next(iter(peers))) == member
        arrived.append(array)
    check_arrived(move, value, arrived, dtype)


@examples(usual=20, full=200)
@given(
    move=moves(one_process=True),
    dtype=st.sampled_from([np.int32, np.float32]),
)
def test_members_of_one_process_move_arrays(move: Move, dtype: Any):
    value, held = random_summands(move, dtype)
    transport = InProcessTransport(MovePlacement.of(move, dtype, 2), move.members, deadline=20.0)
    workers = {peer: transport.of(peer, mesh) for peer, mesh in member_meshes(move).items()}
    tag = Tag(Route(RouteKind.VALUE, *move.stages), 3)
    for place, array in enumerate(member_arrays(move, held)):
        workers[0, place].expect(7, tag)
        workers[0, place].send(7, tag, [array, array])
    found: list[list[jax.Array]] = []
    for place in range(len(move.target.subgroups)):
        worker = workers[move.stages[1], place]
        assert worker.ready(7, tag)
        found.append(worker.receive(7, tag))
        assert worker.arrival(7, tag).at > 0
    for each in range(2):
        check_arrived(move, value, [arrays[each] for arrays in found], dtype)


def test_a_member_that_does_not_send_is_named():
    """By its number, where the stage has several."""
    members = tuple(Subgroup((d,), (("data", 1),), PartitionSpec()) for d in range(2))
    rows, whole = HSharding(members, 0), HSharding(members)
    move = Move((4,), rows, whole, {0: (0, 0), 1: (0, 1)})
    placement = MovePlacement.of(move, np.float32, 1)
    transport = InProcessTransport(placement, [[(0,), (1,)]], deadline=0.1)
    workers = [transport.of((0, place), member_mesh(each)) for place, each in enumerate(members)]
    tag = Tag(Route(RouteKind.VALUE, 0, 0), 0)
    workers[0].send(0, tag, member_arrays(move, {0: np.zeros(2), 1: np.zeros(2)})[:1])
    assert not workers[0].ready(0, tag)
    with pytest.raises(WorkerLostError, match=r"^stage 0, member 1 .* its value did not come"):
        workers[0].receive(0, tag)
    transport.fail(RuntimeError("no more"))
    assert workers[0].ready(0, tag)
    with pytest.raises(WorkerLostError, match=r"^stage 0, member 1 is lost: no more"):
        workers[0].receive(0, tag)


def test_short_floats_are_rounded_after_every_addition():
    """As one device after the other would; a compiler that keeps more digits has another sum."""
    members = tuple(Subgroup((d,), (("data", 1),), PartitionSpec()) for d in range(3))
    move = Move(
        (64,),
        HSharding(members, "partial"),
        HSharding(members),
        {d: (0, d) for d in range(3)},
    )
    rng = np.random.default_rng(0)
    held = {d: rng.normal(size=64).astype(jax.numpy.bfloat16) for d in range(3)}
    transport = InProcessTransport(
        MovePlacement.of(move, jax.numpy.bfloat16, 1), [[(0,), (1,), (2,)]], deadline=20.0
    )
    workers = [transport.of((0, place), member_mesh(each)) for place, each in enumerate(members)]
    tag = Tag(Route(RouteKind.VALUE, 0, 0), 0)
    for worker, array in zip(workers, member_arrays(move, held), strict=True):
        worker.send(0, tag, [array])
    for worker in workers:
        (found,) = worker.receive(0, tag)
        np.testing.assert_array_equal(np.asarray(found), held[0] + held[1] + held[2])


def test_what_was_sent_may_be_given_away():
    """A program may write over an array that others get a part of."""
    one, two, three, four = (
        Subgroup((d,), (("data", 1),), PartitionSpec()) for d in (0, 1, FIRST + 2, FIRST + 3)
    )
    processes = {0: (0, 0), 1: (0, 1), FIRST + 2: (1, 0), FIRST + 3: (1, 1)}
    move = Move((4,), HSharding((one, two), 0, (3, 1)), HSharding((three, four)), processes)
    transport = InProcessTransport(
        MovePlacement.of(move, np.float32, 1), move.members, deadline=20.0
    )
    workers = {peer: transport.of(peer, mesh) for peer, mesh in member_meshes(move).items()}
    value, held = random_summands(move, np.float32)
    tag = Tag(Route(RouteKind.VALUE, 0, 1), 0)
    write_over = jax.jit(lambda array: array * 0 - 1, donate_argnums=0)
    for place, array in enumerate(member_arrays(move, held)):
        workers[0, place].send(0, tag, [array])
        assert write_over(array).sum() == -array.size
        assert array.is_deleted()
    found = [workers[1, place].receive(0, tag)[0] for place in range(2)]
    check_arrived(move, value, found, np.float32)


def test_ends_that_do_the_same_are_compiled_once():
    """A stage of twelve blocks has dozens of moves alike."""
    two = Subgroup((0, 1), (("data", 2),), PartitionSpec("data"))
    one = Subgroup((2,), (("data", 1),), PartitionSpec())
    rows, whole = (
        HSharding((two, one), 0, (10, 7)),
        HSharding((two.with_spec(PartitionSpec()), one)),
    )
    move = Move((17, 3), rows, whole, {0: (0, 0), 1: (0, 0), 2: (0, 1)})
    shape, senders = jax.ShapeDtypeStruct(move.shape, np.float32), BestLink(Network.alike())
    counts = []
    for _ in range(2):
        crossed = CrossingArray.between(shape, *move.ends, senders)
        with counted_compilations() as compiled:
            for peer, mesh in member_meshes(move).items():
                SendingEnd([crossed], mesh, peer)
                ReceivingEnd([crossed], mesh, peer)
        counts.append(len(compiled.seen))
    assert counts[0] > 0
    assert counts[1] == 0
