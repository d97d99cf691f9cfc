"""Trains by the strategies that Hetu v2 publishes, at full depth and tiny width.

Each strategy's plan runs on host CPU devices, as many as its cluster has. The trainer switches from
one to the next in memory. Losses are compared with those of plain `jax.jit` on one device, and the
parameters before and after each switch bit by bit; the exit code is 1 where these differ.

python scripts/check_published.py c1 c2 c3
python scripts/check_published.py c4 c5 c6 c7
python scripts/check_published.py t5_32b_16 t5_32b_24 t5_32b_32
python scripts/check_published.py t5_70b_16 t5_70b_24 t5_70b_32

Source: Hetu v2, appendix A.2 and A.3, tables 5, 7 and 8.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from baselines import one_device_losses
from hetu_plans import CLUSTERS, STRATEGIES, make_plan

from hetjax import Trainer
from hetjax.commands.devices import host_device_flags
from hetjax.configuration import read_configuration
from hetjax.configuration.make import make_ingredients
from hetjax.mesh import Cluster
from hetjax.pipeline.program.tracing import trace

CONFIGURATIONS = CLUSTERS / "papers" / "hetu"
TINY = (
    "model.width = 16",
    "model.heads = 8",
    "model.key_value_heads = 8",
    "model.ffn_width = 16",
    "model.vocabulary = 32",
    "model.sequence = 8",
    "model.compute_dtype = 'float32'",
)
TOLERANCE = 1e-5
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def check(names: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """Train a few steps by each strategy, and switch between them.

    Args:
        names: keys of `STRATEGIES`, of one model and one cluster.
        steps: steps by each.

    Returns:
        A row for each strategy.
    """
    strategy = STRATEGIES[names[0]]
    # Before JAX makes its devices. XLA has a thread for each, and stages whose collectives meet in
    # one process need more threads than devices, or they wait for one another.
    count = 2 * Cluster.from_file(CLUSTERS / strategy.cluster).num_devices
    os.environ["XLA_FLAGS"] = host_device_flags(os.environ.get("XLA_FLAGS", ""), count)
    ingredients = make_ingredients(
        read_configuration(CONFIGURATIONS / f"{strategy.model}.gin", TINY)
    )
    parameters = ingredients.parameters()
    shapes = {"tokens": jax.ShapeDtypeStruct((1, 9), np.int32)}
    program = trace(ingredients.model.loss, parameters, shapes)
    plans = {name: make_plan(name, program) for name in names}
    rng = np.random.default_rng(0)
    batches = [
        {"tokens": rng.integers(0, 32, (64, 9), np.int32)} for _ in range(steps * len(names))
    ]
    expected = one_device_losses(ingredients.model.loss, OPTIMIZER, parameters, batches)
    rows = []
    with Trainer(
        plans[names[0]], ingredients.model.loss, parameters, OPTIMIZER, batches[0]
    ) as trainer:
        for number, name in enumerate(names):
            row: dict[str, Any] = {"strategy": name}
            if number:
                row |= _switch(trainer, plans[name])
            window = slice(number * steps, (number + 1) * steps)
            losses = [trainer.train_step(batch).loss for batch in batches[window]]
            pairs = zip(losses, expected[window], strict=True)
            row["losses"] = losses
            row["largest_loss_difference"] = max(abs(a - b) / b for a, b in pairs)
            rows.append(row)
    return rows


def _switch(trainer: Trainer, plan: Any) -> dict[str, Any]:
    """Switch, and compare every leaf of the parameters before and after."""
    before = jax.tree.leaves(trainer.parameters())
    began = time.perf_counter()
    moved = trainer.switch(plan)
    seconds = time.perf_counter() - began
    after = jax.tree.leaves(trainer.parameters())
    return {
        "equal_bits": all(a.tobytes() == b.tobytes() for a, b in zip(before, after, strict=True)),
        "switch_seconds_with_compilation": seconds,
        "moved_bytes": sum(moved.bytes_sent().values()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("strategies", nargs="+", choices=tuple(STRATEGIES), metavar="STRATEGY")
    parser.add_argument("--steps", type=int, default=5, help="by each strategy (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    rows = check(options.strategies, options.steps)
    failed = any(
        row["largest_loss_difference"] > TOLERANCE or not row.get("equal_bits", True)
        for row in rows
    )
    if options.json:
        print(json.dumps({"rows": rows}, indent=1))
        sys.exit(failed)
    for row in rows:
        line = f"{row['strategy']}: losses differ by {row['largest_loss_difference']:.1e} at most"
        if "equal_bits" in row:
            line += ", every bit moved" if row["equal_bits"] else ", BITS DIFFER"
        print(line)
    sys.exit(failed)


if __name__ == "__main__":
    main()
