"""On Ray a stage over two hosts keeps its optimizer state in their memory, to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ray_jobs import make_plan, make_trainer

from hetjax.mesh import Cluster
from hetjax.planner.plan.plan import Plan

pytestmark = pytest.mark.ray


def plans() -> tuple[Plan, Plan]:
    """A plan whose first stage spans two hosts, and the same with offload."""
    plan = make_plan(hosts=2)
    parts = tuple(replace(each, host_memory_bytes=10**9) for each in plan.cluster.subclusters)
    cluster = Cluster(plan.cluster.name, parts, plan.cluster.links)
    stages = tuple(replace(each, offload=("optimizer_state",)) for each in plan.stages)
    pipeline = replace(plan.pipeline, stages=stages)
    return plan, replace(plan, cluster=cluster, pipelines=(pipeline,))


def run(plan: Plan, workdir: Path) -> tuple[list[Any], list[Any]]:
    """Losses and the last parameters of a run that is saved and resumed."""
    with make_trainer("ray", plan, workdir=workdir) as trainer:
        losses = [trainer.train_step().loss for _ in range(2)]
        trainer.save(wait=True)
        losses.append(trainer.train_step().loss)
        assert trainer.resume()
        losses.append(trainer.train_step(timed=True).loss)
        assert losses[3] == losses[2]
        tracks = trainer.timeline().tracks
        assert ("link host->0" in tracks) == bool(plan.stages[0].offload)
        return losses, jax.tree.leaves(trainer.parameters())


def test_two_hosts_offload_to_the_same_bits(ray_cluster: Any, tmp_path: Path):
    plain, offloading = plans()
    losses, expected = run(plain, tmp_path / "plain")
    found, parameters = run(offloading, tmp_path / "offload")
    assert found == losses
    for one, other in zip(parameters, expected, strict=True):
        np.testing.assert_array_equal(one, other)
