"""How good a plan is, what limits it, whether it pays to mix, and into what to divide the batch."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax import planner
from hetjax.errors import InputError
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster
from hetjax.planner import DynamicProgram, Plan, PlanningProblem, choose_microbatches, parts_alone
from hetjax.planner.harp.mixing import timed_parts

NEAR, FAR = Link(10e9, 1e-5), Link(1e9, 1e-4)
BATCH = 64


def subcluster(name: str, speed: float, devices: int, memory: int = 10**9) -> Subcluster:
    kind = DeviceKind(f"{name} card", {"float32": speed}, memory, 1e11, source="made up")
    return Subcluster(name, kind, 1, devices, NEAR, NEAR)


def cluster_of(*subclusters: Subcluster) -> Cluster:
    pairs = [(a.name, b.name) for i, a in enumerate(subclusters) for b in subclusters[i + 1 :]]
    return Cluster("test", subclusters, tuple((a, b, FAR) for a, b in pairs))


ANY = planner.PlanOptions()


def problem_of(
    cluster: Cluster,
    num_microbatches: int = 8,
    *,
    batch: int = BATCH,
    width: int = 512,
    options: planner.PlanOptions = ANY,
) -> PlanningProblem:
    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    return planner.make_problem(
        loss,
        [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 8,
        jax.ShapeDtypeStruct((batch, width), jnp.float32),
        cluster=cluster,
        optimizer=optax.adam(1e-3),
        num_microbatches=num_microbatches,
        options=options,
    )


def planned(problem: PlanningProblem) -> Plan:
    return planner.solve(problem)


def test_one_device_is_balanced_and_as_good_as_its_time():
    problem = problem_of(cluster_of(subcluster("only", 1e12, 1)))
    plan = planned(problem)
    assert plan.prediction is not None
    assert planner.load_balance(plan, problem.dtype) == pytest.approx(1.0)
    products = BATCH * 2 * 512 * 512 * (8 + 8 + 7)  # The first layer's input has no gradient.
    expected = products / (plan.prediction.step_time * 1e12)
    assert planner.flops_utilization(plan, problem) == pytest.approx(expected)


def test_a_device_that_is_left_out_is_idle():
    one = problem_of(cluster_of(subcluster("only", 1e12, 1)))
    two = replace(one, cluster=cluster_of(subcluster("only", 1e12, 1), subcluster("b", 1e12, 1)))
    plan = replace(planned(one), cluster=two.cluster)
    assert planner.load_balance(plan, "float32") == pytest.approx(0.5)


@settings(max_examples=10)
@given(st.integers(1, 4), st.integers(1, 4), st.floats(2e11, 2e12))
def test_shares_are_shares(first: int, second: int, speed: float):
    cluster = cluster_of(subcluster("a", 1e12, first), subcluster("b", speed, second))
    problem = problem_of(cluster)
    plan = planned(problem)
    limits = planner.limits(plan)
    assert 0 < planner.load_balance(plan, "float32") <= 1
    assert 0 < planner.flops_utilization(plan, problem) < 1
    assert 0 < limits.stage_busy <= 1
    assert 0 <= limits.link_busy <= 1
    assert 0 < limits.memory <= 1
    assert (limits.link is None) == (len(plan.stages) == 1)


def test_what_limits_a_plan():
    problem = problem_of(cluster_of(subcluster("a", 1e12, 2)))
    plan = planned(replace(problem, options=planner.PlanOptions(min_stages=2)))
    assert plan.prediction is not None
    held = list(plan.prediction.stages)
    held[1] = replace(held[1], forward_seconds=1.0)
    held[0] = replace(held[0], communication_seconds=0.5, memory_bytes=held[0].memory_limit_bytes)
    slow = replace(plan, prediction=replace(plan.prediction, stages=tuple(held), step_time=10.0))
    limits = planner.limits(slow)
    assert (limits.stage, limits.link, limits.fullest) == (1, (0, 1), 0)
    assert limits.link_busy == pytest.approx(8 * 0.5 / 10)
    assert limits.memory == 1


@pytest.mark.parametrize("count", [1, 5])
def test_kinds_are_compared_with_all_their_subclusters(count: int):
    names = [f"fast{number}" for number in range(count + 1)]
    fast = [replace(subcluster("fast", 1e12, 2), name=name) for name in names]
    whole = cluster_of(*fast, subcluster("slow", 5e11, 2))
    parts = timed_parts(whole, lambda part: 12.0 / part.num_devices)
    kinds = {part.kind: part.subclusters for part in parts if part.kind}
    assert kinds == {"fast card": tuple(names), "slow card": ("slow",)}
    assert planner.side_by_side(parts) == pytest.approx(12.0 / whole.num_devices)
    of_one_kind = timed_parts(cluster_of(*fast), lambda part: 1.0)
    assert len(of_one_kind) == len(names)
    assert planner.side_by_side(of_one_kind) is None


def test_parts_of_a_cluster_alone():
    whole = problem_of(
        cluster_of(
            subcluster("fast", 1e12, 2),
            subcluster("slow", 5e11, 2),
            subcluster("small", 1e12, 1, memory=10**6),
        )
    )

    def plan_on(part: Cluster) -> Plan | None:
        problem = replace(whole, cluster=part)
        found = DynamicProgram().find(problem)
        return found and planner.complete(found.plan, problem)

    parts = parts_alone(whole.cluster, plan_on)
    times = [part.step_time for part in parts if part.step_time is not None]
    assert times == sorted(times)
    assert len(times) == 5
    assert parts[-1] == planner.PartAlone(("small",), 1, None, "small card")
    assert len(parts) == 6
    by_name = {part.subclusters: part for part in parts}
    assert by_name["fast", "slow"].num_devices == 4
    alone = planner.solve(replace(whole, cluster=whole.cluster.part(["fast"])))
    assert alone.prediction is not None
    assert by_name["fast",].step_time == alone.prediction.step_time


@pytest.mark.parametrize("batch", [48, 64])
def test_the_number_of_microbatches_is_the_best_of_all(batch: int):
    """A data axis has to divide the size: between good numbers there are bad ones."""
    cluster = cluster_of(subcluster("fast", 1e12, 2), subcluster("slow", 5e11, 4))
    problems = {
        count: problem_of(cluster, count, batch=batch)
        for count in range(1, batch + 1)
        if batch % count == 0
    }
    choice = choose_microbatches(problems.__getitem__, batch, DynamicProgram())
    assert set(choice.step_times) == set(problems)
    assert choice.found.step_time == min(choice.step_times.values())
    assert choice.step_times[choice.problem.num_microbatches] == choice.found.step_time


@pytest.mark.parametrize("memory", [12, 20])
def test_microbatches_that_are_too_large_are_not_planned_for(memory: int):
    """Where nothing fits, nothing does with those that are larger and divide no better."""
    few = subcluster("fast", 1e12, 2, memory * 2**20), subcluster("slow", 5e11, 2, memory * 2**20)
    cluster, batch = cluster_of(*few), 2**12
    one = planner.PlanOptions(max_pipelines=1)
    stated: list[int] = []

    def traced(count: int) -> PlanningProblem:
        return problem_of(cluster, count, batch=batch, options=one)

    def problem_for(count: int) -> PlanningProblem:
        stated.append(batch // count)
        return traced(count)

    choice = choose_microbatches(problem_for, batch, DynamicProgram(), traced=traced)
    fitting = {
        count: found.step_time
        for count in choice.step_times
        for found in [DynamicProgram().find(traced(count))]
        if found
    }
    assert choice.found.step_time == min(fitting.values())
    assert batch // min(fitting) <= max(stated) < batch // 2


def test_a_model_that_fits_with_no_number_says_so():
    cluster = cluster_of(subcluster("small", 1e12, 2, memory=10**6))
    with pytest.raises(InputError, match="layer 0 of 8 is too large"):
        choose_microbatches(lambda count: problem_of(cluster, count), BATCH, DynamicProgram())
