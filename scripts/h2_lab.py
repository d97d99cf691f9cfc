"""HeteroAuto and Harp on three unlike hosts of the lab, for real: `bench_h2.py lab` runs this.

The hosts differ in speed, in their link and in memory (`configs/lab/three_unlike.yaml`). Layers are
measured on them; then there are plans by HeteroAuto, as it is and refined, and by Harp, for all
hosts and for each alone, and the even split, all predicted, and trained by in turn. Plans may use a
part of what the even split would take on the small host, but nothing limits its memory meanwhile.
Afterwards the same plans are run where it is limited for real.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarking import (
    WARM_UP_STEPS,
    Size,
    check_losses,
    median_ratio,
    size_flags,
)
from lab import Lab, Specification, names, read_specification
from lab_process import UNCOUNTED, FirstHost

Row = dict[str, Any]

LAB, SMALL_HOST = "three_unlike", "fast"

SIZE = Size(
    blocks=6, width=128, heads=8, sequence=512, vocabulary=512, microbatches=8, microbatch_size=3
)
"""Of the GPT: attention over many positions keeps much of a microbatch for the backward pass."""

ANSWER_SECONDS = 1800.0

STEPS = 2
"""How many steps of a plan in a round count, by their median."""

RUN_SMALL = ("heteroauto, refined", "harp", "even")
"""The plans that are run where memory is limited for real."""

PLANNED = ("heteroauto", "heteroauto, refined", "harp", "even")


TOLD_SHARE, LIMIT_SHARE = 0.8, 0.85
"""Of what the even split takes on the small host: what plans may use of it, by the prediction of
both; and what it has for real, besides what its Ray node takes."""


def lab_rows(rounds: int, size: Size = SIZE) -> Iterator[Row]:
    """Plans for three unlike hosts, predicted and measured, and what memory they need.

    Args:
        rounds: how often every plan takes its turn.
        size: sizes of the model and its batch.
    """
    lab = read_specification(LAB)
    with contextlib.ExitStack() as ends:
        # What one host or round has compiled, others need not.
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": ends.enter_context(tempfile.TemporaryDirectory()),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        files = {name: str(folder / f"{n}.json") for n, name in enumerate(RUN_SMALL)}
        with contextlib.ExitStack() as while_up:
            up = while_up.enter_context(Lab.up(lab.with_memory({SMALL_HOST: UNCOUNTED})))
            asked = _trainers(up, size, while_up)
            yield {"part": "lab", "measured": asked("measure"), **asked("profile")}
            planned = asked("plan", small=names.address(lab, SMALL_HOST), share=TOLD_SHARE)
            yield {"part": "planned", **planned}
            for name, path in files.items():
                asked("save", name=name, path=path)
            yield from _timed(asked, planned, rounds)
        yield from _limited(lab, size, files)


def _trainers(lab: Lab, size: Size, ends: contextlib.ExitStack) -> FirstHost:
    """The process on the lab's first host."""
    return FirstHost(lab, "h2_lab_trainer.py", size_flags(size), ends, ANSWER_SECONDS)


def _timed(asked: FirstHost, planned: Mapping[str, Any], rounds: int) -> Iterator[Row]:
    """Predicted and measured steps of all plans, and the ratios that follow.

    One plan has its workers at a time: those of all would not find room in one machine's memory.
    """
    plans, moments = list(planned["plans"]), [asked("pace")]
    times: dict[str, list[float]] = {name: [] for name in plans}
    paced: dict[str, list[float]] = {name: [] for name in plans}
    least = dict.fromkeys(plans, float("inf"))
    losses: dict[str, list[float]] = {}
    for turn in range(rounds):
        # Backwards every other time, so that none always follows the same neighbour.
        for name in plans[:: -1 if turn % 2 else 1]:
            asked("start", name=name)
            found = asked("steps", name=name, count=1 if turn else WARM_UP_STEPS)
            losses.setdefault(name, found)
            seconds = [asked("step", name=name) for _ in range(STEPS)]
            times[name].append(median(seconds))
            least[name] = min(least[name], *seconds)
            asked("end", name=name)
            print(f"round {turn}: {name} {seconds}", file=sys.stderr, flush=True)
        moments.append(asked("pace"))
        for name in plans:
            paced[name].append(asked("at_pace", name=name, moments=moments[-2:]))
    for name in plans:
        predicted, measured = planned["plans"][name]["predicted_step_time"], median(times[name])
        yield {
            "part": "plan",
            "plan": name,
            "step_time": measured,
            "step_times": times[name],
            "least": least[name],
            "predicted_at_pace": median(paced[name]),
            "error": predicted / measured - 1,
            "error_at_pace": median(map(_error, paced[name], times[name])),
            "even_over_it": median_ratio(times, "even", name),
            **planned["plans"][name],
        }
    for name in PLANNED if len(planned["alone"]) > 1 else ():
        yield ratio_row(name, planned["alone"], planned["ratios"][name], times, least, paced)
    yield {"part": "losses", "largest_difference": check_losses(losses)}


def _error(predicted: float, measured: float) -> float:
    return predicted / measured - 1


def ratio_row(
    name: str,
    alone: Mapping[str, str],
    predicted: float,
    times: Mapping[str, Sequence[float]],
    least: Mapping[str, float],
    paced: Mapping[str, Sequence[float]],
) -> Row:
    """The HeteroSpeedupRatio of a plan, predicted beside measured.

    Each round has a ratio of its own, so that what slows down all of a round counts in none. What
    else runs on the machine slows down a mix, for which both cores work, more than a host alone: so
    there is the ratio of the fastest steps, too.

    Args:
        name: the plan.
        alone: of each host the plan for it alone.
        predicted: the ratio by the profile.
        times: of each plan the seconds of a step in each round.
        least: of each plan the seconds of its fastest step.
        paced: of each plan the seconds predicted at the hosts' pace in each round.
    """

    def ratio(seconds: Mapping[str, Sequence[float]]) -> float:
        rounds = zip(seconds[name], *(seconds[of] for of in alone.values()), strict=True)
        return median(hetero_speedup_ratio(mixed, parts) for mixed, *parts in rounds)

    measured, at_pace = ratio(times), ratio(paced)
    fastest = hetero_speedup_ratio(least[name], [least[of] for of in alone.values()])
    return {
        "part": "ratio",
        "plan": name,
        "hetero_speedup_ratio": predicted,
        "at_pace": at_pace,
        "measured": measured,
        "measured_by_fastest": fastest,
        "error": predicted / measured - 1,
        "error_by_fastest": predicted / fastest - 1,
        "error_at_pace": at_pace / measured - 1,
    }


def hetero_speedup_ratio(mixed: float, alone: Sequence[float]) -> float:
    """What a mix does in a time over what its kinds do by themselves, together.

    Args:
        mixed: seconds of a step of the mix.
        alone: of each kind, seconds of a step of the same batch by itself.

    Source: H2, section 6.2.

    Example:
        >>> hetero_speedup_ratio(2.0, [3.0, 6.0])
        1.0
    """
    return 1 / sum(1 / seconds for seconds in alone) / mixed


def _limited(lab: Specification, size: Size, files: Mapping[str, str]) -> Iterator[Row]:
    """The same plans where the small host's memory is limited for real."""
    before, taken, _ = _run_on(
        lab.with_memory({SMALL_HOST: UNCOUNTED}), size, "even", files["even"]
    )
    limit = before + LIMIT_SHARE * (taken - before)
    for name, path in files.items():
        _, most, done = _run_on(lab.with_memory({SMALL_HOST: limit}), size, name, path)
        yield {
            "part": "memory",
            "plan": name,
            "limit_bytes": limit,
            "even_unlimited_bytes": taken,
            "most_bytes": most,
            "lost": done["lost"],
            "message": done.get("message"),
        }


def _run_on(
    lab: Specification, size: Size, name: str, path: str
) -> tuple[int, int, dict[str, Any]]:
    """Run a plan of a file on a fresh lab.

    Returns:
        The most bytes that the small host had before, and at all, and what became of the steps.
    """
    with contextlib.ExitStack() as ends:
        up = ends.enter_context(Lab.up(lab))
        asked = _trainers(up, size, ends)
        asked("load", name=name, path=path)
        before = up.most_memory(SMALL_HOST)
        done = asked("steps_or_lost", name=name, count=WARM_UP_STEPS)
        return before, up.most_memory(SMALL_HOST), done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for row in lab_rows(options.rounds):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
