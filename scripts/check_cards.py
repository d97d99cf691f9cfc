"""Programs and pipelines over a card and the host's processor: the numbers of one device.

Needs a machine with a card that JAX sees, or plays it on a second host device. Plans are forced to
use both, however slow that is: it is about numbers, not about speed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")

import jax
import optax
from baselines import one_device_losses
from hap_models import HapModel, bert, initial, vgg19

import hetjax
from hetjax.mesh import Link, Subcluster, SubMesh, kind
from hetjax.mesh.host_cpu import HOST_CPU, measure_host_cpu
from hetjax.mesh.jax_devices import kind_name
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import HapPlanner, Plan, PlanningProblem, make_problem, predict
from hetjax.planner.harp.candidate_plans import pipeline_plan
from hetjax.planner.plan.stage_plan import StagePlan

STEPS = 5
MICROBATCHES = 4
_LINK = Link(bandwidth=1e10, latency=1e-5)

MODELS: dict[str, HapModel] = {
    "VGG19": vgg19(32, hidden=512, narrower=8),
    "BERT": bert(32, 2, tokens=32, width=128, hidden=512, heads=4, vocabulary=2048),
}


def optimizer() -> optax.GradientTransformation:
    """Momentum, whose update has no quotient that would make much of the last bits."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9))


def cluster_of(card: str) -> hetjax.Cluster:
    """A card and the processor beside it.

    Args:
        card: the card's kind; that of the host plays one.

    Returns:
        Two subclusters of one device.
    """
    host = measure_host_cpu(1)
    parts = (
        Subcluster("card", host if card == HOST_CPU else kind(card), 1, 1, _LINK, _LINK),
        Subcluster("host", host, 1, 1, _LINK, _LINK),
    )
    return hetjax.Cluster("a card and its host", parts, (("card", "host", _LINK),))


def program(problem: PlanningProblem) -> Plan:
    """HAP's program in which the card has three quarters."""
    return predict(HapPlanner(None, (0.75, 0.25)).plan(problem), problem)


def pipeline(problem: PlanningProblem) -> Plan:
    """The host has the first third of the layers, the card the others."""
    count = len(problem.layers) - 1
    stages = (
        StagePlan.on((0, count // 3), SubMesh("host", 0, (1, 1)), (1, 1)),
        StagePlan.on((count // 3, count), SubMesh("card", 0, (1, 1)), (1, 1)),
    )
    schedule = one_f_one_b(2, MICROBATCHES)
    return predict(pipeline_plan(problem, stages, schedule, "by hand"), problem)


PLANS: dict[str, tuple[int, Callable[[PlanningProblem], Plan]]] = {
    "program": (1, program),
    "pipeline": (MICROBATCHES, pipeline),
}


@dataclass(frozen=True)
class Check:
    """What is trained, and where.

    Args:
        cluster: a card and its host.
        runtime: in this process or on Ray.
    """

    cluster: hetjax.Cluster
    runtime: hetjax.LocalOptions | hetjax.RayOptions

    def rows(self, models: Sequence[str], plans: Sequence[str]) -> Iterator[dict[str, Any]]:
        """A row for each of some models and plans."""
        for name in models:
            for of in plans:
                yield {"model": name, "plan": of, **self._trained(MODELS[name], *PLANS[of])}

    def _trained(
        self, model: HapModel, microbatches: int, make: Callable[[PlanningProblem], Plan]
    ) -> dict[str, Any]:
        parameters, batch = initial(model)
        where: dict[str, Any] = {"cluster": self.cluster, "optimizer": optimizer()}
        problem = make_problem(
            model.loss, parameters, batch, num_microbatches=microbatches, **where
        )
        with jax.default_device(jax.devices("cpu")[0]):
            expected = one_device_losses(
                lambda *each: (model.loss(*each), 1.0),
                optimizer(),
                parameters,
                [batch] * STEPS,
                microbatches,
            )
        began = time.perf_counter()
        with hetjax.Trainer(
            make(problem), model.loss, parameters, optimizer(), batch, runtime=self.runtime
        ) as trainer:
            steps = [trainer.train_step(batch)]
            seconds = time.perf_counter() - began
            steps += [trainer.train_step(batch) for _ in range(STEPS - 1)]
        found = [step.loss for step in steps]
        return {
            "losses": found,
            "largest_difference": max(
                abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)
            ),
            "seconds_to_first_step": seconds,
            "step_time": median(step.seconds for step in steps[1:]),
        }


def local_check(*, played: bool) -> Check:
    """The check in this process.

    Args:
        played: whether a second host device plays the card.

    Returns:
        The check.
    """
    if played:
        jax.config.update("jax_num_cpu_devices", 2)
        return Check(cluster_of(HOST_CPU), hetjax.LocalOptions(jax.devices("cpu")))
    card = jax.devices()[0]
    name = kind_name(card)
    if name is None:
        raise SystemExit(f"{card.device_kind!r} is of no known kind")
    return Check(cluster_of(name), hetjax.LocalOptions([card, jax.devices("cpu")[0]]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runtime", choices=("local", "ray"))
    parser.add_argument("--card", help=f"its kind; {HOST_CPU!r}: a host device plays it")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    options = parser.parse_args(arguments)
    if options.runtime == "ray":
        if options.card is None:
            parser.error("--card: on Ray the card is its worker's alone; name its kind")
        jax.config.update("jax_platforms", "cpu")
        check = Check(cluster_of(options.card), hetjax.RayOptions("local", deadline=60.0))
    else:
        check = local_check(played=options.card == HOST_CPU)
    for row in check.rows(options.models, options.plans):
        print(json.dumps({"runtime": options.runtime, **row}), flush=True)


if __name__ == "__main__":
    main()
