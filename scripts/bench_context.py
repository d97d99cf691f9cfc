"""One long sequence over unlike devices: HexiSeq beside ring attention, Ulysses and USP.

    python scripts/bench_context.py kernel --json      # hetjax.attention beside jax.nn's, by length
    python scripts/bench_context.py logits --json      # losses in chunks beside dense logits
    python scripts/bench_context.py long --json        # a layer's memory, up to 128K tokens
    python scripts/bench_context.py scheduler --json   # seconds of a search, and what it finds
    python scripts/bench_context.py exhaustive --json  # few devices, beside the best of all splits
    python scripts/bench_context.py figures --json     # predicted: the simulations of figure 5
    python scripts/bench_context.py models --json      # six models, trained as one device does
    python scripts/bench_context.py memory --json      # what members hold: predicted, and by XLA
    sudo python scripts/bench_context.py accuracy --json  # steps in the lab: predicted, measured
    sudo python scripts/bench_context.py lab --json    # beside even splits on hosts of the lab
    sudo python scripts/bench_context.py capped --json # a length that only an uneven split trains

A part is a function that yields rows; it lives in a file of its own, `context_*.py`, which says
what its rows mean.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from benchmarking import positive
from context_capped import capped_rows
from context_figures import figure_rows
from context_hosts import lab_rows
from context_kernel import LENGTHS, kernel_rows
from context_lab import accuracy_rows
from context_logits import TOKENS, VOCABULARIES, logit_rows
from context_long import LENGTHS as LONG
from context_long import long_rows
from context_memory import memory_rows
from context_models import model_rows
from context_scheduler import exhaustive_rows, scheduler_rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {
        "kernel": lambda: kernel_rows(options.lengths or LENGTHS, options.rounds),
        "logits": lambda: logit_rows(options.tokens, options.vocabularies, options.rounds),
        "long": lambda: long_rows(options.lengths or LONG),
        "scheduler": lambda: scheduler_rows(options.rounds),
        "exhaustive": lambda: exhaustive_rows(options.cases),
        "figures": lambda: figure_rows(options.efficiency),
        "models": lambda: model_rows(options.steps),
        "memory": memory_rows,
        "accuracy": lambda: accuracy_rows(options),
        "lab": lambda: lab_rows(options.rounds),
        "capped": capped_rows,
    }
    parser.add_argument("part", choices=parts)
    parser.add_argument("--json", action="store_true", help="a row a line, as JSON")
    parser.add_argument("--rounds", type=int, default=3, help="runs whose median counts")
    parser.add_argument("--lengths", type=positive, nargs="+", help="tokens of `kernel` and `long`")
    parser.add_argument("--steps", type=positive, default=50, help="of `models`")
    parser.add_argument(
        "--tokens", type=positive, nargs="+", default=TOKENS, help="of an example in `logits`"
    )
    parser.add_argument(
        "--vocabularies", type=positive, nargs="+", default=VOCABULARIES, help="of `logits`"
    )
    parser.add_argument("--cases", type=int, default=20, help="of each size of `exhaustive`")
    parser.add_argument(
        "--efficiency",
        type=float,
        default=0.5,
        help="share of the peak that products reach on all kinds in `figures`; 0 for what is "
        "known of each kind",
    )
    parser.add_argument(
        "--every", type=positive, default=1, help="of `accuracy` each so manyth case"
    )
    options = parser.parse_args(arguments)
    for row in parts[options.part]():
        print(json.dumps(row) if options.json else row, flush=True)


if __name__ == "__main__":
    main()
