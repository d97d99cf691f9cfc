"""Memory of a layer that takes a long sequence, by its length: does it grow with the tokens alone?

    python scripts/context_long.py 16384

One layer of a Transformer, forward, backward and update, on four host devices of one process that
share the sequence unevenly: two groups, each of which exchanges tokens for heads, and a ring
between them. Of each device the peak over its instruction list is taken (see `h2_memory.py`): the
buffers that are there, by their own sizes, and what XLA's `memory_analysis` says of each program.

`bench_context.py long` runs it for several lengths, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LENGTHS = (16384, 32768, 65536, 131072)
PARTS = (3, 3, 1, 1)
"""Of eight equal parts of the sequence, those of each device."""

WIDTH, HEADS, VOCABULARY, CHUNK = 64, 2, 8192, 512


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("length", type=int)
    asked = parser.parse_args(arguments)
    # Before JAX starts.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={len(PARTS)}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(json.dumps(measured(asked.length)))


def long_rows(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row for each length, each from a process of its own.

    Args:
        lengths: tokens of the sequence, in rising order; multiples of 16.

    Yields:
        Tokens and peak bytes of each device, by XLA, and the program that runs then; the most of
        the process, and how much of it the step took; from the second length on, for each token
        that there is more than in the last row how many bytes more.
    """
    before: dict[str, Any] | None = None
    for length in lengths:
        command = [sys.executable, str(Path(__file__).resolve()), str(length)]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        row = json.loads(found.stdout.splitlines()[-1])
        yield row | _added(row, before)
        before = row


def _added(row: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    if before is None:
        return {}

    def more(name: str) -> list[int]:
        return [held - less for held, less in zip(row[name], before[name], strict=True)]

    pairs = zip(more("xla_bytes"), more("tokens"), strict=True)
    tokens = row["length"] - before["length"]
    return {
        "more_bytes_a_token": [num_bytes / count for num_bytes, count in pairs],
        "more_process_bytes_a_token": (row["step_bytes"] - before["step_bytes"]) / tokens,
    }


def measured(length: int) -> dict[str, Any]:
    """One row: a step on a sequence of some length."""
    import jax
    import numpy as np
    import optax
    from h2_memory import Noting, peak

    import hetjax
    from hetjax.models import LlamaConfig, language_model

    config = LlamaConfig(
        vocabulary=VOCABULARY,
        blocks=1,
        width=WIDTH,
        heads=HEADS,
        key_value_heads=HEADS,
        ffn_width=4 * WIDTH,
        sequence=length,
        tied_embeddings=True,
        logit_chunk=CHUNK,
    )
    model = language_model(config)
    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, VOCABULARY, (1, length + 1), dtype=np.int32)}
    parameters = jax.jit(model.init)(jax.random.key(0))
    plan = plan_of(model, parameters, batch, length)
    with hetjax.Trainer(plan, model.loss, parameters, optax.sgd(1e-3), batch) as trainer:
        trainer.parameters()  # They are placed now.
        executor: Any = trainer._executor
        for worker in executor.workers:
            worker.buffers = Noting(worker.buffers)
        held, began = _most_held(), time.perf_counter()
        loss = trainer.train_step(batch).loss
        seconds = time.perf_counter() - began
        tokens = [length * part // sum(PARTS) for part in PARTS]
        by_xla, _, at = zip(*map(peak, executor.workers), strict=True)
        return {
            "length": length,
            "tokens": tokens,
            "xla_bytes": by_xla,
            "at": at,
            "bytes_a_token": [a / b for a, b in zip(by_xla, tokens, strict=True)],
            "process_bytes": _most_held(),
            "step_bytes": _most_held() - held,
            "seconds": seconds,
            "loss": loss,
        }


def _most_held() -> int:
    """The most bytes that this process has held."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def plan_of(model: Any, parameters: Any, batch: Any, length: int) -> Any:
    """A stage of four devices that share the sequence: two groups of two."""
    from hetjax.mesh import Cluster, Link, Subcluster, SubMesh, measure_host_cpu
    from hetjax.pipeline.program.tracing import trace
    from hetjax.pipeline.schedules.warm_up import one_f_one_b
    from hetjax.planner import Member, Plan, Shares, StagePlan
    from hetjax.planner.plan.stage_plan import PipelinePlan
    from hetjax.sharding.context import ContextGroup, ContextSplit

    program = trace(model.loss, parameters, batch, divides_sequences=True)
    link = Link(10e9, 1e-5)
    host = Subcluster("chips", measure_host_cpu(len(PARTS)), 1, len(PARTS), link, link)
    tokens = [length * part // sum(PARTS) for part in PARTS]
    heads = ((0, 1), (1, HEADS))
    groups = [
        ContextGroup(devices=(i, i + 1), tokens=(tokens[i], tokens[i + 1]), heads=heads)
        for i in (0, 2)
    ]
    split = ContextSplit(length, HEADS, HEADS, tuple(groups))
    members = tuple(Member(SubMesh("chips", i, (1, 1)), (1, 1)) for i in range(len(PARTS)))
    stage = StagePlan((0, 1), members, shares=Shares(context=split))
    pipeline = PipelinePlan((stage,), 1, 1, one_f_one_b(1, 1))
    layers = (0, program.num_positions)
    return Plan(program.fingerprint, layers, Cluster("long", (host,)), (pipeline,))


if __name__ == "__main__":
    main()
