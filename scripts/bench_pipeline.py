"""How much faster a GPT trains on two cores than on one, by a pipeline of two Ray workers.

Each of the two stages' workers is pinned to a core. The same model trains on one core by hetjax
(one stage) and by hand-written `jax.jit` steps; the fastest of these is the base of the speedup.
Where torch is installed, `torch.distributed.pipelining` trains it too, with its defaults and with
the fastest of its settings. All systems start from the same parameters, must have the same losses,
and run in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import jax
import lab_pipeline
import numpy as np
from baselines import BASELINES, HandWritten, model_of, optimizer
from bench_overhead import OneStage
from benchmarking import (
    KEPT_MEMORY,
    SCRIPTS,
    WARM_UP_STEPS,
    Child,
    Size,
    argument_parser,
    check_losses,
    median_ratio,
    serve,
    size_flags,
    size_of,
    take_turns,
)

import hetjax
from hetjax.runtime.ray.ray_worker import pin_to_core

CLUSTER = SCRIPTS.parent / "configs" / "clusters" / "two_hosts.yaml"
CORES = (0, 1)
SCHEDULES = ("1f1b", "h_1f1b", "search")
SAME_PRECISION = 1e-5
"""A larger relative difference of the first losses is no longer float32's rounding."""


@dataclass
class System:
    """A way to train the model.

    Args:
        name: what it is.
        schedule: its pipeline schedule, or how it computes a step on one core.
        cores: how many cores it has.
        step: runs one step; its seconds.
        losses: of its first steps.
        notes: what else to report of it.
    """

    name: str
    schedule: str
    cores: int
    step: Callable[[], float]
    losses: list[float]
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A name that no other system has."""
        return f"{self.name}, {self.schedule}"

    def row(self, times: Sequence[float]) -> dict[str, Any]:
        """The system's row of the result."""
        return {
            "system": self.name,
            "schedule": self.schedule,
            "cores": self.cores,
            "step_time": median(times),
            **self.notes,
        }


def one_core(size: Size, ends: contextlib.ExitStack) -> Iterator[System]:
    """The model on one core: hetjax's one stage and the hand-written steps, in one process."""
    flags = ["--one-core", *size_flags(size)]
    child = ends.enter_context(contextlib.closing(Child("bench_pipeline.py", flags, KEPT_MEMORY)))

    def ask(way: str) -> tuple[float, float]:
        child.ask(way)
        return tuple(child.answer())

    for way in ("hetjax", *BASELINES):
        losses = [ask(way)[1] for _ in range(WARM_UP_STEPS)]
        name, schedule = ("one-core", "one stage") if way == "hetjax" else ("one-core jit", way)
        yield System(name, schedule, 1, lambda way=way: ask(way)[0], losses)


def serve_one_core(size: Size) -> None:
    """Be the process that `one_core` asks."""
    pin_to_core(CORES[0])
    systems: dict[str, OneStage | HandWritten] = {}

    def answer(way: str) -> tuple[float, float]:
        if way not in systems:
            systems[way] = OneStage(size) if way == "hetjax" else HandWritten(size, way)
        return systems[way].step(), systems[way].loss

    serve(answer)


def two_stages(size: Size, schedule: str, ends: contextlib.ExitStack) -> System:
    """The model as a pipeline of two Ray workers, each on its core."""
    model = model_of(size)
    batch = {"tokens": size.tokens()}
    parameters = jax.jit(model.init)(jax.random.key(0))
    plan = hetjax.plan(
        model.loss,
        parameters,
        batch,
        cluster=hetjax.Cluster.from_file(CLUSTER),
        optimizer=optimizer(),
        num_microbatches=size.microbatches,
        options=hetjax.PlanOptions(
            schedule=schedule, allow_recompute=False, min_stages=len(CORES), max_pipelines=1
        ),
    )
    trainer = ends.enter_context(
        hetjax.Trainer(
            plan,
            model.loss,
            parameters,
            optimizer(),
            batch,
            runtime=hetjax.RayOptions("local", CORES),
        )
    )
    losses = [trainer.train_step(batch).loss for _ in range(WARM_UP_STEPS)]
    notes = {
        "warm_up_counts": plan.pipeline.schedule.warm_up_counts,
        "stages": stages(trainer, batch),
    }
    return System(
        "hetjax", schedule, len(CORES), lambda: trainer.train_step(batch).seconds, losses, notes
    )


def stages(trainer: hetjax.Trainer, batch: Any) -> list[dict[str, Any]]:
    """Where a step's time goes on each stage: the quickest of a few with timed operations."""
    steps = []
    for _ in range(WARM_UP_STEPS):
        metrics = trainer.train_step(batch, timed=True)
        steps.append((metrics.seconds, trainer.timeline(), trainer.reports))
    _, timeline, reports = min(steps, key=lambda step: step[0])
    rows = []
    for stage, (plan, report) in enumerate(zip(trainer.plan.pipeline.stages, reports, strict=True)):
        events = timeline.on(f"stage {stage}")
        seconds: dict[str, list[float]] = {}
        for event in events:
            seconds.setdefault(event.kind, []).append(event.duration)
        rows.append(
            {
                "layers": plan.layers,
                **{f"median_{kind}_seconds": median(found) for kind, found in seconds.items()},
                "busy_seconds": timeline.busy(f"stage {stage}"),
                "wait_seconds": report.wait_seconds,
            }
        )
    return rows


class TorchPipeline:
    """`torch.distributed.pipelining` in two processes, each pinned to a core.

    Args:
        size: sizes of model and batch.
        setting: one of `torch_pipeline.SETTINGS`.
        parameters: file of the initial parameters.
        child: starts a stage's process, given its flags and variables.
    """

    def __init__(
        self,
        size: Size,
        setting: str,
        parameters: Path,
        child: Callable[[int, Sequence[str], Mapping[str, str]], Child] | None = None,
    ):
        from torch_pipeline import environment

        def here(stage: int, flags: Sequence[str], variables: Mapping[str, str]) -> Child:
            return Child("torch_pipeline.py", flags, variables)

        flags = [f"--setting={setting}", f"--port={free_port()}", f"--parameters={parameters}"]
        self._children = [
            (child or here)(
                stage,
                [f"--stage={stage}", f"--core={core}", *flags, *size_flags(size)],
                environment(setting),
            )
            for stage, core in enumerate(CORES)
        ]

    def run(self, steps: int) -> tuple[list[float], list[float], int]:
        """Run steps; the seconds and the loss of each, and the number of parameters."""
        for child in self._children:
            child.ask(steps)
        answers = [child.answer() for child in self._children]
        num_parameters = sum(answer["parameters"] for answer in answers)
        return answers[0]["seconds"], answers[-1]["losses"], num_parameters

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.close()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torch_systems(
    size: Size, ends: contextlib.ExitStack
) -> tuple[list[System], list[dict[str, Any]]]:
    """The peer, with its defaults and with the fastest of its settings that compute in float32.

    Returns:
        The two systems, and what every setting gave in a short trial.
    """
    folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
    parameters = folder / "parameters.npz"
    num_parameters = save_parameters(size, parameters)

    def start(setting: str) -> TorchPipeline:
        return TorchPipeline(size, setting, parameters)

    fastest, trials = fastest_setting(start)
    counts = {trial.pop("parameters") for trial in trials}
    assert counts == {num_parameters}, f"torch's model has {counts} parameters"
    systems = []
    for name, setting in (("torch", "default"), ("torch-fastest", fastest)):
        pipeline = ends.enter_context(contextlib.closing(TorchPipeline(size, setting, parameters)))
        _, losses, _ = pipeline.run(WARM_UP_STEPS)
        systems.append(
            System(
                name,
                "1f1b",
                len(CORES),
                lambda pipeline=pipeline: pipeline.run(1)[0][0],
                losses,
                {"setting": setting},
            )
        )
    return systems, trials


def fastest_setting(start: Callable[[str], TorchPipeline]) -> tuple[str, list[dict[str, Any]]]:
    """The peer's fastest setting that computes in float32.

    Args:
        start: starts the peer with a setting.

    Returns:
        The setting, and what every setting gave in a short trial.
    """
    from torch_pipeline import SETTINGS

    trials: list[dict[str, Any]] = []
    reference: list[float] = []
    for setting in SETTINGS:
        with contextlib.closing(start(setting)) as pipeline:
            _, losses, count = pipeline.run(WARM_UP_STEPS)
            seconds, _, _ = pipeline.run(WARM_UP_STEPS)
        reference = reference or losses
        gap = max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))
        trials.append(
            {
                "setting": setting,
                "step_time": median(seconds),
                "float32": gap < SAME_PRECISION,
                "parameters": count,
            }
        )
    exact = [trial for trial in trials if trial["float32"]]
    return min(exact, key=lambda trial: trial["step_time"])["setting"], trials


def save_parameters(size: Size, path: Path) -> int:
    """Write the initial parameters for torch; how many numbers they are."""
    drawn = jax.jit(model_of(size).init)(jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(drawn)
    arrays = {
        jax.tree_util.keystr(names, simple=True, separator="/"): np.asarray(leaf)
        for names, leaf in leaves
    }
    np.savez(path, allow_pickle=False, **arrays)
    return sum(array.size for array in arrays.values())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start all systems, check that they agree, and time them in turn."""
    size = size_of(options)
    peers: dict[str, Any] = {}
    with contextlib.ExitStack() as ends:
        systems = [*one_core(size, ends)]
        systems += [two_stages(size, schedule, ends) for schedule in SCHEDULES]
        if not options.torch:
            peers["skipped"] = {"torch": "left out by --no-torch"}
        elif importlib.util.find_spec("torch") is None:
            peers["skipped"] = {"torch": 'not installed; pip install -e ".[bench]"'}
        else:
            found, peers["torch_settings"] = torch_systems(size, ends)
            systems += found
        difference = check_losses({system.key: system.losses for system in systems})
        times = take_turns(
            {system.key: system.step for system in systems},
            rounds=options.rounds,
            steps=options.steps,
        )
    rows = [system.row(times[system.key]) for system in systems]
    speeds = {system.key: median(times[system.key]) for system in systems}
    base = min((s.key for s in systems if s.cores == 1), key=speeds.__getitem__)
    ours = {s.schedule: median_ratio(times, base, s.key) for s in systems if s.name == "hetjax"}
    microbatches = size.microbatches
    return {
        "speedup": max(ours.values()),
        "speedups": ours,
        "base": base,
        "bubble_bound": len(CORES) * microbatches / (microbatches + len(CORES) - 1),
        "rounds": options.rounds,
        "largest_loss_difference": difference,
        "rows": rows,
        **peers,
    }


def report(result: dict[str, Any]) -> None:
    """Print a result for people."""
    print(f"{'system':16}{'schedule':14}{'cores':>6}{'step':>12}")
    for row in result["rows"]:
        step = f"{row['step_time'] * 1e3:.0f} ms"
        print(f"{row['system']:16}{row['schedule']:14}{row['cores']:6}{step:>12}")
    for schedule, speedup in result["speedups"].items():
        print(f"hetjax, {schedule}: {speedup:.2f} times as fast as {result['base']}")
    print(f"the bubble allows {result['bubble_bound']:.2f}")
    for system, reason in result.get("skipped", {}).items():
        print(f"{system}: {reason}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__, rounds=7, steps=2)
    parser.add_argument(
        "--no-torch", dest="torch", action="store_false", help="leave torch out of the comparison"
    )
    parser.add_argument(
        "--lab", metavar="NAME", help="compare schedules on a lab of configs/lab, as root"
    )
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="+",
        default=lab_pipeline.RATIOS,
        help="c/t on the lab's link: an activation's time on it over a stage's computation",
    )
    parser.add_argument("--one-core", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.lab:
        parser.set_defaults(microbatches=lab_pipeline.MICROBATCHES)
        options = parser.parse_args(arguments)
    # Ray's workers give way to all other processes unless told; no other system here does.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if options.one_core:
        serve_one_core(size_of(options))
        return
    result = lab_pipeline.measure_lab(options) if options.lab else measure(options)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        (lab_pipeline.report_lab if options.lab else report)(result)


if __name__ == "__main__":
    main()
