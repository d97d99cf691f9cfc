"""What a plan is explained by adds up to its step: every second that a step pays is in a row."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax import planner
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh
from hetjax.pipeline import SCHEDULES, make_schedule
from hetjax.pipeline.timeline.timeline import stage_track
from hetjax.planner import (
    PipelinePlan,
    Plan,
    PlanningProblem,
    StagePlan,
    StagePrediction,
    choose_schedule,
    limits,
    predict,
    simulate,
    step_parts,
)


@functools.cache
def problem_of(tied: bool, bandwidth: float, num_microbatches: int) -> PlanningProblem:
    """Six products on four devices of two kinds; the last one may share the first one's table."""
    near, far = Link(2e10, 1e-5), Link(bandwidth, 5e-5)
    fast = DeviceKind("fast card", {"float32": 8e12}, 10**10, 1e12, source="made up")
    slow = DeviceKind("slow card", {"float32": 3e12}, 10**10, 7e11, source="made up")
    cluster = Cluster(
        "two machines",
        (Subcluster("fast", fast, 1, 2, near, far), Subcluster("slow", slow, 1, 2, near, far)),
        (("fast", "slow", far),),
    )

    def loss(weights, x):
        y = x @ weights["table"]
        for weight in weights["blocks"]:
            y = jnp.tanh(y @ weight)
        last = weights["table"] if tied else weights["last"]
        return jnp.mean((y @ last.T - x) ** 2)

    shape = jax.ShapeDtypeStruct
    return planner.make_problem(
        loss,
        {
            "table": shape((1024, 128), jnp.float32),
            "last": shape((1024, 128), jnp.float32),
            "blocks": [shape((128, 128), jnp.float32)] * 6,
        },
        shape((48, 256, 1024), jnp.float32),
        cluster=cluster,
        optimizer=optax.adam(1e-3),
        num_microbatches=num_microbatches,
        options=planner.PlanOptions(num_layers=6),
    )


def pipeline_of(
    problem: PlanningProblem, cuts: list[int], submeshes: list[SubMesh], recompute: bool
) -> PipelinePlan:
    ends = [0, *cuts, problem.num_layers]
    stages = tuple(
        StagePlan.on(layers, submesh, (submesh.num_devices, 1), recompute=recompute)
        for layers, submesh in zip(itertools.pairwise(ends), submeshes, strict=True)
    )
    schedule = make_schedule("1f1b", len(stages), problem.num_microbatches)
    return PipelinePlan(stages, problem.num_microbatches, problem.microbatch_size, schedule)


SINGLE = [SubMesh(name, start, (1, 1)) for name in ("fast", "slow") for start in (0, 1)]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any cut over any devices, in one pipeline or two, with any schedule."""
    num_microbatches = draw(st.sampled_from([2, 4, 6]))
    bandwidth = draw(st.sampled_from([1e7, 1e9, 1e10]))
    problem = problem_of(draw(st.booleans()), bandwidth, num_microbatches)
    order = draw(st.permutations(SINGLE))
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (4,), (1, 1), (2, 2), (3, 1), (1, 2)]))
    pipelines, used = [], 0
    for size in sizes:
        cuts = draw(
            st.lists(
                st.integers(1, problem.num_layers - 1),
                min_size=size - 1,
                max_size=size - 1,
                unique=True,
            )
        )
        chosen = list(order[used : used + size])
        pipelines.append(pipeline_of(problem, sorted(cuts), chosen, draw(st.booleans())))
        used += size
    plan = Plan(
        problem.program.fingerprint,
        problem.layers,
        problem.cluster,
        tuple(pipelines),
        shard_optimizer_state=len(sizes) > 1 and draw(st.booleans()),
        planner="a test",
    )
    return choose_schedule(predict(plan, problem), draw(st.sampled_from(SCHEDULES)))


def stages_of(plan: Plan) -> tuple[StagePrediction, ...]:
    assert plan.prediction is not None
    return plan.prediction.stages


def step_time(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_time


def counts_of(plan: Plan) -> list[int]:
    """The microbatches of every stage."""
    return [each.num_microbatches for each in plan.pipelines for _ in each.stages]


def least_compute(stage: StagePrediction) -> float:
    """What a microbatch computes at least, whether its backward pass is split or not."""
    halves = stage.input_gradient_seconds + stage.weight_gradient_seconds
    once = stage.forward_seconds + stage.recompute_seconds
    return once + min(stage.backward_seconds, halves)


@settings(max_examples=60, deadline=None)
@given(plans())
def test_the_rows_add_up_to_the_simulated_step(plan: Plan):
    rows, timeline = step_parts(plan), simulate(plan)
    assert timeline.makespan == step_time(plan)
    for s, (row, stage, count) in enumerate(
        zip(rows, stages_of(plan), counts_of(plan), strict=True)
    ):
        assert sum(vars(row).values()) == pytest.approx(step_time(plan), rel=1e-12)
        assert min(vars(row).values()) >= 0
        # The figures of the prediction say the same as the events of the timeline.
        split = stage.input_gradient_seconds + stage.weight_gradient_seconds
        whole = stage.forward_seconds + stage.recompute_seconds
        computed = {count * (whole + backward) for backward in (stage.backward_seconds, split)}
        assert any(row.computing == pytest.approx(each, rel=1e-9) for each in computed)
        assert row.updating == pytest.approx(stage.update_seconds, rel=1e-9)
        assert row.exchanging == pytest.approx(stage.sharing_seconds, rel=1e-9, abs=1e-15)
        idle = (row.exchanging + row.waiting) / step_time(plan)
        assert stage.bubble == pytest.approx(idle, rel=1e-9, abs=1e-12)
        # Nothing is counted that happens at the same time as something else.
        events = sorted(timeline.on(stage_track(s)), key=lambda event: event.start)
        for before, after in itertools.pairwise(events):
            assert after.start >= before.end - 1e-12


@settings(max_examples=60, deadline=None)
@given(plans())
def test_a_prediction_without_events_is_the_timelines_to_the_bit(plan: Plan):
    timeline = simulate(plan)
    for s, stage in enumerate(stages_of(plan)):
        events = [event for event in timeline.on(stage_track(s)) if event.kind != "share"]
        computed = sum(event.duration for event in events)
        assert stage.bubble == max(0.0, 1 - computed / timeline.makespan)


@settings(max_examples=60, deadline=None)
@given(plans())
def test_the_bound_knows_all_that_a_stage_does_in_a_step(plan: Plan):
    assert plan.prediction is not None
    bound = plan.prediction.lower_bound
    assert bound <= step_time(plan)
    for stage, count in zip(stages_of(plan), counts_of(plan), strict=True):
        closing = stage.sharing_seconds + stage.update_seconds
        assert count * least_compute(stage) + closing <= bound * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(plans())
def test_what_limits_a_plan_is_among_the_rows(plan: Plan):
    found, rows = limits(plan), step_parts(plan)
    row = rows[found.stage]
    busiest = max((each.computing + each.updating) / step_time(plan) for each in rows)
    # Of a split backward pass the whole is told.
    if plan.pipelines[0].schedule.name not in ("h_1f1b_split", "zb_h1", "zb_h2", "search"):
        assert found.stage_busy == pytest.approx(busiest, rel=1e-9)
        assert (row.computing + row.updating) / step_time(plan) == pytest.approx(busiest, rel=1e-9)
    exchanged = max(each.exchanging for each in rows) / step_time(plan)
    assert found.sharing == pytest.approx(exchanged, rel=1e-9, abs=1e-15)


def test_a_tied_table_over_a_slow_link_is_in_every_row():
    tied, plain = (problem_of(each, 1e7, 4) for each in (True, False))

    def made(problem: PlanningProblem) -> Plan:
        pipeline = pipeline_of(problem, [3], [SINGLE[0], SINGLE[2]], recompute=False)
        plan = Plan(
            problem.program.fingerprint, problem.layers, problem.cluster, (pipeline,), planner="me"
        )
        return choose_schedule(predict(plan, problem), "1f1b")

    plan, without = made(tied), made(plain)
    exchanged = 1024 * 128 * 4 / 1e7  # The gradient one way and the new value back.
    assert all(row.exchanging == pytest.approx(2 * exchanged, rel=0.01) for row in step_parts(plan))
    assert limits(plan).sharing == pytest.approx(2 * exchanged / step_time(plan), rel=0.01)
    assert step_time(plan) >= step_time(without) + exchanged
    assert all(row.exchanging == 0 for row in step_parts(without))
    assert limits(without).sharing == 0
    for ours, theirs in zip(stages_of(plan), stages_of(without), strict=True):
        assert ours.bubble > theirs.bubble
    assert plan.prediction is not None
    assert without.prediction is not None
    assert plan.prediction.lower_bound > without.prediction.lower_bound + exchanged


def test_one_device_never_waits():
    problem = problem_of(True, 1e9, 4)
    pipeline = pipeline_of(problem, [], [SINGLE[0]], recompute=False)
    plan = Plan(
        problem.program.fingerprint, problem.layers, problem.cluster, (pipeline,), planner="me"
    )
    plan = choose_schedule(predict(plan, problem), "1f1b")
    [row] = step_parts(plan)
    assert (row.exchanging, row.waiting) == (0, pytest.approx(0, abs=1e-12))
    assert row.computing + row.updating == pytest.approx(step_time(plan))
