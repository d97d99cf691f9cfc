"""Moves among submeshes of one process, which may share devices; and programs that hold no more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import examples
from deducing import drawn
from hypothesis import given
from jax.sharding import PartitionSpec as P
from random_annotations import pairs, summands

from hetjax import HArray, reshard
from hetjax.pipeline.program.loss import host_array
from hetjax.runtime.instructions.instruction import Free, Receive, Run
from hetjax.runtime.local.local_program import LocalProgram
from hetjax.runtime.moves.pieces import join_pieces
from hetjax.sharding import PARTIAL, HSharding, Subgroup, deduce, specialize

ONE, TWO, THREE = (Subgroup((device,), (("t", 1),), P()) for device in range(3))
PAIR = Subgroup((0, 1), (("t", 2),), P())
TYPED = P(None, "t")
SUMS = P(unreduced=frozenset({"t"}))


@examples(usual=30, full=300)
@given(case=pairs(max_devices=8))
def test_devices_may_be_in_other_submeshes_afterwards(case):
    shape, source, destination = case
    value, arrays = summands(source, shape, np.random.default_rng(0))
    devices = dict(enumerate(jax.devices()))
    shards = {n: jax.device_put(each.astype(np.int32), devices[n]) for n, each in arrays.items()}
    found = HArray(source, shape, shards, devices).reshard(destination)
    np.testing.assert_array_equal(found.numpy(), value)
    for shard in destination.shards(shape):
        assert found[shard.device].devices() == {devices[shard.device]}
        index = tuple(slice(*ends) for ends in shard.bounds)
        np.testing.assert_array_equal(found[shard.device], value[index])


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (HSharding((ONE, TWO, THREE), PARTIAL), HSharding((PAIR.with_spec(SUMS),))),
        (HSharding((PAIR.with_spec(SUMS),)), HSharding((TWO, THREE), PARTIAL)),
        (HSharding((ONE, TWO), PARTIAL), HSharding((ONE, TWO, THREE), PARTIAL)),
        (HSharding((ONE.with_spec(SUMS), TWO), PARTIAL), HSharding((TWO, ONE.with_spec(SUMS)), 0)),
        (HSharding((THREE, PAIR.with_spec(P("t"))), 1, (1, 3)), HSharding((ONE.with_spec(TYPED),))),
    ],
    ids=["fewer", "others", "more", "an axis of one", "types of an axis of one"],
)
def test_arrays_come_to_lie_in_any_way(source, destination):
    value, arrays = summands(source, (4, 4), np.random.default_rng(0))
    devices = dict(enumerate(jax.devices()))
    shards = {n: jax.device_put(each.astype(np.int32), devices[n]) for n, each in arrays.items()}
    found = HArray(source, (4, 4), shards, devices).reshard(destination)
    np.testing.assert_array_equal(found.numpy(), value)
    assert found.annotation == destination
    # What is moved is plain data again, to which anything can be added.
    assert all((found[n] + 1).shape == found[n].shape for n in destination.devices)


def test_keys_that_come_as_words_are_joined():
    keys, device = jax.random.split(jax.random.key(0), 6), jax.devices()[1]
    words = host_array(keys)
    halves = [(((0, 2),), words[:2]), (((2, 6),), words[2:])]
    for pieces in ([(((0, 6),), words)], halves):
        found = join_pieces(((0, 6),), keys.dtype, pieces, device)
        assert (found.dtype, found.devices()) == (keys.dtype, {device})
        np.testing.assert_array_equal(jax.random.key_data(found), words)
    assert join_pieces(((0, 0),), keys.dtype, [], device).shape == (0,)


def test_keys_are_moved():
    """Their bits are nothing that the host could read."""
    keys = jax.random.split(jax.random.key(0), 6)
    rows = HSharding((PAIR.with_spec(P("t")), THREE), 0, (4, 2))
    found = HArray.of(keys, rows).reshard(HSharding((PAIR, THREE)))
    for device in range(3):
        expected = jax.random.key_data(keys)
        np.testing.assert_array_equal(jax.random.key_data(found[device]), expected)


def test_a_program_forgets_what_nobody_needs_any_more():
    rows, whole = HSharding((ONE, TWO), 0), HSharding((ONE, TWO))

    def function(x):
        for _ in range(3):
            x = reshard(jnp.tanh(reshard(x, whole)), rows)
        return x

    (x,) = drawn((4, 3))
    program = LocalProgram(specialize(deduce(jax.make_jaxpr(function)(x), [rows])))
    (found,) = program(HArray.of(x, rows))
    np.testing.assert_allclose(found.numpy(), jnp.tanh(jnp.tanh(jnp.tanh(x))), rtol=1e-6)
    held, most = 2, 0
    for instruction in program._instructions:
        match instruction:
            case Free(buffers=names):
                held -= len(names)
            case Receive(buffers=names) | Run(outputs=names):
                held += len(names)
        most = max(most, held)
    assert (held, most) == (2, 3)
