"""Compare the losses of two runs, step by step.

python scripts/compare_losses.py A/metrics.jsonl B/metrics.jsonl --steps 20 --tolerance 1e-6
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def losses(path: Path, steps: int) -> list[float]:
    """The training losses of a run's first steps."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row][:steps]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs=2, type=Path, metavar="metrics.jsonl")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tolerance", type=float, default=1e-6, help="relative")
    options = parser.parse_args()
    a, b = (losses(path, options.steps) for path in options.runs)
    if len(a) < options.steps or len(b) < options.steps:
        print(f"too few steps: {len(a)} and {len(b)}, {options.steps} wanted", file=sys.stderr)
        return 1
    worst = max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))
    print(f"{options.steps} losses differ by at most {worst:.2e} (allowed {options.tolerance:g})")
    return 0 if worst <= options.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
