"""Schedules on slow links, for real: `bench_pipeline.py --lab` runs this.

The GPT trains as a pipeline of two stages on two hosts of the lab, each with a core. The rate of
the link between them is set so that an activation takes a given part of a stage's computation of
one microbatch. Tasks and transfers are measured in a few timed steps; from these times the
schedules are made and their step times predicted. Then all schedules run in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
from baselines import model_of, optimizer
from benchmarking import (
    LARGE_PAGES,
    SCRIPTS,
    WARM_UP_STEPS,
    Child,
    Size,
    check_losses,
    serve,
    size_flags,
    size_of,
    take_turns,
)
from lab import Lab, names

import hetjax
from hetjax.pipeline import StepTimes
from hetjax.pipeline.overlap import overlap
from hetjax.pipeline.timeline import link_track
from hetjax.planner import choose_schedule

CLUSTERS = SCRIPTS.parent / "configs" / "lab" / "clusters"
SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "h_1f1b", "h_1f1b_split", "search")
RATIOS = (0.0, 0.25, 0.5, 0.9, 1.1)
"""Of one activation's time on the link and a stage's F and B; 0 for a link without a limit."""

TORCH_RATIOS = (0.0, 0.9)
"""Where the peer runs, too."""


class PipelineServer:
    """The trainer on the lab's first host: it does what the benchmark asks, one thing at a time.

    Args:
        size: sizes of model and batch.
        cluster: the cluster file.
    """

    def __init__(self, size: Size, cluster: Path):
        model = model_of(size)
        self.batch = {"tokens": size.tokens()}
        parameters = jax.jit(model.init)(jax.random.key(0))
        plan = hetjax.plan(
            model.loss,
            parameters,
            self.batch,
            cluster=hetjax.Cluster.from_file(cluster),
            optimizer=optimizer(),
            num_microbatches=size.microbatches,
            schedule="1f1b",
            allow_recompute=False,
            min_stages=2,
            max_stages=2,
        )
        self.trainer = hetjax.Trainer(
            plan, model.loss, parameters, optimizer(), self.batch, runtime="ray"
        )

    def answer(self, request: Mapping[str, Any]) -> Any:
        """Do what is asked, by the method that the request names."""
        method = getattr(self, f"do_{request['do']}")
        return method(**{name: value for name, value in request.items() if name != "do"})

    def do_steps(self, count: int) -> list[float]:
        """Run steps; their losses."""
        return [self.trainer.train_step(self.batch).loss for _ in range(count)]

    def do_step(self, plan: str) -> float:
        """Run one step by a plan that was made before; its seconds."""
        self.trainer.use_schedule(self.plans[plan].pipeline.schedule)
        return self.trainer.train_step(self.batch).seconds

    def do_measure(self, rounds: int) -> dict[str, Any]:
        """Time tasks and transfers; their seconds, and the bytes of an activation."""
        times = self.trainer.measure(self.batch, rounds=rounds)
        events = self.trainer.timeline().on(link_track(0, 1))
        self.times = times
        return {"times": asdict(times), "num_bytes": max(event.num_bytes for event in events)}

    def do_plan(self, schedules: Sequence[str]) -> dict[str, Any]:
        """Make schedules of the measured times; what is predicted of each."""
        self.plans = {
            name: choose_schedule(self.trainer.plan, name, self.times) for name in schedules
        }
        return {name: self._figures(plan) for name, plan in self.plans.items()}

    def _figures(self, plan: hetjax.Plan) -> dict[str, Any]:
        assert plan.prediction is not None
        schedule = plan.pipeline.schedule
        return {
            "predicted_step_time": plan.prediction.step_time,
            "lower_bound": plan.prediction.lower_bound,
            "live": [schedule.live_bound(stage) for stage in range(schedule.num_stages)],
        }

    def do_overlap(self, plan: str) -> float:
        """Run one timed step by a plan; the part of the link's time that computation hid."""
        self.trainer.use_schedule(self.plans[plan].pipeline.schedule)
        self.trainer.train_step(self.batch, timed=True)
        return min(overlap(self.trainer.timeline()).values(), default=0.0)


@dataclass
class Hosts:
    """The benchmark's side of the lab.

    Args:
        lab: the lab, of two hosts.
        size: sizes of model and batch.
        ends: what ends the processes.
    """

    lab: Lab
    size: Size
    ends: contextlib.ExitStack

    @property
    def names(self) -> list[str]:
        """The hosts, in order."""
        return [host.name for host in self.lab.specification.hosts]

    def child(self, host: int, script: str, flags: Sequence[str], **variables: str) -> Child:
        """A process on a host."""
        environment = {**self.lab.environment(), **variables}
        child = Child(
            script, flags, environment, lambda command: self.lab.command(self.names[host], command)
        )
        return self.ends.enter_context(contextlib.closing(child))

    def set_rate(self, rate: float | None) -> None:
        """Limit the link between the two hosts to bytes/s, or not at all."""
        self.lab.set_link(self.lab.specification.links[0].name, rate)


class LabPipeline:
    """The trainer in the lab.

    Args:
        hosts: the lab.
        cluster: the file that describes the lab's hosts to the trainer.
    """

    def __init__(self, hosts: Hosts, cluster: Path):
        flags = ["--serve-lab", str(cluster), *size_flags(hosts.size)]
        self._child = hosts.child(0, "bench_pipeline.py", flags, **LARGE_PAGES)

    def __call__(self, do: str, **arguments: Any) -> Any:
        """Have something done; see `PipelineServer`."""
        self._child.ask({"do": do, **arguments})
        return self._child.answer(deadline=1200.0)


def serve_lab(options: argparse.Namespace) -> None:
    """Be the process that `LabPipeline` asks."""
    server = PipelineServer(size_of(options), Path(options.serve_lab))
    try:
        serve(server.answer)
    finally:
        server.trainer.close()


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
        ours = LabPipeline(hosts, CLUSTERS / f"{options.lab}.yaml")
        losses = {"hetjax": ours("steps", count=WARM_UP_STEPS)}
        if peer is not None:
            losses["torch-fastest"] = peer.run(WARM_UP_STEPS)[1]
        difference = check_losses(losses)
        found = ours("measure", rounds=2)
        compute = max(StepTimes(**found["times"]).compute)
        rows: list[dict[str, Any]] = []
        for ratio in options.ratios:
            hosts.set_rate(found["num_bytes"] / (ratio * compute) if ratio else None)
            rows += _rows(options, ratio, ours, peer)
            print(f"c = {ratio:g} t is done", file=sys.stderr)
    return {
        "lab": options.lab,
        "rounds": options.rounds,
        "largest_loss_difference": difference,
        "compute_seconds": compute,
        "activation_bytes": found["num_bytes"],
        "rows": rows,
        **_figures(rows),
    }


def _rows(
    options: argparse.Namespace, ratio: float, ours: LabPipeline, peer: Any
) -> Iterator[dict[str, Any]]:
    """The rows of one rate of the link."""
    times = StepTimes(**ours("measure", rounds=1)["times"])
    plans = ours("plan", schedules=SCHEDULES)
    systems: dict[str, Callable[[], float]] = {
        name: lambda name=name: ours("step", plan=name) for name in SCHEDULES
    }
    if peer is not None and ratio in TORCH_RATIOS:
        systems["torch"] = lambda: peer.run(1)[0][0]
    seconds = take_turns(systems, rounds=options.rounds, steps=1)
    c_over_t = max(times.communication) / max(times.compute)
    for name in SCHEDULES:
        yield {
            "system": "hetjax",
            "schedule": name,
            "ratio": ratio,
            "c_over_t": c_over_t,
            "step_time": median(seconds[name]),
            **plans[name],
            "overlap": ours("overlap", plan=name),
        }
    if "torch" in systems:
        yield {
            "system": "torch-fastest",
            "schedule": "1f1b",
            "ratio": ratio,
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
