"""Messages between two workers by each carrier: the process that `h2_transports` asks.

A tiny pipeline of two stages is started as any run is, so that its carriers are measured and chosen
as in training. Then its workers send each other messages.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from baselines import model_of, optimizer
from benchmarking import RequestServer, Size, serve_until_end
from lab_trainer import CLUSTERS

import hetjax
from hetjax.mesh import Cluster, Link, Subcluster, measure_host_cpu
from hetjax.planner import PlanOptions, make_problem, predict, solve
from hetjax.runtime import RayOptions
from hetjax.runtime.moves.carriers import BETWEEN_PROCESSES, CarrierName, best_carrier
from hetjax.runtime.ray.ray_executor import RayExecutor, connect_to_ray

SIZE = Size(blocks=2, width=32, sequence=16, vocabulary=64, microbatches=2)

_WORKERS = (0, 0), (1, 0)
"""One of each stage."""


class Server(RequestServer):
    """What is asked of the process.

    Args:
        lab: the lab on whose first host it is; None for two workers on one machine.
    """

    def __init__(self, lab: str | None):
        connect_to_ray(RayOptions(None if lab else "local"))
        self._cluster = Cluster.from_file(CLUSTERS / f"{lab}.yaml") if lab else _one_machine()
        self._trainer: hetjax.Trainer | None = None
        self._numbers = itertools.count(1)

    def do_start(self, sizes: Sequence[int]) -> dict[str, Any]:
        """Start a run; which carrier it chooses for messages of some bytes, and its curves."""
        self.close()
        model, batch = model_of(SIZE), {"tokens": SIZE.tokens()}
        parameters = jax.jit(model.init)(jax.random.key(0))
        problem = make_problem(
            model.loss,
            parameters,
            batch,
            cluster=self._cluster,
            optimizer=optimizer(),
            num_microbatches=SIZE.microbatches,
            options=PlanOptions(
                schedule="1f1b", min_stages=2, max_stages=2, max_pipelines=1, union_stages=False
            ),
        )
        plan = predict(solve(problem), problem)
        what = (model.loss, parameters, optimizer(), batch)
        self._trainer = hetjax.Trainer(plan, *what, runtime=RayOptions())
        (link,) = self._trainer.carrier_curves.links
        return {
            "chosen": [str(best_carrier(link.carriers, size)) for size in sizes],
            "curves": {
                str(name): {"sizes": curve.sizes, "seconds": curve.seconds}
                for name, curve in link.carriers.items()
            },
        }

    def do_exchange(self, size: int, carrier: str, count: int) -> list[float]:
        """Send messages to and fro; the seconds of one way of each but the first."""
        assert self._trainer is not None, "start a run first"
        executor = self._trainer._executor
        assert isinstance(executor, RayExecutor)
        workers = executor._workers
        # The run itself had the numbers from 0 on.
        rounds = [10**6 + next(self._numbers) for _ in range(count + 1)]
        calls = {
            one: workers.actor(one).exchange.remote(other, CarrierName(carrier), size, rounds)
            for one, other in (_WORKERS, _WORKERS[::-1])
        }
        return [seconds / 2 for seconds in workers.wait(calls)[_WORKERS[0]][1:]]

    def do_carriers(self) -> list[str]:
        """What carriers there are."""
        return [str(name) for name in BETWEEN_PROCESSES]

    def close(self) -> None:
        """End the run."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None


def _one_machine() -> Cluster:
    link = Link(1e9, 1e-4)
    kind = measure_host_cpu(1)
    parts = tuple(Subcluster(name, kind, 1, 1, link, link) for name in ("first", "second"))
    return Cluster("one machine", parts, (("first", "second", link),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lab")
    serve_until_end(Server(parser.parse_args().lab))


if __name__ == "__main__":
    main()
