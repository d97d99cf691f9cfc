"""Prices of devices: read, checked, paid by the node, and made least where that is asked for."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

from hetjax import planner
from hetjax.errors import InputError
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh
from hetjax.planner import (
    DynamicProgram,
    Member,
    Plan,
    PlanningProblem,
    choose_microbatches,
    step_cost,
)

NEAR, FAR = Link(10e9, 1e-5), Link(1e9, 1e-4)


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def priced(fast: float | None, slow: float | None) -> Cluster:
    card = DeviceKind("fast card", {"float32": 1e12}, 10**9, 1e11, source="made up")
    lame = replace(card, name="slow card", peak_flops={"float32": 5e11})
    return Cluster(
        "test",
        (
            Subcluster("fast", card, 2, 2, NEAR, FAR, price_per_device_hour=fast),
            Subcluster("slow", lame, 2, 2, NEAR, FAR, price_per_device_hour=slow),
        ),
        (("fast", "slow", FAR),),
    )


def problem_of(cluster: Cluster, objective: str = "cost", count: int = 8) -> PlanningProblem:
    return planner.make_problem(
        loss,
        [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 8,
        jax.ShapeDtypeStruct((64, 512), jnp.float32),
        cluster=cluster,
        optimizer=optax.adam(1e-3),
        num_microbatches=count,
        options=planner.PlanOptions(objective=objective),
    )


def used(plan: Plan) -> set[str]:
    return {stage.submesh.subcluster for stage in plan.stages}


def test_what_is_dear_is_left_alone():
    for prices, cheap in (((100.0, 1.0), "slow"), ((1.0, 100.0), "fast")):
        problem = problem_of(priced(*prices))
        assert used(planner.solve(problem)) == {cheap}


def test_no_node_less_or_more_is_cheaper():
    problem = problem_of(priced(2.0, 1.0))
    cheapest = DynamicProgram().find(problem)
    fastest = DynamicProgram().find(
        replace(problem, options=replace(problem.options, objective="step_time"))
    )
    assert cheapest is not None
    assert fastest is not None
    assert cheapest.step_time >= fastest.step_time
    assert cheapest.score == pytest.approx(step_cost(cheapest.plan, cheapest.step_time))
    assert cheapest.score <= (step_cost(fastest.plan, fastest.step_time) or 0.0)
    for names in (["fast"], ["slow"]):
        part = DynamicProgram().find(replace(problem, cluster=problem.cluster.part(names)))
        assert part is not None
        assert cheapest.score <= part.score * (1 + 1e-9)


def test_the_number_of_microbatches_is_the_cheapest():
    problems = {n: problem_of(priced(2.0, 1.0), count=n) for n in (1, 2, 4, 8, 16, 32, 64)}
    choice = choose_microbatches(problems.__getitem__, 64, DynamicProgram())
    others = [DynamicProgram().find(problem) for problem in problems.values()]
    assert choice.found.score == min(each.score for each in others if each)


def alone(subcluster: str, device: int) -> Member:
    return Member(SubMesh(subcluster, device, (1, 1)), (1, 1))


def test_whole_nodes_are_paid_for():
    cluster = priced(3.6, 1.8)
    plan = planner.solve(problem_of(cluster))
    stage = replace(plan.stages[0], layers=(0, 8), members=(alone("fast", 1),))
    one = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(stage,)),))
    assert step_cost(one, 10.0) == pytest.approx(2 * 3.6 / 3600 * 10)
    apart = replace(stage, members=(alone("slow", 2),))
    two = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(stage, apart)),))
    assert step_cost(two, 10.0) == pytest.approx((2 * 3.6 + 2 * 1.8) / 3600 * 10)
    assert step_cost(replace(two, cluster=priced(3.6, None)), 10.0) is None


def test_a_price_that_is_missing_is_named_before_anything_is_traced():
    with pytest.raises(InputError, match=r"subcluster 'slow' .* has no price_per_device_hour"):
        planner.make_problem(
            lambda *_: 1 / 0,
            {},
            jnp.ones((2, 2)),
            cluster=priced(1.0, None),
            optimizer=optax.sgd(1.0),
            num_microbatches=1,
            options=planner.PlanOptions(objective="cost"),
        )
    with pytest.raises(InputError, match="objective"):
        problem_of(priced(1.0, 1.0), objective="costs")


def test_prices_are_written_read_and_checked():
    cluster = priced(2.5, None)
    content = cluster.to_json_dict()
    assert Cluster.from_json_dict(content) == cluster
    assert "price_per_device_hour" not in content["subclusters"][1]
    for price in (0, -1.0, float("nan"), "much"):
        content["subclusters"][0]["price_per_device_hour"] = price
        with pytest.raises(InputError, match="price_per_device_hour"):
            Cluster.from_json_dict(content)
    with pytest.raises(InputError, match="price_per_device_hour: 0"):
        priced(0, None)
