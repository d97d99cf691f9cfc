"""A Transformer whose blocks two members compute together, with moves in every one of them.

Each block is Megatron's: a member has some heads, and some columns of the first product; what both
make of them is added up twice in the forward pass and twice in the backward pass. So a block has
four moves, each of all activations of a microbatch.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from benchmarking import Size, add_size, serve, size_of
from jax.sharding import PartitionSpec

import hetjax
from hetjax.mesh import KINDS, Cluster, Link, Subcluster, SubMesh
from hetjax.pipeline.program.traced_program import trace
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.timeline.timeline import stage_track
from hetjax.planner import Member, PipelinePlan, Share, Shares, StagePlan
from hetjax.sharding import HSharding, Subgroup

MOVES_OF_A_BLOCK = 4
MOVES = Size(
    blocks=12, width=256, heads=8, sequence=128, vocabulary=1, microbatches=4, microbatch_size=2
)
"""48 moves a microbatch, of 256 KB each."""


class MovesTrainer:
    """The Transformer in training on the first devices of two subclusters.

    Args:
        size: of the model and its batch; its vocabulary is not used.
        cluster: the cluster.
        runtime: the runtime.
    """

    def __init__(self, size: Size, cluster: Cluster, runtime: Any):
        names = [each.name for each in cluster.subclusters[:2]]
        members = tuple(Member(SubMesh(name, 0, (1, 1)), (1, 1)) for name in names)
        axes = (("data", 1), ("tensor", 1))
        devices = [tuple(cluster.device_ids(member.submesh)) for member in members]
        everywhere = HSharding(tuple(Subgroup(each, axes, PartitionSpec()) for each in devices))
        loss = partial(_loss, everywhere)
        parameters, self.batch = _parameters(size), _batch(size)
        one = {name: rows[: size.microbatch_size] for name, rows in self.batch.items()}
        program = trace(loss, parameters, one)
        stage = StagePlan((0, 1), members, shares=Shares(parameters=_shares(size)))
        count = size.microbatches
        pipeline = PipelinePlan((stage,), count, size.microbatch_size, one_f_one_b(1, count))
        layers = (0, program.num_positions)
        plan = hetjax.Plan(program.fingerprint, layers, cluster, (pipeline,))
        self.trainer = hetjax.Trainer(
            plan, loss, parameters, optax.sgd(1e-3), self.batch, runtime=runtime
        )

    def do_steps(self, count: int) -> list[float]:
        """Run steps; their losses."""
        return [self.trainer.train_step(self.batch).loss for _ in range(count)]

    def do_step(self) -> float:
        """Run one step; its seconds."""
        return self.trainer.train_step(self.batch).seconds

    def do_busy(self) -> dict[str, float]:
        """Run one timed step; the slowest member's computation, and the bytes that each gets."""
        self.trainer.train_step(self.batch, timed=True)
        (report,) = self.trainer.reports
        timeline = self.trainer.timeline()
        return {
            "compute": max(timeline.busy(stage_track(0, member)) for member in range(2)),
            "bytes": sum(arrival.num_bytes for arrival in report.arrivals.values()) / 2,
        }


def one_device(size: Size, steps: int) -> list[float]:
    """The losses of plain JAX on one device."""
    loss, optimizer = partial(_mean_loss, None), optax.sgd(1e-3)
    parameters, batch = _parameters(size), _batch(size)
    state, found = optimizer.init(parameters), []
    gradient = jax.jit(jax.value_and_grad(loss))
    for _ in range(steps):
        value, gradients = gradient(parameters, batch)
        updates, state = optimizer.update(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        found.append(float(value))
    return found


def _parameters(size: Size) -> dict[str, Any]:
    rng, width, each = np.random.default_rng(0), size.width, size.width // size.heads

    def weights(*shape: int) -> np.ndarray:
        return rng.normal(0, width**-0.5, shape).astype(np.float32)

    blocks = [
        {
            "query": weights(width, size.heads, each),
            "key": weights(width, size.heads, each),
            "value": weights(width, size.heads, each),
            "out": weights(size.heads, each, width),
            "up": weights(width, 4 * width),
            "down": weights(4 * width, width),
        }
        for _ in range(size.blocks)
    ]
    return {"blocks": blocks, "first": weights(width, width)}


def _shares(size: Size) -> dict[str, Share]:
    """Half of the heads and half of the columns for each."""
    heads = (size.heads // 2, size.heads - size.heads // 2)
    columns = (2 * size.width, 2 * size.width)
    dimensions = {"query": 1, "key": 1, "value": 1, "out": 0, "up": 1, "down": 0}
    return {
        f"blocks/{block}/{name}": Share(dimension, columns if name in ("up", "down") else heads)
        for block in range(size.blocks)
        for name, dimension in dimensions.items()
    }


def _batch(size: Size) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shape = (size.microbatches * size.microbatch_size, size.sequence, size.width)
    return {name: rng.normal(size=shape).astype(np.float32) for name in ("x", "y")}


def _whole(x: jax.Array, everywhere: HSharding | None) -> jax.Array:
    return x if everywhere is None else hetjax.reshard(x, everywhere)


def _normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def _block(
    x: jax.Array, weights: Mapping[str, jax.Array], everywhere: HSharding | None
) -> jax.Array:
    h = _whole(_normalized(x), everywhere)
    query, key, value = (
        jnp.einsum("bsd,dhe->bshe", h, weights[name]) for name in ("query", "key", "value")
    )
    scores = jnp.einsum("bshe,bthe->bhst", query, key) * query.shape[-1] ** -0.5
    mixed = jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores), value)
    x = x + _whole(jnp.einsum("bshe,hed->bsd", mixed, weights["out"]), everywhere)
    h = _whole(_normalized(x), everywhere)
    return x + _whole(jax.nn.gelu(h @ weights["up"]) @ weights["down"], everywhere)


def _loss(
    everywhere: HSharding | None, parameters: Mapping[str, Any], batch: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array]:
    x = batch["x"] @ parameters["first"]
    for weights in parameters["blocks"]:
        x = _block(x, weights, everywhere)
    errors = (x - batch["y"]) ** 2
    return jnp.sum(errors), jnp.float32(errors.size)


def _mean_loss(everywhere: None, parameters: Any, batch: Any) -> jax.Array:
    total, count = _loss(everywhere, parameters, batch)
    return total / count


def _in_process() -> Cluster:
    """Two host devices of this process."""
    link = Link(bandwidth=1e10, latency=1e-6)
    one, two = (Subcluster(name, KINDS["T4"], 1, 1, link, link) for name in ("one", "two"))
    return Cluster("two devices", (one, two), (("one", "two", link),))


def main() -> None:
    """Train in this process, step by step as it is asked."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    add_size(parser, MOVES)
    size = size_of(parser.parse_args())
    trainer = MovesTrainer(size, _in_process(), hetjax.LocalOptions())
    serve(lambda request: getattr(trainer, f"do_{request.pop('do')}")(**request))


if __name__ == "__main__":
    main()
