"""What is measured, what it is composed to, and where it is kept."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.checked_files import read_json
from hetjax.errors import InputError
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster
from hetjax.pipeline.program.work_classes import CONVOLVED, MOVED, steps_work
from hetjax.pipeline.update.update_digest import update_digest
from hetjax.planner import DynamicProgram, PlanningProblem, PlanOptions, complete, make_problem
from hetjax.planner.costs.cost_model import estimate
from hetjax.planner.harp.table_making import make_stage_table
from hetjax.planner.profiler import (
    Key,
    Measurement,
    ProfileDatabase,
    RunFigure,
    Survey,
    Wanted,
    compose,
    composition_error,
    layer_classes,
    make_profile,
    merged,
    num_structures,
    num_to_measure,
    structure_digest,
    survey,
    units,
)
from hetjax.planner.profiler.class_rates import MeasuredPass, fit_class_rates
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.layer_runs import all_runs
from hetjax.planner.work.profile import Composition, Profile, Way
from hetjax.planner.work.rates import expected_rate
from hetjax.planner.work.repeating_layers import runs_by_repetition

NEAR, FAR = Link(1e10, 1e-5), Link(1e9, 1e-4)
KEY = Key("0" * 64, "test", "float32", (1, 1), (1, 1), "data")
ADAM = optax.adam(1e-3)
TIMES = Measurement(1e-3, 2e-3, 5e9, 64, 128, 9, 0.02)


def device_kind(name: str, speed: float = 1e12) -> DeviceKind:
    return DeviceKind(name, {"float32": speed}, 10**9, 1e11, source="made up")


def two_kinds() -> Cluster:
    fast = Subcluster("fast", device_kind("quick"), 1, 2, NEAR, NEAR)
    slow = Subcluster("slow", device_kind("lame", 5e11), 2, 1, NEAR, NEAR)
    return Cluster("test", (fast, slow), (("fast", "slow", FAR),))


def problem_of(
    blocks: int = 8,
    width: int = 64,
    examples: int = 32,
    optimizer: optax.GradientTransformation = ADAM,
) -> PlanningProblem:
    """Blocks of two products, between an embedding and a head."""

    def loss(weights: dict[str, list[jax.Array]], x: jax.Array) -> jax.Array:
        for up, down in zip(weights["up"], weights["down"], strict=True):
            x = x + jnp.tanh(x @ up) @ down
        return jnp.mean((x @ weights["head"][0]) ** 2)

    shapes = {
        "up": [jax.ShapeDtypeStruct((width, 4 * width), jnp.float32)] * blocks,
        "down": [jax.ShapeDtypeStruct((4 * width, width), jnp.float32)] * blocks,
        "head": [jax.ShapeDtypeStruct((width, 8 * width), jnp.float32)],
    }
    return make_problem(
        loss,
        shapes,
        jax.ShapeDtypeStruct((examples, width), jnp.float32),
        cluster=two_kinds(),
        optimizer=optimizer,
        num_microbatches=8,
        options=PlanOptions(max_pipelines=1),
    )


PROBLEM = problem_of()
SURVEY = survey(PROBLEM)


def seconds_of(surveyed: Survey, run: tuple[int, int], factor: float) -> float:
    """What a run would take: a start, and for each layer what its class takes."""
    return factor * (1e-4 + sum(1e-3 * (1 + surveyed.classes[layer]) for layer in range(*run)))


def fill(database: ProfileDatabase, slow: float = 3.0) -> None:
    for wanted in SURVEY.wanted:
        factor = slow if wanted.way.subcluster == "slow" else 1.0
        seconds = seconds_of(SURVEY, wanted.request.layers, factor)
        rate = 4e9 if wanted.request.updates else 0.0
        database.put(
            wanted.key,
            replace(
                TIMES,
                forward_seconds=seconds,
                backward_seconds=2 * seconds,
                update_bytes_per_second=rate,
            ),
        )


# What is measured


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_runs_of_one_structure_are_counted_once(classes: list[int]):
    edges = range(len(classes) + 1)
    runs = {tuple(classes[i:j]) for i in edges for j in edges if i < j}
    assert num_structures(classes) == len(runs)


def test_alike_layers_share_and_every_class_is_measured():
    classes = layer_classes(PROBLEM)
    assert len(set(classes)) < len(classes)
    found = units(PROBLEM, classes)
    runs = [classes[unit.layers[0] : unit.layers[1]] for unit in found]
    assert len(set(runs)) == len(runs)
    fitted = {
        each for unit, run in zip(found, runs, strict=True) if not unit.checks for each in run
    }
    assert fitted == set(classes)
    assert any(unit.checks for unit in found)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 8])
def test_long_runs_check_models_of_any_number_of_modules(blocks: int):
    problem = problem_of(blocks=blocks)
    found = units(problem, layer_classes(problem))
    checked = [unit.layers for unit in found if unit.checks]
    others = [unit.layers for unit in found if not unit.checks]
    assert checked or (0, problem.num_layers) in others
    ends = {layer for layers in (checked or others) for layer in layers}
    assert {0, problem.num_layers} <= ends


def test_few_of_the_candidates_are_measured():
    more = survey(problem_of(blocks=40))
    assert len(more.wanted) == len(SURVEY.wanted)
    assert more.candidates > 20 * len(more.wanted)
    assert more.share(len(more.wanted)) < 0.05
    assert more.structures < more.candidates - more.pruned


def test_how_many_would_be_measured_is_counted_without_stating_them():
    fast, slow = PROBLEM.cluster.subclusters
    pair = replace(PROBLEM.cluster, subclusters=(fast, replace(slow, kind=fast.kind)))
    for problem in (PROBLEM, problem_of(blocks=7), replace(PROBLEM, cluster=pair)):
        table = make_stage_table(problem, all_runs(problem.program, problem.works))
        assert num_to_measure(problem, table) == len(survey(problem).wanted)


def test_what_does_not_fit_is_not_measured():
    fast, slow = PROBLEM.cluster.subclusters
    tight = replace(fast, kind=replace(fast.kind, memory_bytes=2_000_000))
    found = survey(replace(PROBLEM, cluster=replace(PROBLEM.cluster, subclusters=(tight, slow))))

    def on_one_device(surveyed: Survey) -> list[tuple[int, int]]:
        ways = [Way("fast", (1, 1), (1, 1), "data")]
        return [each.request.layers for each in surveyed.wanted if each.way in ways]

    assert found.pruned > SURVEY.pruned
    assert 0 < len(on_one_device(found)) < len(on_one_device(SURVEY))


def test_a_digest_is_of_what_is_computed_and_the_same_in_every_process():
    first = structure_digest(PROBLEM.program, PROBLEM.layers, (0, 2), (0,))
    again = problem_of(blocks=6)
    assert structure_digest(again.program, again.layers, (0, 2), (0,)) == first
    wider = problem_of(width=96)
    assert structure_digest(wider.program, wider.layers, (0, 2), (0,)) != first
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_profiler as t;"
        "print(t.structure_digest(t.PROBLEM.program, t.PROBLEM.layers, (0, 2), (0,)))"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == first


# What it is composed to


@given(
    classes=st.lists(st.integers(0, 2), min_size=3, max_size=8),
    start=st.floats(0.0, 2.0),
    per_class=st.tuples(*[st.floats(0.5, 4.0)] * 3),
)
def test_runs_that_add_up_are_composed_exactly(
    classes: list[int], start: float, per_class: tuple[float, float, float]
):
    numbers = {each: place for place, each in enumerate(dict.fromkeys(classes))}
    renamed = [numbers[each] for each in classes]
    truth = Composition(start, np.array([per_class[each] for each in classes]))
    ends = range(len(classes) + 1)
    runs = [(i, j) for i in ends for j in ends if i < j]
    figures = [RunFigure(run, float(truth.of(run))) for run in runs]
    short = [figure for figure in figures if figure.layers[1] - figure.layers[0] <= 2]
    found = compose(renamed, short)
    assert composition_error(found, figures) < 1e-6
    np.testing.assert_allclose(found.of(None)[:-1, 1:][0], truth.of(None)[:-1, 1:][0], rtol=1e-6)


def test_what_was_measured_itself_is_kept_wherever_layers_are_alike():
    # 0.5 is too much for two layers that take 0.2 each, with whatever start.
    short = [RunFigure((0, 1), 0.2), RunFigure((0, 2), 0.5)]
    found = compose([0, 0, 1, 0, 0], [*short, RunFigure((2, 3), 0.3)])
    whole = found.of(None)
    assert [float(found.of(run)) for run in [(0, 2), (3, 5), (4, 5)]] == [0.5, 0.5, 0.2]
    assert whole[0, 2] == whole[3, 5] == 0.5
    assert whole[2, 4] == found.of((2, 4))
    # Sums of runs are differences of running sums, which round.
    expected = found.start + found.layers[2] + found.layers[3]
    assert whole[2, 4] == pytest.approx(expected, rel=1e-14)


def test_a_profile_gives_every_run_its_composed_seconds(tmp_path: Path):
    database = ProfileDatabase(tmp_path)
    fill(database)
    profile = make_profile(PROBLEM, SURVEY, database)
    problem = replace(PROBLEM, profile=profile)
    assert profile.measurements == len(SURVEY.wanted)
    assert profile.composition_error is not None
    assert profile.composition_error < 1e-3
    subcluster = problem.cluster.subclusters[1]
    everything = all_runs(problem.program, problem.works)
    for repeats, runs in runs_by_repetition(everything, problem.repeatable_layers).items():
        way = Execution(subcluster.kind, NEAR, (1, 1), repeats=repeats, subcluster="slow")
        found = estimate(problem, runs, way)
        expected = seconds_of(SURVEY, (1, 6), 3.0)
        again = (
            float(runs.again_share[1, 6]) if repeats in ("half", "layers") else repeats == "stage"
        )
        assert found.forward_seconds[1, 6] == pytest.approx(expected, rel=1e-3)
        assert found.backward_seconds[1, 6] == pytest.approx((2 + again) * expected, rel=1e-3)
    alone = Execution(subcluster.kind, NEAR, (1, 1), subcluster="slow")
    updated = estimate(problem, everything, alone)
    assert updated.update_seconds[0, -1] > 1e-5


def test_one_measurement_is_of_all_subclusters_of_a_kind(tmp_path: Path):
    """As of nodes with four cards and a node with two."""
    first, second = PROBLEM.cluster.subclusters
    twin = replace(first, name="twin")
    cluster = Cluster(
        "three", (first, twin, second), tuple((a, b, NEAR) for a, b in _pairs(first, twin, second))
    )
    problem = replace(PROBLEM, cluster=cluster)
    surveyed = survey(problem)
    assert len(surveyed.wanted) == len(SURVEY.wanted)
    database = ProfileDatabase(tmp_path)
    fill(database)
    profile = make_profile(problem, surveyed, database)
    assert profile.measurements == len(SURVEY.wanted)
    ways = {way: times for way, times in profile.ways.items() if way.subcluster == first.name}
    assert ways
    for way, times in ways.items():
        other = profile.ways[replace(way, subcluster="twin")]
        assert other.forward.layers.tolist() == times.forward.layers.tolist()
    assert profile.updates["twin"] == profile.updates[first.name]


def _pairs(*subclusters: Subcluster) -> list[tuple[str, str]]:
    return list(itertools.combinations([each.name for each in subclusters], 2))


def test_rates_of_updates_are_those_of_the_optimizer(tmp_path: Path):
    database = ProfileDatabase(tmp_path)
    fill(database)
    noisy = problem_of(optimizer=optax.noisy_sgd(1e-3, key=0))
    surveyed = survey(noisy)
    missing = surveyed.missing(database)
    assert missing
    assert all(each.request.updates for each in missing)
    profile = make_profile(noisy, surveyed, database)
    expected = make_profile(PROBLEM, SURVEY, database)
    assert (profile.updates, expected.updates) == ({}, {"fast": 4e9, "slow": 4e9})
    assert profile.ways.keys() == expected.ways.keys()

    # As in files of before, which do not say whose update they measured.
    for each in missing:
        database.put(replace(each.key, update=None), TIMES)
    assert surveyed.missing(database) == missing
    assert make_profile(noisy, surveyed, database).updates == {}


@pytest.mark.parametrize(
    ("optimizer", "is_alike"),
    [
        (optax.adam(optax.linear_schedule(1.0, 0.0, 9)), True),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), False),
        (optax.sgd(1e-3), False),
        (optax.noisy_sgd(1e-3, key=0), False),
    ],
)
def test_updates_are_alike_where_they_do_as_much_for_each_element(
    optimizer: optax.GradientTransformation, is_alike: bool
):
    wider = {"w": [jax.ShapeDtypeStruct((n, 512), jnp.float32) for n in (64, 256)]}
    assert (update_digest(optimizer, wider) == PROBLEM.update_digest) == is_alike


def test_long_runs_correct_what_short_ones_are_wrong_about(tmp_path: Path):
    """As where a layer alone finds all that it needs in the cache."""
    database = ProfileDatabase(tmp_path)
    cold, alone = 1.25, 2
    for wanted in SURVEY.wanted:
        first, end = wanted.request.layers
        factor = cold if end - first > alone else 1.0
        seconds = seconds_of(SURVEY, (first, end), factor)
        times = replace(TIMES, forward_seconds=seconds, backward_seconds=seconds)
        database.put(wanted.key, times)
    profile = make_profile(PROBLEM, SURVEY, database)
    whole = (0, PROBLEM.num_layers)
    for times in profile.ways.values():
        assert times.composition_error is not None
        assert times.composition_error > 0
        expected = seconds_of(SURVEY, whole, cold)
        assert float(times.forward.of(whole)) == pytest.approx(expected, rel=0.05)


def test_shapes_that_were_not_measured_are_corrected_by_their_neighbours(tmp_path: Path):
    database = ProfileDatabase(tmp_path)
    fill(database)
    problem = replace(PROBLEM, profile=make_profile(PROBLEM, SURVEY, database))
    kind = problem.cluster.subclusters[1].kind
    wide = Execution(kind, NEAR, (2, 1), subcluster="slow", shape=(2, 1))
    runs = all_runs(problem.program, problem.works)
    corrected = estimate(problem, runs, wide).forward_seconds[0, -1]
    assert corrected > 10 * estimate(PROBLEM, runs, wide).forward_seconds[0, -1]


def test_what_another_program_tells_of_classes_corrects_the_cost_model(tmp_path: Path):
    """A device three times as slow as its figures say is that for any program."""
    database = ProfileDatabase(tmp_path)
    measured, planned = (problem_of(4, 128, examples) for examples in (2**18, 2**16))
    for wanted in survey(measured).wanted:
        if wanted.request.mesh_shape == (1, 1):
            database.put(wanted.key, three_times_as_slow(measured, wanted))
    profile = make_profile(planned, survey(planned), database)
    assert not profile.ways
    assert profile.calibration.keys() == {("fast", (1, 1)), ("slow", (1, 1))}
    runs, part = planned.runs.of((0, planned.num_layers)), planned.cluster.subclusters[0]
    one = Execution(part.kind, NEAR, (1, 1), subcluster="fast")
    plain, corrected = (
        estimate(replace(planned, profile=each), runs, one) for each in (Profile(), profile)
    )
    # The cost model knows two figures of a device, and classes of work more; both are near.
    assert corrected.forward_seconds / plain.forward_seconds == pytest.approx(3, rel=0.3)
    assert corrected.backward_seconds / plain.backward_seconds == pytest.approx(3, rel=0.3)


def three_times_as_slow(problem: PlanningProblem, wanted: Wanted) -> Measurement:
    """What a run would take on a device that takes three times as long for each class of work."""
    kind = problem.cluster.subcluster(wanted.way.subcluster).kind
    start, stop = (problem.layers[layer] for layer in wanted.request.layers)
    work = steps_work(problem.program.steps[start:stop])
    seconds = 3 * sum(
        amount * expected_rate(name, kind.product_flops("float32"), kind.memory_bandwidth)
        for name, amount in work.items()
    )
    twice = {name: 2 * amount for name, amount in work.items()}
    return replace(
        TIMES,
        forward_seconds=seconds,
        backward_seconds=2 * seconds,
        forward_work=work,
        backward_work=twice,
    )


def test_plans_follow_what_was_measured(tmp_path: Path):
    database = ProfileDatabase(tmp_path)
    fill(database, slow=0.2)
    profile = make_profile(PROBLEM, SURVEY, database)
    assert profile.slowness("slow", (1, 1))[0] < profile.slowness("fast", (1, 1))[0]
    problem = replace(PROBLEM, profile=profile)

    def layers_on(name: str, of: PlanningProblem) -> int:
        found = DynamicProgram().find(of)
        assert found is not None
        made = complete(found.plan, of)
        assert made.prediction is not None
        assert made.prediction.step_time == pytest.approx(found.step_time, rel=1e-6)
        stages = (s for s in made.pipeline.stages if s.submesh.subcluster == name)
        return sum(stage.layers[1] - stage.layers[0] for stage in stages)

    assert layers_on("slow", problem) > layers_on("slow", PROBLEM)


def test_a_database_that_lacks_a_class_of_layers_gives_no_times_of_that_way(tmp_path: Path):
    database = ProfileDatabase(tmp_path)
    fill(database)
    single = next(each for each in SURVEY.wanted if each.way.subcluster == "slow")
    (tmp_path / single.key.path).unlink()
    assert SURVEY.missing(database) == (single,)
    head = [each for each in SURVEY.wanted if PROBLEM.num_layers == each.request.layers[1]]
    for each in head:
        (tmp_path / each.key.path).unlink()
    assert make_profile(PROBLEM, SURVEY, database).ways == {}
    assert make_profile(PROBLEM, SURVEY, ProfileDatabase(tmp_path / "none")) == Profile()


# Where it is kept


def test_a_database_keeps_what_it_is_given(tmp_path: Path):
    database = ProfileDatabase(tmp_path / "made")
    assert database.get(KEY) is None
    database.put(KEY, TIMES, note="a note")
    assert database.get(KEY) == TIMES
    assert database.get(replace(KEY, sharding="fully_sharded")) is None
    assert database.get(replace(KEY, jax="0.0.1")) is None


def test_a_file_is_read_again_only_where_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    database, read = ProfileDatabase(tmp_path), []
    monkeypatch.setattr(
        "hetjax.planner.profiler.database.read_json",
        lambda path, *rest: (read.append(path), read_json(path, *rest))[1],
    )
    for seconds in (1.0, 2.0):
        database.put(KEY, replace(TIMES, forward_seconds=seconds))
        found = [database.get(KEY) for _ in range(3)]
        assert found == 3 * [replace(TIMES, forward_seconds=seconds)]
    assert len(read) == 2


def test_databases_of_several_hosts_become_one(tmp_path: Path):
    ours, theirs = ProfileDatabase(tmp_path / "ours"), ProfileDatabase(tmp_path / "theirs")
    ours.put(KEY, TIMES)
    theirs.put(KEY, replace(TIMES, forward_seconds=9.0))
    other = replace(KEY, kind="of another host")
    theirs.put(other, TIMES)
    assert ours.merge(theirs) == 1
    assert ours.get(KEY) == ours.get(other) == TIMES


def test_many_may_write_and_read_at_once(tmp_path: Path):
    database = ProfileDatabase(tmp_path)

    def write_and_read(number: int) -> Measurement | None:
        database.put(KEY, replace(TIMES, repetitions=number + 1))
        return database.get(KEY)

    with ThreadPoolExecutor(8) as threads:
        read = list(threads.map(write_and_read, range(64)))
    assert all(each is not None and 1 <= each.repetitions <= 64 for each in read)
    assert len(list(tmp_path.rglob("*"))) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "this is not a profile"),
        (lambda text: text.replace("0.001", "-1.0", 1), r"measurement\.forward_seconds: -1\.0"),
        (lambda text: text.replace('"version": 1', '"version": 7'), "version: 7"),
        (lambda text: text.replace("0.001", "NaN", 1), "forward_seconds"),
        (lambda text: text.replace('"float32"', '"float64"'), "key is of another measurement"),
        (lambda text: text.replace('"repetitions"', '"repeats"'), "repeats"),
    ],
)
def test_a_corrupt_file_is_named(tmp_path: Path, change, message: str):
    database = ProfileDatabase(tmp_path)
    database.put(KEY, TIMES)
    path = tmp_path / KEY.path
    path.write_text(change(path.read_text()))
    with pytest.raises(InputError, match=message) as raised:
        database.get(KEY)
    assert str(path) in str(raised.value)


def test_files_are_plain_json(tmp_path: Path):
    ProfileDatabase(tmp_path).put(replace(KEY, kind="host-cpu of 10.0.0.1"), TIMES, note="layer 3")
    (path,) = tmp_path.glob("*/*.json")
    assert path.parent.name == "host-cpu_of_10.0.0.1"
    content = json.loads(path.read_text())
    assert content["note"] == "layer 3"
    assert content["measurement"]["backward_seconds"] == 2e-3


@given(st.lists(st.floats(1e-4, 1e-2), min_size=1, max_size=5))
def test_rounds_at_unlike_moments_are_one_measurement(moments: list[float]):
    steady = replace(TIMES, yardstick_seconds=1e-3)
    found = merged([steady.at_yardstick(each) for each in moments])
    assert found.repetitions == len(moments) * TIMES.repetitions
    again = found.at_yardstick(1e-3)
    assert again.forward_seconds == pytest.approx(TIMES.forward_seconds)
    assert again.backward_seconds == pytest.approx(TIMES.backward_seconds)
    assert again.update_bytes_per_second == pytest.approx(TIMES.update_bytes_per_second)


def test_a_round_in_which_something_else_ran_does_not_count():
    slow = replace(TIMES, forward_seconds=1.0, backward_seconds=1.0, update_bytes_per_second=0.0)
    found = merged([slow, TIMES, TIMES])
    assert (found.forward_seconds, found.backward_seconds) == (1e-3, 2e-3)
    assert found.update_bytes_per_second == TIMES.update_bytes_per_second


def test_measurements_of_slow_moments_count_as_at_usual_ones(tmp_path: Path):
    expected = ProfileDatabase(tmp_path / "steady")
    fill(expected)
    uneven = ProfileDatabase(tmp_path / "uneven")
    for place, wanted in enumerate(SURVEY.wanted):
        measured = expected.get(wanted.key)
        assert measured is not None
        steady = replace(measured, yardstick_seconds=1e-3)
        expected.put(wanted.key, steady)
        # Now and then all takes 1.3 times as long; what is usual stays the median.
        uneven.put(wanted.key, steady.at_yardstick(1.3e-3 if place % 3 == 0 else 1e-3))
    steady, corrected = (make_profile(PROBLEM, SURVEY, each) for each in (expected, uneven))
    for way, times in steady.ways.items():
        found = corrected.ways[way].backward.of(None)
        np.testing.assert_allclose(found, times.backward.of(None), rtol=1e-9)
    assert corrected.updates == pytest.approx(steady.updates)


@given(st.integers(0, 2**32 - 1))
def test_rates_of_classes_are_found_where_runs_tell_of_them(seed: int):
    rng = np.random.default_rng(seed)
    rates = {"product 8": 5e-11, "product 512": 1e-11, MOVED: 1e-10, CONVOLVED: 3e-10}
    passes = []
    for _ in range(12):
        work = {name: float(rng.uniform(0.1, 1.0)) * 1e-2 / rate for name, rate in rates.items()}
        passes.append(MeasuredPass(work, sum(rates[name] * work[name] for name in work)))
    found = fit_class_rates(passes, flops=1e11, bandwidth=1e10)
    assert found == {name: pytest.approx(rate, rel=0.05) for name, rate in rates.items()}


def test_a_class_that_no_run_tells_of_is_slower_than_the_figures_have_it_by_as_much_as_all_else():
    passes = [MeasuredPass({"product 512": 1e9, MOVED: 0.0}, 0.05)]
    found = fit_class_rates(passes, flops=1e11, bandwidth=1e10)
    assert found["product 512"] == pytest.approx(5e-11, rel=0.05)
    assert found[MOVED] == pytest.approx(5 * 0.3 / 1e10)


def test_a_class_that_is_little_of_all_runs_does_not_take_up_what_they_are_measured_wrongly_by():
    rng = np.random.default_rng(0)
    passes = [
        MeasuredPass({"product 512": flops, MOVED: 1e-3 * flops}, 1e-11 * flops * noise)
        for flops, noise in zip(rng.uniform(1e9, 1e10, 20), rng.uniform(0.9, 1.1, 20), strict=True)
    ]
    found = fit_class_rates(passes, flops=1e11, bandwidth=1e10)
    assert found["product 512"] == pytest.approx(1e-11, rel=0.05)
    assert found[MOVED] < 3 * 0.3 / 1e10


def test_what_was_measured_of_one_model_tells_of_another(tmp_path: Path):
    problem, database = problem_of(), ProfileDatabase(tmp_path)
    work = {"product 512": 1e9}
    measured = replace(TIMES, forward_seconds=0.05, forward_work=work)
    other = replace(KEY, update=problem.update_digest)
    for name in ("quick", "lame"):
        database.put(replace(other, structure=f"other on {name}", kind=name), measured)
    profile = make_profile(problem, survey(problem), database)
    assert profile.measurements == 0
    assert profile.classes["fast"]["product 512"] == pytest.approx(5e-11, rel=0.05)
    assert profile.updates == {"fast": 5e9, "slow": 5e9}
