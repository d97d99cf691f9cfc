"""What members that compute programs are predicted to hold, beside what XLA says they do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from execution import running

import hetjax
from hetjax.mesh import KINDS, Cluster, Link, Subcluster
from hetjax.planner import HapPlanner
from hetjax.planner.plan.plan import Plan
from hetjax.runtime.workers.job import Job

VOCABULARY, WIDTH, TOKENS, EXAMPLES = 1024, 32, 32, 8
OPTIMIZER = optax.adam(1e-3)
LINK = Link(1e9, 1e-5)
SHAPES = {
    "embedding": (VOCABULARY, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
    "head": (WIDTH, VOCABULARY),
}
PARAMETERS = {name: np.full(shape, 0.01, np.float32) for name, shape in SHAPES.items()}
BATCH = jax.ShapeDtypeStruct((EXAMPLES, TOKENS + 1), np.int32)


def loss(parameters: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """Most of what a pass holds are the logits, and what their derivatives make of them."""
    x = parameters["embedding"][tokens[:, :-1]]
    x = x + jax.nn.gelu(x @ parameters["up"]) @ parameters["down"]
    logits = jax.nn.log_softmax(x @ parameters["head"])
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1))


def planned(memory: float) -> Plan:
    """HAP's plan for two nodes of so much memory."""
    kind = replace(KINDS["T4"], platform="cpu", memory_bytes=int(memory))
    cluster = Cluster("two", (Subcluster("nodes", kind, 2, 1, LINK, LINK),), ())
    return hetjax.plan(
        loss,
        PARAMETERS,
        BATCH,
        cluster=cluster,
        optimizer=OPTIMIZER,
        num_microbatches=1,
        planner=HapPlanner(),
    )


def analyses(plan: Plan) -> list[Any]:
    """XLA's analyses of the programs that the first member runs."""
    job = Job(loss, PARAMETERS, BATCH, OPTIMIZER, plan, deadline=60.0)
    with running(job) as executor:
        programs = executor.workers[0].compiled.programs.values()
        return [getattr(each, "_program", each).memory_analysis() for each in programs]


def test_what_a_pass_holds_on_its_way_is_what_xla_says():
    plan = planned(1e9)
    assert plan.prediction is not None
    member = plan.prediction.stages[0].members[0]
    most = max(each.temp_size_in_bytes for each in analyses(plan))
    assert member.working_bytes == pytest.approx(most, rel=0.1)


@pytest.mark.parametrize("part", [0.8, 0.65])
def test_programs_that_are_said_to_fit_do(part: float):
    roomy = planned(1e9).prediction
    assert roomy is not None
    limit = part * roomy.stages[0].members[0].memory_bytes / 0.9
    for each in analyses(planned(limit)):
        given = each.argument_size_in_bytes + each.output_size_in_bytes - each.alias_size_in_bytes
        assert given + each.temp_size_in_bytes <= limit
