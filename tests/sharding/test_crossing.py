"""Who pulls what: every byte crosses once, and every device ends with what it wants."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from layouts import Layout, array_shapes, layouts

from hetjax.sharding.bounds import Bounds, within
from hetjax.sharding.crossing import Crossing, crossing
from hetjax.sharding.layout import Shard, shards

DATA = PartitionSpec("data")
WHOLE = PartitionSpec()

pairs_of_layouts = array_shapes.filter(len).flatmap(
    lambda shape: st.tuples(layouts(shape), layouts(shape))
)


def piece(array: np.ndarray, bounds: Bounds) -> np.ndarray:
    return array[tuple(slice(*span) for span in bounds)]


def received(found: Crossing, target: tuple[Shard, ...], whole: np.ndarray) -> list[np.ndarray]:
    """What every device of the receiving stage has in the end, by plain copies."""
    landed: dict[tuple[int, Bounds], np.ndarray] = {}
    for shard in found.landed:
        parts = [each for each in found.pieces if each.landing == shard.device]
        key = (shard.process, shard.bounds)
        if parts or key not in landed:
            landed[key] = np.full([stop - start for start, stop in shard.bounds], -1.0)
        for part in parts:
            assert part.receiver == shard.process
            landed[key][within(part.bounds, shard.bounds)] = piece(whole, part.bounds)
    mine = [landed[shard.process, shard.bounds] for shard in found.landed]
    if found.gathering is None:
        return mine
    together = defaultdict(list)
    for shard, part in zip(target, mine, strict=True):
        together[shard.bounds].append(part)
    axis = found.gathering.axis
    for parts in together.values():
        assert tuple(part.shape[axis] for part in parts) == found.gathering.widths
    return [np.concatenate(together[shard.bounds], axis) for shard in target]


@given(pairs_of_layouts)
def test_every_byte_crosses_once_and_every_device_gets_what_it_wants(pair: tuple[Layout, Layout]):
    source, target = (layout.shards() for layout in pair)
    whole = np.arange(np.prod(pair[0].shape), dtype=float).reshape(pair[0].shape)
    found = crossing(source, target)
    crossed = np.zeros(whole.shape, int)
    for each in found.pieces:
        holder = source[each.origin]
        assert holder.process == each.sender
        within_holder = piece(whole, holder.bounds)[within(each.bounds, holder.bounds)]
        np.testing.assert_array_equal(within_holder, piece(whole, each.bounds))
        crossed[tuple(slice(*span) for span in each.bounds)] += 1
    np.testing.assert_array_equal(crossed, 1)
    for shard, array in zip(target, received(found, target, whole), strict=True):
        np.testing.assert_array_equal(array, piece(whole, shard.bounds))


@given(pairs_of_layouts)
def test_devices_of_one_process_never_gather(pair: tuple[Layout, Layout]):
    source, target = pair
    alone = target._replace(devices_per_process=int(np.prod(target.mesh_shape)))
    assert crossing(source.shards(), alone.shards()).gathering is None


@given(pairs_of_layouts)
def test_processes_that_want_the_same_pull_the_same_amount_of_it(pair: tuple[Layout, Layout]):
    source, target = (layout.shards() for layout in pair)
    found = crossing(source, target)
    if found.gathering is not None:
        assert max(found.gathering.widths) - min(found.gathering.widths) <= 1


def test_what_several_devices_hold_is_taken_from_each_in_turn():
    source = shards((8, 2), WHOLE, (2, 2), 2)
    target = shards((8, 2), DATA, (4, 1), 2)
    pieces = crossing(source, target).pieces
    assert [each.origin for each in pieces] == [0, 1, 2, 3]
    assert [each.sender for each in pieces] == [0, 0, 1, 1]


def test_only_parts_that_overlap_are_pulled():
    source = shards((8,), DATA, (4, 1), 2)
    target = shards((8,), DATA, (2, 1), 1)
    pieces = crossing(source, target).pieces
    assert [(each.origin, each.receiver) for each in pieces] == [(0, 0), (1, 0), (2, 1), (3, 1)]


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
    gathering = crossing(shards(shape, WHOLE, (1, 1), 1), shards(shape, WHOLE, (2, 1), 1)).gathering
    assert gathering is not None
    assert (gathering.axis, gathering.widths) == (axis, widths)
