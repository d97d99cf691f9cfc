"""What plans hold that make layers again or offload: predicted, and by XLA.

    python scripts/h2_memory.py nothing
    python scripts/h2_memory.py offload --seconds
    python scripts/h2_memory.py activations --seconds

Two stages of a GPT on two host devices. In the ways that tell of activations stages run all forward
passes before the first backward pass, so that much is kept. "By XLA" is the peak over a stage's
instruction list: the buffers that are there, by their own sizes, and what XLA's `memory_analysis`
says of each program that runs on them: its temporary memory, and those results that take no
argument's place. On host devices the hosts' memory is the same: what is offloaded counts by where
its arrays say that they are.

`bench_h2.py memory` runs all of it, each way in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from hetjax.planner.plan.stage_plan import Offloaded as Kept
from hetjax.planner.work.repeating_layers import Repetition

WAYS: Mapping[str, tuple[Repetition, tuple[Kept, ...], str]] = {
    "nothing": ("nothing", (), "1f1b"),
    "half": ("half", (), "1f1b"),
    "layers": ("layers", (), "1f1b"),
    "stage": ("stage", (), "1f1b"),
    "offload": ("nothing", ("optimizer_state",), "1f1b"),
    "offload layers": ("layers", ("optimizer_state",), "1f1b"),
    "kept activations": ("nothing", (), "gpipe"),
    "activations": ("nothing", ("activations",), "gpipe"),
    "activations layers": ("layers", ("activations",), "gpipe"),
    "activations and state": ("nothing", ("activations", "optimizer_state"), "gpipe"),
}
"""What stages make again, what they offload, and the schedule."""

MODELS: Mapping[str, dict[str, Any]] = {
    "long": {"width": 128, "heads": 4, "sequence": 256},
    "wide": {"width": 512, "heads": 4, "sequence": 32},
    "half_precision": {"width": 768, "heads": 12, "sequence": 512, "compute_dtype": "bfloat16"},
}
"""Of "long" much is kept of a microbatch; of "wide" optimizer state is the most."""

MICROBATCHES, EXAMPLES, STEPS = 4, 16, 7


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--model", choices=MODELS, default="long")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--seconds", action="store_true", help="time steps, too")
    asked = parser.parse_args(arguments)
    # Before JAX starts.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={asked.stages}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    for row in rows(asked.way, asked.model, asked.stages, with_seconds=asked.seconds):
        print(json.dumps(row))


def rows(way: str, model: str, stages: int, *, with_seconds: bool) -> Iterator[dict[str, Any]]:
    """A row for each stage of a plan.

    Args:
        way: one of `WAYS`.
        model: one of `MODELS`.
        stages: how many stages.
        with_seconds: whether steps are timed.
    """
    import jax
    import numpy as np

    import hetjax

    config, language, optimizer = model_of(model)
    parameters = jax.jit(language.init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, 512, (EXAMPLES, config.sequence + 1), dtype=np.int32)}
    plan = plan_of(way, stages, language.loss, parameters, batch, optimizer)
    with hetjax.Trainer(plan, language.loss, parameters, optimizer, batch) as trainer:
        trainer.train_step(batch)
        executor: Any = trainer._executor
        workers = executor.workers
        for worker in workers:
            worker.buffers = Noting(worker.buffers)
        trainer.train_step(batch)
        for predicted, worker in zip(plan.predicted.stages, workers, strict=True):
            by_xla, on_host, at = peak(worker)
            yield {
                "way": way,
                "model": model,
                "stage": worker.stage,
                "predicted_bytes": predicted.memory_bytes,
                "xla_bytes": by_xla,
                "ratio": predicted.memory_bytes / by_xla,
                "at": at,
                "predicted_host_bytes": predicted.host_bytes + predicted.host_activation_bytes,
                "host_bytes": on_host,
            }
        if with_seconds:
            yield seconds(trainer, batch, plan, way, model)


def model_of(name: str) -> tuple[Any, Any, Any]:
    """A model of `MODELS`: its configuration, itself, and what updates it."""
    import optax

    from hetjax.models import GPTConfig, language_model

    config = GPTConfig(vocabulary=512, blocks=12, **MODELS[name])
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return config, language_model(config), optimizer


def seconds(trainer: Any, batch: Any, plan: Any, way: str, model: str) -> dict[str, Any]:
    """What steps and the stages' updates take, beside what is predicted of the updates."""
    from hetjax.pipeline.timeline.measured_times import update_seconds

    steps, updates = [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        trainer.train_step(batch)
        steps.append(time.perf_counter() - began)
    for _ in range(STEPS):
        trainer.train_step(batch, timed=True)
        timeline = trainer.timeline()
        updates.append([update_seconds(timeline, s) for s in range(len(plan.stages))])
    return {
        "way": way,
        "model": model,
        "step_seconds": median(steps),
        "predicted_step_seconds": plan.prediction.step_time,
        "update_seconds": [median(each) for each in zip(*updates, strict=True)],
        "predicted_update_seconds": [each.update_seconds for each in plan.prediction.stages],
    }


def peak(worker: Any) -> tuple[int, int, str]:
    """The most bytes on a stage's devices, those on its hosts, and what runs at the peak.

    Args:
        worker: the stage's, which has trained with `Noting` for its buffers.
    """
    return peak_of(worker, worker.buffers.sizes, worker.buffers)


def peak_of(worker: Any, sizes: Mapping[Any, int], there: Collection[Any]) -> tuple[int, int, str]:
    """The same of a worker that need not have trained.

    Args:
        worker: the stage's.
        sizes: bytes of all its buffers.
        there: the buffers that are there when a step begins.
    """
    from hetjax.runtime.instructions import instruction as kinds
    from hetjax.runtime.instructions.buffers import Offloaded

    programs = worker.compiled.programs
    device = {name for name in there if not isinstance(name, Offloaded)}
    host = {*there} - device
    most, at, on_host = 0, "", 0
    for each in worker.training:
        held = sum(sizes[name] for name in device)
        on_host = max(on_host, sum(sizes[name] for name in host))
        match each:
            case kinds.Run():
                made = sum(sizes[b] for b in each.outputs if b not in device)
                analysis = programs[each.program].memory_analysis()
                held += analysis.temp_size_in_bytes + made
                held += _unplaced(analysis, made)
                what, device = each.program, device | set(each.outputs)
            case kinds.Load() | kinds.Receive() | kinds.Fetch():
                device = device | set(each.buffers)
                held, what = sum(sizes[name] for name in device), type(each).__name__
            case kinds.Store():
                host, what = host | set(each.targets), ""
            case kinds.Free():
                gone = set(each.buffers)
                device, host, what = device - gone, host - gone, ""
            case _:
                what = ""
        if held > most:
            most, at = held, what
    return most, on_host, at


def _unplaced(analysis: Any, made: int) -> int:
    """Bytes of a program's results that take no argument's place, beside new buffers."""
    from hetjax.runtime.compilation.piecewise_program import PiecewiseMemory

    if isinstance(analysis, PiecewiseMemory):
        return 0
    return max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes - made)


def device_bytes(array: Any) -> int:
    """What an array takes of the device that has the most of it."""
    shards = getattr(array, "addressable_shards", None)
    return max(shard.data.nbytes for shard in shards) if shards else array.nbytes


class Noting(dict[Any, Any]):
    """A worker's buffers, with the sizes of all that were ever there."""

    def __init__(self, buffers: Mapping[Any, Any]):
        super().__init__(buffers)
        self.sizes = {name: device_bytes(array) for name, array in buffers.items()}

    def __setitem__(self, name: Any, array: Any) -> None:
        self.sizes[name] = device_bytes(array)
        super().__setitem__(name, array)

    def update(self, *pairs: Any, **named: Any) -> None:
        """Name arrays, one by one."""
        for name, array in dict(*pairs, **named).items():
            self[name] = array


def plan_of(
    way: str,
    stages: int,
    loss: Any,
    parameters: Any,
    batch: Any,
    optimizer: Any,
    chip: Any = None,
) -> Any:
    """A plan of equal stages that run in a way, with its prediction; on this host by default."""
    from hetjax.mesh import Cluster, Link, Subcluster, SubMesh, measure_host_cpu
    from hetjax.pipeline.schedule_search.named_schedules import make_schedule
    from hetjax.planner import make_problem, predict
    from hetjax.planner.harp.candidate_plans import pipeline_plan
    from hetjax.planner.plan.stage_plan import Member, StagePlan
    from hetjax.planner.work.repeating_layers import repeated_by

    link = Link(10e9, 1e-5)
    chip = replace(chip or measure_host_cpu(stages), memory_bytes=10**11)
    part = Subcluster("chips", chip, 1, stages, link, link, host_memory_bytes=10**11)
    problem = make_problem(
        loss,
        parameters,
        batch,
        cluster=Cluster("memory", (part,)),
        optimizer=optimizer,
        num_microbatches=MICROBATCHES,
    )
    repeats, offload, name = WAYS[way]
    count = problem.num_layers
    edges = [round(count * s / stages) for s in range(stages + 1)]
    made = []
    for s in range(stages):
        layers = edges[s], edges[s + 1]
        member = Member(SubMesh("chips", s, (1, 1)), (1, 1))
        again = repeated_by(repeats, problem.repeatable_layers, layers)
        made.append(
            StagePlan(
                layers,
                (member,),
                recompute=repeats == "stage",
                recompute_layers=again,
                offload=offload,
            )
        )
    schedule = make_schedule(name, stages, MICROBATCHES)
    plan = pipeline_plan(problem, made, schedule, "bench_h2.py memory")
    return predict(plan, problem)


if __name__ == "__main__":
    main()
