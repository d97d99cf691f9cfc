"""On Ray a stage over two hosts keeps state and activations in their memory, to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ray_jobs import make_plan, make_trainer

from hetjax.mesh import Cluster
from hetjax.pipeline.schedules.warm_up import gpipe
from hetjax.pipeline.timeline.measured_times import with_split_backward
from hetjax.planner.plan.plan import Plan

pytestmark = pytest.mark.ray


def plans() -> tuple[Plan, Plan]:
    """A plan whose first stage spans two hosts, and the same with offload."""
    plan = make_plan(hosts=2)
    parts = tuple(replace(each, host_memory_bytes=10**9) for each in plan.cluster.subclusters)
    cluster = Cluster(plan.cluster.name, parts, plan.cluster.links)
    # All microbatches are live at once, and two of them wait for tasks enough to travel.
    schedule = with_split_backward(gpipe(2, plan.pipeline.num_microbatches))
    plan = plan.with_schedule(schedule)
    away = ("activations", "optimizer_state")
    stages = tuple(replace(each, offload=away) for each in plan.stages)
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
        timeline, offloads = trainer.timeline(), bool(plan.stages[0].offload)
        for track in ("link host->0", "link 0->host"):
            names = {event.name.partition(" ")[2] for event in timeline.on(track)}
            assert (names >= {"0", "F1", "F2"}) if offloads else not names
        return losses, jax.tree.leaves(trainer.parameters())


def test_two_hosts_offload_to_the_same_bits(ray_cluster: Any, tmp_path: Path):
    plain, offloading = plans()
    losses, expected = run(plain, tmp_path / "plain")
    found, parameters = run(offloading, tmp_path / "offload")
    assert found == losses
    for one, other in zip(parameters, expected, strict=True):
        np.testing.assert_array_equal(one, other)
