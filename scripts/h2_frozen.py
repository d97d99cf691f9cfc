"""A GPT of which a half is frozen, beside the same of which all is trained.

    python scripts/h2_frozen.py --json

The lower half of the blocks is frozen, with the embedding. Gradients and optimizer state of the
rest are compared bit by bit with those of a run whose optimizer changes nothing of that half
either, but by a product with a zero that is not known before the step: there everything is
computed. Step time and memory are predicted by a profile that is measured here, and measured, in
turns with a run that trains everything. Seconds of one stage on a host device are its processor's:
no waiting for other processes is in them. Those of several stages are a clock's, and want a machine
that does nothing else. `bench_h2.py frozen` runs it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

FROZEN = ("token_embedding", "position_embedding", "blocks/[0-{last}]")
"""The lower half, by patterns of names."""

STEPS = 3
"""How many steps are compared bit by bit."""

ROUNDS = 5
"""How often every run of layers is measured."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="a row a line, as JSON")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2], help="pipelines to try")
    parser.add_argument("--blocks", type=int, default=8, help="of the GPT, 8 or fewer")
    parser.add_argument("--width", type=int, default=256, help="of the GPT")
    parser.add_argument("--steps", type=int, default=15, help="measured, whose median counts")
    parser.add_argument("--accelerator", action="store_true", help="not on host devices")
    options = parser.parse_args(arguments)
    if not options.accelerator:
        # Before JAX starts.
        count = max(options.stages)
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
        os.environ["JAX_PLATFORMS"] = "cpu"
    for stages in options.stages:
        for row in rows(stages, options.blocks, options.width, options.steps):
            print(json.dumps(row) if options.json else row, flush=True)


def rows(stages: int, blocks: int, width: int, steps: int) -> Iterator[dict[str, Any]]:
    """What a pipeline shows.

    Args:
        stages: of the pipeline, each on a device of this process.
        blocks: of the GPT.
        width: of the GPT.
        steps: how many are measured.

    Yields:
        A row of the bits, one of the step time and one of each stage's memory.
    """
    some, all_trained = setting(stages, blocks, width, True), setting(stages, blocks, width, False)
    yield {"part": "bits", "stages": stages, **bits(some)}
    seconds, held = measured([some, all_trained], steps)
    predicted = [each.plan.prediction.step_time for each in (some, all_trained)]
    yield {
        "part": "step time",
        "stages": stages,
        "predicted": predicted[0],
        "measured": seconds[0],
        "error": predicted[0] / seconds[0] - 1,
        "all_trained_predicted": predicted[1],
        "all_trained_measured": seconds[1],
        "all_trained_error": predicted[1] / seconds[1] - 1,
        "predicted_ratio": predicted[0] / predicted[1],
        "measured_ratio": seconds[0] / seconds[1],
    }
    for each, found in zip((some, all_trained), held, strict=True):
        for s, size in enumerate(found):
            expected = each.plan.prediction.stages[s].memory_bytes
            yield {
                "part": "memory",
                "stages": stages,
                "stage": s,
                "frozen": each is some,
                "predicted": expected,
                "measured": size,
                "error": expected / size - 1,
            }


class Setting(NamedTuple):
    """What a run is made of.

    Args:
        ingredients: the model, the data and the optimizer.
        plan: with its prediction.
        yardstick: seconds of a computation that is always the same while it was profiled.
    """

    ingredients: Any
    plan: Any
    yardstick: float


def setting(stages: int, blocks: int, width: int, is_frozen: bool) -> Setting:
    """A profiled model with a plan of even stages.

    Args:
        stages: how many.
        blocks: of the GPT.
        width: of the GPT.
        is_frozen: whether its lower half is frozen.
    """
    import jax

    import hetjax
    from hetjax.commands.prepare import problem_to_profile
    from hetjax.configuration import read_configuration
    from hetjax.configuration.make import make_ingredients
    from hetjax.planner import predict

    frozen = tuple(each.format(last=blocks // 2 - 1) for each in FROZEN) if is_frozen else ()
    configuration = read_configuration(
        None,
        [
            "model.recipe = 'gpt-bench'",
            f"model.blocks = {blocks}",
            f"model.width = {width}",
            "data.kind = 'synthetic'",
            "train.batch_size = 32",
            "train.microbatches = 8",
            f"train.frozen = {frozen}",
            "planner.max_pipelines = 1",
        ],
    )
    ingredients = make_ingredients(configuration)
    cluster = hetjax.Cluster.local(jax.devices()[:stages])
    problem = problem_to_profile(ingredients, cluster)
    profile, yardstick = profile_of(ingredients, problem)
    problem = replace(problem, profile=profile)
    return Setting(ingredients, predict(even_plan(problem, stages), problem), yardstick)


def profile_of(ingredients: Any, problem: Any) -> tuple[Any, float]:
    """What layers take on a device alone, and what a yardstick took meanwhile.

    Args:
        ingredients: the model, the data and the optimizer.
        problem: the planning problem.
    """
    import jax

    from hetjax.commands.profiling import measured_program
    from hetjax.planner.profiler import ProfileDatabase, make_profile, merged, survey
    from hetjax.runtime.local import profiling
    from hetjax.runtime.local.profiling import StageMeasurer

    surveyed = survey(problem)
    alone = [each for each in surveyed.wanted if each.way.mesh_shape == (1, 1)]
    measurer = StageMeasurer(measured_program(ingredients, problem), jax.devices()[:1])
    found: dict[Any, list[Any]] = {}
    with mock.patch.object(profiling, "time") as clock:
        clock.perf_counter = clock_of(problem.cluster.num_devices)
        for wanted in ROUNDS * alone:
            found.setdefault(wanted.key, []).append(measurer.measure(wanted.request))
    with tempfile.TemporaryDirectory() as folder:
        database = ProfileDatabase(Path(folder))
        for key, measurements in found.items():
            database.put(key, merged(measurements), "")
        profile = make_profile(problem, surveyed, database)
    return profile, median(each.yardstick_seconds for m in found.values() for each in m)


def clock_of(stages: int) -> Callable[[], float]:
    """What steps of a pipeline are timed by.

    Args:
        stages: how many it has.
    """
    import jax

    is_host = jax.default_backend() == "cpu"
    return time.process_time if is_host and stages == 1 else time.perf_counter


def even_plan(problem: Any, stages: int) -> Any:
    """A plan of stages of as many layers, each on a device.

    Args:
        problem: the planning problem.
        stages: how many.
    """
    from hetjax.mesh import SubMesh
    from hetjax.pipeline.schedules.warm_up import from_warm_up_counts
    from hetjax.planner import PipelinePlan, Plan, StagePlan

    edges = [round(problem.num_layers * s / stages) for s in range(stages + 1)]
    name, count = problem.cluster.subclusters[0].name, problem.num_microbatches
    made = tuple(
        StagePlan.on(layers=layers, submesh=SubMesh(name, s, (1, 1)), mesh_shape=(1, 1))
        for s, layers in enumerate(itertools.pairwise(edges))
    )
    schedule = from_warm_up_counts([stages - s for s in range(stages)], count, "1f1b")
    pipeline = PipelinePlan(made, count, problem.microbatch_size, schedule)
    return Plan(problem.program.fingerprint, problem.layers, problem.cluster, (pipeline,))


def executor_of(given: Setting, optimizer: Any | None = None) -> Any:
    """A local executor that has started.

    Args:
        given: what it runs.
        optimizer: another optimizer than the setting's.
    """
    from hetjax.runtime.local.local_executor import LocalExecutor
    from hetjax.runtime.workers.job import Job, build

    made = given.ingredients
    chosen: Any = made.optimizer if optimizer is None else optimizer
    job = Job(made.model.loss, made.parameters, made.batch, chosen, given.plan)
    executor = LocalExecutor(job, build(job))
    executor.start()
    return executor


def bits(given: Setting) -> dict[str, Any]:
    """Whether the rest gets the same gradients and optimizer state as where all is computed.

    Args:
        given: a setting with a frozen half.

    Returns:
        How many arrays were compared, how many are equal bit by bit, and the largest difference.
    """
    import numpy as np

    found: list[Mapping[str, Any]] = []
    frozen: list[int] = []
    for is_known in (True, False):
        executor = executor_of(given, optimizer_of(given, is_known))
        for step in range(STEPS):
            batch = given.ingredients.dataset.batch(step, given.plan.batch_size)
            executor.train_step(step, batch)
        found.append(dict(state_of(executor)))
        frozen.append(len(executor.workers[0].pipelines.program.frozen.without_gradient))
        executor.close()
    assert frozen[0] > 0 == frozen[1], "one run knows what is frozen, the other does not"
    some, every = found
    pairs = [(np.asarray(some[name]), np.asarray(every[name])) for name in some if name in every]
    return {
        "steps": STEPS,
        "arrays": len(pairs),
        "equal": sum(np.array_equal(a, b) for a, b in pairs),
        "largest_difference": max(float(np.max(np.abs(a - b), initial=0.0)) for a, b in pairs),
    }


def optimizer_of(given: Setting, is_known: bool) -> Any:
    """AdamW of the upper half, which remembers its gradients.

    Args:
        given: the setting.
        is_known: whether the lower half's updates are known to be zeros before a step.
    """
    import jax
    import jax.numpy as jnp
    import optax

    from hetjax.configuration.frozen import frozen_labels

    patterns = given.ingredients.configuration.train.frozen
    labels = frozen_labels(given.ingredients.parameter_shapes, patterns)
    remember = optax.GradientTransformation(
        lambda params: {"gradients": jax.tree.map(jnp.zeros_like, params)},
        lambda updates, state, params=None: (updates, {"gradients": updates}),
    )
    unknown = optax.GradientTransformation(
        lambda params: {"factor": jnp.zeros(())},
        lambda updates, state, params=None: (
            jax.tree.map(lambda each: each * state["factor"], updates),
            state,
        ),
    )
    still = optax.set_to_zero() if is_known else unknown
    trained = optax.chain(remember, optax.adamw(1e-3))
    return optax.multi_transform({"trained": trained, "frozen": still}, labels)


def state_of(executor: Any) -> Iterator[tuple[str, Any]]:
    """Every array of a state by its name: parameters, gradients and optimizer state.

    Args:
        executor: the executor.
    """
    from hetjax.runtime.checkpoints.saved_leaves import saved_leaves

    pipelines = executor.workers[0].pipelines
    parameters, optimizer = (
        kind.leaves.split_names(kind.names) for kind in saved_leaves(pipelines)
    )
    for worker in executor.workers:
        state, stage = worker.state(), worker.stage
        for part, array in zip(pipelines.stages[stage].parameters, state.parameters, strict=True):
            yield f"{stage} parameters {parameters[part.leaf]}", array
        for part, array in zip(pipelines.updates[stage].state, state.optimizer, strict=True):
            yield f"{stage} optimizer {optimizer[part.leaf]}", array


def measured(settings: Sequence[Setting], steps: int) -> tuple[list[float], list[list[int]]]:
    """Medians of step times, of runs that take turns, and the bytes that each stage holds.

    A step is as long as it would be, were its device as fast as while it was profiled: others use
    the processor, too, and a yardstick before and after tells of it.

    Args:
        settings: what is run.
        steps: how many steps of each, after two.
    """
    import jax

    from hetjax.runtime.compilation.yardstick import Yardstick

    yardstick, clock = Yardstick(jax.devices()[0]), clock_of(len(settings[0].plan.stages))
    executors = [executor_of(each) for each in settings]
    seconds: list[list[float]] = [[] for _ in settings]
    held: list[list[int]] = [[] for _ in settings]
    for step in range(steps + 2):
        for place, (given, executor) in enumerate(zip(settings, executors, strict=True)):
            batch = given.ingredients.dataset.batch(step, given.plan.batch_size)
            before, began = yardstick.seconds(), clock()
            reports = executor.train_step(step, batch)
            took = clock() - began
            slower = (before + yardstick.seconds()) / 2 / given.yardstick
            seconds[place].append(took / slower)
            held[place] = [
                bytes_of(worker, report.live_bytes) + waiting_bytes(worker, report, after)
                for worker, report, after in zip(
                    executor.workers, reports, [*reports[1:], None], strict=True
                )
            ]
    for executor in executors:
        executor.close()
    return [median(each[2:]) for each in seconds], held


def bytes_of(worker: Any, live_bytes: int) -> int:
    """What a stage's device holds: what stays, what microbatches keep, and XLA's own.

    Args:
        worker: the stage's worker, after a step.
        live_bytes: what microbatches kept at once in it.
    """
    stays = sum(array.nbytes for array in worker.buffers.values())
    of_tasks = ("forward", "backward", "recompute", "input_gradient", "weight_gradient")
    own = [
        analysis().temp_size_in_bytes
        for name, program in worker.compiled.programs.items()
        if name in of_tasks and (analysis := getattr(program, "memory_analysis", None))
    ]
    return stays + live_bytes + max(own, default=0)


def waiting_bytes(worker: Any, report: Any, after: Any) -> int:
    """What a stage without a backward pass has sent at most that the next one did not take yet.

    Args:
        worker: the stage's worker.
        report: of its step.
        after: the report of the next stage's step; None in the last.
    """
    if after is None or worker.programs.has_backward:
        return 0
    values = [tag for tag in report.sends if tag.microbatch >= 0]
    changes = [(report.sends[tag], after.arrivals[tag].num_bytes) for tag in values]
    changes += [(after.arrivals[tag].at, -after.arrivals[tag].num_bytes) for tag in values]
    return max(itertools.accumulate(size for _, size in sorted(changes)))


if __name__ == "__main__":
    main()
