"""On Ray, too, a run with stages of several members is saved, resumed and switched, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import ray_jobs
from ray_jobs import MICROBATCHES, SIZE, make_cluster, make_plan, make_trainer

from hetjax.mesh import SubMesh
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import Member, PipelinePlan, Shares, StagePlan

pytestmark = pytest.mark.ray


def union_plan() -> Plan:
    """One stage of two devices and one, which share the examples."""
    shapes = jax.eval_shape(lambda: ray_jobs.Tokens().batch(0, SIZE))
    program = trace(ray_jobs.loss, ray_jobs.parameters(), shapes)
    members = (
        Member(SubMesh("first", 0, (1, 2)), (2, 1)),
        Member(SubMesh("second", 0, (1, 1)), (1, 1)),
    )
    stage = StagePlan((0, 1), members, shares=Shares(batch=(2, 2)))
    pipeline = PipelinePlan((stage,), MICROBATCHES, SIZE, one_f_one_b(1, MICROBATCHES))
    return Plan(program.fingerprint, (0, program.num_positions), make_cluster(1), (pipeline,))


def run(runtime: str, workdir: Path) -> tuple[list[Any], list[Any], list[Any]]:
    """Losses, and parameters when they were saved, and at the end under another plan."""
    with make_trainer(runtime, union_plan(), workdir=workdir) as trainer:
        losses = [trainer.train_step().loss for _ in range(2)]
        trainer.save(wait=True)
        saved = jax.tree.leaves(trainer.parameters())
        losses.append(trainer.train_step().loss)
        assert trainer.resume()
        assert_same(trainer.parameters(), saved)
        trainer.switch(make_plan())
        assert_same(trainer.parameters(), saved)
        losses += [trainer.train_step().loss for _ in range(2)]
        return losses, saved, jax.tree.leaves(trainer.parameters())


def assert_same(found: Any, expected: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_union_is_saved_resumed_and_switched_on_ray(ray_cluster: Any, tmp_path: Path):
    found = {runtime: run(runtime, tmp_path / runtime) for runtime in ("local", "ray")}
    (losses, *parameters), (others, *other_parameters) = found["local"], found["ray"]
    assert losses == others
    np.testing.assert_allclose(losses[3], losses[2], rtol=1e-5)
    assert_same(other_parameters, parameters)
    with make_trainer("local", make_plan(), workdir=tmp_path / "ray") as trainer:
        assert trainer.resume()
        assert_same(trainer.parameters(), parameters[0])
