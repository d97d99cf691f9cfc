"""Plans around devices that are gone."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from cases import examples
from hypothesis import given
from hypothesis import strategies as st

from hetjax.errors import InputError
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh
from hetjax.planner import DynamicProgram, make_problem
from hetjax.planner.hap.hap_planner import HapPlanner, cluster_members
from hetjax.planner.harp.dynamic_program import Found
from hetjax.planner.harp.lost_devices import (
    around_lost,
    check_lost,
    is_power_of_two,
    lost_of_nodes,
    widest_of_nodes,
)
from hetjax.planner.plan.plan import validate

LINK = Link(1e10, 1e-5)
KIND = DeviceKind("test", {"float32": 1e12}, 10**9, 1e11, source="made up")


def rack(*nodes: tuple[int, int]) -> Cluster:
    subclusters = tuple(
        Subcluster(f"part{place}", KIND, count, per_node, LINK, LINK)
        for place, (count, per_node) in enumerate(nodes)
    )
    pairs = itertools.combinations(subclusters, 2)
    return Cluster("rack", subclusters, tuple((a.name, b.name, LINK) for a, b in pairs))


@st.composite
def cut_nodes(draw: st.DrawFn) -> tuple[int, set[int], list[int]]:
    """A node, devices of it that are gone, and sizes of submeshes that the rest has room for."""
    per_node = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    gone = draw(st.sets(st.integers(0, per_node - 1), max_size=per_node - 1))
    cluster = rack((1, per_node))
    room, widest = (
        per_node - lost_of_nodes(cluster, gone)[0][0],
        widest_of_nodes(cluster, gone)[0][0],
    )
    sizes: list[int] = []
    while room and draw(st.booleans()):
        # As `StageTable.may_hold` has it.
        odd = [] if gone and is_power_of_two(per_node) else [3, 6]
        size = draw(
            st.sampled_from([each for each in (1, 2, 4, 8, *odd) if each <= min(room, widest)])
        )
        sizes.append(size)
        room -= size
    return per_node, gone, sizes


@given(cut_nodes())
def test_what_a_node_has_room_for_finds_its_place(case: tuple[int, set[int], list[int]]):
    per_node, gone, sizes = case
    cluster = rack((2, 2), (1, per_node))
    starts = [per_node - sum(sizes[: place + 1]) for place in range(len(sizes))]
    submeshes = [
        SubMesh("part1", start, (1, size)) for start, size in zip(starts, sizes, strict=True)
    ]
    lost = {4 + device for device in gone}
    used: set[int] = set(lost)
    for before, after in zip(submeshes, around_lost(cluster, submeshes, lost), strict=True):
        devices = set(cluster.device_ids(after))
        assert after.shape == before.shape
        assert not devices & used
        used |= devices


@pytest.mark.parametrize(
    ("gone", "room"), [({2, 5}, 6), ({3, 4}, 4), ({5, 6, 7}, 5), ({0, 1, 6, 7}, 4), ({3}, 7)]
)
def test_what_is_left_on_both_sides_is_used(gone: set[int], room: int):
    assert lost_of_nodes(rack((1, 8)), gone) == ((8 - room,),)


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


@functools.cache
def found_with_all() -> Found:
    """The best plan for all devices."""
    found = DynamicProgram().find(PROBLEM)
    assert found is not None
    return found


@examples(usual=6, full=300)
@given(lost=st.sets(st.integers(0, 9), min_size=1, max_size=4))
def test_plans_do_without_what_is_lost_and_are_no_faster(lost: set[int]):
    found = found_with_all()
    without = DynamicProgram().find_without(PROBLEM, lost, found)
    anew = DynamicProgram().find(replace(PROBLEM, lost=frozenset(lost)))
    assert without is not None
    assert anew is not None
    # What decides among finalists is their simulation, which the closed form is not far from.
    assert without.step_time < 1.1 * anew.step_time
    validate(without.plan)
    used = {
        device
        for stage in without.plan.stages
        for device in without.plan.cluster.device_ids(stage.submesh)
    }
    assert used
    assert not used & lost
    assert without.plan.cluster == PROBLEM.cluster
    assert without.plan.lost_devices == anew.plan.lost_devices == tuple(sorted(lost))


PROBLEM = make_problem(
    loss,
    [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 6,
    jax.ShapeDtypeStruct((64, 512), jnp.float32),
    cluster=rack((2, 4), (1, 2)),
    optimizer=optax.adam(1e-3),
    num_microbatches=4,
)


@pytest.mark.parametrize(("lost", "message"), [({10}, "device 10"), (set(range(10)), "no device")])
def test_what_cannot_be_lost_is_named(lost: set[int], message: str):
    with pytest.raises(InputError, match=message):
        check_lost(PROBLEM.cluster, lost)


@pytest.mark.parametrize(("least", "lost"), [(2, {1}), (3, {0})])
def test_more_stages_than_devices_are_left_is_said_at_once(least: int, lost: set[int]):
    options = replace(PROBLEM.options, min_stages=least)
    problem = replace(PROBLEM, cluster=rack((1, least)), options=options, lost=frozenset(lost))
    message = f"min_stages is {least}, and without the lost ones there are {least - 1} devices"
    with pytest.raises(InputError, match=message):
        DynamicProgram().plan(problem)


def test_programs_of_members_know_what_is_lost():
    problem = replace(PROBLEM, cluster=rack((1, 3)), lost=frozenset({1}))
    assert HapPlanner().plan(problem).lost_devices == (1,)
    (half,) = rack((2, 2)).subclusters
    members = cluster_members(Cluster("half", (half,)), 8, frozenset({0}))
    # Of one whole node there is one member, so its devices are members.
    assert len(members) == 3
