"""HexiSeq beside ring attention, Ulysses and USP on hosts of the lab: `bench_context.py lab`.

Hosts of unlike speed share long sequences of a small GPT, each system by its best settings for what
is measured of the hosts, in the same runtime and in turn. Rows: of each `lab` what was measured; of
its plans the `system`, its `tokens` and `heads` on each device, `step_time` (the median over
rounds), `step_times`, and what is `predicted` by the scheduler and by the plan's cost model; and by
how much the best of the others is slower, in the median of rounds, and at most, if nobody waited.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarking import KEPT_MEMORY, WARM_UP_STEPS, Child, Size, check_losses, size_flags
from lab import Lab, read_specification

SIZE = Size(
    blocks=1, width=128, heads=4, sequence=8192, vocabulary=256, microbatches=1, microbatch_size=1
)
"""Of the GPT: attention takes most of the time, and links nearly none."""

LABS = {
    "two hosts": ("two_hosts", {"b": 0.5}),
    "four hosts": ("four_hosts", {"c": 0.25, "d": 0.25}),
}
"""A lab, and the speeds of its slower hosts."""

STEPS = 2
"""Steps of a turn, of which the median counts."""

SYSTEMS = ("hexiseq", "ring", "ulysses", "usp")

ANSWER_SECONDS = 1800.0


def lab_rows(rounds: int) -> Iterator[dict[str, Any]]:
    """Rows of all labs.

    Args:
        rounds: how often every plan takes its turn.
    """
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        for name in LABS:
            yield from _rows_of(name, rounds)


def _rows_of(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    file, slower = LABS[name]
    specification = read_specification(file)
    with contextlib.ExitStack() as ends:
        lab = ends.enter_context(Lab.up(specification))
        for host, speed in slower.items():
            lab.set_speed(host, speed)
        for link in specification.links:
            lab.set_link("-".join(link.between), None)
        first = specification.hosts[0].name
        child = Child(
            "context_hosts_trainer.py",
            size_flags(SIZE),
            {**lab.environment(), **KEPT_MEMORY},
            lambda command: lab.command(first, command),
        )
        ends.enter_context(contextlib.closing(child))

        def asked(do: str, **arguments: Any) -> Any:
            child.ask({"do": do, **arguments})
            return child.answer(ANSWER_SECONDS)

        measured = asked("measure")
        yield {"part": "lab", "lab": name, **measured}
        flops = measured["flops"]
        plans = {system: asked("plan", system=system) for system in SYSTEMS}
        plans = {system: plan for system, plan in plans.items() if plan is not None}
        losses: dict[str, list[float]] = {}
        times: dict[str, list[float]] = {system: [] for system in plans}
        for turn in range(rounds):
            for system in [*plans][:: -1 if turn % 2 else 1]:
                asked("start", system=system)
                found = asked("steps", system=system, count=WARM_UP_STEPS)
                losses.setdefault(system, found)
                times[system].append(median(asked("step", system=system) for _ in range(STEPS)))
                asked("end", system=system)
                print(f"{name}: round {turn}, {system} {times[system][-1]}", file=sys.stderr)
        for system, plan in plans.items():
            row = {"part": "plan", "lab": name, "system": system, **plan}
            yield row | {"step_time": median(times[system]), "step_times": times[system]}
        others = [
            min(each) for each in zip(*(times[s] for s in plans if s != "hexiseq"), strict=True)
        ]
        ratios = [a / b for a, b in zip(others, times["hexiseq"], strict=True)]
        yield {
            "part": "ratio",
            "lab": name,
            "best_over_hexiseq": median(ratios),
            "ceiling": sum(flops) / max(max(flops), len(flops) * min(flops)),
            "largest_loss_difference": check_losses(losses),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    for row in lab_rows(parser.parse_args().rounds):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
