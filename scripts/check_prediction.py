"""Check that a run's predictions came true: the step time, and every other row of its table.

python scripts/check_prediction.py RUN/prediction.json --step 0.10 --rows 0.15
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prediction", type=Path, metavar="prediction.json")
    parser.add_argument("--step", type=float, default=0.10, help="allowed error of the step time")
    parser.add_argument("--rows", type=float, default=0.15, help="allowed error of other rows")
    options = parser.parse_args()
    rows = json.loads(options.prediction.read_text())["rows"]
    wrong = 0
    for row in rows:
        allowed = options.step if row["name"].startswith("step time") else options.rows
        if row["error"] is None or abs(row["error"]) > allowed:
            wrong += 1
            print(f"{row['name']}: error {row['error']} (allowed {allowed:g})", file=sys.stderr)
    print(f"{len(rows) - wrong} of {len(rows)} predictions came true")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
