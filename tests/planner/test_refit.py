"""A plan's stages run in other ways: against every way by brute force; what memory forces."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

from hetjax import planner
from hetjax.errors import InputError
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh
from hetjax.pipeline import make_schedule
from hetjax.planner import PipelinePlan, Plan, PlanningProblem, StagePlan, choose_schedule, predict
from hetjax.planner.harp.refit import can_be_refitted, keeping_all, refitted, ways_of
from hetjax.planner.predictions.scheduled_memory import leaves_room

NEAR, FAR = Link(10e9, 1e-5), Link(2e9, 1e-4)
WAYS = [(rule, again) for rule in ("data", "state_sharded", "fully_sharded") for again in (0, 1)]


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight) * jax.nn.sigmoid(x)
    return jnp.mean(x**2)


def problem_of(megabytes: float) -> PlanningProblem:
    """Eight layers on a pair of cards of so much memory, then on one with twice as much."""
    fast = DeviceKind("fast card", {"float32": 1e12}, int(megabytes * 1e6), 1e11, source="made up")
    slow = replace(fast, name="slow card", memory_bytes=2 * fast.memory_bytes)
    cluster = Cluster(
        "test",
        (Subcluster("fast", fast, 1, 2, NEAR, NEAR), Subcluster("slow", slow, 1, 1, NEAR, NEAR)),
        (("fast", "slow", FAR),),
    )
    return planner.make_problem(
        loss,
        [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 8,
        jax.ShapeDtypeStruct((4096, 256), jnp.float32),
        cluster=cluster,
        optimizer=optax.adam(1e-3),
        num_microbatches=8,
        options=planner.PlanOptions(num_layers=8),
    )


def plan_of(problem: PlanningProblem) -> Plan:
    """Its first layers on the pair, each recomputing, the others on the single card."""
    stages = (
        StagePlan.on((0, 5), SubMesh("fast", 0, (1, 2)), (2, 1), recompute=True),
        StagePlan.on((5, 8), SubMesh("slow", 0, (1, 1)), (1, 1), recompute=True),
    )
    schedule = replace(make_schedule("1f1b", 2, 8), name="h_1f1b")
    pipeline = PipelinePlan(stages, 8, problem.microbatch_size, schedule)
    given = Plan(
        problem.program.fingerprint, problem.layers, problem.cluster, (pipeline,), planner="me"
    )
    return choose_schedule(predict(given, problem), "h_1f1b")


def every_way(problem: PlanningProblem) -> list[Plan]:
    """The plan with every choice for each of its stages, each with its own warm-up counts."""
    given, found = plan_of(problem), []
    for first, second in itertools.product(WAYS, WAYS[:2]):
        stages = tuple(
            replace(stage, sharding=rule, recompute=bool(again))
            for stage, (rule, again) in zip(given.stages, (first, second), strict=True)
        )
        plan = replace(given, pipelines=(replace(given.pipeline, stages=stages),))
        found.append(choose_schedule(predict(plan, problem), "h_1f1b"))
    return found


def seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_time


def fits(plan: Plan) -> bool:
    assert plan.prediction is not None
    return leaves_room(plan.prediction)


@pytest.mark.parametrize("megabytes", [9, 10, 11, 12, 14])
def test_it_is_the_best_of_every_way_that_fits(megabytes: float):
    problem = problem_of(megabytes)
    fitting = [plan for plan in every_way(problem) if fits(plan)]
    found = refitted(plan_of(problem), problem)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert fits(found)
    assert [s.submesh for s in found.stages] == [s.submesh for s in plan_of(problem).stages]
    assert seconds(found) <= min(map(seconds, fitting)) * (1 + 1e-9)


def test_some_of_the_cases_fit_in_few_ways_and_some_in_all():
    numbers = [sum(map(fits, every_way(problem_of(size)))) for size in (9, 10, 11, 12, 14)]
    assert numbers == sorted(numbers)
    assert numbers[0] == 0 < numbers[1] < numbers[2] < numbers[3] < 12
    assert numbers[-1] == 12


def test_what_nothing_forces_is_not_recomputed_and_what_memory_forces_is_told():
    roomy, narrow = problem_of(30), problem_of(10)
    found = refitted(plan_of(roomy), roomy)
    assert found is not None
    assert not any(stage.recompute for stage in found.stages)
    kept = keeping_all(plan_of(roomy), roomy)
    assert fits(kept)
    assert seconds(kept) == pytest.approx(seconds(found))

    forced = refitted(plan_of(narrow), narrow)
    assert forced is not None
    assert any(stage.recompute for stage in forced.stages)
    kept = keeping_all(plan_of(narrow), narrow)
    assert not fits(kept)
    assert seconds(kept) < seconds(forced)


def test_what_is_known_of_its_ways_is_not_predicted_again(monkeypatch: pytest.MonkeyPatch):
    problem = problem_of(10)
    plan = plan_of(problem)
    expected = refitted(plan, problem), keeping_all(plan, problem)
    known = ways_of(plan, problem)
    monkeypatch.setattr("hetjax.planner.harp.refit.predict_stages", None)
    assert (refitted(plan, problem, known), keeping_all(plan, problem, known)) == expected


def test_ways_are_predicted_without_a_step(monkeypatch: pytest.MonkeyPatch):
    problem = problem_of(10)
    plan = plan_of(problem)
    monkeypatch.setattr("hetjax.planner.predictions.step_prediction.stage_clocks", None)
    known = ways_of(plan, problem)
    # The single card has room for all.
    assert [len(ways) for ways in known] == [12, 1]


def test_stages_with_room_for_all_are_not_asked_what_making_layers_again_takes():
    roomy = problem_of(30)
    known = ways_of(plan_of(roomy), roomy)
    assert {again for ways in known for _, again in ways} == {"nothing"}


def test_what_no_warm_up_counts_describe_is_refused():
    problem = problem_of(30)
    plan = plan_of(problem)
    split = choose_schedule(plan, "zb_h1")
    assert can_be_refitted(plan)
    assert not can_be_refitted(split)
    with pytest.raises(InputError, match="zb_h1"):
        refitted(split, problem)
    with pytest.raises(InputError, match="zb_h1"):
        keeping_all(split, problem)
    with pytest.raises(InputError, match="zb_h1"):
        ways_of(split, problem)
