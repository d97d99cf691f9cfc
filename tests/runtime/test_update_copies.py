"""What XLA for CPUs copies while an update is about: predicted, and by XLA."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.mesh import Cluster, Link, Subcluster, SubMesh, kind, measure_host_cpu
from hetjax.mesh.kinds import DeviceKind
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import make_problem, predict
from hetjax.planner.harp.candidate_plans import pipeline_plan
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import StagePlan

SIDE, LAYERS = 512, 6
BATCH = np.ones((2, SIDE), np.float32)
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def loss(weights: Any, rows: Any) -> Any:
    for weight in weights:
        rows = jnp.tanh(rows @ weight)
    return rows.mean()


def weights() -> Any:
    return [jnp.eye(SIDE) for _ in range(LAYERS)]


def plan_on(chip: DeviceKind) -> Plan:
    link = Link(1e10, 1e-5)
    cluster = Cluster("one", (Subcluster("chips", chip, 1, 1, link, link),))
    problem = make_problem(
        loss, weights(), BATCH, cluster=cluster, optimizer=ADAMW, num_microbatches=2
    )
    stage = StagePlan.on((0, problem.num_layers), SubMesh("chips", 0, (1, 1)), (1, 1))
    return predict(pipeline_plan(problem, [stage], one_f_one_b(1, 2), "by hand"), problem)


def test_copies_are_predicted():
    plan = plan_on(measure_host_cpu(1))
    predicted = plan.predicted.stages[0]
    # The gradients are as many, and all else is made.
    assert predicted.update_bytes == pytest.approx(0.7 * 3 * LAYERS * 4 * SIDE**2, rel=0.01)
    assert predicted.memory_bytes >= predicted.state_bytes + predicted.update_bytes
    with hetjax.Trainer(plan, loss, weights(), ADAMW, BATCH) as trainer:
        trainer.train_step(BATCH)
        executor: Any = trainer._executor
        (name,) = (n for n in executor.workers[0].compiled.programs if n.startswith("update"))
        analysis = executor.workers[0].compiled.programs[name].memory_analysis()
    assert predicted.update_bytes == pytest.approx(analysis.temp_size_in_bytes, rel=0.1)


def test_cards_copy_nothing():
    assert plan_on(kind("T4")).predicted.stages[0].update_bytes == 0
