"""Optimizer state in the hosts' memory: the same bits, and on the devices only what is updated."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import optax
from cases import CLUSTER, Case, examples, random_case
from execution import job_of, running, train
from hypothesis import given
from hypothesis import strategies as st
from small_models import make_batch

from hetjax.mesh import Cluster
from hetjax.planner.plan.plan import Plan

CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3, eps=1e-5))
ROOMY = Cluster(
    CLUSTER.name,
    tuple(replace(part, host_memory_bytes=10**9) for part in CLUSTER.subclusters),
    CLUSTER.links,
)


def offloading(plan: Plan, *what: Any) -> Plan:
    pipelines = tuple(
        replace(pipeline, stages=tuple(replace(each, offload=what) for each in pipeline.stages))
        for pipeline in plan.pipelines
    )
    return replace(plan, cluster=ROOMY, pipelines=pipelines)


def steps(case: Case, optimizer: optax.GradientTransformation) -> tuple[Any, list[np.ndarray]]:
    batches = [make_batch(case.plan.batch_size, seed) for seed in range(3)]
    with running(job_of(case, optimizer)) as executor:
        losses = train(executor, batches)
        states = [worker.state() for worker in executor.workers]
        arrays = [np.asarray(each) for s in states for each in (*s.parameters, *s.optimizer)]
    return losses, arrays


def check_same_bits(case: Case, optimizer: optax.GradientTransformation, *what: Any) -> None:
    expected = steps(case, optimizer)
    found = steps(replace(case, plan=offloading(case.plan, *what)), optimizer)
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_array_equal(one, other)


@examples(usual=5, full=100)
@given(number=st.integers(0, 2**32 - 1), pipelines=st.integers(1, 2))
def test_offloaded_state_gives_the_same_bits(number: int, pipelines: int):
    check_same_bits(random_case(Random(number), 3, 3, pipelines), CLIPPED, "optimizer_state")
