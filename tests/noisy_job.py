"""A job whose batches hold typed random keys, and whose loss has figures beside it.

Worker processes import this module too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ray_jobs import RUNTIMES, make_cluster

from hetjax.mesh import SubMesh
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.runtime import Trainer

BATCH, WIDTHS = 12, (4, 8, 8, 2)
OPTIMIZER = optax.adamw(1e-2)


def parameters() -> list[np.ndarray]:
    """The initial weights."""
    rng = np.random.default_rng(0)
    shapes = itertools.pairwise(WIDTHS)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def loss(weights: Any, batch: Any) -> tuple[tuple[jax.Array, jax.Array], dict[str, jax.Array]]:
    """The error of noisy examples, some of which weigh nothing; total and count, and figures."""
    noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTHS[0],)))(batch["key"])
    features = batch["x"] + 0.1 * noise
    for weight in weights:
        features = jnp.tanh(features @ weight)
    errors = jnp.mean((features - batch["y"]) ** 2, axis=-1)
    count = jnp.sum(batch["weight"])
    figures = {
        "largest": jnp.max(errors),
        "positive": jnp.mean(jnp.asarray(features > 0, jnp.float32)),
    }
    return (jnp.sum(errors * batch["weight"]), count), figures


@dataclass(frozen=True)
class Examples:
    """A source of batches, and two held-out ones."""

    def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Any:
        rng, rows = np.random.default_rng(step), rows or slice(None)
        made = {
            "x": rng.normal(size=(batch_size, WIDTHS[0])).astype(np.float32),
            "y": rng.normal(size=(batch_size, WIDTHS[-1])).astype(np.float32),
            # The first examples weigh nothing: microbatches have unlike counts.
            "weight": np.asarray(np.arange(batch_size) > 1, np.float32),
            "key": jax.random.split(jax.random.key(step), batch_size),
        }
        return {name: leaf[rows] for name, leaf in made.items()}

    def held_out_batches(self, batch_size: int) -> Iterator[Any]:
        return (self.batch(1000 + i, batch_size) for i in range(2))


def make_noisy_plan(pipelines: int = 1) -> Plan:
    """Two stages; or a pipeline of these beside one of a single stage, which has less to do."""
    shapes = jax.eval_shape(lambda: Examples().batch(0, 4))
    program = trace(loss, parameters(), shapes, has_aux=True)
    end = program.num_positions
    first, last = SubMesh("first", 0, (1, 2)), SubMesh("second", 0, (1, 1))
    stages = (StagePlan.on((0, 1), first, (2, 1)), StagePlan.on((1, 2), last, (1, 1)))
    if pipelines == 1:
        pipeline = PipelinePlan(stages, 3, 4, one_f_one_b(2, 3))
        return Plan(program.fingerprint, (0, end // 2, end), make_cluster(1), (pipeline,))
    whole = StagePlan.on((0, 2), SubMesh("first", 2, (1, 2)), (2, 1))
    return Plan(
        program.fingerprint,
        (0, end // 2, end),
        make_cluster(2),
        (
            PipelinePlan(stages, 2, 4, one_f_one_b(2, 2)),
            PipelinePlan((whole,), 2, 2, one_f_one_b(1, 2)),
        ),
    )


def make_noisy_trainer(runtime: str, plan: Plan | None = None) -> Trainer:
    """A trainer of the job."""
    return Trainer(
        plan or make_noisy_plan(),
        loss,
        parameters,
        OPTIMIZER,
        Examples().batch(0, BATCH),
        has_aux=True,
        source=Examples(),
        runtime=RUNTIMES[runtime],
    )
