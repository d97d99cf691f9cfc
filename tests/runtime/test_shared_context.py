"""Stages that share the context train as one device does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from context_jobs import (
    JOB,
    LENGTH,
    QUERY_HEADS,
    context_plan,
    one_device_losses,
    scanned,
    split_of,
    stacked,
    written_out,
)
from one_device import TOLERANCE
from ray_jobs import RUNTIMES

from hetjax import Trainer
from hetjax.errors import InputError
from hetjax.planner import Shares
from hetjax.planner.plan.plan import Plan, validate
from hetjax.runtime.workers.job import Job, build

UNEVEN = split_of(((7, (0, 4)), (5, (4, 6))), ((8, (0, 6)),))
"""Two members with unlike tokens and heads, whose heads divide a head of keys, and one beside."""
RING = split_of(((13, (0, 6)),), ((7, (0, 6)),))
EXCHANGE = split_of(((17, (2, 6)), (3, (0, 2))))


def losses(runtime: str, plan: Plan, steps: int = 3) -> list[float]:
    with Trainer(**JOB, plan=plan, runtime=RUNTIMES[runtime]) as trainer:
        return [trainer.train_step().loss for _ in range(steps)]


@pytest.mark.parametrize(
    ("splits", "changes"),
    [((UNEVEN,), {"recompute": True}), ((RING, EXCHANGE), {})],
    ids=["recomputed", "pipeline"],
)
def test_it_trains_as_one_device_does(splits: Any, changes: dict[str, Any], tmp_path: Path):
    context_plan(*splits, **changes).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    np.testing.assert_allclose(losses("local", plan), one_device_losses(3), rtol=TOLERANCE)


def test_attention_that_is_written_out_becomes_a_ring():
    # There keys are repeated for every query head before they are used.
    plan = context_plan(replace(RING, key_value_heads=QUERY_HEADS), function=written_out)
    with Trainer(**{**JOB, "loss_function": written_out}, plan=plan) as trainer:
        found = [trainer.train_step().loss for _ in range(2)]
    np.testing.assert_allclose(found, one_device_losses(2), rtol=TOLERANCE)


def test_blocks_that_are_scanned_over_share_the_context():
    plan = context_plan(RING, function=scanned, parameters=stacked)
    job = {**JOB, "loss_function": scanned, "parameters": stacked}
    with Trainer(**job, plan=plan) as trainer:
        found = [trainer.train_step().loss for _ in range(2)]
    np.testing.assert_allclose(found, one_device_losses(2), rtol=TOLERANCE)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_on_ray_it_computes_what_one_process_does():
    plan = context_plan(UNEVEN)
    assert losses("ray", plan) == losses("local", plan)


def with_stage(plan: Plan, stage: int, **changes: Any) -> Plan:
    stages = list(plan.stages)
    stages[stage] = replace(stages[stage], **changes)
    return plan.with_stages(stages)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: with_stage(context_plan(RING, EXCHANGE), 1, shares=Shares()),
            r"stages\[1\].shares.context is not given, and that of another stage is",
        ),
        (
            lambda: with_stage(context_plan(RING), 0, shares=Shares(batch=(1, 1), context=RING)),
            r"shares.context is given beside shares.batch \[1, 1\]",
        ),
        (
            lambda: with_stage(context_plan(UNEVEN), 0, shares=Shares(context=RING)),
            r"groups have the devices \[0, 1\]; allowed: .* \[0, 1, 2\]",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, message: str):
    with pytest.raises(InputError, match=message):
        validate(make())


def test_a_split_of_another_model_is_refused():
    longer = replace(
        RING, length=LENGTH + 1, groups=(replace(RING.groups[0], tokens=(14,)), RING.groups[1])
    )
    arguments = {name: each for name, each in JOB.items() if name != "source"}
    message = rf"shares.context.length is {LENGTH + 1}, and the model's attentions have {LENGTH}"
    with pytest.raises(InputError, match=message):
        build(Job(**arguments, plan=context_plan(longer)))
