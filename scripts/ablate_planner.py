"""What fine layers and a cost of communication are worth: Harp's figure 13.

Setting 7(h) is planned on 8, 16 and 48 layers of similar cost and on the layers of the model's
structure; setting 7(e) as if transfers took no time, and as they are. Every plan is predicted with
all that its stages and transfers take, and scheduled for it. Where a model does not fit, its
step time is null.

python scripts/ablate_planner.py
python scripts/ablate_planner.py --json

Source: Harp, sections 6.5 and 6.6.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harp_settings import problem_of

from hetjax.planner import DynamicProgram, PlanningProblem, choose_schedule, load_balance, predict

LAYERS = (8, 16, 48, None)
"""Numbers of layers of similar cost; None for layers by structure."""


def without_transfers(problem: PlanningProblem) -> PlanningProblem:
    """The problem as it would be if nothing crossed between stages."""
    works = (replace(work, received_bytes=0, returned_bytes=0) for work in problem.works)
    return replace(problem, works=tuple(works))


def row(what: str, problem: PlanningProblem, seen: PlanningProblem) -> dict[str, Any]:
    """What the plan for a problem as it is seen takes in the problem as it is."""
    found = DynamicProgram().find(seen)
    step_time = balance = None
    if found is not None:
        plan = choose_schedule(predict(found.plan, problem), "h_1f1b")
        step_time, balance = plan.predicted.step_time, load_balance(plan, problem.dtype)
    result = {"what": what, "layers": problem.num_layers, "step_time": step_time}
    print(f"{what}: {step_time} s, load balance {balance}", file=sys.stderr)
    return {**result, "load_balance": balance}


def measure(num_microbatches: int) -> dict[str, list[dict[str, Any]]]:
    """Both ablations; ratios are over the last row of each."""
    rows = []
    for count in LAYERS:
        problem = problem_of("h", num_microbatches, num_layers=count)
        rows.append(row(f"{count} layers" if count else "by structure", problem, problem))
    problem = problem_of("e", num_microbatches)
    joint = [
        row("transfers take no time", problem, without_transfers(problem)),
        row("transfers as they are", problem, problem),
    ]
    return {"layers": _with_ratios(rows), "communication": _with_ratios(joint)}


def _with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    best = rows[-1]["step_time"]
    ratios = (each["step_time"] and each["step_time"] / best for each in rows)
    return [{**each, "ratio": ratio} for each, ratio in zip(rows, ratios, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--microbatches", type=int, default=256, help="microbatches in a step")
    options = parser.parse_args(arguments)
    result = measure(options.microbatches)
    if options.json:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
