"""What hetjax costs where there is nothing to divide: one stage beside hand-written `jax.jit`.

Both train the same GPT on the same batches on one device of this process. The first row is a step
of one microbatch, whose ratio is the figure; the others sum the gradients of several microbatches,
beside a `jax.lax.scan` and a Python loop over them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from statistics import median
from typing import Any

import jax
from baselines import HandWritten, model_of, optimizer
from benchmarking import (
    WARM_UP_STEPS,
    Size,
    argument_parser,
    check_losses,
    median_ratio,
    size_of,
    take_turns,
)

import hetjax


class OneStage:
    """The same training by a plan of one stage, in this process.

    Args:
        size: sizes of model and batch.
    """

    def __init__(self, size: Size):
        model = model_of(size)
        parameters = jax.jit(model.init)(jax.random.key(0))
        self._batch = {"tokens": size.tokens()}
        plan = hetjax.plan(
            model.loss,
            parameters,
            self._batch,
            cluster=hetjax.Cluster.local(jax.devices()[:1]),
            optimizer=optimizer(),
            num_microbatches=size.microbatches,
            options=hetjax.PlanOptions(allow_recompute=False),
        )
        self.trainer = hetjax.Trainer(plan, model.loss, parameters, optimizer(), self._batch)
        self.loss = 0.0

    def step(self) -> float:
        """Run a step; its seconds."""
        metrics = self.trainer.train_step(self._batch)
        self.loss = metrics.loss
        return metrics.seconds


def compare(size: Size, baselines: Sequence[str], rounds: int, steps: int) -> list[dict[str, Any]]:
    """Time a one-stage plan against hand-written steps.

    Args:
        size: sizes of model and batch.
        baselines: of `baselines.BASELINES`.
        rounds: how many rounds.
        steps: how many steps in each.

    Returns:
        A row for each baseline.
    """
    one_stage = OneStage(size)
    systems = {name: HandWritten(size, name) for name in baselines} | {"hetjax": one_stage}
    losses: dict[str, list[float]] = {name: [] for name in systems}
    for name, system in systems.items():
        for _ in range(WARM_UP_STEPS):
            system.step()
            losses[name].append(system.loss)
    difference = check_losses(losses)
    turns = {name: system.step for name, system in systems.items()}
    times = take_turns(turns, rounds=rounds, steps=steps)
    one_stage.trainer.close()
    return [
        {
            "baseline": name,
            "microbatches": size.microbatches,
            "ratio": median_ratio(times, "hetjax", name),
            "hetjax_step_time": median(times["hetjax"]),
            "jit_step_time": median(times[name]),
            "largest_loss_difference": difference,
        }
        for name in baselines
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    size = Size(microbatches=4, microbatch_size=2)
    options = argument_parser(__doc__, rounds=15, steps=2, size=size).parse_args(arguments)
    size = size_of(options)
    whole = dataclasses.replace(size, microbatches=1, microbatch_size=size.batch_size)
    rows = compare(whole, ["full batch"], options.rounds, options.steps)
    rows += compare(size, ["scan", "loop"], options.rounds, options.steps)
    if options.json:
        figures = ("ratio", "hetjax_step_time", "jit_step_time")
        result = {name: rows[0][name] for name in figures}
        print(json.dumps({**result, "rounds": options.rounds, "rows": rows}, indent=2))
        return
    print(f"{'baseline':12}{'microbatches':>14}{'jit':>12}{'hetjax':>12}{'ratio':>8}")
    for row in rows:
        jit, ours = (f"{row[name] * 1e3:.1f} ms" for name in ("jit_step_time", "hetjax_step_time"))
        print(f"{row['baseline']:12}{row['microbatches']:14}{jit:>12}{ours:>12}{row['ratio']:8.3f}")


if __name__ == "__main__":
    main()
