"""A plan is never slower than the best part of its cluster alone."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

from hetjax import planner
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster
from hetjax.planner import DynamicProgram


@pytest.mark.parametrize("bandwidth", [1e7, 1e8, 1e9, 1e10])
@pytest.mark.parametrize("num_microbatches", [1, 4, 16])
def test_a_tied_embedding_over_a_slow_link(bandwidth: float, num_microbatches: int):
    near, far = Link(2e10, 1e-5), Link(bandwidth, 5e-5)
    fast = DeviceKind("fast card", {"float32": 8e12}, 10**10, 1e12, source="made up")
    slow = DeviceKind("slow card", {"float32": 3e12}, 10**10, 7e11, source="made up")
    cluster = Cluster(
        "two machines",
        (Subcluster("fast", fast, 1, 1, near, far), Subcluster("slow", slow, 1, 2, near, far)),
        (("fast", "slow", far),),
    )

    def loss(weights, x):
        y = x @ weights["table"]
        for weight in weights["blocks"]:
            y = jnp.tanh(y @ weight)
        return jnp.mean((y @ weights["table"].T - x) ** 2)

    shape = jax.ShapeDtypeStruct
    problem = planner.make_problem(
        loss,
        {"table": shape((4096, 256), jnp.float32), "blocks": [shape((256, 256), jnp.float32)] * 6},
        shape((32, 512, 4096), jnp.float32),
        cluster=cluster,
        optimizer=optax.adam(1e-3),
        num_microbatches=num_microbatches,
    )
    found = DynamicProgram().find(problem)
    assert found is not None
    predicted = planner.complete(found.plan, problem).prediction
    assert predicted is not None
    # A search adds up layers; a prediction differentiates whole stages.
    assert predicted.step_time == pytest.approx(found.step_time, rel=0.02)
    for name in ("fast", "slow"):
        alone = DynamicProgram().find(replace(problem, cluster=cluster.part([name])))
        assert alone is not None
        assert found.step_time <= alone.step_time * (1 + 1e-9)
