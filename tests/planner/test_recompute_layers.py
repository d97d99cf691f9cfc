"""Runs of layers that are made again, as a plan's file has them; and that no more are than must."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from wide_blocks import BLOCKS, loss

from hetjax.errors import InputError
from hetjax.mesh import Cluster, Link, Subcluster, SubMesh, kind
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import DynamicProgram, complete, make_problem, predict
from hetjax.planner.plan.plan import Plan, validate
from hetjax.planner.plan.stage_plan import Member, PipelinePlan, Shares, StagePlan
from hetjax.planner.predictions.kept_layers import keeping_what_fits

LINK = Link(1e9, 1e-5)
ONE = Member(SubMesh("card", 0, (1, 1)), (1, 1))


def cluster_of(memory_bytes: float, devices: int = 2) -> Cluster:
    card = replace(kind("T4"), name="card", memory_bytes=int(memory_bytes))
    return Cluster("test", (Subcluster("card", card, 1, devices, LINK, LINK),))


def plan_of(**changes: Any) -> Plan:
    stage = StagePlan((0, 4), (ONE,), recompute_layers=((0, 1), (2, 4)))
    pipeline = PipelinePlan((replace(stage, **changes),), 2, 4, one_f_one_b(1, 2))
    return Plan("abc", (0, 2, 4, 6, 8), cluster_of(1e9), (pipeline,))


def test_a_file_keeps_them(tmp_path: Path) -> None:
    plan = plan_of()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert '"recompute_layers"' in (tmp_path / "plan.json").read_text()
    plan_of(recompute_layers=()).save(tmp_path / "none.json")
    assert '"recompute_layers"' not in (tmp_path / "none.json").read_text()
    (stage,) = plan.stages
    assert plan.recompute_positions(stage) == ((0, 2), (4, 8))
    assert stage.sharding_text == "one device, recompute 3 of 4"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recompute": True}, "recompute_layers is given, and recompute is true"),
        ({"recompute_layers": ((0, 5),)}, r"is \[\[0, 5\]\]; allowed: runs of layers 0 to 3"),
        ({"recompute_layers": ((2, 2),)}, r"is \[\[2, 2\]\]; allowed"),
        ({"recompute_layers": ((2, 4), (0, 1))}, "in order, none twice"),
        ({"recompute_layers": ((0, 3), (2, 4))}, "in order, none twice"),
        (
            {
                "members": (ONE, Member(SubMesh("card", 1, (1, 1)), (1, 1))),
                "shares": Shares(batch=(2, 2)),
            },
            "the stage has 2 members that do not share the context; allowed there: recompute true",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        validate(plan_of(**changes))


def problem_of(memory_bytes: float, devices: int = 1) -> Any:
    return make_problem(
        loss,
        BLOCKS,
        jax.ShapeDtypeStruct((8192, 64), jnp.float32),
        cluster=cluster_of(memory_bytes, devices),
        optimizer=optax.sgd(1e-2),
        num_microbatches=1,
    )


def needs(problem: Any, count: int) -> int:
    """Bytes of one stage that makes so many of its runs again."""
    runs = problem.repeatable_layers
    stage = StagePlan((0, problem.num_layers), (ONE,), recompute_layers=runs[len(runs) - count :])
    pipeline = PipelinePlan((stage,), 1, problem.microbatch_size, one_f_one_b(1, 1))
    fingerprint = problem.program.fingerprint
    plan = Plan(fingerprint, problem.layers, problem.cluster, (pipeline,))
    prediction = predict(plan, problem).prediction
    assert prediction is not None
    return prediction.stages[0].memory_bytes


def test_as_few_layers_as_memory_asks_for_are_made_again() -> None:
    roomy = problem_of(1e12)
    runs = roomy.repeatable_layers
    assert len(runs) == 8
    by_count = [needs(roomy, count) for count in range(9)]
    # One alone saves nothing: what it would have kept is there once, too.
    assert by_count[1:] == sorted(by_count[1:], reverse=True)
    tight = problem_of(by_count[5] * 1.02 / 0.9)
    stage = StagePlan((0, tight.num_layers), (ONE,), recompute_layers=runs)
    pipeline = PipelinePlan((stage,), 1, tight.microbatch_size, one_f_one_b(1, 1))
    plan = Plan(tight.program.fingerprint, tight.layers, tight.cluster, (pipeline,))
    kept = keeping_what_fits(predict(plan, tight), tight)
    assert 0 < len(kept.stages[0].recompute_layers) < 8
    assert kept.prediction is not None
    assert all(each.fits for each in kept.prediction.stages)
    fewer = len(kept.stages[0].recompute_layers) - 1
    assert needs(tight, fewer) > kept.prediction.stages[0].memory_bytes


def test_the_search_takes_them_where_all_would_not_fit() -> None:
    keeps = complete(DynamicProgram().plan(problem_of(1e12)), problem_of(1e12))
    assert all(stage.repeats == "nothing" for stage in keeps.stages)
    most = needs(problem_of(1e12), 0)
    tight = problem_of(most * 0.7 / 0.9)
    made = complete(DynamicProgram().plan(tight), tight)
    assert any(stage.recompute_layers for stage in made.stages)
    assert made.prediction is not None
    assert all(each.fits for each in made.prediction.stages)
