"""Resolution: whatever two annotations are, the steps between them give exactly the second."""

import itertools
from collections import Counter

import jax
import numpy as np
import pytest
from cases import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.experimental import transfer
from jax.sharding import PartitionSpec as P
from random_annotations import an_annotation, groups_of_devices, pairs, summands
from run_steps import Machine, jax_machine, run_resolution

from hetjax import HArray, InputError
from hetjax.mesh import KINDS, Cluster, Link, Subcluster
from hetjax.sharding import PARTIAL, HSharding, Network, Subgroup, resolve
from hetjax.sharding.annotation.bounds import contains, finest_slices, within
from hetjax.sharding.resolution.steps import KINDS as KINDS_OF_STEPS


def holds(annotation, shape, value):
    """What every device holds of a value that lies as an annotation without partial sums says."""
    return {
        shard.device: value[tuple(slice(a, b) for a, b in shard.bounds)]
        for shard in annotation.shards(shape)
    }


@examples(usual=200, full=2000)
@given(pairs())
def test_steps_give_exactly_the_destination(case):
    shape, source, destination = case
    value, arrays = summands(source, shape, np.random.default_rng(0))
    found = resolve(source, destination, shape)
    result = run_resolution(found, arrays)
    expected = holds(destination, shape, value)
    assert result.keys() == expected.keys()
    for device in expected:
        np.testing.assert_array_equal(result[device], expected[device])
    assert all(kind in KINDS_OF_STEPS for kinds in found.kinds for kind in kinds)


@pytest.fixture(scope="module")
def machines():
    """Both ways from device to device: a copy in the process, and a pull through a socket."""
    devices = dict(enumerate(jax.devices()))
    local = jax_machine(devices)
    host = "127.0.0.1:0"
    server = transfer.start_transfer_server(jax.devices()[0].client, host, [host])
    connection = server.connect(server.address())
    numbers = itertools.count()

    def pull(array, device):
        number, sharding = next(numbers), jax.sharding.SingleDeviceSharding(devices[device])
        server.await_pull(number, [jax.device_put(array)])
        shape = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        return connection.pull(number, [shape])[0]

    return {"in process": local, "transfer server": Machine(pull, local.join)}


@pytest.mark.parametrize("transport", ["in process", "transfer server"])
@examples(usual=10, full=100)
@given(case=pairs(max_devices=8))
def test_steps_move_real_shards(machines, transport, case):
    shape, source, destination = case
    value, arrays = summands(source, shape, np.random.default_rng(0))
    devices = jax.devices()
    shards = {
        number: jax.device_put(array.astype(np.int32), devices[number])
        for number, array in arrays.items()
    }
    moved = run_resolution(resolve(source, destination, shape), shards, machines[transport])
    for device, expected in holds(destination, shape, value).items():
        assert moved[device].devices() == {devices[device]}
        np.testing.assert_array_equal(moved[device], expected)


@examples(usual=10)
@given(pairs(max_devices=8))
def test_an_array_is_resharded(case):
    shape, source, destination = case
    value, arrays = summands(source, shape, np.random.default_rng(0))
    devices = dict(enumerate(jax.devices()))
    shards = {
        number: jax.device_put(array.astype(np.int32), devices[number])
        for number, array in arrays.items()
    }
    found = HArray(source, shape, shards, devices)
    np.testing.assert_array_equal(found.numpy(), value)
    np.testing.assert_array_equal(found.reshard(destination).numpy(), value)


def test_an_array_is_laid_out_and_comes_back():
    annotation = HSharding((TWO.with_spec(SUMMANDS), ONE), PARTIAL)
    value = np.arange(16).reshape(4, 4)
    array = HArray.of(value, annotation)
    assert array.dtype == np.int32
    np.testing.assert_array_equal(array.numpy(), value)
    np.testing.assert_array_equal(array[2], 0 * value)
    with pytest.raises(InputError, match="device 99 is not there; there are 8"):
        HArray.of(value, HSharding((Subgroup((99,), (), P()),)))
    with pytest.raises(InputError, match="device 2 has nothing"):
        HArray(annotation, (4, 4), {0: array[0], 1: array[1]}, {})


TWO = Subgroup((0, 1), (("t", 2),), P(None, "t"))
ONE = Subgroup((2,), (), P())
OTHER = Subgroup((3, 4), (("t", 2),), P(None, "t"))
SUMMANDS = P(None, None, unreduced=frozenset({"t"}))


@pytest.mark.parametrize(
    ("source", "destination", "kinds"),
    [
        (HSharding((TWO,)), HSharding((TWO,)), (("identity",),)),
        (HSharding((TWO,)), HSharding((TWO.with_spec(P()),)), (("all_gather",),)),
        (HSharding((TWO.with_spec(P()),)), HSharding((TWO,)), (("slice",),)),
        (HSharding((TWO,)), HSharding((TWO.with_spec(P("t")),)), (("all_to_all",),)),
        (
            HSharding((TWO.with_spec(SUMMANDS),)),
            HSharding((TWO.with_spec(P()),)),
            (("all_reduce",),),
        ),
        (HSharding((TWO.with_spec(SUMMANDS),)), HSharding((TWO,)), (("reduce_scatter",),)),
        (HSharding((TWO,)), HSharding((OTHER,)), (("send_receive",),)),
        (HSharding((TWO,)), HSharding((ONE,)), (("batched_send_receive",),)),
        (HSharding((TWO, ONE), PARTIAL), HSharding((TWO, ONE)), (("split_all_reduce",),)),
        (HSharding((TWO, ONE), PARTIAL), HSharding((TWO, ONE), 0), (("split_reduce_scatter",),)),
        (HSharding((TWO, ONE), 0), HSharding((TWO, ONE)), (("split_all_gather",),)),
        (
            HSharding((TWO, ONE)),
            HSharding((TWO.with_spec(P()), ONE)),
            (("all_gather", "identity"),),
        ),
        (
            HSharding((TWO.with_spec(SUMMANDS), ONE), PARTIAL),
            HSharding((TWO.with_spec(P()), ONE), PARTIAL),
            (("all_reduce", "identity"),),
        ),
    ],
)
def test_each_form_is_found(source, destination, kinds):
    assert resolve(source, destination, (8, 8)).kinds == kinds


def test_the_bottom_tier_goes_first_where_both_change():
    """Hetu v2, figure 7: reduce-scatter and identity in the submeshes, then split-all-reduce."""
    inside, between = Link(100e9, 1e-6), Link(1e9, 1e-4)
    sub = [Subcluster(name, KINDS["T4"], 1, 2, inside, inside) for name in ("a", "b")]
    network = Network.of(Cluster("two", tuple(sub), (("a", "b", between),)))
    far = Subgroup((2, 3), (("t", 2),), P(None, "t"))
    source = HSharding((TWO.with_spec(SUMMANDS), far), PARTIAL)
    found = resolve(source, HSharding((TWO, far)), (512, 512), network=network)
    assert found.kinds == (("reduce_scatter", "identity"), ("split_all_reduce",))


def test_unequal_tensor_parallelism_sums_the_slices_that_belong_together():
    four = Subgroup((0, 1, 2, 3), (("t", 4),), P("t"))
    two = Subgroup((4, 5), (("t", 2),), P("t"))
    one = Subgroup((6,), (), P())
    for spec in (P("t"), P(None, "t")):
        groups = (four.with_spec(spec), two.with_spec(spec), one)
        source, shape = HSharding(groups, PARTIAL), (8, 8)
        value, arrays = summands(source, shape, np.random.default_rng(0))
        found = resolve(source, HSharding(groups), shape)
        assert found.kinds == (("split_all_reduce",),)
        expected = holds(HSharding(groups), shape, value)
        for device, array in run_resolution(found, arrays).items():
            np.testing.assert_array_equal(array, expected[device])


def test_partial_sums_are_made_by_computation_alone():
    with pytest.raises(InputError, match="of which the source has the value"):
        resolve(HSharding((TWO, ONE)), HSharding((TWO, ONE), PARTIAL), (8, 8))


@st.composite
def partial_pairs(draw):
    """A shape, and two annotations of it by which devices have summands."""
    shape = tuple(draw(st.sampled_from((4, 6, 12))) for _ in range(draw(st.integers(1, 2))))
    sides = []
    for _ in range(2):
        groups = draw(groups_of_devices(max_devices=16))
        sides.append(draw(an_annotation(shape, groups, partial=True)))
    source, destination = sides
    groups = [group.devices for group in source.subgroups]
    if len(groups) > 1:
        source = draw(an_annotation(shape, groups, partial=True, hdims=[PARTIAL]))
    assume(source.is_partial and destination.is_partial)
    return shape, source, destination


@examples(usual=200, full=2000)
@given(partial_pairs(), st.booleans())
def test_sums_may_stay_in_other_summands(case, nodes):
    """Of whatever devices, and however many: what they add up to is the same."""
    shape, source, destination = case
    value, arrays = summands(source, shape, np.random.default_rng(0))
    network = TWO_NODES if nodes else None
    found = run_resolution(resolve(source, destination, shape, network=network), arrays)
    sums = {}
    for shard in destination.shards(shape):
        index = tuple(slice(a, b) for a, b in shard.bounds)
        if shard.summand is None:
            np.testing.assert_array_equal(found[shard.device], value[index])
            continue
        places = sums.setdefault(shard.summand.group, {}).setdefault(shard.bounds, {})
        before = places.setdefault(shard.summand.place, found[shard.device])
        np.testing.assert_array_equal(found[shard.device], before)
    for regions in sums.values():
        # Where regions of one group overlap, a device of each place has one that holds a slice.
        for bounds in finest_slices(regions, shape):
            parts = {
                place: array[within(bounds, region)]
                for region, places in regions.items()
                if contains(region, bounds)
                for place, array in places.items()
            }
            if parts:
                np.testing.assert_array_equal(
                    sum(parts.values()), value[tuple(slice(a, b) for a, b in bounds)]
                )


def test_summands_stay_where_they_are_whatever_their_number_is():
    four = Subgroup((0, 1, 2, 3), (("t", 4),), SUMMANDS)
    turned = Subgroup((3, 2, 1, 0), (("t", 4),), SUMMANDS)
    found = resolve(HSharding((four,)), HSharding((turned,)), (8, 8))
    assert found.kinds == (("identity",),)
    halves = tuple(Subgroup(devices, (("t", 2),), P()) for devices in ((0, 1), (2, 3)))
    found = resolve(HSharding((four,)), HSharding(halves, PARTIAL), (8, 8))
    assert sum(found.rounds[0][0].elements_sent().values()) == 4 * 64


NODES_OF_FOUR = Cluster(
    "two", (Subcluster("a", KINDS["T4"], 2, 4, Link(100e9, 1e-6), Link(1e9, 1e-5)),), ()
)
TWO_NODES = Network.of(NODES_OF_FOUR)


def test_sums_over_two_nodes_cross_once_each_way():
    """Eight devices on two nodes: 2 N between nodes, where each summing for itself sent 5 N."""
    eight = Subgroup(tuple(range(8)), (("t", 8),), SUMMANDS)
    shape = (512, 512)
    source, destination = HSharding((eight,)), HSharding((eight.with_spec(P()),))
    found = resolve(source, destination, shape, network=TWO_NODES)
    sent = Counter()
    for steps in found.rounds:
        for step in steps:
            sent.update(step.elements_sent())
    between = sum(n for (a, b), n in sent.items() if TWO_NODES.node(a) != TWO_NODES.node(b))
    assert between == 2 * 512 * 512
    assert sum(sent.values()) == 2 * 7 * 512 * 512
    value, arrays = summands(source, shape, np.random.default_rng(0))
    for array in run_resolution(found, arrays).values():
        np.testing.assert_array_equal(array, value)


@examples(usual=200, full=2000)
@given(pairs(max_devices=8))
def test_steps_over_two_nodes_give_exactly_the_destination(case):
    shape, source, destination = case
    value, arrays = summands(source, shape, np.random.default_rng(0))
    # The links are so slow that forms with many phases are taken for these small arrays, too.
    found = resolve(source, destination, shape, network=TWO_NODES, itemsize=1 << 24)
    result = run_resolution(found, arrays)
    for device, expected in holds(destination, shape, value).items():
        np.testing.assert_array_equal(result[device], expected)


def test_every_byte_crosses_a_slow_link_once():
    """H2, section 5: each device of a node pulls a piece, and they gather them among themselves."""
    inside, between = Link(100e9, 1e-6), Link(1e8, 1e-4)
    sub = [Subcluster(name, KINDS["T4"], 1, 4, inside, inside) for name in ("a", "b")]
    network = Network.of(Cluster("two", tuple(sub), (("a", "b", between),)))
    near, far = Subgroup((0,), (), P()), Subgroup((4, 5, 6, 7), (("t", 4),), P())
    found = resolve(HSharding((near,)), HSharding((far,)), (64, 64), network=network)
    sent = Counter()
    for steps in found.rounds:
        for step in steps:
            sent.update(step.elements_sent())
    assert sum(count for (a, _), count in sent.items() if a == 0) == 64 * 64
    assert sum(sent.values()) == 4 * 64 * 64
