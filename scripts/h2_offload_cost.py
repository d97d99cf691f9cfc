"""What offloading activations costs a step: predicted, and measured beside the plan without it.

    python scripts/h2_offload_cost.py
    python scripts/h2_offload_cost.py --microbatches 16 --rounds 10

One stage of a GPT on one host device of one core, all forward passes before the first backward
pass. In turn are taken a step without, a step with, and the copies alone of as many arrays of the
sizes that travel, which tell what a cluster file has as `host_link`. All is told by the wall clock
and by the processor's, which others on the machine disturb less, as JSON. As a worker on Ray does,
the process keeps memory that it has had.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from hetjax.runtime.ray.ray_cluster import KEPT_MEMORY


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args(arguments)
    if os.environ.get("GLIBC_TUNABLES") != KEPT_MEMORY:
        command = [sys.executable, __file__, *(sys.argv[1:] if arguments is None else arguments)]
        told = {"GLIBC_TUNABLES": KEPT_MEMORY, "JAX_PLATFORMS": "cpu"}
        environment = {**os.environ, **told}
        subprocess.run(command, env=environment, check=True, timeout=1800)
        return
    # A second core would copy beside the computation.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
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
    from hetjax.mesh import Link
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
        copies = copies_of(executor.workers[0], microbatches)
        taken = [
            [
                _taken(lambda: plain.train_step(batch)),
                _taken(lambda: offloading.train_step(batch)),
                _taken(copies.there_and_back),
            ]
            for _ in range(rounds)
        ]
    row: dict[str, Any] = {"microbatches": microbatches, "bitwise_equal": same}
    for place, clock in enumerate(("wall", "cpu")):
        seconds = median(alone[place] for _, _, alone in taken)
        link = Link(2 * microbatches * copies.num_bytes / seconds, 0.0)
        kept, away = plans(given, microbatches, link)
        predicted = away.predicted.step_time - kept.predicted.step_time
        cost = median(after[place] - before[place] for before, after, _ in taken)
        row |= {
            f"{clock}_bytes_per_second": link.bandwidth,
            f"{clock}_kept_step": median(before[place] for before, _, _ in taken),
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


@dataclass(frozen=True)
class Copies:
    """Arrays of one microbatch, to be copied for several.

    Args:
        arrays: on the device.
        microbatches: for how many.
    """

    arrays: Sequence[Any]
    microbatches: int

    @property
    def num_bytes(self) -> int:
        """The size of what one microbatch sends."""
        return sum(array.nbytes for array in self.arrays)

    def there_and_back(self) -> None:
        """Copy for all microbatches to the host's memory, and then for all of them back."""
        import jax

        from hetjax.runtime.compilation.host_memory import to_devices, to_host

        there = [jax.block_until_ready(to_host(self.arrays)) for _ in range(self.microbatches)]
        while there:
            jax.block_until_ready(to_devices(there.pop()))


def copies_of(worker: Any, microbatches: int) -> Copies:
    """Arrays of the sizes that a stage sends."""
    import jax
    import jax.numpy as jnp

    from hetjax.pipeline.stages.offloaded_values import offloaded_values

    values, programs = offloaded_values(worker.programs), worker.programs
    shapes = [programs.residuals[place] for place in values.residuals]
    arrays = [jnp.ones(each.shape, each.dtype) for each in shapes]
    replicated = worker.compiled.parameters[0].update(spec=jax.sharding.PartitionSpec())
    return Copies(jax.block_until_ready(jax.device_put(arrays, replicated)), microbatches)


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
