"""Measuring runs of layers: here, and on a Ray cluster of two nodes."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from hetjax.errors import InputError, WorkerLostError
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster
from hetjax.planner import PlanningProblem, make_problem
from hetjax.planner.profiler import (
    ROUNDS,
    Measured,
    ProfileDatabase,
    Request,
    Wanted,
    make_profile,
    merged,
    survey,
)
from hetjax.runtime.local.profiling import StageMeasurer
from hetjax.runtime.ray import ray_profiling
from hetjax.runtime.ray.ray_profiling import measure_on_ray

LINK = Link(1e10, 1e-5)
WIDTH, EXAMPLES, MICROBATCHES = 16, 8, 4


def loss(weights: list[jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    x = batch["x"]
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


SHAPES = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4
BATCH = {"x": jax.ShapeDtypeStruct((EXAMPLES, WIDTH), jnp.float32)}


def problem_on(
    *subclusters: Subcluster, optimizer: optax.GradientTransformation | None = None
) -> PlanningProblem:
    pairs = [(a.name, b.name) for i, a in enumerate(subclusters) for b in subclusters[i + 1 :]]
    return make_problem(
        loss,
        SHAPES,
        {"x": jax.ShapeDtypeStruct((EXAMPLES * MICROBATCHES, WIDTH), jnp.float32)},
        cluster=Cluster("test", subclusters, tuple((a, b, LINK) for a, b in pairs)),
        optimizer=optimizer or optax.adam(1e-3),
        num_microbatches=MICROBATCHES,
    )


def subcluster(name: str, devices: int, resource: str | None = None) -> Subcluster:
    kind = DeviceKind(name, {"float32": 1e10}, 10**9, 1e10, source="made up", platform="cpu")
    return Subcluster(name, kind, 1, devices, LINK, LINK, resource)


def measured_of(problem: PlanningProblem) -> Measured:
    return Measured(loss, SHAPES, BATCH, optax.adam(1e-3), problem.layers, EXAMPLES)


@pytest.mark.parametrize(
    ("mesh_shape", "sharding"),
    [((1, 1), "data"), ((2, 1), "data"), ((2, 1), "fully_sharded"), ((2, 2), "data")],
)
def test_any_run_is_measured_as_a_stage_would_run_it(mesh_shape: tuple[int, int], sharding: str):
    problem = problem_on(subcluster("only", 4))
    measurer = StageMeasurer(measured_of(problem))
    for layers, updates in (((0, 2), False), ((1, 3), True), ((2, 4), False)):
        request = Request(layers, mesh_shape, sharding, (0,), updates)
        found = merged([measurer.measure(request) for _ in range(ROUNDS)])
        assert found.forward_seconds > 0
        assert found.backward_seconds > 0
        assert found.repetitions >= 7
        assert found.yardstick_seconds > 0
        assert (found.update_bytes_per_second > 0) == updates
        assert found.backward_bytes >= 0


def test_what_is_frozen_is_measured_as_it_runs(tmp_path: Path):
    optimizer = optax.multi_transform(
        {"frozen": optax.set_to_zero(), "trained": optax.adam(1e-3)},
        ["frozen"] * 2 + ["trained"] * 2,
    )
    problem = problem_on(subcluster("only", 1), optimizer=optimizer)
    measurer = StageMeasurer(replace(measured_of(problem), optimizer=optimizer))
    below, all_of_it = problem.works[2].returned, (0,)
    database = ProfileDatabase(tmp_path)
    surveyed = survey(problem)
    for wanted in surveyed.wanted:
        database.put(wanted.key, measurer.measure(wanted.request), "")
    lower = measurer.measure(Request((0, 2), (1, 1), "data", below, False))
    assert lower.backward_seconds == 0 < lower.forward_seconds
    whole = measurer.measure(Request((1, 4), (1, 1), "data", all_of_it, True))
    assert whole.backward_seconds > 0
    assert whole.update_bytes_per_second > 0
    (times,) = make_profile(problem, surveyed, database).ways.values()
    assert times.backward.layers[:2].tolist() == [0, 0]
    keys = {each.key.structure for each in surveyed.wanted}
    assert keys.isdisjoint(
        each.key.structure for each in survey(problem_on(subcluster("only", 1))).wanted
    )


def written_out(weight: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """A model that attends, whose softmax is found where sequences may be divided."""
    x = batch["x"].reshape(EXAMPLES, WIDTH, 1) @ weight
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x, x) / jnp.sqrt(jnp.float32(WIDTH)))
    return jnp.mean((jnp.einsum("bqk,bkd->bqd", scores, x) @ weight.T) ** 2)


def test_layers_of_a_program_whose_sequences_may_be_divided_are_its_own():
    shape = jax.ShapeDtypeStruct((1, WIDTH), jnp.float32)
    problem = make_problem(
        written_out,
        shape,
        BATCH,
        cluster=Cluster("test", (subcluster("only", 1),)),
        optimizer=optax.adam(1e-3),
        num_microbatches=1,
        divides_sequences=True,
    )
    assert "attention" in [step.name for step in problem.program.steps]
    asked = Measured(written_out, shape, BATCH, optax.adam(1e-3), problem.layers, EXAMPLES)
    measurer = StageMeasurer(replace(asked, divides_sequences=True))
    whole = Request((0, problem.num_layers), (1, 1), "data", (0,), False)
    found = measurer.measure(whole)
    assert any(name.startswith("batched product") for name in found.forward_work)


def test_a_profile_is_measured_whole_and_never_twice(tmp_path: Path):
    problem = problem_on(subcluster("only", 1))
    surveyed, database = survey(problem), ProfileDatabase(tmp_path)
    measurer = StageMeasurer(measured_of(problem))
    for wanted in surveyed.missing(database):
        database.put(wanted.key, measurer.measure(wanted.request))
    assert surveyed.missing(database) == ()
    profile = make_profile(problem, surveyed, database)
    ((way, times),) = profile.ways.items()
    assert way.subcluster == "only"
    assert float(times.forward.of((0, problem.num_layers))) > 0
    assert profile.updates["only"] > 0


# On Ray


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    with warnings.catch_warnings():
        # Ray starts its processes by fork and exec at once, which JAX's threads do not mind.
        warnings.filterwarnings("ignore", message=r".*fork\(\)")
        cluster = RayCluster()
        for name in ("a", "b"):
            cluster.add_node(
                num_cpus=1,
                object_store_memory=80_000_000,
                include_dashboard=False,
                resources={name: 2},
            )
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()
    cluster.shutdown()


def first_of_each(problem: PlanningProblem) -> list[Wanted]:
    wanted = survey(problem).wanted
    names = dict.fromkeys(each.way.subcluster for each in wanted)
    return [next(each for each in wanted if each.way.subcluster == name) for name in names]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("two_nodes")
def test_workers_of_all_subclusters_measure(monkeypatch: pytest.MonkeyPatch):
    problem = problem_on(subcluster("fast", 2, "a"), subcluster("slow", 1, "b"))
    wanted = first_of_each(problem)
    came = list(measure_on_ray(problem.cluster, measured_of(problem), wanted))
    assert Counter(each for each, _ in came) == dict.fromkeys(wanted, ROUNDS)
    found = {each: merged([one for of, one in came if of == each]) for each in wanted}
    assert all(each.repetitions >= 3 * ROUNDS for each in found.values())
    assert {each.way.subcluster for each in found} == {"fast", "slow"}
    assert all(each.forward_seconds > 0 for each in found.values())

    monkeypatch.setattr(ray_profiling, "START_SECONDS", 1e-3)
    with pytest.raises(WorkerLostError, match=r"profiling worker on (fast|slow)"):
        list(measure_on_ray(problem.cluster, measured_of(problem), wanted))

    elsewhere = problem_on(subcluster("fast", 2, "c"))
    with pytest.raises(InputError, match="'c'"):
        list(measure_on_ray(elsewhere.cluster, measured_of(elsewhere), first_of_each(elsewhere)))
