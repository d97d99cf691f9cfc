"""Offload in plans' files, predictions and searches: only where devices have no memory for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from wide_blocks import BLOCKS, loss

from hetjax.errors import InputError
from hetjax.mesh import Cluster, Link, Subcluster, SubMesh, kind
from hetjax.mesh.host_links import PCIE_3, host_share, link_to_host
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.timeline.streamed_update import GroupTimes, stream_update
from hetjax.pipeline.update.state_groups import STATE_GROUPS, state_groups
from hetjax.planner import DynamicProgram, complete, make_problem, predict
from hetjax.planner.h2.heteroauto_planner import HeteroAuto
from hetjax.planner.plan.module_shares import ModuleShares
from hetjax.planner.plan.plan import Plan, validate
from hetjax.planner.plan.stage_plan import Member, PipelinePlan, Shares, StagePlan
from hetjax.planner.predictions.predicted_timeline import simulate

LINK = Link(1e9, 1e-5)
ONE = Member(SubMesh("card", 0, (1, 1)), (1, 1))
OFFLOAD = ("optimizer_state",)
ADAMW = optax.adamw(1e-2)


def cluster_of(memory_bytes: float, host: int | None, devices: int = 2) -> Cluster:
    card = replace(kind("T4"), name="card", memory_bytes=int(memory_bytes))
    of_cards = Subcluster("card", card, 1, devices, LINK, LINK, host_memory_bytes=host)
    return Cluster("test", (of_cards,))


def plan_of(host: int | None = 10**9, **changes: Any) -> Plan:
    stage = replace(StagePlan((0, 4), (ONE,), offload=OFFLOAD), **changes)
    pipeline = PipelinePlan((stage,), 2, 4, one_f_one_b(1, 2))
    return Plan("abc", (0, 2, 4, 6, 8), cluster_of(1e9, host), (pipeline,))


def test_a_file_keeps_it(tmp_path: Path) -> None:
    plan = plan_of()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    plan_of(offload=()).save(tmp_path / "none.json")
    assert '"offload"' not in (tmp_path / "none.json").read_text()
    assert plan.stages[0].sharding_text == "one device, offload optimizer state"


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(InputError, match=r"subcluster 'card' gives no host_memory \(.*\); allowed"):
        validate(plan_of(host=None))
    with pytest.raises(InputError, match="allowed: each once"):
        validate(plan_of(offload=OFFLOAD * 2))
    two = ONE, Member(SubMesh("card", 1, (1, 1)), (1, 1))
    told = Shares(modules=(ModuleShares(((0, 4),)),))
    with pytest.raises(InputError, match=r"and shares.modules is given; allowed there: nothing"):
        validate(plan_of(members=two, shares=told))
    content = plan_of().to_json_dict()
    content["pipelines"][0]["stages"][0]["offload"] = ["parameters"]
    with pytest.raises(InputError, match="optimizer_state"):
        Plan.from_json_dict(content)


def test_a_cluster_file_says_host_memory_and_its_link() -> None:
    cluster = cluster_of(1e9, 64 * 10**9)
    (card,) = cluster.subclusters
    assert link_to_host(card) == PCIE_3 or link_to_host(card).bandwidth == 25e9
    assert host_share(card) == 32e9
    told = Cluster("test", (replace(card, host_link=Link(3e9, 1e-6)),))
    assert Cluster.from_json_dict(told.to_json_dict()) == told
    assert link_to_host(told.subclusters[0]) == Link(3e9, 1e-6)
    with pytest.raises(InputError, match="host_memory_bytes: 0 is not allowed"):
        replace(card, host_memory_bytes=0)


def test_groups_follow_each_other_and_none_is_large() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = rng.integers(1, 1000, rng.integers(1, 60)).tolist()
        groups = state_groups(sizes)
        assert [place for group in groups for place in group] == list(range(len(sizes)))
        held = [sum(sizes[place] for place in group) for group in groups]
        assert max(held) <= max(max(sizes), sum(sizes) / STATE_GROUPS)
        assert len(groups) <= 2 * STATE_GROUPS + 1


def test_copies_wait_for_room_and_for_each_other() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        groups = [GroupTimes(*rng.uniform(0.1, 1.0, 3)) for _ in range(rng.integers(1, 9))]
        spans = stream_update(groups)
        by = {(span.what, span.group): span for span in spans}
        for g in range(1, len(groups)):
            assert by["update", g].start >= by["fetch", g].end
            assert by["fetch", g].start >= by["fetch", g - 1].end
            if g > 1:
                assert by["fetch", g].start >= by["store", g - 2].end
        serial = sum(each.fetch + each.update + each.store for each in groups)
        assert spans[-1].end <= serial * (1 + 1e-9)
        assert stream_update(groups, overlaps=False)[-1].end == pytest.approx(serial)


def problem_of(
    memory_bytes: float,
    host: int | None,
    optimizer: optax.GradientTransformation = ADAMW,
) -> Any:
    return make_problem(
        loss,
        BLOCKS,
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
        cluster=cluster_of(memory_bytes, host),
        optimizer=optimizer,
        num_microbatches=4,
    )


TIGHT, ROOMY = 8e6, 20e6


def test_what_is_frozen_has_no_state_to_offload() -> None:
    labels = ["frozen" if block % 2 else "trained" for block in range(8)]
    ways: dict[Any, Any] = {"trained": ADAMW, "frozen": optax.set_to_zero()}
    problem = problem_of(ROOMY, 10**9, optax.multi_transform(ways, labels))
    plan = complete(DynamicProgram().plan(problem), problem)
    away = predict(offloading(plan), problem)
    assert plan.prediction is not None
    assert away.prediction is not None
    for kept, stage in zip(plan.prediction.stages, away.prediction.stages, strict=True):
        assert kept.state_bytes - stage.state_bytes == pytest.approx(stage.host_bytes, abs=8)
        assert 0 < stage.host_bytes < kept.state_bytes / 2
        assert len(stage.update_groups) <= 8


def offloading(plan: Plan) -> Plan:
    stages = tuple(replace(stage, offload=OFFLOAD) for stage in plan.stages)
    return replace(plan, pipelines=(replace(plan.pipeline, stages=stages),))


def test_the_search_offloads_where_nothing_else_fits() -> None:
    roomy = problem_of(ROOMY, 10**9)
    kept = complete(DynamicProgram().plan(roomy), roomy)
    assert not any(stage.offload for stage in kept.stages)
    with pytest.raises(InputError, match="host_memory in the cluster"):
        DynamicProgram().plan(problem_of(TIGHT, None))
    with pytest.raises(InputError, match="does not fit"):
        DynamicProgram().plan(problem_of(TIGHT, 10**6))
    tight = problem_of(TIGHT, 10**9)
    for planner in (DynamicProgram(), HeteroAuto()):
        plan = complete(planner.plan(tight), tight)
        assert all(stage.offload == OFFLOAD for stage in plan.stages)
        assert plan.prediction is not None
        assert plan.prediction.fits
        assert all(stage.host_bytes > 0 for stage in plan.prediction.stages)


def test_a_prediction_has_the_copies_on_its_timeline() -> None:
    tight = problem_of(TIGHT, 10**9)
    plan = complete(DynamicProgram().plan(tight), tight)
    kept = predict(
        replace(
            plan,
            pipelines=(
                replace(
                    plan.pipeline,
                    stages=tuple(replace(stage, offload=()) for stage in plan.stages),
                ),
            ),
        ),
        tight,
    )
    assert plan.prediction is not None
    assert kept.prediction is not None
    for away, there in zip(plan.prediction.stages, kept.prediction.stages, strict=True):
        assert there.state_bytes - away.state_bytes == pytest.approx(away.host_bytes, abs=8)
        assert away.update_seconds > there.update_seconds
        assert away.memory_bytes < there.memory_bytes
    timeline = simulate(plan)
    assert timeline.makespan == pytest.approx(plan.prediction.step_time)
    assert {"link host->0", "link 0->host"} <= set(timeline.tracks)
    assert "fetch 0" in {event.name for event in timeline.on("link host->0")}
    assert timeline.to_chrome_trace()["traceEvents"]
    assert Plan.from_json_dict(plan.to_json_dict()) == plan
