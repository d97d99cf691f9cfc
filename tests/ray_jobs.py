"""A small job for the tests of the Ray runtime; worker processes import this module too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax.mesh import KINDS, Cluster, DeviceKind, Link, Subcluster, SubMesh
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedules.interleaved import interleaved
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner.plan.module_shares import Share
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import Member, PipelinePlan, Shares, StagePlan
from hetjax.runtime import LocalOptions, RayOptions, Trainer

VOCABULARY, WIDTH, DEPTH, LENGTH = 13, 8, 4, 6
MICROBATCHES, SIZE = 3, 4
BATCH = MICROBATCHES * SIZE

_LINK = Link(bandwidth=1e9, latency=1e-5)
HOST = replace(KINDS["T4"], name="test-host", platform="cpu")
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(3e-2, 1e-3, 20))
)


def loss(parameters: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """A scan over blocks between tied embeddings: the summed loss, and the count.

    Where the batch has a weight for each example, it scales the embedded tokens.
    """
    tokens = batch["tokens"]
    features = parameters["embedding"][tokens[:, :-1]]
    if "weight" in batch:
        features = features * batch["weight"][:, None, None]

    def block(features: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return features + jnp.tanh(features @ weights["in"]) @ weights["out"], None

    features, _ = jax.lax.scan(block, features, parameters["blocks"])
    scores = jax.nn.log_softmax(features @ parameters["embedding"].T)
    losses = -jnp.take_along_axis(scores, tokens[:, 1:, None], -1)
    return jnp.sum(losses), jnp.float32(losses.size)


def loss_by_half_products(parameters: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The same with products of bfloat16 in all that the second stage of `make_plan` computes."""
    tokens = batch["tokens"]
    features = parameters["embedding"][tokens[:, :-1]]

    def half(a: jax.Array, b: jax.Array) -> jax.Array:
        return (a.astype(jnp.bfloat16) @ b.astype(jnp.bfloat16)).astype(jnp.float32)

    def block(product: Any, features: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return features + product(jnp.tanh(product(features, weights["in"])), weights["out"]), None

    first, second = (
        jax.tree.map(lambda leaf, part=part: leaf[part], parameters["blocks"])
        for part in (slice(None, DEPTH // 2), slice(DEPTH // 2, None))
    )
    features, _ = jax.lax.scan(partial(block, jnp.matmul), features, first)
    features, _ = jax.lax.scan(partial(block, half), features, second)
    scores = jax.nn.log_softmax(half(features, parameters["embedding"].T))
    losses = -jnp.take_along_axis(scores, tokens[:, 1:, None], -1)
    return jnp.sum(losses), jnp.float32(losses.size)


def parameters() -> Any:
    """The initial parameters."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return (0.3 * rng.normal(size=shape)).astype(np.float32)

    blocks = {"in": draw(DEPTH, WIDTH, 2 * WIDTH), "out": draw(DEPTH, 2 * WIDTH, WIDTH)}
    return {"embedding": draw(VOCABULARY, WIDTH), "blocks": blocks}


@dataclass(frozen=True)
class Tokens:
    """Random tokens as a source of batches."""

    def batch(self, step: int, batch_size: int, rows: slice | None = None) -> Any:
        rng = np.random.default_rng(step)
        tokens = rng.integers(0, VOCABULARY, (batch_size, LENGTH + 1), np.int32)
        return {"tokens": tokens[rows or slice(None)]}

    def held_out_batches(self, batch_size: int) -> Iterator[Any]:
        return (self.batch(1000 + i, batch_size) for i in range(2))


@dataclass(frozen=True)
class TokensOfFile(Tokens):
    """The same; those held out are there when a file is."""

    path: Path

    def held_out_batches(self, batch_size: int) -> Iterator[Any]:
        self.path.read_bytes()
        return super().held_out_batches(batch_size)


def make_cluster(nodes: int, kind: DeviceKind = HOST) -> Cluster:
    """A subcluster of two devices a node, and one of a single host CPU device."""
    first = Subcluster("first", kind, nodes, 2, _LINK, _LINK)
    second = Subcluster("second", HOST, 1, 1, _LINK, _LINK)
    return Cluster("test", (first, second), (("first", "second", _LINK),))


def block_start(program: Program, block: int) -> int:
    """The position where a block begins."""
    named = zip(program.parameter_names, program.parameters, strict=True)
    own = {value for name, value in named if name.endswith(f"[{block}]")}
    return next(p for p, step in enumerate(program.steps) if own.intersection(step.values()))


def make_plan(
    hosts: int = 1,
    cluster: Cluster | None = None,
    mesh_shape: tuple[int, int] | None = None,
    *,
    weighted: bool = False,
    function: Any = loss,
) -> Plan:
    """Two stages that meet in the middle of the scan, or between two of them.

    Args:
        hosts: how many hosts the first stage spans.
        cluster: where to run; one that has just these devices unless given.
        mesh_shape: the logical mesh of the first stage; its devices in a row unless given.
        weighted: whether batches have weights.
        function: `loss`, or `loss_by_half_products`.
    """
    shapes = {"tokens": jax.ShapeDtypeStruct((SIZE, LENGTH + 1), np.dtype(np.int32))}
    if weighted:
        shapes["weight"] = jax.ShapeDtypeStruct((SIZE,), np.dtype(np.float32))
    program = trace(function, parameters(), shapes)
    middle = block_start(program, DEPTH // 2)
    stages = (
        StagePlan.on(
            (0, 1),
            SubMesh("first", 0, (hosts, 2)),
            mesh_shape or (2 * hosts, 1),
            "fully_sharded",
        ),
        StagePlan.on((1, 2), SubMesh("second", 0, (1, 1)), (1, 1), recompute=True),
    )
    pipeline = PipelinePlan(stages, MICROBATCHES, SIZE, one_f_one_b(2, MICROBATCHES))
    return Plan(
        program.fingerprint,
        (0, middle, program.num_positions),
        cluster or make_cluster(hosts),
        (pipeline,),
    )


def make_plan_of_two_passes() -> Plan:
    """Both submeshes of `make_plan` twice, the first with two logical meshes; cut in the scan."""
    plan = make_plan()
    start, middle, end = plan.layers
    first, second = plan.pipeline.stages
    stages = (
        replace(first, layers=(0, 1)),
        replace(second, layers=(1, 2)),
        replace(first, layers=(2, 3), members=(Member(first.submesh, (1, 2)),)),
        replace(second, layers=(3, 4), recompute=False),
    )
    pipeline = replace(plan.pipeline, stages=stages, schedule=interleaved(2, 2, MICROBATCHES))
    program = trace(loss, parameters(), jax.eval_shape(lambda: Tokens().batch(0, SIZE)))
    before, after = (block_start(program, DEPTH // 2 + way) for way in (-1, 1))
    layers = (start, before, middle, after, end)
    return replace(plan, layers=layers, pipelines=(pipeline,))


def make_plan_of_two_pipelines() -> Plan:
    """Two pipelines of unlike depth and width, each with its own microbatches."""
    one, two = make_plan(), make_plan(hosts=2)
    whole = StagePlan.on((0, 2), SubMesh("first", 0, (1, 2)), (1, 2))
    stages = (StagePlan.on((0, 1), SubMesh("first", 2, (1, 2)), (1, 2)), one.stages[1])
    pipelines = (
        PipelinePlan((whole,), 2, SIZE, one_f_one_b(1, 2)),
        PipelinePlan(stages, SIZE, 1, one_f_one_b(2, SIZE)),
    )
    return replace(two, pipelines=pipelines)


PARAMETERS = {"blocks/in": Share(1, (10, 6)), "blocks/out": Share(0, (10, 6))}
"""Columns of the one product and rows of the other, of all blocks, as tensor parallelism has."""

SHARES = {
    "batch": Shares(batch=(2, 2)),
    "columns": Shares(parameters=PARAMETERS),
    "both": Shares(batch=(2, 2), parameters=PARAMETERS),
}


def union_plan(shares: Shares) -> Plan:
    """One stage over two devices and one device."""
    program = trace(loss, parameters(), jax.eval_shape(lambda: Tokens().batch(0, SIZE)))
    members = (
        Member(SubMesh("first", 0, (1, 2)), (2, 1)),
        Member(SubMesh("second", 0, (1, 1)), (1, 1)),
    )
    stage = StagePlan((0, 1), members, shares=shares)
    pipeline = PipelinePlan((stage,), MICROBATCHES, SIZE, one_f_one_b(1, MICROBATCHES))
    return Plan(program.fingerprint, (0, program.num_positions), make_cluster(1), (pipeline,))


RUNTIMES = {"local": LocalOptions(), "ray": RayOptions()}


def make_trainer(
    runtime: str | LocalOptions | RayOptions, plan: Plan | None = None, **changes: Any
) -> Trainer:
    """A trainer of the job; what is given replaces arguments of `Trainer`."""
    arguments: dict[str, Any] = {
        "plan": plan or make_plan(),
        "loss_function": loss,
        "parameters": parameters,
        "optimizer": OPTIMIZER,
        "batch": Tokens().batch(0, BATCH),
        "source": Tokens(),
        "runtime": RUNTIMES[runtime] if isinstance(runtime, str) else runtime,
    }
    return Trainer(**{**arguments, **changes})
