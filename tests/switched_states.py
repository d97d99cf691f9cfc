"""What tests of switching share: plans, and the whole training state of a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from cases import CLUSTER, trace_model
from execution import empty_leaves, gather
from small_models import Model

from hetjax import Trainer
from hetjax.mesh import SubMesh
from hetjax.pipeline.program.loss import host_array
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.runtime.local.local_executor import LocalExecutor

OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3))

NOISY = optax.chain(optax.add_noise(1e-4, 0.5, jax.random.key(3)), OPTIMIZER)
"""One with a random key in its state."""


def state_of(trainer: Trainer, *, fresh: bool = False) -> list[np.ndarray]:
    """Every leaf of the training state, whole, of the first stages that hold it.

    Copies of parameters are compared on the way. Those of optimizer state are once a switch has
    made them alike; in training each holder rounds for itself.
    """
    executor = trainer._executor
    assert isinstance(executor, LocalExecutor)
    pipelines = trainer._placement.pipelines
    parameters = [
        (stage.parameters, executor.workers[stage.index].state().parameters)
        for stage in pipelines.stages
    ]
    optimizer = [
        (update.state, worker.state().optimizer)
        for update, worker in zip(pipelines.updates, executor.workers, strict=True)
    ]
    return [
        *pipelines.program.leaves.join(gather(parameters, pipelines.parameter_shapes), np.stack),
        *pipelines.state_leaves.join(
            (gather if fresh else first_copies)(optimizer, pipelines.state_shapes), np.stack
        ),
    ]


def first_copies(
    held: Sequence[tuple[Any, Any]], shapes: Sequence[jax.ShapeDtypeStruct]
) -> list[np.ndarray]:
    """Whole leaves, of which every row is that of the first stage that holds it."""
    leaves = empty_leaves(shapes)
    for parts, arrays in reversed(held):
        for part, array in zip(parts, arrays, strict=True):
            rows = (slice(part.start, part.stop),) if part.stop is not None else ...
            leaves[part.leaf][rows] = host_array(array)
    return leaves


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def two_pipelines(model: Model) -> Plan:
    """Two pipelines of one stage each, of four devices."""
    program = trace_model(model, 1)
    pipelines = tuple(
        PipelinePlan(
            (StagePlan.on((0, 1), SubMesh(name, 0, (1, 4)), (4, 1)),), 3, 4, one_f_one_b(1, 3)
        )
        for name in ("first", "second")
    )
    return Plan(program.fingerprint, (0, program.num_positions), CLUSTER, pipelines)
