"""Predicted against measured: plans of a model on a lab of unlike hosts, at several link rates.

The model's layers are profiled on the hosts themselves. Then, at each rate, plans are predicted:
the planner's choice, the best ones near it, and some as people make them; each is trained by. This
is done in rounds, and the medians of predicted and of measured step times stand beside each other.
It needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarking import SCRIPTS, WARM_UP_STEPS, positive
from lab import Lab, read_specification
from lab_process import FirstHost

CONFIGS = SCRIPTS.parent / "configs" / "lab"
RATES = ("unlimited", "200mbit", "50mbit")
UNLIKE_SPEEDS = (1.0, 0.5)
ANSWER_SECONDS = 1800.0
PREDICTIONS = {
    "predicted": "by the profile",
    "at_pace": "at the hosts' pace",
    "given_passes": "where passes are known",
}
"""What is predicted of a plan's step: by the profile alone; at the hosts' pace before and after the
steps, since processors that others use too are faster at one time than at another; and where passes
take what they took in the step, so that the error is the timeline's."""

_OF_STEPS = ("measured", "given_passes")
"""What is known of each step."""

CLOSE = 0.08
"""A prediction that is off by at most this share is close."""

CLEAR = 0.05
"""Plans whose measured step times differ by more than this share are ranked."""


class Asked(FirstHost):
    """The process on the lab's first host.

    Args:
        lab: the lab.
        options: the command line.
        ends: what ends the process.
    """

    def __init__(self, lab: Lab, options: argparse.Namespace, ends: contextlib.ExitStack):
        flags = ["--config", str(options.config)]
        flags += [part for each in options.gin for part in ("--gin", each)]
        super().__init__(lab, "prediction_trainer.py", flags, ends, ANSWER_SECONDS)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Predict and measure, in rounds; what was found."""
    with contextlib.ExitStack() as ends:
        # Later rounds start sooner.
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": ends.enter_context(tempfile.TemporaryDirectory()),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        lab = ends.enter_context(Lab.up(read_specification(options.lab)))
        for host, speed in zip(lab.specification.hosts, _speeds(lab, options.speeds), strict=False):
            lab.set_speed(host.name, speed)
        asked = Asked(lab, options, ends)
        rounds = [_round(lab, asked, options) for _ in range(options.rounds)]
    rates = {rate: _medians([each["rates"][rate] for each in rounds]) for rate in options.rates}
    return {
        "profiles": [each["profile"] for each in rounds],
        "rates": {rate: {"rows": rows, **judge(rows)} for rate, rows in rates.items()},
    }


def _round(lab: Lab, asked: Asked, options: argparse.Namespace) -> dict[str, Any]:
    """Profile the hosts, predict the plans, and train by each: of a round, soon after another.

    Processors that others use too are a few percent faster or slower for minutes.
    """
    profile = asked("profile")
    predicted = {}
    for rate in options.rates:
        _set_rates(lab, rate)
        links = asked("links")
        predicted[rate] = asked("predict", rate=rate, hand_made=options.by_hand, best=options.best)
        _say(f"# {rate}: {[f'{each * 8e-6:.0f} Mbit/s' for each in links]}")
    return {"profile": profile, "rates": _run(lab, asked, options, predicted)}


def _medians(rounds: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of all rounds, which have the same plans, as rows of medians."""
    return [
        {**rows[0], **{key: median(row[key] for row in rows) for key in (*PREDICTIONS, "measured")}}
        for rows in zip(*rounds, strict=True)
    ]


def _speeds(lab: Lab, asked: Sequence[float] | None) -> Sequence[float]:
    """The hosts' speeds: those asked for, or the lab's own where they are unlike."""
    own = [host.speed for host in lab.specification.hosts]
    return asked or (own if len(set(own)) > 1 else UNLIKE_SPEEDS)


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
) -> dict[str, list[dict[str, Any]]]:
    """Train by every plan at every rate that it is predicted for; the rows of each rate."""
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
        before = asked("pace")
        for rate, row in found.items():
            _set_rates(lab, rate)
            steps = asked("steps", rate=rate, plan=plan, count=options.steps + 1)[1:]
            after = asked("pace")
            paced = asked("at_pace", rate=rate, plan=plan, moments=[before, after])
            known = {key: median(step[key] for step in steps) for key in _OF_STEPS}
            found_row = {**row, **known, "at_pace": paced}
            before = after
            rows[rate].append(found_row)
            _say(f"{rate}: {_row_text(found_row)}")
        asked("end")
    return rows


def judge(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What predictions are worth.

    Args:
        rows: plans with predicted and measured step times.

    Returns:
        The largest and the usual error, and how many are close, of predictions by the profile, at
        the hosts' pace, and where passes are known; of the best plans, how many pairs that differ
        clearly are ranked wrongly; the chosen plan over the best one made by hand. Plans are
        compared by what their steps take at one pace, the profile's.
    """
    best = [row for row in rows if row["among_best"]]
    pairs = [sorted(pair, key=_at_one_pace) for pair in itertools.combinations(best, 2)]
    clear = [(a, b) for a, b in pairs if _at_one_pace(b) > (1 + CLEAR) * _at_one_pace(a)]
    chosen = next(_at_one_pace(row) for row in rows if row["chosen"])
    by_hand = min(_at_one_pace(row) for row in rows if row["by_hand"])
    return {
        "errors": {name: _errors(rows, name) for name in PREDICTIONS},
        "clear_pairs": len(clear),
        "wrong_pairs": sum(a["predicted"] > b["predicted"] for a, b in clear),
        "chosen_over_best_by_hand": chosen / by_hand,
    }


def _errors(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    errors = [abs(row[name] / row["measured"] - 1.0) for row in rows]
    close = sum(error <= CLOSE for error in errors)
    return {"largest": max(errors), "median": median(errors), "close": close}


def _at_one_pace(row: Mapping[str, Any]) -> float:
    """What a plan's steps would have taken had its hosts been as fast as when profiled."""
    return row["measured"] * row["predicted"] / row["at_pace"]


def report(result: Mapping[str, Any]) -> None:
    """Print the result for people."""
    for profile in result["profiles"]:
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
            print(f"  {_row_text(row)}  {', '.join(marks)}")
        count = len(found["rows"])
        for name, words in PREDICTIONS.items():
            errors = found["errors"][name]
            print(
                f"  {words}: {errors['largest']:.1%} off at most, {errors['median']:.1%} usually, "
                f"{errors['close']} of {count} within {CLOSE:.0%}"
            )
        print(
            f"  {found['wrong_pairs']} of {found['clear_pairs']} pairs that differ clearly are "
            f"ranked wrongly; the choice takes {found['chosen_over_best_by_hand']:.3f} times as "
            "long as the best by hand"
        )


def _row_text(row: Mapping[str, Any]) -> str:
    predicted, measured = row["predicted"], row["measured"]
    errors = [f"{words} {row[name] / measured - 1:+.1%}" for name, words in PREDICTIONS.items()]
    return (
        f"{row['plan']:40}{predicted * 1e3:8.0f} ms predicted{measured * 1e3:8.0f} ms measured: "
        f"{', '.join(errors)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--config", default=str(CONFIGS / "predicted_gpt.gin"), help="gin file")
    parser.add_argument("--gin", action="append", default=[], help="a setting of its own")
    parser.add_argument("--lab", default="two_hosts", help="a lab of configs/lab")
    parser.add_argument(
        "--speeds",
        type=float,
        nargs="+",
        help=f"of the hosts; unless given the lab's own, or {UNLIKE_SPEEDS} if those are alike",
    )
    parser.add_argument("--rates", nargs="+", default=RATES, help="of the links, in turn")
    parser.add_argument("--by-hand", type=positive, default=20, help="plans made by hand")
    parser.add_argument("--best", type=positive, default=10, help="best plans")
    parser.add_argument("--rounds", type=positive, default=3, help="of profiling and training")
    parser.add_argument(
        "--steps", type=positive, default=1, help="timed steps of a plan in a round"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    result = measure(options)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        report(result)


if __name__ == "__main__":
    main()
