"""A pipeline that passes its submeshes twice beside 1F1B, H-1F1B and the search: simulated, run.

    python scripts/h2_virtual.py played --json
    python scripts/h2_virtual.py local --json
    python scripts/h2_virtual.py ray --json

A GPT on equal devices with as many microbatches as devices. `played` is one process that plays four
fast devices: what is simulated is the plan's own prediction, and what is measured shows whether the
runtime goes through the plan as it says. `local` and `ray` are two cores of this machine, in one
process and as two workers with a core each; there each plan's tasks and transfers are measured
first, its schedule is made for these times, and all plans are then timed in turns. A row tells of
each schedule what is simulated of it and what its steps took, and whether it is the one with the
least simulated time, which is the one that is taken. `bench_h2.py virtual` runs all three.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

RUNTIMES = ("played", "local", "ray")

SCHEDULES = ("1f1b", "h_1f1b", "search")
"""Those of stages with devices of their own."""

INTERLEAVED = "interleaved"

CARD_FLOPS, CARD_LINK = 2e11, 25e9
"""Of the devices that are played: FLOP/s, and bytes/s between two of them."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runtime", choices=RUNTIMES)
    parser.add_argument("--json", action="store_true", help="a row a line, as JSON")
    parser.add_argument("--devices", type=int, help="4 where they are played, else 2")
    parser.add_argument("--passes", type=int, default=2, help="over all devices")
    parser.add_argument("--blocks", type=int, default=8, help="of the GPT")
    parser.add_argument("--width", type=int, default=128, help="of the GPT")
    parser.add_argument("--microbatch", type=int, default=1, help="examples in each")
    parser.add_argument("--rounds", type=int, default=7, help="timed, whose median counts")
    options = parser.parse_args(arguments)
    devices = options.devices or (4 if options.runtime == "played" else 2)
    # Before JAX starts: a device computes on one core, as it does in a worker that has but one.
    flags = f"--xla_force_host_platform_device_count={devices}"
    if options.runtime == "local":
        flags += " --xla_cpu_multi_thread_eigen=false"
    os.environ["XLA_FLAGS"], os.environ["JAX_PLATFORMS"] = flags, "cpu"
    for row in rows(options, devices):
        print(json.dumps(row) if options.json else row, flush=True)


def rows(options: argparse.Namespace, devices: int) -> Iterator[dict[str, Any]]:
    """A row for each schedule.

    Args:
        options: as the command line has them.
        devices: how many.
    """
    ingredients, plans = plans_of(options, devices)
    with contextlib.ExitStack() as stack:
        trainers = {}
        for name, plan in plans.items():
            # Schedules of the same stages are those of one trainer.
            kind = INTERLEAVED if name == INTERLEAVED else SCHEDULES[0]
            if kind not in trainers:
                made = trainer_of(options.runtime, ingredients, plan)
                trainers[kind] = stack.enter_context(made)
        if options.runtime != "played":
            plans = measured_plans(trainers, plans, ingredients)
        steps = {
            name: step_of(
                trainers[INTERLEAVED if name == INTERLEAVED else SCHEDULES[0]], plan, ingredients
            )
            for name, plan in plans.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in plans}
        for round_ in range(options.rounds + 1):
            for name in list(plans)[:: -1 if round_ % 2 else 1]:
                found = steps[name]()
                if round_:
                    seconds[name].append(found)
    simulated = {name: plan.prediction.step_time for name, plan in plans.items()}
    taken = min(simulated, key=lambda name: simulated[name])
    measured = {name: median(each) for name, each in seconds.items()}
    for name, plan in plans.items():
        yield {
            "runtime": options.runtime,
            "schedule": name,
            "devices": devices,
            "stages": len(plan.stages),
            "num_microbatches": plan.pipeline.num_microbatches,
            "simulated": simulated[name],
            "measured": measured[name],
            "simulated_over_1f1b": simulated[name] / simulated["1f1b"],
            "measured_over_1f1b": measured[name] / measured["1f1b"],
            "measured_least": min(seconds[name]),
            "memory": max(stage.memory_bytes for stage in plan.prediction.stages),
            "taken": name == taken,
        }


def plans_of(options: argparse.Namespace, devices: int) -> tuple[Any, dict[str, Any]]:
    """What is trained, and the plan for each schedule.

    Args:
        options: as the command line has them.
        devices: how many.
    """
    import jax

    import hetjax
    from hetjax.commands.prepare import problem_to_profile
    from hetjax.configuration import read_configuration
    from hetjax.configuration.make import make_ingredients
    from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster
    from hetjax.planner import DynamicProgram, choose_schedule, complete
    from hetjax.planner.predictions.more_passes import with_passes

    configuration = read_configuration(
        None,
        [
            "model.recipe = 'gpt-bench'",
            f"model.blocks = {options.blocks}",
            f"model.width = {options.width}",
            "data.kind = 'synthetic'",
            f"train.batch_size = {devices * options.microbatch}",
            f"train.microbatches = {devices}",
            "planner.max_pipelines = 1",
            f"planner.min_stages = {devices}",
        ],
    )
    ingredients = make_ingredients(configuration)
    cluster = hetjax.Cluster.local(jax.devices()[:devices])
    if options.runtime == "played":
        kind = DeviceKind(
            "card", {"float32": CARD_FLOPS}, 24 * 10**9, 2e11, source="made up", platform="cpu"
        )
        link = Link(CARD_LINK, 1e-5)
        cluster = Cluster("even", (Subcluster("cards", kind, devices, 1, link, link),))
    problem = problem_to_profile(ingredients, cluster)
    once = replace(problem, options=replace(problem.options, max_passes=1))
    plan = complete(DynamicProgram().plan(once), once)
    plans = {name: choose_schedule(plan, name) for name in SCHEDULES}
    repeated = with_passes(plan, problem, options.passes)
    assert repeated is not None, "there are layers enough"
    return ingredients, {**plans, INTERLEAVED: repeated}


def trainer_of(runtime: str, ingredients: Any, plan: Any) -> Any:
    """A trainer by a plan.

    Args:
        runtime: one of `RUNTIMES`.
        ingredients: what is trained.
        plan: the plan.
    """
    import hetjax

    options = {
        "played": lambda: hetjax.LocalOptions(play=hetjax.Play()),
        "local": hetjax.LocalOptions,
        "ray": lambda: hetjax.RayOptions("local", cores=(0, 1)),
    }
    return hetjax.Trainer(
        plan,
        ingredients.model.loss,
        ingredients.parameters,
        ingredients.optimizer,
        ingredients.batch,
        runtime=options[runtime](),
    )


def measured_plans(trainers: Any, plans: dict[str, Any], ingredients: Any) -> dict[str, Any]:
    """The plans with schedules and predictions by measured times.

    Args:
        trainers: one for each kind of stages.
        plans: by schedule.
        ingredients: what is trained.
    """
    from hetjax.planner import choose_schedule

    found = {}
    for kind, trainer in trainers.items():
        batch = ingredients.dataset.batch(0, trainer.plan.batch_size)
        times = trainer.measure(batch, rounds=4)
        for name in (INTERLEAVED,) if kind == INTERLEAVED else SCHEDULES:
            found[name] = choose_schedule(plans[name], name, times)
    return {name: found[name] for name in plans}


def step_of(trainer: Any, plan: Any, ingredients: Any) -> Callable[[], float]:
    """What trains a step by a plan; its seconds.

    Args:
        trainer: of the plan's stages.
        plan: the plan.
        ingredients: what is trained.
    """
    batch = ingredients.dataset.batch(0, plan.batch_size)

    def step() -> float:
        if trainer.plan != plan:
            trainer.use_plan(plan)
            trainer.train_step(batch)
        return trainer.train_step(batch).seconds

    return step


if __name__ == "__main__":
    main()
