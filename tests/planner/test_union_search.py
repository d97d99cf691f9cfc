"""The search puts unlike devices into one stage where that wins, and says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from cases import examples
from hypothesis import given
from hypothesis import strategies as st

from hetjax import planner
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, kind
from hetjax.models import model_of, recipe
from hetjax.planner import DynamicProgram, Plan, PlanningProblem, PlanOptions, Shares
from hetjax.planner.harp.union_slices import joinings
from hetjax.planner.problem.options import DEFAULTS

NEAR, FAR = Link(2e10, 1e-5), Link(1e9, 1e-4)


def card(name: str, flops: float, memory: int = 10**10) -> DeviceKind:
    return DeviceKind(name, {"float32": flops}, memory, 1e12, source="made up")


FAST, SLOW = card("fast card", 6e12), card("slow card", 2e12)


def cluster_of(
    *parts: tuple[str, DeviceKind, int], links: dict[tuple[str, str], Link] | None = None
) -> Cluster:
    """Subclusters of one node, with a fast link between any two unless it is said otherwise."""
    names = [name for name, *_ in parts]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    return Cluster(
        "unlike",
        tuple(Subcluster(name, kind, 1, count, NEAR, NEAR) for name, kind, count in parts),
        tuple((a, b, (links or {}).get((a, b), NEAR)) for a, b in pairs),
    )


BOX = cluster_of(("fast", FAST, 2), ("slow", SLOW, 2))


def problem_on(
    cluster: Cluster,
    batch: int = 64,
    microbatches: int = 1,
    layers: int = 6,
    width: int = 256,
    options: PlanOptions = DEFAULTS,
) -> PlanningProblem:
    def loss(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    return planner.make_problem(
        loss,
        [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers,
        jax.ShapeDtypeStruct((batch, 512, width), jnp.float32),
        cluster=cluster,
        optimizer=optax.adam(1e-3),
        num_microbatches=microbatches,
        options=options,
    )


def without_unions(problem: PlanningProblem) -> PlanningProblem:
    return replace(problem, options=replace(problem.options, union_stages=False))


def step_time(plan: Plan, problem: PlanningProblem) -> float:
    prediction = planner.predict(plan, problem).prediction
    assert prediction is not None
    assert all(stage.fits for stage in prediction.stages)
    return prediction.step_time


def with_shares(plan: Plan, batch: tuple[int, ...]) -> Plan:
    (stage,) = plan.stages
    changed = replace(stage, shares=Shares(batch=batch))
    return replace(plan, pipelines=(replace(plan.pipeline, stages=(changed,)),))


def test_unlike_cards_of_a_box_share_one_stage_by_their_speed():
    problem = problem_on(BOX)
    found = DynamicProgram().find(problem)
    assert found is not None
    (stage,) = found.plan.stages
    assert [str(submesh) for submesh in stage.submeshes] == ["fast[0:2] 1x2", "slow[0:2] 1x2"]
    fast, slow = stage.shares.batch
    assert 2 < fast / slow <= 3
    planned = step_time(found.plan, problem)
    assert planned == pytest.approx(found.step_time, rel=1e-6)
    even = step_time(with_shares(found.plan, (32, 32)), problem)
    assert even / planned >= 1.25
    plain = DynamicProgram().find(without_unions(problem))
    assert plain is not None
    assert not plain.plan.has_unions
    assert step_time(plain.plan, problem) > planned
    # What it was compared with is told.
    assert plain.plan in [each.plan for each in found.runners_up]


def test_memory_decides_where_speeds_are_equal():
    large = card("16 GB card", 6e12, 16 * 10**7)
    small = replace(large, name="8 GB card", memory_bytes=8 * 10**7)
    cluster = cluster_of(("large", large, 1), ("small", small, 1))
    options = PlanOptions(allow_recompute=False, max_stages=1)
    problem = problem_on(cluster, batch=40, options=options)
    found = DynamicProgram().find(problem)
    assert found is not None
    (stage,) = found.plan.stages
    first, second = stage.shares.batch
    assert first > second
    planned = planner.predict(found.plan, problem).prediction
    assert planned is not None
    members = planned.stages[0].members
    assert all(each.memory_bytes <= 0.9 * each.memory_limit_bytes for each in members)
    # One example more, and the small card is fuller than a plan may fill it; even less, half.
    more = planner.predict(with_shares(found.plan, (first - 1, second + 1)), problem).prediction
    assert more is not None
    assert more.stages[0].members[1].memory_bytes > 0.9 * small.memory_bytes


def test_a_stage_of_a_pipeline_may_be_a_union():
    """Two unlike cards in one box, and a third one far away."""
    far = {("fast", "far"): FAR, ("slow", "far"): FAR}
    cluster = cluster_of(("fast", FAST, 1), ("slow", SLOW, 1), ("far", FAST, 2), links=far)
    options = PlanOptions(max_pipelines=1)
    problem = problem_on(cluster, microbatches=8, width=2048, layers=5, options=options)
    found = DynamicProgram().find(problem)
    assert found is not None
    assert len(found.plan.stages) > 1
    assert found.plan.has_unions
    plain = DynamicProgram().find(without_unions(problem))
    assert plain is not None
    ours, theirs = step_time(found.plan, problem), step_time(plain.plan, problem)
    assert ours < theirs
    assert ours == pytest.approx(found.step_time, rel=0.02)


def test_where_links_are_slow_nothing_changes():
    cluster = cluster_of(
        ("fast", FAST, 2), ("slow", SLOW, 2), links={("fast", "slow"): Link(1e6, 1e-3)}
    )
    problem = problem_on(cluster, microbatches=8)
    found, plain = (DynamicProgram().find(each) for each in (problem, without_unions(problem)))
    assert found is not None
    assert plain is not None
    assert found.plan == plain.plan


def test_devices_that_are_lost_leave_no_unions():
    problem = replace(problem_on(BOX), lost=frozenset({0}))
    found = DynamicProgram().find(problem)
    assert found is not None
    assert not found.plan.has_unions


@pytest.mark.parametrize(("count", "ways"), [(1, 0), (2, 1), (3, 4), (4, 14), (5, 4)])
def test_every_way_to_join_subclusters(count: int, ways: int):
    cluster = cluster_of(*((f"part{place}", FAST, 2) for place in range(count)))
    assert len(list(joinings(cluster))) == ways


@examples(usual=6)
@given(
    st.sampled_from([1e7, 1e9, 2e10]),
    st.floats(1.0, 6.0),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 4]),
)
def test_a_plan_is_never_slower_for_what_is_allowed(
    bandwidth: float, ratio: float, fast: int, slow: int, microbatches: int
):
    link = {("fast", "slow"): Link(bandwidth, 5e-5)}
    other = replace(SLOW, peak_flops={"float32": 6e12 / ratio})
    cluster = cluster_of(("fast", FAST, fast), ("slow", other, slow), links=link)
    options = PlanOptions(max_pipelines=1)
    problem = problem_on(cluster, batch=24, microbatches=microbatches, layers=4, options=options)
    found, plain = (DynamicProgram().find(each) for each in (problem, without_unions(problem)))
    assert found is not None
    assert plain is not None
    assert found.step_time <= plain.step_time
    assert step_time(found.plan, problem) == pytest.approx(found.step_time, rel=0.02)


def test_resnet_50_on_two_a6000_and_two_2080_ti():
    """Issue 580 of timm: 2,000 images a second with equal batches, 2,500 with unequal ones."""
    box = cluster_of(("a6000", kind("A6000"), 2), ("rtx2080ti", kind("RTX2080Ti"), 2))
    model = model_of(recipe("resnet-50"))
    problem = planner.make_problem(
        model.loss,
        model.parameter_shapes,
        model.batch_shapes(256),
        cluster=box,
        optimizer=optax.sgd(0.1, momentum=0.9),
        num_microbatches=1,
    )
    found = DynamicProgram().find(problem)
    assert found is not None
    (stage,) = found.plan.stages
    first, second = stage.shares.batch
    assert stage.num_devices == 4
    assert first > second
    planned = step_time(found.plan, problem)
    assert step_time(with_shares(found.plan, (128, 128)), problem) / planned >= 1.25
    # Shares are the best for both passes together, of which each waits for its own slowest member;
    # no others are better by more than that, and each step of the way to even ones is worse.
    times = [
        step_time(with_shares(found.plan, (first - by, second + by)), problem)
        for by in range(-4, first - 128 + 1, 4)
    ]
    assert min(times) == pytest.approx(planned, rel=1e-3)
    behind = times[times.index(min(times)) :]
    assert behind == sorted(behind)
