"""Hosts of the lab that share long sequences: the process on the first one, for `context_hosts`."""

from __future__ import annotations

import argparse
from typing import Any

import jax
from baselines import model_of, optimizer
from benchmarking import RequestServer, Size, add_size, serve_until_end, size_of

import hetjax
from hetjax.errors import DoesNotFitError
from hetjax.planner import HexiSeqPlanner, Plan, make_problem
from hetjax.runtime import RayOptions, measure_cluster
from hetjax.runtime.ray.ray_executor import connect_to_ray


class Server(RequestServer):
    """What is asked of the process.

    Args:
        size: sizes of the model and its batch.
    """

    def __init__(self, size: Size):
        self.size, self.model = size, model_of(size)
        self.batch = {"tokens": size.tokens()}
        self.parameters = jax.jit(self.model.init)(jax.random.key(0))
        self.plans: dict[str, Plan] = {}
        self.trainers: dict[str, hetjax.Trainer] = {}
        connect_to_ray(RayOptions())

    def close(self) -> None:
        """End all trainers."""
        for trainer in self.trainers.values():
            trainer.close()

    def do_measure(self) -> dict[str, Any]:
        """Measure hosts and links; the hosts' FLOP/s, and the links."""
        cluster = measure_cluster()
        self.problem = make_problem(
            self.model.loss,
            self.parameters,
            self.batch,
            cluster=cluster,
            optimizer=optimizer(),
            num_microbatches=self.size.microbatches,
            divides_sequences=True,
        )
        return {
            "flops": [each.kind.flops("float32") for each in cluster.subclusters],
            "links": [[a, b, link.bandwidth, link.latency] for a, b, link in cluster.links],
        }

    def do_plan(self, system: str) -> dict[str, Any] | None:
        """Plan by a system; None where it is not legal."""
        try:
            plan = HexiSeqPlanner(system).plan(self.problem)
        except DoesNotFitError:
            return None
        self.plans[system] = plan
        (stage,), split = plan.stages, plan.stages[0].shares.context
        return {
            "devices": stage.devices_text,
            "groups": [] if split is None else [group.devices for group in split.groups],
            "tokens": [] if split is None else split.tokens,
            "heads": [] if split is None else split.head_ranges,
            "predicted": plan.predicted.step_time,
        }

    def do_start(self, system: str) -> None:
        """Make the trainer of a plan."""
        what = (self.model.loss, self.parameters, optimizer(), self.batch)
        self.trainers[system] = hetjax.Trainer(self.plans[system], *what, runtime=RayOptions())

    def do_steps(self, system: str, count: int) -> list[float]:
        """Run steps; their losses."""
        return [self.trainers[system].train_step(self.batch).loss for _ in range(count)]

    def do_step(self, system: str) -> float:
        """Run one step; its seconds."""
        return self.trainers[system].train_step(self.batch).seconds

    def do_end(self, system: str) -> None:
        """End a trainer."""
        self.trainers.pop(system).close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_size(parser)
    serve_until_end(Server(size_of(parser.parse_args())))


if __name__ == "__main__":
    main()
