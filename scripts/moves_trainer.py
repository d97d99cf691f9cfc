"""A Transformer whose blocks two members compute together, with moves in every one of them.

Each sum of a block is a move, of all activations of a microbatch; see `moves_model.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import optax
from benchmarking import Size, add_size, serve, size_of
from jax.sharding import PartitionSpec
from moves_model import DIVIDED, MOVES, batch_of, parameters_of, summed_loss
from moves_program import OneProgram

import hetjax
from hetjax.mesh import KINDS, Cluster, Link, Subcluster, SubMesh
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.timeline.timeline import stage_track
from hetjax.planner import Member, PipelinePlan, Share, Shares, StagePlan
from hetjax.sharding import HSharding, Subgroup


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
        parameters, self.batch = parameters_of(size), batch_of(size)
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
        self._size = size
        self._programs: dict[bool, OneProgram] = {}

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

    def do_one_program(self, sums: bool) -> float:
        """Run one step of one program of all devices; its seconds. The first one compiles it."""
        if sums not in self._programs:
            self._programs[sums] = OneProgram(self._size, sums=sums)
        return self._programs[sums].step()


def one_device(size: Size, steps: int) -> list[float]:
    """The losses of plain JAX on one device."""
    loss, optimizer = partial(_mean_loss, None), optax.sgd(1e-3)
    parameters, batch = parameters_of(size), batch_of(size)
    state, found = optimizer.init(parameters), []
    gradient = jax.jit(jax.value_and_grad(loss))
    for _ in range(steps):
        value, gradients = gradient(parameters, batch)
        updates, state = optimizer.update(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        found.append(float(value))
    return found


def _shares(size: Size) -> dict[str, Share]:
    """Half of the heads and half of the columns for each."""
    heads = (size.heads // 2, size.heads - size.heads // 2)
    columns = (2 * size.width, 2 * size.width)
    return {
        f"blocks/{block}/{name}": Share(dimension, columns if name in ("up", "down") else heads)
        for block in range(size.blocks)
        for name, dimension in DIVIDED.items()
    }


def _loss(
    everywhere: HSharding | None, parameters: Mapping[str, Any], batch: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array]:
    def whole(x: jax.Array) -> jax.Array:
        return x if everywhere is None else hetjax.reshard(x, everywhere)

    return summed_loss(parameters, batch, whole, whole)


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
