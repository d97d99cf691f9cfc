"""Faults in the lab, for real: `bench_lab.py faults` runs this.

A small GPT trains on two hosts. At a random moment of a step the second host is stopped, or the
link to it is cut; the run must end in time, and name the worker that is out of reach.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarking import size_of
from lab import names, read_specification
from lab.state import present
from lab.system import wait_until
from lab_trainer import Hosts, LabTrainers, trainers

UNDO = {"stop": "resume", "cut": "mend"}
LATEST_SECONDS = 1.0
"""The latest moment of a fault, in seconds of a run whose steps take about a tenth of one."""

GONE_SECONDS = 15.0
"""How long a lost worker's process may stay when its host is in reach again."""

DEADLINE_SECONDS = 15.0
"""Within which a fault must have ended the run."""


@dataclass(frozen=True)
class Fault:
    """What happens to a lab while it trains.

    Args:
        what: ``"stop"`` or ``"cut"``.
        where: the host, or the link.
        moment: how many seconds after the run is under way.
    """

    what: str
    where: str
    moment: float


def random_faults(tries: int, seed: int) -> list[Fault]:
    """Faults at random moments: in every other try a host is stopped, in the others a link is cut.

    Args:
        tries: how many.
        seed: of the random numbers.

    Returns:
        The faults.
    """
    moments = random.Random(seed)
    kinds = (("stop", "b"), ("cut", "a-b"))
    return [Fault(*kinds[i % 2], moments.uniform(0, LATEST_SECONDS)) for i in range(tries)]


def run_into(fault: Fault, hosts: Hosts, ours: LabTrainers, name: str) -> dict[str, Any]:
    """Train on two hosts until a fault ends it.

    Args:
        fault: the fault, which comes to the second host.
        hosts: the lab; at the end the second host is in reach again.
        ours: where the trainer is made.
        name: of the trainer, which none had before.

    Returns:
        Whether the worker there was named, the message, how many seconds after the fault, after
        how many the trainer had let go of everything, and whether its process was gone soon after
        the host was in reach again.
    """
    before = _processes(hosts)
    stages = ours("make", name)
    lost = names.address(hosts.lab.specification, hosts.names[1])
    [stage] = [index for index, each in enumerate(stages) if each["host"] == lost]
    ours("steps", name, count=2)
    ours.begin("until_lost", name)
    time.sleep(fault.moment)
    began = time.monotonic()
    getattr(hosts.lab, fault.what)(fault.where)
    found = ours.end(deadline=120.0)
    getattr(hosts.lab, UNDO[fault.what])(fault.where)
    gone = wait_until(lambda: _processes(hosts) <= before, GONE_SECONDS)
    return {
        "what": fault.what,
        "moment": fault.moment,
        "named": found["worker"] == f"stage {stage}, host 0",
        "message": found["message"],
        "seconds": found["lost"] - began,
        "end_seconds": found["ended"] - began,
        "gone": gone,
    }


def _processes(hosts: Hosts) -> int:
    """How many processes the second host has."""
    return list(hosts.lab.host_status())[1].processes


def left_behind() -> list[str]:
    """The labs of which anything is there, and the processes that belonged to one."""
    found = present()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(names.STATE).encode() in (folder / "environ").read_bytes():
                found.append(f"process {folder.name}")
    return found


def measure_faults(options: argparse.Namespace) -> dict[str, Any]:
    """Stop a host or cut a link in mid-step, again and again."""
    rows = []
    with trainers(read_specification("two_hosts"), size_of(options)) as (hosts, ours):
        ours("measure_cluster")
        for number, fault in enumerate(random_faults(options.tries, options.seed), start=1):
            rows.append(run_into(fault, hosts, ours, f"try {number}"))
            print(f"try {number}: {rows[-1]['message']}", file=sys.stderr)
    seconds = [row["seconds"] for row in rows]
    return {
        "tries": len(rows),
        "named": sum(row["named"] for row in rows),
        "in_time": sum(each <= DEADLINE_SECONDS for each in seconds),
        "median_seconds": median(seconds),
        "max_seconds": max(seconds),
        "max_end_seconds": max(row["end_seconds"] for row in rows),
        "gone": sum(row["gone"] for row in rows),
        "left_behind": left_behind(),
        "rows": rows,
    }


def report_faults(result: Mapping[str, Any]) -> None:
    """Print the result of `faults` for people."""
    print(
        f"{result['tries']} tries: {result['named']} ended with the worker's name, "
        f"{result['in_time']} of them within {DEADLINE_SECONDS:g} s; after "
        f"{result['median_seconds']:.1f} s (median), {result['max_seconds']:.1f} s (longest)"
    )
    print(f"left behind: {', '.join(result['left_behind']) or 'nothing'}")
