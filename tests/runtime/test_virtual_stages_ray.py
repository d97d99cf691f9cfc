"""Stages that share devices on Ray: one worker has them, and computes what one process does."""

from pathlib import Path

import jax
import numpy as np
import pytest
from ray_jobs import BATCH, Tokens, make_plan, make_plan_of_two_passes, make_trainer

from hetjax import InputError
from hetjax.planner.plan.plan import Plan
from hetjax.runtime.ray.ray_executor import RayExecutor

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def test_two_passes_train_as_one(tmp_path: Path):
    with make_trainer("local", make_plan()) as trainer:
        losses = [trainer.train_step().loss for _ in range(4)]
        held_out = trainer.evaluate()
        expected = trainer.parameters()
    plan = make_plan_of_two_passes()
    assert Plan.from_json_dict(plan.to_json_dict()) == plan
    with make_trainer("local", plan, workdir=tmp_path) as trainer:
        found = [trainer.train_step().loss for _ in range(2)]
        trainer.save(wait=True)
        with pytest.raises(InputError, match=r"stages \[0, 2\] on the same devices"):
            trainer.switch(make_plan())
    with make_trainer("ray", plan, workdir=tmp_path) as trainer:
        assert trainer.resume()
        executor = trainer._executor
        assert isinstance(executor, RayExecutor)
        assert len(executor.processes) == 2
        found.append(trainer.train_step().loss)
        found.append(trainer.train_step(Tokens().batch(3, BATCH), timed=True).loss)
        tracks = {track for track in trainer.timeline().tracks if "stage" in track}
        assert trainer.evaluate() == pytest.approx(held_out, rel=1e-5)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), trainer.parameters(), expected
        )
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert tracks == {"stage 0", "stage 1", "stage 2", "stage 3"}
