"""How good the schedules are: simulated makespans over a lower bound, the search beside all others.

Five cases of a few stages behind slow links, and random ones: 2 to 16 stages of unlike speed (t
within 1:2), 8 to 128 microbatches, every link's c drawn from 0 to 1.1 t_max. F, B and W of a
microbatch take a third of t each, the whole backward pass two thirds; sends and returns take c.

Memory is capped in live microbatches: at H-1F1B's peak, the most that any of its stages holds, on
every stage (cap "peak"); on random cases also somewhere between 1F1B's peak and that ("between"),
and with H-1F1B's own number on each stage ("stages"). `ratio` is over the lower bound under that
cap, `free_ratio` over the bound for any memory.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

from benchmarking import positive

from hetjax.pipeline import (
    Schedule,
    StepTimes,
    fixed_schedules,
    h_1f1b_counts,
    lower_bound,
    search_schedule,
    simulate_schedule,
)

SEARCH = "search"


@dataclass(frozen=True)
class Case:
    """A pipeline.

    Args:
        name: what it is called.
        compute: t of every stage.
        communication: c of every link.
        num_microbatches: M.
    """

    name: str
    compute: Sequence[float]
    communication: Sequence[float]
    num_microbatches: int

    @property
    def times(self) -> StepTimes:
        """The times of its tasks."""
        third = [t / 3 for t in self.compute]
        whole = [2 * t / 3 for t in self.compute]
        links = self.communication
        return StepTimes(third, whole, links, links, (), third, third)

    def counts(self) -> list[int]:
        """What H-1F1B holds on every stage."""
        counts = h_1f1b_counts(self.compute, self.communication)
        return [min(count, self.num_microbatches) for count in counts]

    def caps(self, rng: Random | None) -> Iterator[tuple[str, list[int]]]:
        """The caps of every stage that the case is run with, by name."""
        counts, stages = self.counts(), len(self.compute)
        peak = max(counts)
        yield "peak", [peak] * stages
        if rng is not None:
            yield "between", [rng.randint(min(stages, peak), peak)] * stages
            yield "stages", counts


def known_cases() -> list[Case]:
    """Equal and unequal stages behind slow links, one slow link between two speeds."""
    rng = Random(0)
    unequal = [rng.uniform(0.7, 1.0) for _ in range(6)]
    two_speeds = [1.0] * 4 + [0.6] * 4
    one_slow = [[0.05] * 3 + [c] + [0.05] * 3 for c in (0.65, 1.1)]
    return [
        Case("4 equal stages, c = 0.65", [1.0] * 4, [0.65] * 3, 16),
        Case("6 stages, t from 0.7 to 1, c = 0.65", unequal, [0.65] * 5, 24),
        Case("8 stages, two speeds, one link of c = 0.65", two_speeds, one_slow[0], 32),
        Case("8 stages, two speeds, one link of c = 1.1", two_speeds, one_slow[1], 32),
        Case("8 equal stages, c = 1", [1.0] * 8, [1.0] * 7, 32),
    ]


def random_case(rng: Random, name: str, size: tuple[int, int] | None = None) -> Case:
    """A random pipeline, or one of a given number of stages and microbatches."""
    stages, microbatches = size or (rng.randint(2, 16), rng.randint(8, 128))
    compute = [rng.uniform(0.5, 1.0) for _ in range(stages)]
    links = [rng.uniform(0.0, 1.1) * max(compute) for _ in range(stages - 1)]
    return Case(name, compute, links, microbatches)


def run(case: Case, cap: str, limits: Sequence[int], trials: int | None) -> list[dict[str, Any]]:
    """One row a schedule: its makespan beside the bounds, and whether it fits the cap."""
    times, num_microbatches = case.times, case.num_microbatches
    bound = lower_bound(num_microbatches, times, limits)
    free_bound = lower_bound(num_microbatches, times)
    found = search_schedule(times, num_microbatches, limits, trials=trials)

    def figures(schedule: Schedule) -> dict[str, Any]:
        makespan = simulate_schedule(schedule, times).makespan
        held = [schedule.live_bound(stage) for stage in range(times.num_stages)]
        return {
            "case": case.name,
            "stages": times.num_stages,
            "microbatches": num_microbatches,
            "cap": cap,
            "limits": list(limits),
            "schedule": schedule.name,
            "held": held,
            "fits": all(h <= limit for h, limit in zip(held, limits, strict=True)),
            "makespan": makespan,
            "ratio": makespan / bound,
            "free_ratio": makespan / free_bound,
        }

    return [figures(each) for each in (*fixed_schedules(times, num_microbatches), found)]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How near the search comes to the bounds, over the cases of one cap."""
    found = [row for row in rows if row["schedule"] == SEARCH]
    ratios, free = (sorted(row[name] for row in found) for name in ("ratio", "free_ratio"))
    nine_in_ten = math.ceil(0.9 * len(found)) - 1
    return {
        "cases": len(found),
        "median": median(ratios),
        "nine_in_ten": ratios[nine_in_ten],
        "worst": ratios[-1],
        "free_median": median(free),
        "free_nine_in_ten": free[nine_in_ten],
        "free_worst": free[-1],
    }


def ever_worse(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a fixed schedule that fits the cap was faster than the search, but for rounding."""
    found = {(r["case"], r["cap"]): r["makespan"] for r in rows if r["schedule"] == SEARCH}
    return any(
        row["fits"] and row["makespan"] < found[row["case"], row["cap"]] * (1 - 1e-6)
        for row in rows
    )


def search_seconds(trials: int | None) -> float:
    """What the search takes for 16 stages and 128 microbatches."""
    case = random_case(Random(16), "16 x 128", (16, 128))
    limits = [max(case.counts())] * 16
    start = time.perf_counter()
    search_schedule(case.times, case.num_microbatches, limits, trials=trials)
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=positive, default=100, metavar="N", help="random cases")
    parser.add_argument("--seed", type=int, default=0, help="of the random cases")
    parser.add_argument("--trials", type=positive, metavar="N", help="schedules a search tries")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    rng = Random(options.seed)
    known = [
        row
        for case in known_cases()
        for cap, limits in case.caps(None)
        for row in run(case, cap, limits, options.trials)
    ]
    drawn = [
        row
        for number in range(options.cases)
        for case in [random_case(rng, f"random {number}")]
        for cap, limits in case.caps(rng)
        for row in run(case, cap, limits, options.trials)
    ]
    caps = {
        cap: summary([row for row in drawn if row["cap"] == cap])
        for cap in ("peak", "between", "stages")
    }
    result = {
        "random": caps,
        "ever_worse_than_a_fixed_schedule_that_fits": ever_worse([*known, *drawn]),
        "search_seconds_16x128": search_seconds(options.trials),
    }
    if options.json:
        print(json.dumps({**result, "rows": known, "random_rows": drawn}, indent=2))
        return
    show(known, result)


def show(known: Sequence[dict[str, Any]], result: dict[str, Any]) -> None:
    print("makespan over the bound for any memory; * holds more than the cap")
    for name in dict.fromkeys(row["case"] for row in known):
        print(f"{name}:")
        rows = [row for row in known if row["case"] == name]
        print(
            "   "
            + "  ".join(
                f"{row['schedule']} {row['free_ratio']:.3f}" + "*" * (not row["fits"])
                for row in rows
            )
        )
    for cap, figures in result["random"].items():
        print(
            f"{figures['cases']} random cases, cap {cap!r}: search over the bound median "
            f"{figures['median']:.4f}, nine in ten {figures['nine_in_ten']:.4f}, worst "
            f"{figures['worst']:.4f}; over the bound for any memory {figures['free_median']:.4f}, "
            f"{figures['free_nine_in_ten']:.4f}, {figures['free_worst']:.4f}"
        )
    worse = result["ever_worse_than_a_fixed_schedule_that_fits"]
    print(f"worse than a fixed schedule that fits, in any case: {'yes' if worse else 'no'}")
    print(f"search of 16 stages x 128 microbatches: {result['search_seconds_16x128']:.2f} s")


if __name__ == "__main__":
    main()
