"""Switch plans bring every part to where it is wanted, whatever chooses the senders."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from random_annotations import an_annotation, groups_of_devices

from hetjax.errors import InputError
from hetjax.mesh import KINDS, Cluster, Link, Subcluster
from hetjax.sharding import HSharding, Network, Subgroup
from hetjax.sharding.annotation.bounds import contains, within
from hetjax.sharding.resolution.switch_transfers import POLICIES, MovedArray, plan_switch

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


@given(switches(), st.sampled_from(sorted(POLICIES)))
def test_every_part_arrives(arrays, policy):
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
        for (sender, receiver), slices in messages.items():
            for i, bounds in slices:
                around, part = next(p for p in readable[i, sender] if contains(p[0], bounds))
                piece = part[within(bounds, around)]
                arrived.setdefault((i, receiver), []).append((bounds, piece))
    for i, array in enumerate(arrays):
        for shard in array.after:
            found = np.full([b - a for a, b in shard.bounds], np.nan)
            for bounds, piece in arrived[i, shard.device]:
                found[within(bounds, shard.bounds)] = piece
            expected = values[i][tuple(slice(a, b) for a, b in shard.bounds)]
            np.testing.assert_array_equal(found, expected)


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


def test_a_part_that_only_lost_devices_hold_is_named():
    one, other = Subgroup((0,), (), P()), Subgroup((1,), (), P())
    sides = [HSharding((group,)).shards((4,)) for group in (one, other)]
    before, after = sides
    weights = MovedArray("parameters/weights", (4,), 4, before, after)
    with pytest.raises(InputError, match="parameters/weights: source: no device holds"):
        plan_switch([weights], NODES, lost={0})
