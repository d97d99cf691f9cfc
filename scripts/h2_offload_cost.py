"""What offloading activations costs a step: predicted, and measured beside the plan without it.

    python scripts/h2_offload_cost.py
    python scripts/h2_offload_cost.py --microbatches 16 --rounds 10

One stage of a GPT on one host device, all forward passes before the first backward pass. How fast
the device reaches its host's memory is measured first, with arrays of the sizes that travel; this
is what a cluster file's `host_link` says. Then steps with and without are taken in turn. All is
told by the wall clock and by the processor's, which others on the machine disturb less, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args(arguments)
    # Before JAX starts.
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(json.dumps(measured(asked.microbatches, asked.rounds)))


def measured(microbatches: int, rounds: int) -> dict[str, Any]:
    """The cost of offload in seconds of a step, predicted and measured.

    Args:
        microbatches: how many there are.
        rounds: how many steps are taken each way.
    """
    import jax
    import numpy as np
    import optax

    import hetjax
    from hetjax.models import GPTConfig, language_model

    config = GPTConfig(vocabulary=512, blocks=8, width=32, heads=4, sequence=256)
    model = language_model(config)
    parameters = jax.jit(model.init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, 512, (4 * microbatches, 257), dtype=np.int32)}
    optimizer = optax.adamw(1e-3)
    given = model.loss, parameters, batch, optimizer
    kept, away = plans(given, microbatches)
    with (
        hetjax.Trainer(kept, model.loss, parameters, optimizer, batch) as plain,
        hetjax.Trainer(away, model.loss, parameters, optimizer, batch) as offloading,
    ):
        same = all(plain.train_step(batch).loss == offloading.train_step(batch).loss for _ in "ab")
        executor: Any = offloading._executor
        worker = executor.workers[0]
        links = measured_links(worker, rounds)
        taken = [
            [_taken(lambda t=trainer: t.train_step(batch)) for trainer in (plain, offloading)]
            for _ in range(rounds)
        ]
    row: dict[str, Any] = {"microbatches": microbatches, "bitwise_equal": same}
    for place, clock in enumerate(("wall", "cpu")):
        kept, away = plans(given, microbatches, links[place])
        predicted = away.predicted.step_time - kept.predicted.step_time
        cost = median(after[place] - before[place] for before, after in taken)
        row |= {
            f"{clock}_bytes_per_second": links[place].bandwidth,
            f"{clock}_kept_step": median(before[place] for before, _ in taken),
            f"{clock}_cost": cost,
            f"{clock}_predicted_cost": predicted,
            f"{clock}_ratio": predicted / cost,
        }
    return row


def _taken(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds that something takes, by the wall clock and of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def measured_links(worker: Any, rounds: int) -> list[Any]:
    """How fast arrays of the sizes that travel are copied to the host's memory and back.

    Returns:
        By the wall clock and by the processor's.
    """
    import jax
    import jax.numpy as jnp

    from hetjax.mesh import Link
    from hetjax.pipeline.stages.offloaded_values import offloaded_values
    from hetjax.runtime.compilation.host_memory import to_devices, to_host

    values, programs = offloaded_values(worker.programs), worker.programs
    shapes = [programs.residuals[place] for place in values.residuals]
    arrays = [jnp.ones(each.shape, each.dtype) for each in shapes]
    sharding = worker.compiled.parameters[0]
    arrays = jax.block_until_ready(jax.device_put(arrays, sharding))
    size = sum(each.nbytes for each in arrays)

    def there_and_back() -> None:
        there = jax.block_until_ready(to_host(arrays))
        jax.block_until_ready(to_devices(there))

    taken = [_taken(there_and_back) for _ in range(2 * rounds)]
    return [Link(2 * size / median(each), 0.0) for each in zip(*taken, strict=True)]


def plans(given: Any, microbatches: int, link: Any = None) -> tuple[Any, Any]:
    """A plan of one stage that keeps its activations on the device, and one that offloads them."""
    from hetjax.mesh import Cluster, Link, Subcluster, SubMesh, measure_host_cpu
    from hetjax.pipeline.schedules.warm_up import gpipe
    from hetjax.planner import make_problem, predict
    from hetjax.planner.harp.candidate_plans import pipeline_plan
    from hetjax.planner.plan.stage_plan import Member, StagePlan

    loss, parameters, batch, optimizer = given
    near = Link(10e9, 1e-5)
    host = replace(measure_host_cpu(), memory_bytes=10**11)
    part = Subcluster("chips", host, 1, 1, near, near, host_memory_bytes=10**11, host_link=link)
    problem = make_problem(
        loss,
        parameters,
        batch,
        cluster=Cluster("cost", (part,)),
        optimizer=optimizer,
        num_microbatches=microbatches,
    )
    stage = StagePlan((0, problem.num_layers), (Member(SubMesh("chips", 0, (1, 1)), (1, 1)),))
    schedule = gpipe(1, microbatches)
    kept, away = (
        predict(pipeline_plan(problem, [replace(stage, offload=each)], schedule, "cost"), problem)
        for each in ((), ("activations",))
    )
    return kept, away


if __name__ == "__main__":
    main()
