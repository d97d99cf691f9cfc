"""Measuring the layers of a configured model on a cluster, and planning with what was measured."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from hetjax.commands.devices import use_devices
from hetjax.configuration.make import Ingredients
from hetjax.errors import InputError, shown
from hetjax.mesh import Cluster, devices_in_order
from hetjax.pipeline.program.traced_program import with_examples
from hetjax.planner import PlanningProblem
from hetjax.planner.profiler import (
    ROUNDS,
    Measured,
    Measurement,
    ProfileDatabase,
    Survey,
    Wanted,
    make_profile,
    merged,
    survey,
)
from hetjax.planner.work.profile import Profile
from hetjax.reading import check_path


@dataclass(frozen=True)
class Profiled:
    """What came of a profile.

    Args:
        problem: the problem that it is of.
        surveyed: what it takes.
        measured: how many measurements were made now; the database had the others.
        seconds: how long they took, workers' start and all.
        profile: the profile.
    """

    problem: PlanningProblem
    surveyed: Survey
    measured: int
    seconds: float
    profile: Profile


def profile_database(folder: str) -> ProfileDatabase:
    """The database of a configuration.

    Args:
        folder: ``planner.profile``.

    Returns:
        The database, which may have nothing yet.

    Raises:
        InputError: there is something else where the folder should be.
    """
    check_path(folder, f"planner.profile = {shown(folder, 200)}")
    if Path(folder).exists() and not Path(folder).is_dir():
        raise InputError(
            f"planner.profile is {folder!r}, which is a file; it must be a folder. By a file of "
            f"another tool there are plans to look at alone, by python -m hetjax.plan"
        )
    return ProfileDatabase(Path(folder))


def with_profile(problem: PlanningProblem, database: ProfileDatabase) -> PlanningProblem:
    """A problem with what a database has measured of it.

    Args:
        problem: the problem.
        database: the database.

    Returns:
        The problem with its profile, which is empty where the database has nothing of it.

    Raises:
        InputError: a file of the database is corrupt.
    """
    return replace(problem, profile=make_profile(problem, survey(problem), database))


def check_measured(problem: PlanningProblem, database: ProfileDatabase) -> None:
    """Check that a database has something of a problem.

    Raises:
        InputError: it has nothing.
    """
    if problem.profile.measurements == 0:
        raise InputError(
            f"planner.profile is {str(database.folder)!r}, which has no measurement of this model "
            f"with microbatches of {problem.microbatch_size} examples on the cluster "
            f"{problem.cluster.name!r}; make them with python -m hetjax.profile, or set "
            f"planner.profile = None to plan by the analytic model"
        )


def measured_program(ingredients: Ingredients, problem: PlanningProblem) -> Measured:
    """The program whose runs of layers are measured for a problem.

    Args:
        ingredients: the model and the optimizer.
        problem: the problem.

    Returns:
        The program.
    """
    return Measured(
        loss_function=ingredients.model.loss,
        parameters=ingredients.parameter_shapes,
        batch=with_examples(ingredients.batch, problem.microbatch_size),
        optimizer=ingredients.optimizer,
        layers=problem.layers,
        microbatch_size=problem.microbatch_size,
        divides_sequences=ingredients.configuration.planner.shares_context,
    )


def measure_profile(
    ingredients: Ingredients,
    problem: PlanningProblem,
    database: ProfileDatabase,
    show: Callable[[int, int, str], None],
) -> Profiled:
    """Measure what a database lacks of a problem.

    Args:
        ingredients: the model and the optimizer.
        problem: the problem.
        database: where measurements are kept, each as soon as it is made.
        show: is told how many are made, of how many, in all rounds, and which the last one was.

    Returns:
        The profile, and what it took.

    Raises:
        InputError: the cluster's devices are not there.
        WorkerLostError: a worker was lost; what was measured before is kept.
    """
    configuration = ingredients.configuration
    use_devices(problem.cluster, configuration.runtime, play=configuration.cluster.play)
    surveyed = survey(problem)
    missing = surveyed.missing(database)
    began = time.perf_counter()
    found: dict[Wanted, list[Measurement]] = defaultdict(list)
    for count, (wanted, measurement) in enumerate(_measure(ingredients, problem, missing), start=1):
        first, end = wanted.request.layers
        run = f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"
        found[wanted].append(measurement)
        database.put(wanted.key, merged(found[wanted]), f"{run} of {ingredients.model.name}")
        show(count, ROUNDS * len(missing), f"{run} on {wanted.way.subcluster}")
    seconds = time.perf_counter() - began if missing else 0.0
    profile = make_profile(problem, surveyed, database, seconds)
    return Profiled(problem, surveyed, len(missing), seconds, profile)


def _measure(
    ingredients: Ingredients, problem: PlanningProblem, missing: Sequence[Wanted]
) -> Iterator[tuple[Wanted, Measurement]]:
    if not missing:
        return iter(())
    runtime = ingredients.configuration.runtime
    measured = measured_program(ingredients, problem)
    if runtime.name == "local":
        return _measure_here(problem.cluster, measured, missing)
    from hetjax.runtime import RayOptions
    from hetjax.runtime.ray.ray_executor import connect_to_ray
    from hetjax.runtime.ray.ray_profiling import measure_on_ray

    connect_to_ray(RayOptions(runtime.ray_address))
    return measure_on_ray(problem.cluster, measured, missing)


def _measure_here(
    cluster: Cluster, measured: Measured, missing: Sequence[Wanted]
) -> Iterator[tuple[Wanted, Measurement]]:
    """Measure on this process's devices, one subcluster after the other."""
    from hetjax.runtime.local.profiling import StageMeasurer

    devices = jax.devices()
    if len(devices) < cluster.num_devices:
        raise InputError(
            f"the cluster {cluster.name!r} has {cluster.num_devices} devices, and this process "
            f"sees {len(devices)}; measure where the devices are, or with runtime.name = 'ray'"
        )
    devices = devices_in_order(cluster, devices)
    for subcluster in cluster.subclusters:
        if devices[0].platform == "cpu" and not subcluster.kind.is_processor:
            raise InputError(
                f"subcluster {subcluster.name!r} is of {subcluster.kind.name!r}, and this process "
                f"has host CPU devices, whose times would be kept as that kind's; measure where "
                f"these devices are"
            )
    first = 0
    for subcluster in cluster.subclusters:
        measurer = StageMeasurer(measured, devices[first : first + subcluster.devices_per_node])
        here = [wanted for wanted in missing if wanted.way.subcluster == subcluster.name]
        for wanted in ROUNDS * here:
            yield wanted, measurer.measure(wanted.request)
        first += subcluster.num_devices
