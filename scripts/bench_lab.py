"""Training in the lab, for real: unlike speeds, slow links, three and four hosts, faults.

Each part brings a lab of configs/lab up and takes it down again; it needs root. `unlike` plans for
a fast and a slow host from what it measures of them; `union` gives both shares of one stage;
`images` does so with a ResNet by the plan that is made by default, for speed and for memory;
`sweep` makes the link between two hosts slower and slower; `hosts` compares the losses on three and
four hosts with those of one device; `faults` stops a host or cuts a link in mid-step, again and
again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from baselines import HandWritten
from benchmarking import (
    SCRIPTS,
    WARM_UP_STEPS,
    Size,
    add_size,
    check_losses,
    median_ratio,
    positive,
    size_of,
    take_turns,
)
from lab import Lab, Specification, read_specification
from lab_faults import measure_faults, report_faults
from lab_images import measure_images, report_images
from lab_pipeline import measure_ratios
from lab_trainer import trainers

FIGURE = SCRIPTS.parent / "docs" / "images" / "bandwidth_sweep.png"
LABS = ("three_hosts", "two_islands")
RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.5, 2.0)
"""Of one activation's time on the link and a stage's forward and backward pass."""

SWEPT = Size(blocks=4, microbatches=48)
"""Many microbatches: filling and draining the pipeline takes longer the slower the link is."""
SMALL = Size(blocks=4, width=64, sequence=32, vocabulary=128, microbatches=4)


def load_balance(seconds: Sequence[float], flops: Sequence[float]) -> float:
    """How well unlike devices share the work: 1 where all compute for the same time.

    Args:
        seconds: for each device, how long it computes in a step.
        flops: its peak, in FLOP/s.

    Returns:
        The share of what all devices could compute, while the busiest one does, that they compute.

    Source: Harp equation 20.

    Example:
        >>> load_balance([1.0, 1.0], [2e11, 1e11]), round(load_balance([0.5, 1.0], [2e11, 1e11]), 3)
        (1.0, 0.667)
    """
    longest = max(seconds)
    idle = sum((longest - each) * peak for each, peak in zip(seconds, flops, strict=True))
    return 1 - idle / (longest * sum(flops))


# Unlike speeds


def measure_unlike(options: argparse.Namespace) -> dict[str, Any]:
    """Two hosts, one slower: the plan for what is measured of them, against the even split."""
    ways = {"planned": False, "even": True}

    def slow_down(lab: Lab) -> None:
        lab.set_speed("b", options.speed)
        lab.set_link("a-b", None)

    with trainers(read_specification("two_hosts"), size_of(options), slow_down) as (_, ours):
        cluster = ours("measure_cluster")
        stages = {of: ours("make", of, even=even) for of, even in ways.items()}
        losses = {of: ours("steps", of, count=WARM_UP_STEPS) for of in ways}
        difference = check_losses(losses)
        for of in ways:
            ours("measure", of, rounds=2)
            ours("plan", of, schedules=["h_1f1b"])
        times = take_turns(
            {of: lambda of=of: ours("step", of, plan="h_1f1b") for of in ways},
            rounds=options.rounds,
            steps=1,
        )
        rows = []
        for of in ways:
            busy = [ours("busy", of, plan="h_1f1b") for _ in range(options.rounds)]
            seconds = [median(each) for each in zip(*busy, strict=True)]
            flops = [stage["flops"] for stage in stages[of]]
            rows.append(
                {
                    "plan": of,
                    "step_time": median(times[of]),
                    "stages": stages[of],
                    "compute_seconds": seconds,
                    "balance": load_balance(seconds, flops),
                    "work_ratio": _work_ratio(stages[of]),
                }
            )
    return {
        "speed": options.speed,
        "cluster": cluster,
        "rounds": options.rounds,
        "largest_loss_difference": difference,
        "rows": rows,
        "work_ratio": rows[0]["work_ratio"],
        "balance": rows[0]["balance"],
        "even_over_planned": median_ratio(times, "even", "planned"),
    }


def _work_ratio(stages: Sequence[Mapping[str, Any]]) -> float:
    """The work of the fastest host over that of the slowest one."""
    by_speed = sorted(stages, key=lambda stage: stage["flops"])
    return by_speed[-1]["work"] / by_speed[0]["work"]


def report_unlike(result: Mapping[str, Any]) -> None:
    """Print the result of `unlike` for people."""
    for row in result["rows"]:
        print(
            f"{row['plan']:10}{row['step_time'] * 1e3:6.0f} ms a step, "
            f"{row['work_ratio']:.2f} times the work on the fast host, "
            f"load balance {row['balance']:.3f}"
        )
    print(f"the plan is {result['even_over_planned']:.2f} times as fast as the even split")


# One stage over both hosts


def measure_union(options: argparse.Namespace) -> dict[str, Any]:
    """One data-parallel stage over a fast and a slow host: planned shares against even ones."""
    ways = {"planned": False, "even": True}

    def slow_down(lab: Lab) -> None:
        lab.set_speed("b", options.speed)
        lab.set_link("a-b", None)

    with trainers(read_specification("two_hosts"), size_of(options), slow_down) as (_, ours):
        cluster = ours("measure_cluster")
        shares = {of: ours("make_union", of, even=even) for of, even in ways.items()}
        losses = {of: ours("steps", of, count=WARM_UP_STEPS) for of in ways}
        difference = check_losses(losses)
        times = take_turns(
            {of: lambda of=of: ours("step", of) for of in ways}, rounds=options.rounds, steps=1
        )
    return {
        "speed": options.speed,
        "cluster": cluster,
        "rounds": options.rounds,
        "largest_loss_difference": difference,
        "rows": [{"plan": of, "step_time": median(times[of]), "shares": shares[of]} for of in ways],
        "even_over_planned": median_ratio(times, "even", "planned"),
    }


def report_union(result: Mapping[str, Any]) -> None:
    """Print the result of `union` for people."""
    for row in result["rows"]:
        print(f"{row['plan']:10}{row['step_time'] * 1e3:6.0f} ms a step, shares {row['shares']}")
    print(f"planned shares are {result['even_over_planned']:.2f} times as fast as even ones")


# Bandwidth sweep


def measure_sweep(options: argparse.Namespace) -> dict[str, Any]:
    """Step time against the rate of the link between two hosts."""
    schedules = ["h_1f1b", "search", "1f1b"]
    with trainers(read_specification("two_hosts"), size_of(options)) as (hosts, ours):
        ours("measure_cluster")
        ours("make")
        ours("steps", count=WARM_UP_STEPS)
        found = measure_ratios(hosts, ours, options.ratios, schedules, options.rounds)
    draw_sweep(found["rows"], options.figure)
    rises = {schedule: _rise(found["rows"], schedule) for schedule in schedules}
    return {"rounds": options.rounds, "figure": str(options.figure), "rises": rises, **found}


def _rise(rows: Sequence[Mapping[str, Any]], schedule: str) -> float:
    """A step with the slowest link that a stage's computation can hide, over the fastest one."""
    points = [point for point in _line(rows, schedule, "step_time") if point[0] <= 1]
    return points[-1][1] / points[0][1]


def draw_sweep(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw step times against the time of an activation on the link."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    lines = {
        "1F1B": _line(rows, "1f1b", "step_time"),
        "H-1F1B": _line(rows, "h_1f1b", "step_time"),
        "search": _line(rows, "search", "step_time"),
        "lower bound, by the times measured": _line(rows, "h_1f1b", "lower_bound"),
    }
    for (name, points), style in zip(lines.items(), ("o-", "o-", "o-", "k:"), strict=True):
        axes.plot(*zip(*points, strict=True), style, label=name)
    axes.axvline(1.0, color="0.6", linestyle="--", linewidth=1)
    axes.set(
        xlabel="time of one activation on the link over a stage's computation, c / t",
        ylabel="seconds a step",
        title="Slower and slower links between two hosts of the lab",
        ylim=(0, None),
    )
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _line(
    rows: Sequence[Mapping[str, Any]], schedule: str, figure: str
) -> list[tuple[float, float]]:
    """The points of a schedule, by c / t."""
    return sorted((row["c_over_t"], row[figure]) for row in rows if row["schedule"] == schedule)


def report_sweep(result: Mapping[str, Any]) -> None:
    """Print the result of `sweep` for people."""
    print(f"{'c/t':>5}{'rate':>14}  {'schedule':10}{'step':>9}{'predicted':>11}{'overlap':>9}")
    for row in result["rows"]:
        print(
            f"{row['c_over_t']:5.2f}{row['rate'] * 8e-6:7.1f} Mbit/s  {row['schedule']:10}"
            f"{row['step_time'] * 1e3:6.0f} ms{row['predicted_step_time'] * 1e3:8.0f} ms"
            f"{row['overlap']:9.0%}"
        )
    for schedule, rise in result["rises"].items():
        print(f"{schedule}: {rise:.3f} times as long a step where c nearly reaches t")
    print(f"drawn in {result['figure']}")


# Three hosts, four hosts


def measure_hosts(options: argparse.Namespace) -> dict[str, Any]:
    """Train on every host of a lab, and on one device; the same losses."""
    size = size_of(options)
    expected = one_device_losses(size, options.steps)
    rows = [lab_losses(read_specification(lab), size, expected) for lab in options.labs]
    return {"steps": options.steps, "losses": expected, "rows": rows}


def one_device_losses(size: Size, steps: int) -> list[float]:
    """The losses of hand-written steps on one device."""
    model = HandWritten(size, "scan")

    def loss() -> float:
        model.step()
        return model.loss

    return [loss() for _ in range(steps)]


def lab_losses(
    lab: Specification, size: Size, expected: Sequence[float], cluster: Path | None = None
) -> dict[str, Any]:
    """Train on all hosts of a lab.

    Args:
        lab: the lab.
        size: sizes of model and batch.
        expected: the losses of one device.
        cluster: the file of the lab's cluster; None to measure the lab.

    Returns:
        The plan's stages, and the largest relative difference of the losses.
    """
    with trainers(lab, size) as (_, ours):
        if cluster is None:
            ours("measure_cluster")
        stages = ours("make", cluster=cluster and str(cluster), num_stages=len(lab.hosts))
        losses = ours("steps", count=len(expected))
    difference = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    return {"lab": lab.name, "stages": stages, "largest_loss_difference": difference}


def report_hosts(result: Mapping[str, Any]) -> None:
    """Print the result of `hosts` for people."""
    for row in result["rows"]:
        shares = ", ".join(f"{stage['host']} {stage['work'] / 1e6:.0f}" for stage in row["stages"])
        print(
            f"{row['lab']:12} losses of {result['steps']} steps differ by "
            f"{row['largest_loss_difference']:.1e} at most; MFLOP on each host: {shares}"
        )


@dataclass(frozen=True)
class Part:
    """A part of the benchmark.

    Args:
        measure: measures it.
        report: prints the result for people.
        size: sizes of the GPT and its batch unless told; None where another model trains.
    """

    measure: Callable[[argparse.Namespace], dict[str, Any]]
    report: Callable[[Mapping[str, Any]], None]
    size: Size | None


PARTS = {
    "unlike": Part(measure_unlike, report_unlike, Size()),
    "union": Part(measure_union, report_union, Size(microbatches=4, microbatch_size=12)),
    "images": Part(measure_images, report_images, None),
    "sweep": Part(measure_sweep, report_sweep, SWEPT),
    "hosts": Part(measure_hosts, report_hosts, SMALL),
    "faults": Part(measure_faults, report_faults, SMALL),
}


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    whole = argparse.ArgumentParser(description=__doc__)
    parts = whole.add_subparsers(dest="part", required=True, metavar="PART")
    made = {}
    for name, part in PARTS.items():
        purpose = part.measure.__doc__
        made[name] = parts.add_parser(
            name,
            help=purpose,
            description=purpose,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        if part.size is not None:
            add_size(made[name], part.size)
        made[name].add_argument("--json", action="store_true", help="print one JSON object")
    for name, rounds in (("unlike", 5), ("union", 5), ("images", 5), ("sweep", 3)):
        made[name].add_argument("--rounds", type=positive, default=rounds, metavar="N")
    for name in ("unlike", "union", "images"):
        made[name].add_argument("--speed", type=float, default=0.5, help="of the second host")
    made["images"].add_argument("--batch", type=positive, default=512, metavar="N", help="images")
    made["sweep"].add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="c/t")
    made["sweep"].add_argument("--figure", type=Path, default=FIGURE, help="PNG file")
    made["hosts"].add_argument("--labs", nargs="+", default=LABS, metavar="LAB", help="which")
    made["hosts"].add_argument("--steps", type=positive, default=20, metavar="N")
    made["faults"].add_argument("--tries", type=positive, default=20, metavar="N")
    made["faults"].add_argument("--seed", type=int, default=0, help="of the moments")
    return whole


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    part = PARTS[options.part]
    result = part.measure(options)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        part.report(result)


if __name__ == "__main__":
    main()
