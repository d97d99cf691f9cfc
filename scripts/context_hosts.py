"""HexiSeq beside ring attention, Ulysses and USP on hosts of the lab: `bench_context.py lab`.

Hosts of unlike speed share long sequences of a small GPT, each system by its best settings for what
is measured of the hosts and of the model's layers on them, in the same runtime and in turn. Rows:
of each `lab` what was measured; of its plans the `system`, its `tokens` and `heads` on each device,
`step_time` (the median over rounds), `step_times`, and what is `predicted`. Then the `ratio` row:
by how much the best of the others is slower, in the median of rounds, and at most, if nobody waited
(`ceiling`); and what the chosen plan takes over the same in step, where hosts compute nothing while
they give or await arrays. In the lab whose link is slow, the others are what else the hosts may be
grouped as, each with its best tokens and heads, and it is said what the chosen plan takes over the
best of these (`over_best`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarking import WARM_UP_STEPS, Size, check_losses, size_flags
from lab import Lab, read_specification
from lab_process import FirstHost

SIZE = Size(
    blocks=1, width=128, heads=4, sequence=16384, vocabulary=256, microbatches=1, microbatch_size=1
)
"""Of the GPT: attention takes most of the time, and links nearly none."""

STEPS = 2
"""Steps of a turn, of which the median counts."""

CHOSEN, SYSTEMS, IN_STEP = "hexiseq", ("ring", "ulysses", "usp"), "in step"

ANSWER_SECONDS = 1800.0

Groups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Setting:
    """Hosts that share a sequence.

    Args:
        lab: the lab's specification.
        speeds: of hosts, where it says another one.
        is_limited: whether its links are as fast as it says, else as fast as they can be.
        forced: groups of hosts that are compared with the chosen ones; else the even systems are.
    """

    lab: str
    speeds: Mapping[str, float] = field(default_factory=dict)
    is_limited: bool = False
    forced: Sequence[Groups] = ()


SETTINGS = {
    "two hosts": Setting("two_hosts", {"b": 0.5}),
    "four hosts": Setting("four_hosts", {"c": 0.25, "d": 0.25}),
    "slow link": Setting(
        "two_groups",
        is_limited=True,
        forced=(
            ((0,), (1,)),
            ((0, 1),),
            ((0,), (1,), (2,), (3,)),
            ((0, 1), (2, 3)),
            ((0, 2), (1, 3)),
            ((0, 1, 2, 3),),
        ),
    ),
}


def lab_rows(rounds: int, wanted: Sequence[str] = tuple(SETTINGS)) -> Iterator[dict[str, Any]]:
    """Rows of all labs.

    Args:
        rounds: how often every plan takes its turn.
        wanted: which labs.
    """
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        for name in wanted:
            yield from _rows_of(name, SETTINGS[name], rounds)


def _rows_of(name: str, setting: Setting, rounds: int) -> Iterator[dict[str, Any]]:
    with contextlib.ExitStack() as ends:
        asked = _first_host(setting, ends)
        measured = asked("measure")
        yield {"part": "lab", "lab": name, **measured}
        plans = {CHOSEN: asked("plan", system=CHOSEN)}
        if setting.forced:
            for groups in setting.forced:
                plans[str(groups)] = asked("force", name=str(groups), groups=groups)
        else:
            found = {system: asked("plan", system=system) for system in SYSTEMS}
            plans |= {system: plan for system, plan in found.items() if plan is not None}
        losses, times = _measured(asked, name, list(plans), rounds)
        for system, plan in plans.items():
            row = {"part": "plan", "lab": name, "system": system, **plan}
            yield row | {"step_time": median(times[system]), "step_times": times[system]}
        others = [min(each) for each in zip(*(times[s] for s in plans if s != CHOSEN), strict=True)]
        over = [a / b for a, b in zip(others, times[CHOSEN], strict=True)]
        in_step = [a / b for a, b in zip(times[CHOSEN], times[IN_STEP], strict=True)]
        yield {
            "part": "ratio",
            "lab": name,
            **({} if setting.forced else {"best_over_hexiseq": median(over)}),
            **({"over_best": 1 / median(over)} if setting.forced else {}),
            "ceiling": _ceiling([1 / seconds for seconds in measured["alone"].values()]),
            "over_in_step": median(in_step),
            "largest_loss_difference": check_losses(losses),
        }


def _first_host(setting: Setting, ends: contextlib.ExitStack) -> FirstHost:
    """The process that trains, in a lab that is up."""
    specification = read_specification(setting.lab)
    lab = ends.enter_context(Lab.up(specification))
    for host, speed in setting.speeds.items():
        lab.set_speed(host, speed)
    for link in () if setting.is_limited else specification.links:
        lab.set_link(link.name, None)
    return FirstHost(lab, "context_hosts_trainer.py", size_flags(SIZE), ends, ANSWER_SECONDS)


def _measured(
    asked: FirstHost, name: str, systems: Sequence[str], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Losses of all plans, and the seconds of their steps in each round.

    Of the chosen one also those of steps in which hosts compute nothing while they give arrays.
    """
    losses: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {system: [] for system in (*systems, IN_STEP)}
    for turn in range(rounds):
        for system in systems[:: -1 if turn % 2 else 1]:
            asked("start", system=system)
            found = asked("steps", system=system, count=WARM_UP_STEPS)
            losses.setdefault(system, found)
            ways = (False, True) if system == CHOSEN else (False,)
            taken: dict[bool, list[float]] = {way: [] for way in ways}
            for way in STEPS * ways:
                taken[way].append(asked("step", system=system, in_step=way))
            asked("end", system=system)
            times[system].append(median(taken[False]))
            if system == CHOSEN:
                times[IN_STEP].append(median(taken[True]))
            print(f"{name}: round {turn}, {system} {times[system][-1]}", file=sys.stderr)
    return losses, times


def _ceiling(speeds: Sequence[float]) -> float:
    """How many times as fast all are together as the best of them that are taken for alike.

    Example:
        >>> _ceiling([1.0, 0.5]), _ceiling([0.5, 0.5, 0.25, 0.25])
        (1.5, 1.5)
    """
    ordered = sorted(speeds, reverse=True)
    return sum(ordered) / max(count * speed for count, speed in enumerate(ordered, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--labs", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    options = parser.parse_args()
    for row in lab_rows(options.rounds, options.labs):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
