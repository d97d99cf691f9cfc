"""Plans whose stages offload, and what their workers hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import optax
from cases import CLUSTER

from hetjax.mesh import Cluster
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import Offloaded
from hetjax.runtime.local.local_executor import LocalExecutor

CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3, eps=1e-5))


def roomy(cluster: Cluster) -> Cluster:
    """The cluster, whose hosts have memory for what is offloaded."""
    parts = (replace(part, host_memory_bytes=10**9) for part in cluster.subclusters)
    return replace(cluster, subclusters=tuple(parts))


ROOMY = roomy(CLUSTER)


def offloading(plan: Plan, *kinds: Offloaded) -> Plan:
    """The plan, all of whose stages offload some kinds of arrays."""
    pipelines = tuple(
        replace(pipeline, stages=tuple(replace(each, offload=kinds) for each in pipeline.stages))
        for pipeline in plan.pipelines
    )
    return replace(plan, cluster=roomy(plan.cluster), pipelines=pipelines)


def held(executor: LocalExecutor) -> list[np.ndarray]:
    """The parameters and the optimizer's state of all workers."""
    states = [worker.state() for worker in executor.workers]
    return [np.asarray(each) for s in states for each in (*s.parameters, *s.optimizer)]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    """Whether arrays have the same bits."""
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
