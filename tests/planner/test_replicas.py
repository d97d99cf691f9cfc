"""Several pipelines: which clusters divide how, who gets how much, and whether it is the best."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax import planner
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster
from hetjax.planner import DynamicProgram, Plan, PlanningProblem
from hetjax.planner.costs.sharing_cost import SharedParameters, sharing_seconds
from hetjax.planner.harp.divisions import divisions
from hetjax.planner.harp.replicas import (
    _joined,
    _problem_on,
    least_score,
    score_of,
    several_pipelines,
)

NEAR, FAR = Link(10e9, 1e-5), Link(2e8, 1e-4)
ADAM = optax.adam(1e-3)


def part(name: str, speed: float, nodes: int, devices: int) -> Subcluster:
    kind = DeviceKind(f"{name} card", {"float32": speed}, 10**9, 1e11, source="made up")
    return Subcluster(name, kind, nodes, devices, NEAR, FAR)


def cluster_of(*parts: Subcluster) -> Cluster:
    pairs = itertools.combinations([each.name for each in parts], 2)
    return Cluster("test", parts, tuple((a, b, FAR) for a, b in pairs))


def problem_of(
    cluster: Cluster, optimizer: optax.GradientTransformation = ADAM, **options: Any
) -> PlanningProblem:
    """A model of wide activations and few parameters: what crosses a cut is dear."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    return planner.make_problem(
        loss,
        [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4,
        jax.ShapeDtypeStruct((48, 4096, 64), jnp.float32),
        cluster=cluster,
        optimizer=optimizer,
        num_microbatches=6,
        options=planner.PlanOptions(**options),
    )


def starts(cluster: Cluster, most: int) -> set[str]:
    return {
        " | ".join(
            " ".join(
                f"{each.subcluster}{each.start}:{each.nodes}x{each.devices_per_node}"
                for each in part
            )
            for part in parts
        )
        for parts in divisions(cluster, most)
    }


def test_how_clusters_divide():
    pair = cluster_of(part("a", 1e12, 2, 4), part("b", 1e12, 1, 2))
    assert starts(pair, 1) == set()
    assert starts(pair, 2) == {
        "a0:1x4 b0:1x1 | a4:1x4 b1:1x1",
        "a0:2x4 | b0:1x2",
        "a0:1x4 | a4:1x4",
        "b0:1x1 | b1:1x1",
    }
    six = cluster_of(part("a", 1e12, 1, 6))
    assert starts(six, 2) == {"a0:1x3 | a3:1x3", "a0:1x4 | a4:1x2", "a0:1x5 | a5:1x1"}
    alike = cluster_of(part("a", 1e12, 3, 2), part("b", 1e12, 1, 6))
    assert "a0:2x2 b0:1x4 | a4:1x2 b4:1x2" in starts(alike, 2)
    assert starts(pair, 3) - starts(pair, 2) == {
        "a0:1x4 | a4:1x4 | b0:1x2",
        "a0:2x4 | b0:1x1 | b1:1x1",
    }
    three = cluster_of(*(part(name, 1e12, 1, 1) for name in "abc"))
    assert len(starts(three, 3)) == 4 + 3


def test_many_subclusters_are_divided_by_kind_by_speed_and_alike():
    speeds = {"a": 1e12, "b": 5e11, "c": 9e11, "d": 2e11, "e": 6e11}
    many = cluster_of(*(part(name, speed, 1, 1) for name, speed in speeds.items()))
    alone = {name: f"{name}0:1x1" for name in speeds}
    assert starts(many, 2) == {
        f"{alone['a']} {alone['b']} {alone['d']} | {alone['c']} {alone['e']}",
        f"{alone['a']} {alone['b']} | {alone['c']} {alone['e']}",
        f"{alone['a']} | {alone['c']} {alone['e']}",
        f"{alone['a']} | {alone['c']}",
    }
    assert " | ".join(alone[name] for name in "abce") in starts(many, 4)
    assert " | ".join(alone.values()) in starts(many, 5)
    cards = zip("abcde", ("fast", "slow", "fast", "slow", "fast"), strict=True)
    alike = cluster_of(*(replace(part(kind, 1e12, 1, 1), name=name) for name, kind in cards))
    assert "a0:1x1 c0:1x1 e0:1x1 | b0:1x1 d0:1x1" in starts(alike, 2)


def test_a_subcluster_more_makes_no_plan_slower():
    parts = [part(name, 1e12, 1, 1) for name in "abcdef"]
    times = [best_on(problem_of(cluster_of(*parts[:count]))) for count in (4, 5, 6)]
    four, five, six = (found[0] for found in times if found is not None)
    assert six <= five <= four


CLUSTERS = [
    cluster_of(part("fast", 1e12, 1, 2), part("slow", 5e11, 1, 2)),
    cluster_of(part("fast", 1e12, 2, 1), part("slow", 3e11, 1, 1)),
]


def best_on(smaller: PlanningProblem, _: float = float("inf")) -> tuple[float, Plan] | None:
    found = DynamicProgram().find(smaller)
    return found and (found.step_time, found.plan)


@pytest.mark.parametrize("cluster", CLUSTERS, ids=["one node each", "two nodes and one"])
def test_no_division_and_no_numbers_are_better(cluster: Cluster):
    problem = problem_of(cluster)
    timed = several_pipelines([problem], best_on, best_on)
    assert timed is not None
    best = float("inf")
    for parts in divisions(cluster, 4):
        for numbers in itertools.product(range(1, 7), repeat=len(parts)):
            if sum(numbers) == 6:
                best = min(best, time_of(problem, parts, numbers))
    assert timed[0] == pytest.approx(best, rel=1e-9)


def time_of(problem, parts, numbers) -> float:
    timed = (best_on(_problem_on(problem, *each)) for each in zip(parts, numbers, strict=True))
    found = [each for each in timed if each is not None]
    plan = _joined(problem, parts, [plan for _, plan in found])
    planner.validate(plan)
    shared = sharing_seconds(plan, SharedParameters.of(plan, problem.program))
    return max(seconds for seconds, _ in found) + max(shared)


@pytest.mark.parametrize("schedule", ["h_1f1b", "1f1b", "h_1f1b_split"])
def test_several_pipelines_are_chosen_where_they_are_faster(schedule: str):
    problem = problem_of(CLUSTERS[0], schedule=schedule)
    one = planner.solve(
        replace(problem, options=replace(problem.options, max_pipelines=1))
    ).prediction
    plan = planner.solve(problem)
    planner.validate(plan)
    assert one is not None
    assert plan.prediction is not None
    assert len(plan.pipelines) > 1
    assert plan.prediction.step_time < one.step_time
    assert plan.batch_size == 48
    assert {pipeline.schedule.name for pipeline in plan.pipelines} == {schedule}
    fast, slow = plan.pipelines[0], plan.pipelines[-1]
    assert fast.num_microbatches > slow.num_microbatches
    assert planner.simulate(plan).makespan == pytest.approx(plan.prediction.step_time)


def test_one_pipeline_stays_where_it_is_faster():
    alone = cluster_of(part("only", 1e12, 1, 4))
    found = DynamicProgram().find(problem_of(alone))
    single = DynamicProgram().find(problem_of(alone, max_pipelines=1))
    assert found is not None
    assert single is not None
    assert found.score <= single.score
    assert found.runners_up


def test_what_is_dear_gets_no_pipeline():
    cluster = CLUSTERS[0]
    fast, slow = cluster.subclusters
    dear = (replace(fast, price_per_device_hour=1.0), replace(slow, price_per_device_hour=50.0))
    problem = problem_of(replace(cluster, subclusters=dear), objective="cost")
    plan = planner.solve(problem)
    assert {stage.submesh.subcluster for stage in plan.stages} == {"fast"}


@settings(max_examples=15)
@given(
    shapes=st.lists(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]), min_size=1, max_size=2),
    speed=st.floats(1e11, 1e13),
    objective=st.sampled_from(planner.OBJECTIVES),
)
def test_no_division_is_better_than_its_floor(shapes, speed, objective):
    parts = (part(f"p{i}", speed * (i + 1), *shape) for i, shape in enumerate(shapes))
    cluster = cluster_of(
        *(replace(each, price_per_device_hour=i + 1.0) for i, each in enumerate(parts))
    )
    problem = problem_of(cluster, objective=objective)
    for each in divisions(cluster, 4):
        numbers = [1] * (len(each) - 1) + [7 - len(each)]
        found = [
            DynamicProgram().find(_problem_on(problem, *pair))
            for pair in zip(each, numbers, strict=True)
        ]
        plan = _joined(problem, each, [one.plan for one in found if one])
        shared = sharing_seconds(plan, SharedParameters.of(plan, problem.program))
        step_time = max(one.step_time for one in found if one) + max(shared)
        assert least_score([problem], each) <= score_of(problem, plan, step_time)


def test_what_is_frozen_is_not_in_the_floor():
    """Over links that the parameters would take seconds for."""
    far = Link(1e4, 1e-4)
    slow = tuple(replace(each, inter_node=far) for each in CLUSTERS[0].subclusters)
    cluster = replace(CLUSTERS[0], subclusters=slow, links=(("fast", "slow", far),))
    optimizer = optax.multi_transform(
        {"trained": ADAM, "frozen": optax.set_to_zero()}, ["trained", *["frozen"] * 3]
    )
    problem = problem_of(cluster, optimizer)
    for parts in divisions(cluster, 2):
        assert least_score([problem], parts) <= time_of(problem, parts, (3, 3))


def test_several_are_weighed_unless_it_is_said_otherwise():
    options = {"cluster": CLUSTERS[0], "optimizer": optax.sgd(1.0), "num_microbatches": 6}
    shape = jax.ShapeDtypeStruct((48, 4096, 64), jnp.float32)

    def loss(weight: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ weight @ weight) ** 2)

    weight = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert len(planner.plan(loss, weight, shape, **options).pipelines) > 1
    assert (
        len(
            planner.plan(
                loss,
                weight,
                shape,
                options=planner.PlanOptions(max_pipelines=1),
                **options,
            ).pipelines
        )
        == 1
    )
