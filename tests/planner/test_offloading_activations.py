"""Activations offloaded in plans' files, predictions and searches: where nothing is faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from wide_blocks import loss

from hetjax.commands.prepare import check_memory
from hetjax.errors import InputError
from hetjax.mesh import Cluster, Link, Subcluster, SubMesh, kind
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import (
    DynamicProgram,
    PlanOptions,
    choose_schedule,
    complete,
    make_problem,
    predict,
)
from hetjax.planner.h2.heteroauto_planner import HeteroAuto
from hetjax.planner.harp.candidate_plans import pipeline_plan
from hetjax.planner.plan.plan import Plan, validate
from hetjax.planner.plan.stage_plan import Member, Offloaded, StagePlan
from hetjax.planner.predictions.predicted_timeline import simulate

ACTIVATIONS: tuple[Offloaded, ...] = ("activations",)
LINK = Link(1e9, 1e-5)
BLOCKS = [
    (
        jax.ShapeDtypeStruct((1024, 8192), jnp.float32),
        jax.ShapeDtypeStruct((8192, 1024), jnp.float32),
    )
] * 8
"""Products so large that a microbatch's activations come and go beside them."""

TIGHT, ROOMY, MICROBATCHES = 9e8, 3e9, 16


def cluster_of(memory_bytes: float, host: int | None, **changes: Any) -> Cluster:
    card = replace(kind("T4"), name="card", memory_bytes=int(memory_bytes))
    part = Subcluster("card", card, 4, 1, LINK, LINK, host_memory_bytes=host)
    return Cluster("test", (replace(part, **changes),))


def problem_of(
    memory_bytes: float, host: int | None, options: PlanOptions | None = None, **changes: Any
) -> Any:
    return make_problem(
        loss,
        BLOCKS,
        jax.ShapeDtypeStruct((MICROBATCHES * 2048, 1024), jnp.float32),
        cluster=cluster_of(memory_bytes, host, **changes),
        optimizer=optax.sgd(1e-2),
        num_microbatches=MICROBATCHES,
        options=options or PlanOptions(schedule="1f1b"),
    )


def plan_of(problem: Any, offload: tuple[Offloaded, ...], **changes: Any) -> Plan:
    """Four stages of two blocks, all alike."""
    edges = [problem.num_layers * s // 4 for s in range(5)]
    stages = [
        StagePlan(
            (edges[s], edges[s + 1]),
            (Member(SubMesh("card", s, (1, 1)), (1, 1)),),
            offload=offload,
            **changes,
        )
        for s in range(4)
    ]
    return pipeline_plan(problem, stages, one_f_one_b(4, MICROBATCHES), "test")


def test_a_file_keeps_it_and_says_it(tmp_path: Path) -> None:
    problem = problem_of(ROOMY, 10**10)
    plan = predict(plan_of(problem, ("activations", "optimizer_state")), problem)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    said = plan.stages[0].sharding_text
    assert said == "one device, offload activations, offload optimizer state"
    assert "MB of 10 GB of its host's" in str(plan)


def test_what_makes_no_sense_is_refused() -> None:
    problem = problem_of(ROOMY, None)
    with pytest.raises(InputError, match=r"subcluster 'card' gives no host_memory \(.*\); allowed"):
        validate(plan_of(problem, ACTIVATIONS))


def test_a_host_that_holds_too_little_is_told() -> None:
    problem = problem_of(ROOMY, 2 * 10**8)
    plan = predict(plan_of(problem, ACTIVATIONS), problem)
    assert not plan.predicted.fits
    message = "stage 0 on card.*offloads activations, 6.. MB for each device, and a device's share"
    with pytest.raises(InputError, match=message):
        check_memory(plan)


def test_two_microbatches_are_on_a_device_and_the_rest_on_its_host() -> None:
    problem = problem_of(ROOMY, 10**10)
    there = predict(plan_of(problem, ()), problem).predicted
    plan = predict(plan_of(problem, ACTIVATIONS), problem)
    for s, (kept, away) in enumerate(zip(there.stages, plan.predicted.stages, strict=True)):
        live = 4 - s
        assert away.offloaded_bytes == away.activation_bytes == kept.activation_bytes
        saved = max(0, live - 2) * kept.activation_bytes
        assert kept.memory_bytes - away.memory_bytes == pytest.approx(saved, rel=1e-6)
        assert away.host_activation_bytes == (live if live > 2 else 0) * kept.activation_bytes
    assert there.step_time <= plan.predicted.step_time < 1.02 * there.step_time


def test_copies_are_on_the_timeline_and_take_their_time() -> None:
    problem = problem_of(ROOMY, 10**10, host_link=Link(1e9, 1e-5))
    there = predict(plan_of(problem, ()), problem).predicted
    plan = predict(plan_of(problem, ACTIVATIONS), problem)
    # On so slow a link copies are what a step waits for.
    assert plan.predicted.step_time > 1.5 * there.step_time
    timeline = simulate(plan)
    assert timeline.makespan == pytest.approx(plan.predicted.step_time)
    stores, fetches = timeline.on("link 0->host"), timeline.on("link host->0")
    assert {event.name for event in stores} == {f"store F{event.microbatch}" for event in fetches}
    assert all(
        event.duration == pytest.approx(plan.predicted.stages[0].store_seconds) for event in stores
    )
    assert not timeline.on("link 3->host")
    assert timeline.to_chrome_trace()["traceEvents"]
    assert Plan.from_json_dict(plan.to_json_dict()) == plan


def as_h2_has_it(problem: Any) -> Plan:
    return HeteroAuto().find(problem)[0]


@pytest.mark.parametrize("find", [DynamicProgram().plan, as_h2_has_it], ids=["Harp", "HeteroAuto"])
def test_planners_offload_where_it_is_faster_than_to_make_again(
    find: Callable[[Any], Plan],
) -> None:
    again, tight = problem_of(TIGHT, None), problem_of(TIGHT, 10**10)
    repeats = complete(find(again), again)
    assert any(stage.repeats != "nothing" for stage in repeats.stages)
    plan = complete(find(tight), tight)
    assert [stage.offload for stage in plan.stages] == [ACTIVATIONS, ACTIVATIONS, (), ()]
    assert plan.predicted.fits
    assert plan.predicted.step_time < 0.97 * repeats.predicted.step_time
    slow = problem_of(TIGHT, 10**10, host_link=Link(1e8, 1e-5))
    kept = complete(find(slow), slow)
    assert kept.predicted.step_time == pytest.approx(repeats.predicted.step_time)
    assert not any(stage.offload for stage in kept.stages)


def test_a_found_plan_says_what_its_stages_keep_make_again_or_offload() -> None:
    """Also one whose planner knows of no hosts' memory."""
    tight = problem_of(TIGHT, 10**10)
    plan = complete(plan_of(tight, (), recompute=True), tight)
    assert [stage.offload for stage in plan.stages] == [ACTIVATIONS, ACTIVATIONS, (), ()]
    roomy = problem_of(ROOMY, 10**10)
    assert not any(stage.offload for stage in complete(plan_of(roomy, ACTIVATIONS), roomy).stages)


def test_a_searched_schedule_keeps_within_both_memories() -> None:
    problem = problem_of(TIGHT, 10**10, PlanOptions(schedule="search"))
    plan = choose_schedule(predict(plan_of(problem, ACTIVATIONS), problem), "search")
    assert plan.predicted.fits
    fixed = choose_schedule(plan, "1f1b").predicted.step_time
    assert plan.predicted.step_time <= fixed * (1 + 1e-9)
