"""Switch plans bring every part to where it is wanted, whatever chooses the senders."""

import itertools
from collections.abc import Mapping, Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from random_annotations import an_annotation, groups_of_devices

from hetjax.errors import InputError
from hetjax.mesh import KINDS, Cluster, Link, Subcluster
from hetjax.sharding import HSharding, Network, Subgroup
from hetjax.sharding.annotation.bounds import contains, volume, within
from hetjax.sharding.resolution import balanced_senders
from hetjax.sharding.resolution.balanced_senders import SMALLEST_PIECE, EqualOwners, level_loads
from hetjax.sharding.resolution.switch_transfers import (
    POLICIES,
    MovedArray,
    SwitchPlan,
    plan_switch,
)

NODES = Network.of(
    Cluster("c", (Subcluster("s", KINDS["T4"], 4, 8, Link(1e11, 1e-6), Link(1e9, 1e-5)),), ())
)


@st.composite
def switches(draw):
    """A few arrays, and how each lies before and after."""
    arrays = []
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.sampled_from((4, 8, 24)), min_size=1, max_size=2)))
        sides = [
            draw(an_annotation(shape, draw(groups_of_devices()), partial=False)).shards(shape)
            for _ in range(2)
        ]
        arrays.append(MovedArray(str(number), shape, 4, *sides))
    return arrays


@given(switches(), st.sampled_from(sorted(POLICIES)), st.sampled_from((SMALLEST_PIECE, 4)))
def test_every_part_arrives(arrays, policy, smallest):
    with mock.patch.object(balanced_senders, "SMALLEST_PIECE", smallest):
        plan = plan_switch(arrays, NODES, policy=policy)
    values = [np.random.default_rng(i).normal(size=a.shape) for i, a in enumerate(arrays)]
    held: dict = {}
    for i, array in enumerate(arrays):
        for shard in array.before:
            part = values[i][tuple(slice(a, b) for a, b in shard.bounds)]
            held.setdefault((i, shard.device), []).append((shard.bounds, part))
    arrived: dict = {}
    for place, messages in enumerate(plan.phases):
        readable = {key: list(parts) for key, parts in (held if place == 0 else arrived).items()}
        for i, bounds, sender, receiver in messages:
            around, part = next(p for p in readable[i, sender] if contains(p[0], bounds))
            piece = part[within(bounds, around)]
            arrived.setdefault((i, receiver), []).append((bounds, piece))
    for i, array in enumerate(arrays):
        for shard in array.after:
            found = np.full([b - a for a, b in shard.bounds], np.nan)
            for bounds, piece in arrived.get((i, shard.device), []):
                found[within(bounds, shard.bounds)] = piece
            expected = values[i][tuple(slice(a, b) for a, b in shard.bounds)]
            np.testing.assert_array_equal(found, expected)


def test_what_comes_from_several_is_passed_on_as_it_came():
    """Two owners send three devices of a node a piece each; one of the pieces is halved."""
    before, after = (
        HSharding((Subgroup(devices, (("x", len(devices)),), P()),)).shards((24, 24))
        for devices in ((0, 1), (0, 1, 8, 9, 10))
    )
    array = MovedArray("weights", (24, 24), 4, before, after)
    with mock.patch.object(balanced_senders, "SMALLEST_PIECE", 4):
        plan = plan_switch([array], NODES)
    first, second = plan.phases
    came = {(bounds, receiver) for _, bounds, sender, receiver in first if sender != receiver}
    assert len(came) == 4
    assert {(bounds, sender) for _, bounds, sender, _ in second} == came


@given(switches())
def test_policies_send_the_same_bytes_and_fused_ones_stay_in_nodes(arrays):
    plans = {policy: plan_switch(arrays, NODES, policy=policy) for policy in POLICIES}
    totals = {policy: sum(plan.bytes_sent().values()) for policy, plan in plans.items()}
    assert len(set(totals.values())) == 1
    far = {
        policy: sum(row["inter_node"] for row in plan.volumes(NODES).values())
        for policy, plan in plans.items()
    }
    assert far["fused"] <= far["unfused"] <= far["min_rank"]


@given(switches())
def test_min_rank_is_the_lowest_device_that_holds_a_slice(arrays):
    plan = plan_switch(arrays, NODES, policy="min_rank")
    assert len(plan.phases) <= 1, "nothing is passed on"
    for messages in plan.phases:
        for i, bounds, sender, receiver in messages:
            holders = {s.device for s in arrays[i].before if contains(s.bounds, bounds)}
            assert sender == (receiver if receiver in holders else min(holders))


def test_min_rank_takes_a_far_device_where_a_near_one_holds_it_too():
    everywhere = Subgroup((0, 8, 9), (("x", 3),), P())
    new = Subgroup((10,), (), P())
    before, after = (HSharding((group,)).shards((4,)) for group in (everywhere, new))
    weights = MovedArray("weights", (4,), 4, before, after)
    senders = {
        policy: next(iter(plan_switch([weights], NODES, policy=policy).bytes_sent()))[0]
        for policy in POLICIES
    }
    assert senders == {"min_rank": 0, "fused": 8, "unfused": 8}


def stacked(name: str, rows: int, before: Sequence[int], after: Sequence[int]) -> MovedArray:
    """A leaf of blocks, whole on each device of one side, and on each of the other."""
    shape = (rows, 256, 256)
    old, new = (
        HSharding((Subgroup(tuple(devices), (("x", len(devices)),), P()),)).shards(shape)
        for devices in (before, after)
    )
    return MovedArray(name, shape, 4, old, new)


def sent_by(plan: SwitchPlan, i: int | None = None) -> dict[int, int]:
    """What each device sends of an array, or of all."""
    found: dict[int, int] = {}
    for messages in plan.phases:
        for array, bounds, sender, receiver in messages:
            size = volume(bounds) if i in (None, array) and sender != receiver else 0
            found[sender] = found.get(sender, 0) + size
    return found


def test_a_stacked_leaf_is_balanced_however_its_rows_lie():
    # Three rows of one leaf and five of another: two holders in other nodes send half of each.
    arrays = [stacked("gate", 3, (0, 8), (16,)), stacked("up", 5, (0, 8), (16,))]
    plan = plan_switch(arrays, NODES)
    for i in (None, 0, 1):
        assert len(set(sent_by(plan, i).values())) == 1, i


def test_what_can_be_shared_makes_up_for_what_cannot():
    # Device 0 alone has to send six rows; of ten that device 8 has too it sends two.
    arrays = [stacked("alone", 6, (0,), (16,)), stacked("shared", 10, (0, 8), (16,))]
    sent = sent_by(plan_switch(arrays, NODES))
    assert sent == pytest.approx({0: 8 * 2**16, 8: 8 * 2**16}, rel=2e-3)


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), st.integers(0, 10**6)), max_size=12)
)
def test_loads_are_level(found):
    """No division has a busiest device with less to send: some must send what only they have."""
    wanted: dict[EqualOwners, int] = {}
    for owners, count in found:
        choice = EqualOwners(tuple(sorted(owners)), 1.0)
        wanted[choice] = wanted.get(choice, 0) + count
    loads = level_loads(wanted)
    busiest = np.zeros(6)
    for choice, parts in loads.items():
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(wanted[choice])
        busiest[list(choice.owners)] += parts
    assert busiest.max() <= least_busiest(wanted) * 1.01 + 1


def least_busiest(wanted: Mapping[EqualOwners, int]) -> float:
    """The least that the busiest device can have to send: for some devices, what only they have."""
    found = 0.0
    for count in range(1, 7):
        for devices in itertools.combinations(range(6), count):
            only = sum(size for choice, size in wanted.items() if {*choice.owners} <= {*devices})
            found = max(found, only / count)
    return found


def test_a_part_that_only_lost_devices_hold_is_named():
    one, other = Subgroup((0,), (), P()), Subgroup((1,), (), P())
    sides = [HSharding((group,)).shards((4,)) for group in (one, other)]
    before, after = sides
    weights = MovedArray("parameters/weights", (4,), 4, before, after)
    with pytest.raises(InputError, match="parameters/weights: source: no device holds"):
        plan_switch([weights], NODES, lost={0})
