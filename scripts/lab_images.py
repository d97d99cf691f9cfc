"""Unlike hosts share the images of a ResNet, for real: `bench_lab.py images` runs this.

The plan is what `hetjax.plan` makes when it is asked for no number of microbatches: the batch is
normalised, so it stays whole, and each host has as many images as it has time for, or memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarking import WARM_UP_STEPS, Size, check_losses, median_ratio, take_turns
from images_trainer import ImageSize, one_device
from lab import Lab, Specification, read_specification
from lab_process import UNCOUNTED
from lab_trainer import LabTrainers, trainers

TOLERANCE = 1e-5


def measure_images(options: argparse.Namespace) -> dict[str, Any]:
    """A ResNet by the planner's own choice: a slow host, and a small one, each in one stage."""
    lab = read_specification("two_hosts")
    size = ImageSize(batch=options.batch)
    return {
        "rounds": options.rounds,
        **unlike_speeds(lab, size, options.speed, options.rounds),
        "memory": unlike_memories(lab, size),
    }


def unlike_speeds(
    lab: Specification, size: ImageSize, speed: float, rounds: int, cluster: str | None = None
) -> dict[str, Any]:
    """Hosts at speed 1 and a fraction of it: the plan, beside the even split.

    Args:
        lab: the lab of two hosts.
        size: the model and its batch.
        speed: of the second host.
        rounds: how many.
        cluster: the file of the lab's cluster; None to measure the lab.
    """
    arguments = {"size": asdict(size), "cluster": cluster}
    ways = {"planned": False, "even": True}

    def slow_down(lab: Lab) -> None:
        lab.set_speed("b", speed)
        lab.set_link("a-b", None)

    with trainers(lab, Size(), slow_down) as (_, ours):
        measured = _measure(ours, cluster)
        told = {of: ours("make_images", of, even=even, **arguments) for of, even in ways.items()}
        losses = {"one device": one_device(size, WARM_UP_STEPS)}
        losses |= {of: ours("steps", of, count=WARM_UP_STEPS) for of in ways}
        difference = check_losses(losses, TOLERANCE)
        times = take_turns(
            {of: lambda of=of: ours("step", of) for of in ways}, rounds=rounds, steps=1
        )
    return {
        "speed": speed,
        "cluster": measured,
        "largest_loss_difference": difference,
        "rows": [{"plan": of, "step_time": median(times[of]), **told[of]} for of in ways],
        "even_over_planned": median_ratio(times, "even", "planned"),
    }


def unlike_memories(
    lab: Specification, size: ImageSize, cluster: str | None = None
) -> dict[str, Any]:
    """Hosts as fast as each other, of which the second may have less than half of the images take.

    What an even split takes there is found first. A process takes memory for more than the cost
    model counts, so the second host gets three quarters of it for real, and the planner is told of
    half of what it predicts.

    Args:
        lab: the lab of two hosts.
        size: the model and its batch.
        cluster: the file of the lab's cluster; None to measure the lab.
    """
    arguments = {"size": asdict(size), "cluster": cluster}
    losses = {"one device": one_device(size, WARM_UP_STEPS)}
    with trainers(lab.with_memory({"b": UNCOUNTED}), Size(), _unlimited_link) as (hosts, ours):
        _measure(ours, cluster)
        before = hosts.lab.most_memory("b")
        even = ours("make_images", "even", even=True, **arguments)
        losses["even, unlimited"] = ours("steps", "even", count=WARM_UP_STEPS)
        taken = hosts.lab.most_memory("b")
    limit = before + 0.75 * (taken - before)
    memory = {even["hosts"][1]: 0.5 * even["memory_bytes"][1]}
    with trainers(lab.with_memory({"b": limit}), Size(), _unlimited_link) as (hosts, ours):
        _measure(ours, cluster)
        planned = ours("make_images", "planned", memory=memory, **arguments)
        losses["planned"] = ours("steps", "planned", count=WARM_UP_STEPS)
        most = hosts.lab.most_memory("b")
        ours("end", "planned")
        again = ours("make_images", "even", even=True, memory=memory, **arguments)
        lost = ours("steps_or_lost", "even", count=WARM_UP_STEPS)
    return {
        "limit_bytes": limit,
        "largest_loss_difference": check_losses(losses, TOLERANCE),
        "rows": [
            {"plan": "planned", **planned, "most_bytes": most, "lost": None},
            {"plan": "even", **again, "most_bytes": taken, "lost": lost.get("lost")},
        ],
        "even_over_limit": taken / limit,
        "planned_over_limit": most / limit,
    }


def _measure(ours: LabTrainers, cluster: str | None) -> list[dict[str, Any]]:
    """Measure the lab, unless there is a file of its cluster; what was found of each host."""
    return ours("measure_cluster") if cluster is None else []


def _unlimited_link(lab: Lab) -> None:
    lab.set_link("a-b", None)


def report_images(result: Mapping[str, Any]) -> None:
    """Print the result of `images` for people."""
    for row in result["rows"]:
        print(f"{row['plan']:10}{row['step_time'] * 1e3:6.0f} ms a step, images {row['shares']}")
    print(f"planned shares are {result['even_over_planned']:.2f} times as fast as even ones")
    memory = result["memory"]
    for row in memory["rows"]:
        ended = f"lost {row['lost']}" if row["lost"] else "trained"
        share = row["most_bytes"] / memory["limit_bytes"]
        print(
            f"{row['plan']:10}images {row['shares']}, {share:.2f} times the small host's memory: "
            f"{ended}"
        )
