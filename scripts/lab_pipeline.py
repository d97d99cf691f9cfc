"""Schedules on slow links, for real: `bench_pipeline.py --lab` runs this.

The GPT trains as a pipeline of two stages on two hosts of the lab, each with a core. The rate of
the link between them is set so that an activation takes a given part of a stage's computation of
one microbatch. Tasks and transfers are measured in a few timed steps, by 1F1B and then by each
schedule that came of that; from these times the schedules are made. Then all schedules run in turn,
each round a step with timed tasks and one without: what is predicted of the tasks' times is
compared with the median of the steps that were not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarking import WARM_UP_STEPS, Child, check_losses, size_of, take_turns
from lab import Lab, names
from lab_trainer import CLUSTERS, Hosts, LabTrainers

from hetjax.pipeline import StepTimes

SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "h_1f1b", "h_1f1b_split", "search")
RATIOS = (0.0, 0.25, 0.5, 0.9, 1.1)
"""Of one activation's time on the link and a stage's F and B; 0 for a link without a limit."""

MICROBATCHES = 16
"""Of a step unless told: so many that filling and draining the pipeline is little of it."""

TORCH_RATIOS = (0.0, 0.9)
"""Where the peer runs, too."""


def torch_pipeline(hosts: Hosts, folder: Path) -> Any:
    """The peer at its fastest setting, on the same hosts; None where it is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    from bench_pipeline import TorchPipeline, fastest_setting, save_parameters

    parameters = folder / "parameters.npz"
    save_parameters(hosts.size, parameters)
    specification = hosts.lab.specification
    address = names.address(specification, hosts.names[0])

    def child(stage: int, flags: Sequence[str], environment: Mapping[str, str]) -> Child:
        other = hosts.names[1 - stage]
        flags = [*flags, f"--address={address}", f"--interface={names.interface(other)}"]
        return hosts.child(stage, "torch_pipeline.py", flags, **environment)

    def start(setting: str) -> TorchPipeline:
        return TorchPipeline(hosts.size, setting, parameters, child)

    setting, _ = fastest_setting(start)
    return hosts.ends.enter_context(contextlib.closing(start(setting)))


def measure_lab(options: argparse.Namespace) -> dict[str, Any]:
    """Bring the lab up, and time all schedules on links of several rates."""
    size = size_of(options)
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        hosts = Hosts(ends.enter_context(Lab.up(options.lab)), size, ends)
        hosts.set_rate(None)
        peer = torch_pipeline(hosts, folder) if options.torch else None
        ours = LabTrainers(hosts)
        ours("make", cluster=str(CLUSTERS / f"{options.lab}.yaml"))
        losses = {"hetjax": ours("steps", count=WARM_UP_STEPS)}
        if peer is not None:
            losses["torch-fastest"] = peer.run(WARM_UP_STEPS)[1]
        difference = check_losses(losses)
        measured = measure_ratios(hosts, ours, options.ratios, SCHEDULES, options.rounds, peer)
    return {
        "lab": options.lab,
        "rounds": options.rounds,
        "largest_loss_difference": difference,
        **measured,
        **_figures(measured["rows"]),
    }


def measure_ratios(
    hosts: Hosts,
    ours: LabTrainers,
    ratios: Sequence[float],
    schedules: Sequence[str],
    rounds: int,
    peer: Any = None,
) -> dict[str, Any]:
    """Time schedules on links of several rates.

    Args:
        hosts: the lab, of two hosts.
        ours: the trainer.
        ratios: for each rate, an activation's time on it over a stage's computation; 0 for a link
            without a limit.
        schedules: the schedules' names.
        rounds: how often each runs in its turn.
        peer: what else takes turns at `TORCH_RATIOS`; None for nothing.

    Returns:
        The seconds of a stage's computation, the bytes of an activation, and the rows.
    """
    hosts.set_rate(None)
    found = ours("measure", rounds=2)
    compute = max(StepTimes(**found["times"]).compute)
    rows: list[dict[str, Any]] = []
    for ratio in ratios:
        rate = found["num_bytes"] / (ratio * compute) if ratio else None
        hosts.set_rate(rate)
        rivals = {"torch": peer} if peer is not None and ratio in TORCH_RATIOS else {}
        for row in _rows(ours, schedules, rounds, **rivals):
            rows.append({"ratio": ratio, "rate": rate, **row})
        print(f"c = {ratio:g} t is done", file=sys.stderr)
    return {"compute_seconds": compute, "activation_bytes": found["num_bytes"], "rows": rows}


def _rows(
    ours: LabTrainers, schedules: Sequence[str], rounds: int, torch: Any = None
) -> Iterator[dict[str, Any]]:
    """The rows of one rate of the link."""
    times = StepTimes(**ours("measure", rounds=1)["times"])
    ours("plan", schedules=schedules)

    def turns(name: str) -> Callable[[], float]:
        # The first of two steps in a round does not count, so it is the timed one.
        steps = itertools.cycle(("timed_step", "step"))
        return lambda: ours(next(steps), plan=name)

    systems = {name: turns(name) for name in schedules}
    if torch is not None:
        systems["torch"] = lambda: torch.run(1)[0][0]
    seconds = take_turns(systems, rounds=rounds, steps=1)
    c_over_t = max(times.communication) / max(times.compute)
    for name in schedules:
        yield {
            "system": "hetjax",
            "schedule": name,
            "c_over_t": c_over_t,
            "step_time": median(seconds[name]),
            **ours("figures", plan=name),
        }
    if torch is not None:
        yield {
            "system": "torch-fastest",
            "schedule": "1f1b",
            "c_over_t": c_over_t,
            "step_time": median(seconds["torch"]),
            "predicted_step_time": None,
            "overlap": None,
        }


def _figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the rows come to: errors of the prediction, and ratios between the systems."""
    ours = [row for row in rows if row["system"] == "hetjax"]
    errors = [row["predicted_step_time"] / row["step_time"] - 1 for row in ours]
    figures: dict[str, Any] = {
        "largest_prediction_error": max(map(abs, errors)),
        "mean_prediction_error": sum(map(abs, errors)) / len(errors),
        "wrong_rankings": wrong_rankings(ours),
        "against": {},
    }
    for ratio in dict.fromkeys(row["ratio"] for row in rows):
        times = {
            (row["system"], row["schedule"]): row["step_time"]
            for row in rows
            if row["ratio"] == ratio
        }
        best = min(seconds for (system, _), seconds in times.items() if system == "hetjax")
        figures["against"][f"{ratio:g}"] = {
            f"{system}, {schedule}": best / seconds for (system, schedule), seconds in times.items()
        }
    return figures


def wrong_rankings(rows: Sequence[Mapping[str, Any]], tolerance: float = 0.05) -> list[list[Any]]:
    """Pairs of rows of one rate whose measured order is not the predicted one.

    Args:
        rows: with ``ratio``, ``schedule``, ``step_time`` and ``predicted_step_time``.
        tolerance: pairs whose measured times differ by less, relatively, are not looked at.

    Returns:
        For each such pair the ratio and the two schedules.
    """
    wrong = []
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            if a["ratio"] != b["ratio"]:
                continue
            measured = a["step_time"] / b["step_time"]
            predicted = a["predicted_step_time"] / b["predicted_step_time"]
            if abs(measured - 1) > tolerance and (measured > 1) != (predicted > 1):
                wrong.append([a["ratio"], a["schedule"], b["schedule"]])
    return wrong


def report_lab(result: Mapping[str, Any]) -> None:
    """Print a result for people."""
    print(f"{'c/t':>5}  {'system':14}{'schedule':14}{'step':>9}{'predicted':>11}{'overlap':>9}")
    for row in result["rows"]:
        predicted, hidden = row["predicted_step_time"], row["overlap"]
        print(
            f"{row['c_over_t']:5.2f}  {row['system']:14}{row['schedule']:14}"
            f"{row['step_time'] * 1e3:6.0f} ms"
            + (f"{predicted * 1e3:8.0f} ms" if predicted else "")
            + (f"{hidden:9.0%}" if hidden is not None else "")
        )
    print(f"largest error of a prediction: {result['largest_prediction_error']:.1%}")
    print(f"pairs ranked wrongly: {result['wrong_rankings'] or 'none'}")
