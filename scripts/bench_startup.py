"""How long it takes until a model of many blocks trains, and what that costs a step.

Each number of blocks is started in a process of its own, as a user's run is: the loss is traced, a
plan is found for one device, the programs are compiled, the parameters made, and a first step done.
Then steps are timed in turn with those of the same plan whose tasks and updates are compiled whole,
as one program each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

import jax
import numpy as np
import optax
from benchmarking import positive, take_turns

import hetjax
from hetjax.models import GPTConfig, LanguageModel, language_model
from hetjax.pipeline.program.traced_program import with_examples
from hetjax.pipeline.program.tracing import trace
from hetjax.runtime.compilation import partitioners

BLOCKS = (4, 16, 32, 80)
COMPARED = (4, 16, 32)
"""How many blocks the steps are compared with: 80, whole, take minutes to compile."""

EXAMPLES, MICROBATCHES = 8, 2

PARTS = ("trace", "plan", "compile", "first_step")


def model_of(options: argparse.Namespace, blocks: int) -> LanguageModel:
    """The GPT: its blocks are unrolled, or scanned over."""
    width, sequence = options.width, options.sequence
    heads, scanned = max(1, width // 64), options.scanned
    config = GPTConfig(
        1024, blocks, width, heads, sequence, tied_embeddings=False, scan_blocks=scanned
    )
    return language_model(config)


def optimizer() -> optax.GradientTransformation:
    """AdamW behind a clip by the global norm."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def batch_of(sequence: int) -> dict[str, np.ndarray]:
    """A batch for one step."""
    tokens = np.random.default_rng(0).integers(0, 1024, (EXAMPLES, sequence + 1))
    return {"tokens": tokens.astype(np.int32)}


def start(options: argparse.Namespace, blocks: int) -> tuple[dict[str, float], hetjax.Trainer]:
    """Start a run.

    Returns:
        The seconds of each part, by the clock and of the process's own work; and the trainer.
    """
    model, batch = model_of(options, blocks), batch_of(options.sequence)
    update = optimizer()
    found: dict[str, float] = {"blocks": blocks}

    def init() -> Any:
        return model.init(jax.random.key(0))

    cluster = hetjax.Cluster.local(jax.devices()[:1])
    times = [(time.perf_counter(), time.process_time())]

    def done(name: str) -> None:
        times.append((time.perf_counter(), time.process_time()))
        (began, worked), (ended, had_worked) = times[-2:]
        found[name], found[f"{name}_work"] = ended - began, had_worked - worked

    # The planner asks for this trace again, and then the trainer: JAX keeps it for them.
    trace(model.loss, init, with_examples(batch, EXAMPLES // MICROBATCHES))
    done("trace")
    plan = hetjax.plan(
        model.loss,
        init,
        batch,
        cluster=cluster,
        optimizer=update,
        num_microbatches=MICROBATCHES,
        options=hetjax.PlanOptions(allow_recompute=False),
    )
    done("plan")
    trainer = hetjax.Trainer(plan, model.loss, init, update, batch)
    done("compile")
    trainer.train_step(batch)
    done("first_step")
    for kind in ("", "_work"):
        found[f"total{kind}"] = sum(found[part + kind] for part in PARTS)
    return found, trainer


@contextmanager
def whole_programs() -> Iterator[None]:
    """Tasks and updates are compiled whole in this block."""
    pieces, leaves = partitioners.pieces_of, partitioners.leafwise_pieces
    partitioners.pieces_of = lambda program: ()
    partitioners.leafwise_pieces = lambda program: (program, ())
    try:
        yield
    finally:
        partitioners.pieces_of, partitioners.leafwise_pieces = pieces, leaves


def compare(options: argparse.Namespace, blocks: int) -> dict[str, float]:
    """Time steps of a run in pieces and of one whole, in turn."""
    batch = batch_of(options.sequence)
    trainers, losses = {}, {}
    for name, way in (("pieces", nullcontext()), ("whole", whole_programs())):
        with way:
            _, trainers[name] = start(options, blocks)
        losses[name] = [trainers[name].train_step(batch).loss for _ in range(3)]

    def step(name: str) -> float:
        began = time.process_time() if options.work else time.perf_counter()
        trainers[name].train_step(batch)
        return (time.process_time() if options.work else time.perf_counter()) - began

    times = take_turns(
        {name: lambda name=name: step(name) for name in trainers},
        rounds=options.rounds,
        steps=options.steps,
    )
    ratios = [p / w for p, w in zip(times["pieces"], times["whole"], strict=True)]
    difference = max(abs(a / b - 1) for a, b in zip(losses["pieces"], losses["whole"], strict=True))
    return {
        "blocks": blocks,
        "step_in_pieces": median(times["pieces"]),
        "step_whole": median(times["whole"]),
        "ratio": median(ratios),
        "largest_loss_difference": difference,
    }


def measured(options: argparse.Namespace, blocks: int, flag: str) -> dict[str, float]:
    """What a fresh process measures."""
    own = [sys.executable, __file__, flag, str(blocks), "--json"]
    names = ("width", "sequence", "rounds", "steps")
    own += [part for name in names for part in (f"--{name}", str(getattr(options, name)))]
    own += [each for each in ("--work", "--scanned") if getattr(options, each[2:])]
    return json.loads(subprocess.run(own, check=True, capture_output=True, text=True).stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--width", type=positive, default=256, help="of the GPT")
    parser.add_argument("--sequence", type=positive, default=128, help="positions of an example")
    parser.add_argument("--rounds", type=positive, default=9, help="rounds of the comparison")
    parser.add_argument("--steps", type=positive, default=2, help="steps in a round")
    parser.add_argument("--work", action="store_true", help="compare the processors' time")
    parser.add_argument("--scanned", action="store_true", help="the blocks are scanned over")
    parser.add_argument("--blocks", type=positive, nargs="*", default=BLOCKS)
    parser.add_argument("--compared", type=positive, nargs="*", default=COMPARED)
    parser.add_argument("--start", type=positive, help=argparse.SUPPRESS)
    parser.add_argument("--compare", type=positive, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.start or options.compare:
        if options.start:
            found, trainer = start(options, options.start)
            trainer.close()
        else:
            found = compare(options, options.compare)
        print(json.dumps(found))
        return
    rows = [measured(options, blocks, "--start") for blocks in options.blocks]
    steps = [measured(options, blocks, "--compare") for blocks in options.compared]
    ratio = rows[-1]["total_work"] / rows[0]["total_work"]
    if options.json:
        print(json.dumps({"ratio": ratio, "rows": rows, "steps": steps}, indent=2))
        return
    print(f"{'blocks':>6}" + "".join(f"{part:>12}" for part in (*PARTS, "total", "work")))
    for row in rows:
        cells = [row[part] for part in (*PARTS, "total", "total_work")]
        print(f"{row['blocks']:6}" + "".join(f"{cell:10.1f} s" for cell in cells))
    print(f"work of the last beside the first: {ratio:.2f}")
    for row in steps:
        print(
            f"{row['blocks']:6} blocks: a step {row['step_in_pieces'] * 1e3:.0f} ms in pieces, "
            f"{row['step_whole'] * 1e3:.0f} ms whole: {row['ratio']:.3f}"
        )


if __name__ == "__main__":
    main()
