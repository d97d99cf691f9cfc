"""More passes over the same submeshes: taken where they win, refused where they make no sense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from hetjax.errors import InputError
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster
from hetjax.pipeline.schedules.interleaved import interleaved
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.planner import PlanOptions, choose_schedule, simulate, validate
from hetjax.planner.harp.dynamic_program import DynamicProgram
from hetjax.planner.plan.plan import Plan
from hetjax.planner.predictions.complete import complete
from hetjax.planner.predictions.more_passes import with_more_passes, with_passes
from hetjax.planner.predictions.predict import predict
from hetjax.planner.predictions.quality import limits, load_balance, step_parts
from hetjax.planner.predictions.schedule_choice import live_limits, reschedule
from hetjax.planner.predictions.scheduled_memory import leaves_room
from hetjax.planner.problem.problem import PlanningProblem, make_problem
from hetjax.planner.work.rates import USABLE_MEMORY

OPTIONS = PlanOptions(schedule="search", min_stages=4, max_pipelines=1, num_layers=16)


def loss(weights: list[jax.Array], batch: jax.Array) -> jax.Array:
    x = batch
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def problem(bandwidth: float, memory: int = 10**10) -> PlanningProblem:
    """Sixteen products on four equal devices."""
    kind = DeviceKind("card", {"float32": 1e13}, memory, 1e12, source="made up", platform="cpu")
    link = Link(bandwidth, 1e-6)
    cluster = Cluster("even", (Subcluster("cards", kind, 4, 1, link, link),))
    weights: Any = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 16
    batch = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    return make_problem(
        loss,
        weights,
        batch,
        cluster=cluster,
        optimizer=optax.sgd(0.1),
        num_microbatches=4,
        options=OPTIONS,
    )


def planned(asked: PlanningProblem) -> Plan:
    return complete(DynamicProgram().plan(asked), asked)


@pytest.fixture(scope="module")
def fast() -> PlanningProblem:
    return problem(bandwidth=1e12)


@pytest.fixture(scope="module")
def once(fast: PlanningProblem) -> Plan:
    return planned(replace(fast, options=replace(OPTIONS, max_passes=1)))


def seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_time


def test_they_are_taken_over_fast_links_alone(fast: PlanningProblem, once: Plan):
    more = planned(fast)
    assert len(once.stages) == once.num_devices == more.num_devices == 4
    assert len(more.stages) > 4
    assert more.pipeline.schedule.name == "interleaved"
    assert seconds(more) < 0.97 * seconds(once)
    validate(more)
    assert Plan.from_json_dict(more.to_json_dict()) == more
    assert "on 4 of 4 devices" in str(more)
    slow = planned(problem(bandwidth=3e9))
    assert not slow.pipeline.schedule.groups


def test_what_is_predicted_of_them_is_their_timeline(fast: PlanningProblem, once: Plan):
    plan = with_passes(once, fast, 2)
    assert plan is not None
    assert plan.prediction is not None
    assert simulate(plan).makespan == plan.prediction.step_time
    assert plan.prediction.lower_bound <= plan.prediction.step_time
    parts, (first, second) = step_parts(plan), plan.sharing[0]
    assert parts[first] == parts[second]
    assert 0 < limits(plan).stage_busy <= 1
    assert 0 < load_balance(plan, "float32") <= 1
    held = plan.prediction.stages
    assert held[first].memory_bytes == held[second].memory_bytes
    assert held[first].memory_bytes > held[first].state_bytes + held[second].state_bytes


def test_both_stages_of_a_device_must_fit(fast: PlanningProblem, once: Plan):
    """What both hold counts together: a device that has room for either is too small."""
    plan = with_passes(once, fast, 2)
    assert plan is not None
    assert plan.prediction is not None
    first = plan.prediction.stages[0]
    assert first.fits
    assert not replace(first, memory_limit_bytes=first.memory_bytes - 1).fits


def test_more_passes_leave_what_a_plan_may_not_fill(fast: PlanningProblem, once: Plan):
    plan = with_passes(once, fast, 2)
    assert plan is not None
    most = max(stage.memory_bytes for stage in plan.predicted.stages)
    full = problem(bandwidth=1e12, memory=int(0.93 * most))
    held = replace(once.with_schedule(one_f_one_b(4, 4)), cluster=full.cluster)
    made = with_more_passes(predict(held, full), full)
    assert len(made.stages) > 4
    assert leaves_room(made.predicted)


@pytest.mark.parametrize(("most", "stages"), [(7, 4), (11, 8)])
def test_there_are_no_more_stages_than_may_be(
    most: int, stages: int, fast: PlanningProblem, once: Plan
):
    asked = replace(fast, options=replace(OPTIONS, max_stages=most))
    assert len(with_more_passes(once, asked).stages) == stages


def test_what_makes_no_sense_is_told(fast: PlanningProblem, once: Plan):
    plan = with_passes(once, fast, 2)
    assert plan is not None
    pipeline = plan.pipeline

    def with_stages(*stages: Any, schedule: Any = pipeline.schedule) -> Plan:
        return replace(plan, pipelines=(replace(pipeline, stages=stages, schedule=schedule),))

    stages = pipeline.stages
    for changed, message in [
        (
            with_stages(*stages, schedule=one_f_one_b(8, 4)),
            "its schedule has turns of these",
        ),
        (
            with_stages(*stages, schedule=interleaved(2, 4, 4)),
            "with which it takes turns in the schedule",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            validate(changed)
    with pytest.raises(InputError, match="allowed there: 'search' or 'interleaved'"):
        choose_schedule(plan, "1f1b")
    with pytest.raises(InputError, match="max_passes is 9; it must be from 1 to 4"):
        PlanOptions(max_passes=9)


def test_a_pipeline_of_too_many_tasks_is_left_as_it_is(
    fast: PlanningProblem, once: Plan, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hetjax.pipeline.schedules.warm_up.MAX_TASKS", 2 * 8 * 4 - 1)
    assert with_passes(once, fast, 2) is None


@pytest.fixture(scope="module")
def tight(once: Plan) -> tuple[Plan, PlanningProblem]:
    """A plan and its problem on devices that hold what 1F1B has, and hardly more."""
    few = predict(once.with_schedule(one_f_one_b(4, 4)), problem(bandwidth=1e12))
    most = max(stage.memory_bytes for stage in few.predicted.stages)
    asked = problem(bandwidth=1e12, memory=int(most / USABLE_MEMORY) + 1)
    return predict(replace(few, cluster=asked.cluster), asked), asked


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_a_schedule_that_holds_too_much_is_not_taken(
    name: str, tight: tuple[Plan, PlanningProblem]
):
    plan, asked = tight
    asked = replace(asked, options=replace(OPTIONS, schedule=name, max_passes=1))
    assert not choose_schedule(plan, name).predicted.fits
    made = complete(plan, asked)
    assert made.predicted.fits
    assert made.pipeline.schedule.name == "1f1b"
    assert f"the schedule {name!r} holds more microbatches" in made.notes[0]


def test_a_searched_schedule_leaves_what_a_plan_may_not_fill(tight: tuple[Plan, PlanningProblem]):
    found = choose_schedule(tight[0], "search").predicted
    assert all(s.memory_bytes <= USABLE_MEMORY * s.memory_limit_bytes for s in found.stages)


def test_a_searched_schedule_is_no_slower_where_memory_is_tight(
    tight: tuple[Plan, PlanningProblem],
):
    """Caps that hold for any order are below what 1F1B has, which fits."""
    plan, _ = tight
    assert any(
        limit < plan.pipeline.schedule.live_bound(s) for s, limit in enumerate(live_limits(plan))
    )
    assert seconds(choose_schedule(plan, "search")) < seconds(plan)


def test_times_without_halves_leave_those_that_are_predicted(once: Plan):
    times = once.predicted.times
    bare = StepTimes(times.forward, times.backward, times.sends, times.returns)
    made = reschedule(once, one_f_one_b(4, 4), bare)
    assert made.predicted.times.weight_gradient == times.weight_gradient
    assert made.predicted.times.update == times.update
