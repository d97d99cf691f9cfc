"""Who pulls what: every byte crosses once, and every device ends with what it wants."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from layouts import Layout, array_shapes, layouts
from random_annotations import summands
from random_moves import FIRST, Move, moves

from hetjax.sharding import HSharding, Network, Subgroup
from hetjax.sharding.annotation.bounds import Bounds, contains, within
from hetjax.sharding.resolution.crossing import Crossing, crossing
from hetjax.sharding.resolution.senders import BestLink

DATA = PartitionSpec("data")
WHOLE = PartitionSpec()
pairs_of_layouts = array_shapes.filter(len).flatmap(
    lambda shape: st.tuples(layouts(shape), layouts(shape))
)


def crossed(source: Layout, target: Layout) -> Crossing:
    """Between stages, whose processes have nothing to do with each other."""
    processes = {d: (0, p) for d, p in source.processes().items()}
    processes |= {d: (1, p) for d, p in target.processes(FIRST).items()}
    senders = BestLink(Network.alike())
    ends = source.annotation(), target.annotation(FIRST)
    return crossing(*ends, source.shape, processes, senders)


def piece(array: np.ndarray, bounds: Bounds) -> np.ndarray:
    return array[tuple(slice(*span) for span in bounds)]


def carried_out(
    found: Crossing,
    source: HSharding,
    target: HSharding,
    shape: Sequence[int],
    held: Mapping[int, np.ndarray],
    processes: Mapping[int, Hashable],
) -> dict[int, np.ndarray]:
    """What every device of the target has in the end, by plain copies and sums."""
    before = {shard.device: shard.bounds for shard in source.shards(shape)}
    landed: dict[int, np.ndarray] = {}
    for shard in found.landed:
        array = np.full([stop - start for start, stop in shard.bounds], np.nan)
        for part in found.parts:
            if shard.device in part.receivers:
                pieces = [held[d][within(part.bounds, before[d])] for d in part.senders]
                array[within(part.bounds, shard.bounds)] = sum(pieces)
        landed[shard.device] = array
    mine: dict[int, np.ndarray] = {}
    receivers = {receiver for part in found.parts for receiver in part.receivers}
    for shard in found.landed:
        like = [
            other.device
            for other in found.landed
            if processes[other.device] == processes[shard.device]
            and (other.bounds, other.summand) == (shard.bounds, shard.summand)
            and other.device in receivers
        ]
        mine[shard.device] = landed[
            like[0] if like and shard.device not in receivers else shard.device
        ]
    shards = target.shards(shape)
    result = {}
    first = 0
    for group, gathering in zip(target.subgroups, found.gatherings, strict=True):
        members = shards[first : first + len(group.devices)]
        first += len(group.devices)
        together = defaultdict(list)
        for shard in members:
            together[shard.bounds].append(mine[shard.device])
        for shard in members:
            result[shard.device] = mine[shard.device]
            if gathering is not None:
                parts = together[shard.bounds]
                assert tuple(p.shape[gathering.axis] for p in parts) == gathering.widths
                result[shard.device] = np.concatenate(parts, gathering.axis)
    return result


@given(pairs_of_layouts)
def test_every_byte_crosses_once_and_every_device_gets_what_it_wants(pair: tuple[Layout, Layout]):
    source, target = pair
    whole = np.arange(np.prod(source.shape), dtype=float).reshape(source.shape)
    found = crossed(source, target)
    count = np.zeros(whole.shape, int)
    for part in found.parts:
        assert len(part.senders) == len(part.receivers) == 1
        count[tuple(slice(*span) for span in part.bounds)] += 1
    np.testing.assert_array_equal(count, 1)
    ends = source.annotation(), target.annotation(FIRST)
    held = {shard.device: piece(whole, shard.bounds) for shard in ends[0].shards(source.shape)}
    processes = target.processes(FIRST)
    arrived = carried_out(found, *ends, source.shape, held, processes)
    for shard in ends[1].shards(target.shape):
        np.testing.assert_array_equal(arrived[shard.device], piece(whole, shard.bounds))


@given(pairs_of_layouts)
def test_devices_of_one_process_never_gather(pair: tuple[Layout, Layout]):
    source, target = pair
    alone = target._replace(devices_per_process=int(np.prod(target.mesh_shape)))
    assert crossed(source, alone).gatherings == (None,)


@given(pairs_of_layouts)
def test_processes_that_want_the_same_pull_the_same_amount_of_it(pair: tuple[Layout, Layout]):
    (gathering,) = crossed(*pair).gatherings
    if gathering is not None:
        assert max(gathering.widths) - min(gathering.widths) <= 1


def test_what_several_devices_hold_is_taken_from_each_in_turn():
    source = Layout((8, 2), WHOLE, (2, 2), 2)
    target = Layout((8, 2), DATA, (4, 1), 2)
    assert [part.senders for part in crossed(source, target).parts] == [(0,), (1,), (2,), (3,)]


def test_only_parts_that_overlap_are_pulled():
    source, target = Layout((8,), DATA, (4, 1), 2), Layout((8,), DATA, (2, 1), 1)
    found = {pair for part in crossed(source, target).parts for pair in part.messages}
    assert found == {(0, FIRST), (1, FIRST), (2, FIRST + 1), (3, FIRST + 1)}


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
    (gathering,) = crossed(source, target).gatherings
    assert gathering is not None
    assert (gathering.axis, gathering.widths) == (axis, widths)


@settings(max_examples=300)
@given(moves())
def test_a_move_among_members_gives_every_device_what_it_wants(case: Move):
    shape, source, target, processes = case.shape, case.source, case.target, case.processes
    value, held = summands(source, shape, np.random.default_rng(0))
    found = crossing(source, target, shape, processes, BestLink(Network.alike()))
    arrived = carried_out(found, source, target, shape, held, processes)
    for shard in target.shards(shape):
        np.testing.assert_array_equal(arrived[shard.device], piece(value, shard.bounds))


@settings(max_examples=300)
@given(moves())
def test_a_move_sends_nothing_twice_to_a_member(case: Move):
    """Nothing that is no sum; and nothing at all to a device that has it."""
    shape, source, target, processes = case.shape, case.source, case.target, case.processes
    before = {shard.device: shard for shard in source.shards(shape)}
    found = crossing(source, target, shape, processes, BestLink(Network.alike()))
    wanted = {shard.device: shard for shard in target.shards(shape)}
    for group, gathering in zip(target.subgroups, found.gatherings, strict=True):
        counts: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros(shape, int))
        for part in found.parts:
            for sender, receiver in part.messages:
                if receiver in group.devices and processes[sender] != processes[receiver]:
                    key = before[sender].summand
                    counts[key][tuple(slice(*span) for span in part.bounds)] += 1
                    mine = before.get(receiver)
                    assert (
                        mine is None
                        or mine.summand != key
                        or not contains(mine.bounds, part.bounds)
                    )
        shared = {
            (shard.bounds, processes[device])
            for device, shard in wanted.items()
            if device in group.devices
        }
        overlapping = len({bounds for bounds, _ in shared}) < len(shared)
        if gathering is not None or not overlapping:
            assert all(count.max(initial=0) <= 1 for count in counts.values())


def test_every_device_adds_the_same_summands_in_the_same_order():
    three = [Subgroup((d,), (), WHOLE) for d in range(3)]
    source, target = HSharding(tuple(three), "partial"), HSharding(tuple(three))
    found = crossing(source, target, (8,), {0: 0, 1: 1, 2: 2}, BestLink(Network.alike()))
    assert [(part.senders, part.receivers) for part in found.parts] == [((0, 1, 2), (0, 1, 2))]


def test_what_a_device_keeps_is_not_cut_where_only_others_cut():
    two = Subgroup((0, 1), (("data", 2),), DATA)
    one = Subgroup((2,), (), WHOLE)
    source = HSharding((two, one), 0, (4, 4))
    target = HSharding((two.with_spec(WHOLE), one))
    found = crossing(source, target, (8,), {0: 0, 1: 0, 2: 1}, BestLink(Network.alike()))
    assert [(part.senders, part.bounds) for part in found.parts if 2 in part.receivers] == [
        ((0,), ((0, 2),)),
        ((1,), ((2, 4),)),
        ((2,), ((4, 8),)),
    ]


def test_a_member_without_a_share_gives_nothing_and_takes_what_it_wants():
    one, other = Subgroup((0,), (), WHOLE), Subgroup((1,), (), WHOLE)
    source, target = HSharding((one, other), 0, (0, 4)), HSharding((one, other), 0, (3, 1))
    found = crossing(source, target, (4,), {0: 0, 1: 1}, BestLink(Network.alike()))
    assert [(part.senders, part.receivers, part.bounds) for part in found.parts] == [
        ((1,), (0,), ((0, 3),)),
        ((1,), (1,), ((3, 4),)),
    ]


def test_hosts_that_have_what_they_want_gather_nothing():
    four = Subgroup((0, 1, 2, 3), (("data", 4),), WHOLE)
    processes = {0: 0, 1: 0, 2: 1, 3: 1}
    whole = HSharding((four,))
    found = crossing(whole, whole, (8,), processes, BestLink(Network.alike()))
    assert found.gatherings == (None,)
    assert not [pair for part in found.parts for pair in part.messages]
