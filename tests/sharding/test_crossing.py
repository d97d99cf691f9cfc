"""Who pulls what: every byte crosses once, and every device ends with what it wants."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from layouts import Layout, array_shapes, layouts

from hetjax.sharding import Network
from hetjax.sharding.annotation.bounds import Bounds, within
from hetjax.sharding.resolution.crossing import Crossing, crossing
from hetjax.sharding.resolution.senders import BestLink

DATA = PartitionSpec("data")
WHOLE = PartitionSpec()
FIRST = 100
"""The first device of a receiving stage."""

pairs_of_layouts = array_shapes.filter(len).flatmap(
    lambda shape: st.tuples(layouts(shape), layouts(shape))
)


def crossed(source: Layout, target: Layout) -> Crossing:
    annotations = source.annotation(), target.annotation(FIRST)
    senders = BestLink(Network.alike())
    return crossing(*annotations, source.shape, target.processes(FIRST), senders)


def piece(array: np.ndarray, bounds: Bounds) -> np.ndarray:
    return array[tuple(slice(*span) for span in bounds)]


def received(found: Crossing, target: Layout, whole: np.ndarray) -> list[np.ndarray]:
    """What every device of the receiving stage has in the end, by plain copies."""
    landed: dict[tuple[int, Bounds], np.ndarray] = {}
    processes = target.processes(FIRST)
    for shard in found.landed:
        parts = [each for each in found.pieces if each.landing == shard.device]
        key = (processes[shard.device], shard.bounds)
        if parts or key not in landed:
            landed[key] = np.full([stop - start for start, stop in shard.bounds], -1.0)
        for part in parts:
            landed[key][within(part.bounds, shard.bounds)] = piece(whole, part.bounds)
    mine = [landed[processes[shard.device], shard.bounds] for shard in found.landed]
    if found.gathering is None:
        return mine
    together = defaultdict(list)
    shards = target.annotation(FIRST).shards(target.shape)
    for shard, part in zip(shards, mine, strict=True):
        together[shard.bounds].append(part)
    axis = found.gathering.axis
    for parts in together.values():
        assert tuple(part.shape[axis] for part in parts) == found.gathering.widths
    return [np.concatenate(together[shard.bounds], axis) for shard in shards]


@given(pairs_of_layouts)
def test_every_byte_crosses_once_and_every_device_gets_what_it_wants(pair: tuple[Layout, Layout]):
    source, target = pair
    whole = np.arange(np.prod(source.shape), dtype=float).reshape(source.shape)
    found = crossed(source, target)
    count = np.zeros(whole.shape, int)
    holders = {shard.device: shard for shard in source.annotation().shards(source.shape)}
    for each in found.pieces:
        holder = holders[each.origin]
        within_holder = piece(whole, holder.bounds)[within(each.bounds, holder.bounds)]
        np.testing.assert_array_equal(within_holder, piece(whole, each.bounds))
        count[tuple(slice(*span) for span in each.bounds)] += 1
    np.testing.assert_array_equal(count, 1)
    shards = target.annotation(FIRST).shards(target.shape)
    for shard, array in zip(shards, received(found, target, whole), strict=True):
        np.testing.assert_array_equal(array, piece(whole, shard.bounds))


@given(pairs_of_layouts)
def test_devices_of_one_process_never_gather(pair: tuple[Layout, Layout]):
    source, target = pair
    alone = target._replace(devices_per_process=int(np.prod(target.mesh_shape)))
    assert crossed(source, alone).gathering is None


@given(pairs_of_layouts)
def test_processes_that_want_the_same_pull_the_same_amount_of_it(pair: tuple[Layout, Layout]):
    found = crossed(*pair)
    if found.gathering is not None:
        assert max(found.gathering.widths) - min(found.gathering.widths) <= 1


def test_what_several_devices_hold_is_taken_from_each_in_turn():
    source = Layout((8, 2), WHOLE, (2, 2), 2)
    target = Layout((8, 2), DATA, (4, 1), 2)
    assert [each.origin for each in crossed(source, target).pieces] == [0, 1, 2, 3]


def test_only_parts_that_overlap_are_pulled():
    source, target = Layout((8,), DATA, (4, 1), 2), Layout((8,), DATA, (2, 1), 1)
    pieces = crossed(source, target).pieces
    assert [(each.origin, each.landing - FIRST) for each in pieces] == [
        (0, 0),
        (1, 0),
        (2, 1),
        (3, 1),
    ]


@pytest.mark.parametrize(
    ("shape", "axis", "widths"),
    [
        ((8, 3), 0, (4, 4)),
        ((3, 8), 1, (4, 4)),
        ((3, 5), 1, (2, 3)),
        ((1,), 0, (0, 1)),
    ],
)
def test_slices_are_even_where_they_can_be(
    shape: tuple[int, ...], axis: int, widths: tuple[int, ...]
):
    source, target = Layout(shape, WHOLE, (1, 1), 1), Layout(shape, WHOLE, (2, 1), 1)
    gathering = crossed(source, target).gathering
    assert gathering is not None
    assert (gathering.axis, gathering.widths) == (axis, widths)
