"""Predicted against measured: plans of a model on a lab of unlike hosts, at several link rates.

The model's layers are profiled on the hosts themselves. Then, at each rate, plans are predicted:
the planner's choice, the best ones near it, and some as people make them; each is trained by, and
its usual step time stands beside the predicted one. It needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarking import KEPT_MEMORY, SCRIPTS, WARM_UP_STEPS, Child, positive
from lab import Lab, read_specification

CONFIGS = SCRIPTS.parent / "configs" / "lab"
RATES = ("unlimited", "200mbit", "50mbit")
ANSWER_SECONDS = 1800.0
CLEAR = 0.05
"""Plans whose measured step times differ by more than this share are ranked."""


class Asked:
    """The process on the lab's first host.

    Args:
        lab: the lab.
        options: the command line.
        ends: what ends the process.
    """

    def __init__(self, lab: Lab, options: argparse.Namespace, ends: contextlib.ExitStack):
        first = lab.specification.hosts[0].name
        flags = ["--config", str(options.config)]
        flags += [part for each in options.gin for part in ("--gin", each)]
        self._child = Child(
            "prediction_trainer.py",
            flags,
            {**lab.environment(), **KEPT_MEMORY},
            lambda command: lab.command(first, command),
        )
        ends.enter_context(contextlib.closing(self._child))

    def __call__(self, do: str, **arguments: Any) -> Any:
        """Have something done by a method of `prediction_trainer.Server`."""
        self._child.ask({"do": do, **arguments})
        return self._child.answer(ANSWER_SECONDS)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Predict and measure; what was found."""
    with contextlib.ExitStack() as ends:
        lab = ends.enter_context(Lab.up(read_specification(options.lab)))
        for place, host in enumerate(lab.specification.hosts):
            lab.set_speed(host.name, options.speeds[place % len(options.speeds)])
        asked = Asked(lab, options, ends)
        profile = asked("profile")
        predicted = {}
        for rate in options.rates:
            _set_rates(lab, rate)
            links = asked("links")
            predicted[rate] = asked(
                "predict", rate=rate, hand_made=options.by_hand, best=options.best
            )
            print(
                f"# {rate}: {[f'{each * 8e-6:.0f} Mbit/s' for each in links]}",
                file=sys.stderr,
                flush=True,
            )
        return {"profile": profile, "rates": _run(lab, asked, options, predicted)}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _set_rates(lab: Lab, rate: str) -> None:
    limit = None if rate == "unlimited" else float(rate.removesuffix("mbit")) * 1e6 / 8
    for link in lab.specification.links:
        lab.set_link(link.name, limit)


def _run(
    lab: Lab,
    asked: Asked,
    options: argparse.Namespace,
    predicted: Mapping[str, Sequence[dict[str, Any]]],
) -> dict[str, dict[str, Any]]:
    """Train by every plan at every rate that it is predicted for."""
    rows: dict[str, list[dict[str, Any]]] = {rate: [] for rate in predicted}
    plans = dict.fromkeys(each["plan"] for each in itertools.chain(*predicted.values()))
    for plan in plans:
        found = {
            rate: each
            for rate, shown in predicted.items()
            for each in shown
            if each["plan"] == plan
        }
        first = next(iter(found))
        asked("start", rate=first, plan=plan)
        _set_rates(lab, first)
        asked("steps", rate=first, plan=plan, count=WARM_UP_STEPS)
        for rate, row in found.items():
            _set_rates(lab, rate)
            seconds = asked("steps", rate=rate, plan=plan, count=options.steps + 1)[1:]
            rows[rate].append({**row, "measured": median(seconds)})
            _say(f"{rate}: {plan}: {row['predicted']:.3f} s predicted, {median(seconds):.3f} s")
        asked("end")
    return {rate: {"rows": each, **judge(each)} for rate, each in rows.items()}


def judge(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What predictions are worth.

    Args:
        rows: plans with predicted and measured step times.

    Returns:
        The largest and the usual error of predictions; of the best plans, how many pairs that
        differ clearly are ranked wrongly; the chosen plan over the best one made by hand.
    """
    errors = [abs(row["predicted"] / row["measured"] - 1.0) for row in rows]
    best = [row for row in rows if row["among_best"]]
    pairs = [
        (a, b) if a["measured"] < b["measured"] else (b, a)
        for a, b in itertools.combinations(best, 2)
    ]
    clear = [(a, b) for a, b in pairs if b["measured"] > (1 + CLEAR) * a["measured"]]
    chosen = next(row["measured"] for row in rows if row["chosen"])
    return {
        "largest_error": max(errors),
        "median_error": median(errors),
        "clear_pairs": len(clear),
        "wrong_pairs": sum(a["predicted"] > b["predicted"] for a, b in clear),
        "chosen_over_best_by_hand": chosen / min(r["measured"] for r in rows if r["by_hand"]),
    }


def report(result: Mapping[str, Any]) -> None:
    """Print the result for people."""
    profile = result["profile"]
    error = profile["composition_error"]
    composed = "" if error is None else f", composed to within {error:.1%}"
    print(
        f"{profile['layers']} layers, {profile['measurements']} measurements in "
        f"{profile['seconds']:.0f} s{composed}"
    )
    for rate, found in result["rates"].items():
        print(f"\n{rate}")
        for row in sorted(found["rows"], key=lambda row: row["measured"]):
            marks = [name for name in ("chosen", "by_hand") if row[name]]
            print(
                f"  {row['plan']:40}{row['predicted'] * 1e3:8.0f} ms predicted"
                f"{row['measured'] * 1e3:8.0f} ms measured"
                f"{row['predicted'] / row['measured'] - 1:+8.1%}  {', '.join(marks)}"
            )
        print(
            f"  predictions are {found['largest_error']:.1%} off at most, "
            f"{found['median_error']:.1%} usually; {found['wrong_pairs']} of "
            f"{found['clear_pairs']} pairs that differ clearly are ranked wrongly; the choice "
            f"takes {found['chosen_over_best_by_hand']:.3f} times as long as the best by hand"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--config", default=str(CONFIGS / "predicted_gpt.gin"), help="gin file")
    parser.add_argument("--gin", action="append", default=[], help="a setting of its own")
    parser.add_argument("--lab", default="two_hosts", help="a lab of configs/lab")
    parser.add_argument(
        "--speeds", type=float, nargs="+", default=[1.0, 0.5], help="of the hosts, in turn"
    )
    parser.add_argument("--rates", nargs="+", default=RATES, help="of the links, in turn")
    parser.add_argument("--by-hand", type=positive, default=20, help="plans made by hand")
    parser.add_argument("--best", type=positive, default=10, help="best plans")
    parser.add_argument("--steps", type=positive, default=5, help="timed steps of a plan")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    result = measure(options)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        report(result)


if __name__ == "__main__":
    main()
