"""What members hold that share the context: predicted, and by XLA.

    python scripts/context_memory.py

Each member is a host device of this process, or two with a tensor axis. "By XLA" is the peak over
its instructions, on one device: the buffers that are there, by their own sizes, and what XLA's
`memory_analysis` says of each program that runs on them; see `h2_memory.py`.

Rows of `bench_context.py memory`, which runs this in a process of its own: `case`, `stage`,
`member`, `predicted_bytes`, `xla_bytes` and their `ratio`; `at`, what runs at the peak.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

DEVICES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequence", type=int, default=2048)
    asked = parser.parse_args()
    # Before JAX starts.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    for row in rows(asked.sequence):
        print(json.dumps(row), flush=True)


def memory_rows() -> Iterator[dict[str, Any]]:
    """All rows, made by a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__], stdout=subprocess.PIPE, text=True, check=True, timeout=3600
    )
    yield from map(json.loads, done.stdout.splitlines())


def rows(sequence: int) -> Iterator[dict[str, Any]]:
    """A row for each member of some cases.

    Args:
        sequence: tokens.
    """
    from context_cases import Case, exchange, ring

    half = ((1, 4), (1, 4))
    for case in (
        Case("gpt", sequence, (ring(1, 1),)),
        Case("gpt", sequence, (ring(3, 1),)),
        Case("gpt", sequence, (exchange((1, 4), (1, 4)),)),
        Case("gpt", sequence, (exchange((2, 6), (1, 2)),)),
        Case("gpt", sequence, ((half, half),)),
        Case("gpt", sequence, (ring(3, 1),), recompute=True),
        Case("llama", sequence, (ring(2, 1, 1),)),
        Case("llama", sequence, ((((2, 5), (1, 3)), ((1, 8),)),)),
        Case("gpt", sequence, (ring(2, 1), ring(1, 1)), microbatches=2),
        Case("gpt", sequence, (ring(3, 1),), tensor=2),
        Case("gpt", sequence, (exchange((2, 6), (1, 2)),), tensor=2),
        Case("gpt", sequence, (ring(1, 1),), tensor=2, recompute=True),
        Case("llama", sequence, (ring(2, 1),), tensor=2),
    ):
        yield from case_rows(case)


def case_rows(case: Any) -> Iterator[dict[str, Any]]:
    """A row for each member of a case."""
    import jax
    from context_cases import optimizer, plan_of, problem_of, tokens_of
    from h2_memory import Noting, peak

    import hetjax
    from hetjax.mesh import Cluster, Link, Subcluster, measure_host_cpu
    from hetjax.planner import predict
    from hetjax.planner.predictions.plan_sharding import divide_members

    link, count = Link(5e9, 1e-4), sum(len(split.devices) for split in case.splits)
    part = Subcluster("hosts", measure_host_cpu(), count, case.tensor, link, link)
    problem = problem_of(case, Cluster("memory", (part,)))
    plan = predict(divide_members(plan_of(case, problem), problem), problem)
    parameters, batch = jax.jit(case.language.init)(jax.random.key(0)), tokens_of(case)
    arguments: Any = (plan, case.language.loss, parameters, optimizer(), batch)
    with hetjax.Trainer(*arguments) as trainer:
        trainer.train_step(batch)
        executor: Any = trainer._executor
        for worker in executor.workers:
            worker.buffers = Noting(worker.buffers)
        trainer.train_step(batch)
        workers = iter(executor.workers)
        for s, stage in enumerate(plan.predicted.stages):
            for m, member in enumerate(stage.members):
                by_xla, _, at = peak(next(workers))
                yield {
                    "case": case.name,
                    "stage": s,
                    "member": m,
                    "predicted_bytes": member.memory_bytes,
                    "xla_bytes": by_xla,
                    "ratio": member.memory_bytes / by_xla,
                    "at": at,
                }


if __name__ == "__main__":
    main()
