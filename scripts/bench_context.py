"""Long sequences: what hetjax's parts for them take, beside what else there is.

    python scripts/bench_context.py kernel --json   # hetjax.attention beside jax.nn's, by length

Causal attention of 4 heads of size 64, 2 of keys and values, float32. Times are processor
seconds, of both systems in turn; memory is what XLA says that a program takes beside its arguments
and results.
"""

from __future__ import annotations

import argparse
import json

from benchmarking import positive
from context_kernel import LENGTHS, kernel_rows, shown


def main() -> None:
    """Measure what is asked for, and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("kernel",))
    parser.add_argument("--lengths", type=positive, nargs="+", default=LENGTHS, metavar="N")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N")
    parser.add_argument("--json", action="store_true", help="a row a line, as JSON")
    arguments = parser.parse_args()
    for row in kernel_rows(arguments.lengths, arguments.rounds):
        print(json.dumps(row) if arguments.json else shown(row), flush=True)


if __name__ == "__main__":
    main()
