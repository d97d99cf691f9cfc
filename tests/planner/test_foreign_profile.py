"""Plans by another tool's profile: what a file may say, what is read between lines, the plan."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from foreign_profile import from_tables, opt_350m, write
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.commands.foreign import names_of_layers
from hetjax.errors import DoesNotFitError, InputError
from hetjax.limits import MAX_MICROBATCHES, MAX_TASKS
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.timeline.simulate import stage_clocks
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.planner import Plan, PlanOptions, simulate
from hetjax.planner.costs.told_updates import told_moments
from hetjax.planner.foreign.foreign_costs import ForeignCosts
from hetjax.planner.foreign.foreign_planner import ForeignFound, ForeignPlanner
from hetjax.planner.foreign.foreign_profile import (
    ForeignProfile,
    checked_foreign_profile,
    read_foreign_profile,
)
from hetjax.planner.harp.microbatches import divisors
from hetjax.planner.work.rates import TASK_SECONDS

EXAMPLE = Path(__file__).parents[2] / "configs" / "foreign" / "opt_350m.json"
MISSING = object()
GB = 10**9
LINK = Link(1e9, 1e-5)
OLD = DeviceKind("old", {"float32": 1e12}, 16 * GB, 1e11, source="made up")
NEW = DeviceKind("new", {"float32": 2e12}, 16 * GB, 2e11, source="made up")


def cluster(*kinds: DeviceKind, devices: int = 2) -> Cluster:
    parts = tuple(Subcluster(each.name, each, 1, devices, LINK, LINK) for each in kinds)
    pairs = itertools.combinations([each.name for each in kinds], 2)
    return Cluster("made up", parts, tuple((a, b, LINK) for a, b in pairs))


def row(layer: str, kind: str, mesh: list[int], size: int, seconds: float, **more: Any) -> dict:
    return {
        "layer": layer,
        "kind": kind,
        "mesh": mesh,
        "microbatch_size": size,
        "forward_seconds": seconds,
        "backward_seconds": 2 * seconds,
        "kept_bytes": 1e6 * size,
        **more,
    }


BLOCK = {"name": "block", "parameter_bytes": 4e6, "optimizer_bytes": 2.4e7, "sent_bytes": 1e5}

TWO_KINDS: dict[str, Any] = {
    "version": 1,
    "model": "four blocks",
    "source": "made up",
    "layers": [{**BLOCK, "count": 3}, {**BLOCK, "name": "head"}],
    "times": [
        row(layer, kind, [1, tensor], size, 0.01 * size * slow / tensor**0.5)
        for layer in ("block", "head")
        for kind, slow in (("old", 2), ("new", 1))
        for tensor in (1, 2)
        for size in (1, 2, 8)
    ],
}


PROFILE = checked_foreign_profile(TWO_KINDS, "made_up.json")


def changed(*path: Any, to: Any) -> dict[str, Any]:
    """The content with another value at a place; with none where that is `MISSING`."""
    content = deepcopy(TWO_KINDS)
    inner = content
    for part in path[:-1]:
        inner = inner[part]
    if to is MISSING:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return content


def without(**values: Any) -> dict[str, Any]:
    """The content without the rows of times that have these values."""
    rows = [r for r in TWO_KINDS["times"] if any(r[name] != v for name, v in values.items())]
    return changed("times", to=rows)


def test_layers_are_written_once_and_counted():
    names = [each.name for each in PROFILE.layers]
    assert names == ["block 0", "block 1", "block 2", "head"]
    assert names_of_layers(PROFILE.layers) == "block 0 to block 2, head"
    assert PROFILE.layers[0].gradient_bytes == 4e6
    assert PROFILE.layers[0].returned_bytes == 1e5


def test_a_layer_may_be_like_an_earlier_one():
    content = changed("layers", to=[*TWO_KINDS["layers"], {"name": "more", "like": "block"}])
    last = checked_foreign_profile(content, "made_up.json").layers[-1]
    assert (last.name, last.figures, last.parameter_bytes) == ("more", "block", 4e6)


@given(st.integers(1, 12))
def test_times_lie_on_lines_between_sizes_and_nowhere_else(size: int):
    found = PROFILE.times_on("old", (1, 1), size)
    if size > 8:
        assert found is None
        return
    assert found is not None
    assert found.forward_seconds == pytest.approx([0.02 * size] * 4)
    assert found.kept_bytes == pytest.approx([1e6 * size] * 4)


def test_a_data_axis_computes_shares_of_the_examples_unless_its_times_are_given():
    shared = PROFILE.times_on("new", (2, 2), 8)
    alone = PROFILE.times_on("new", (1, 2), 4)
    assert shared is not None
    assert alone is not None
    assert (shared.forward_seconds == alone.forward_seconds).all()
    assert PROFILE.times_on("new", (2, 1), 3) is None
    given_rows = [row(layer, "new", [2, 1], 4, 0.5) for layer in ("block", "head")]
    more = checked_foreign_profile(changed("times", to=[*TWO_KINDS["times"], *given_rows]), "")
    own = more.times_on("new", (2, 1), 4)
    assert own is not None
    assert own.forward_seconds == pytest.approx([0.5] * 4)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (changed("version", to=2), "version: 2 is not allowed"),
        (changed("model", to=MISSING), "model: the field is missing"),
        (changed("layers", 0, "name", to="blok"), "unknown times[0].layer 'block'"),
        (changed("layers", 0, "sent_bytes", to=MISSING), "layers[0].sent_bytes: the field is"),
        (changed("layers", 0, "count", to=0), "layers[0].count: 0 is not allowed"),
        (changed("layers", 0, "count", to=256), "layers: there are 257; allowed: 256 at most"),
        (changed("layers", 1, "name", to="block"), "layers[1].name: 'block' is given twice"),
        (changed("layers", 1, to={"name": "x", "like": "y"}), "unknown layers[1].like 'y'"),
        (changed("layers", 1, "like", to="block"), "layers[1].parameter_bytes: it is not allowed"),
        (changed("layers", 1, "tied_to", to="tail"), "unknown layers[1].tied_to 'tail'"),
        (changed("times", 3, "mesh", to=[1]), "times[3].mesh: [1] is not allowed"),
        (changed("times", 3, "forward_secs", to=1.0), "times[3]: unknown field 'forward_secs'"),
        (changed("times", 3, "kept_bytes", to=-1), "times[3].kept_bytes: -1 is not allowed"),
        (changed("times", 1, "microbatch_size", to=1), "[1, 1], has times for microbatches of 1"),
        (without(layer="head", kind="old"), "layer 'head' has none on old, mesh [1, 1], which"),
        (without(layer="head", mesh=[1, 2]), "layer 'head' has none on old, mesh [1, 2], which"),
    ],
)
def test_what_a_file_lacks_or_has_wrong_is_named(content: Any, told: str, tmp_path: Path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as error:
        read_foreign_profile(path)
    assert str(error.value).startswith(f"{path}: ")
    assert told in str(error.value)


def find(
    content: Any = TWO_KINDS,
    batch: int = 8,
    devices: int = 2,
    kinds: Any = (OLD, NEW),
    **options: Any,
) -> ForeignFound:
    profile = checked_foreign_profile(content, "made_up.json")
    planner = ForeignPlanner(profile, cluster(*kinds, devices=devices), PlanOptions(**options))
    return planner.find(batch, divisors(batch))


def test_a_profile_that_lacks_a_kind_is_refused():
    with pytest.raises(InputError, match="no times of kind 'new', which subcluster 'new'"):
        find(without(kind="new"))


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(InputError, match="min_stages is 5; a stage needs a layer"):
        find(min_stages=5, devices=4)


def test_schedules_of_halves_are_refused():
    with pytest.raises(InputError, match=r"unknown planner\.schedule 'zb_h1'"):
        find(schedule="zb_h1")


def test_microbatches_without_times_are_refused():
    planner = ForeignPlanner(PROFILE, cluster(OLD), PlanOptions())
    with pytest.raises(InputError, match=r"microbatches of 64 examples.*\[1, 2\]: 1 to 8"):
        planner.find(64, (1,))


def test_layers_whose_sizes_do_not_overlap_are_told():
    rows = [{**r, "microbatch_size": 16} if r["layer"] == "head" else r for r in TWO_KINDS["times"]]
    rows = [row for row in rows if row["mesh"] == [1, 1]]
    only = [*({(r["layer"], r["kind"], r["microbatch_size"]): r for r in rows}).values()]
    with pytest.raises(InputError, match=r"old, mesh \[1, 1\]: none that all layers have; new"):
        find(changed("times", to=only))


def test_more_microbatches_than_a_step_may_have_are_not_tried():
    batch = 2 * MAX_MICROBATCHES
    planner = ForeignPlanner(PROFILE, cluster(OLD, NEW), PlanOptions())
    found = planner.find(batch, (MAX_MICROBATCHES, batch))
    assert list(found.step_times) == [MAX_MICROBATCHES]
    with pytest.raises(InputError, match=r"counts is \(32768,\); a step may have 16,384"):
        planner.find(batch, (batch,))
    with pytest.raises(InputError, match=r"of 32, .* examples, .*; a step may have 16,384"):
        planner.find(16 * batch, divisors(16 * batch))
    many = changed("layers", 0, "count", to=7)
    deep = ForeignPlanner(
        checked_foreign_profile(many, ""), cluster(OLD, NEW, devices=4), PlanOptions(min_stages=5)
    )
    assert 2 * 5 * MAX_MICROBATCHES > MAX_TASKS
    assert list(deep.find(MAX_MICROBATCHES, (2048, MAX_MICROBATCHES)).step_times) == [2048]


def test_what_is_left_out_for_want_of_times_is_said():
    notes = find(without(mesh=[1, 2]), batch=64).plan.notes
    assert "left out, for want of times on old: tensor parallelism of 2 devices" in notes
    assert "left out, for want of times on new: microbatches of 32, 64 examples" in notes


def test_what_fits_nowhere_is_refused():
    with pytest.raises(DoesNotFitError, match="four blocks fits on cluster 'made up' by no plan"):
        find(changed("layers", 0, "optimizer_bytes", to=1e11))


def test_a_stage_makes_layers_again_where_they_do_not_fit():
    content = deepcopy(TWO_KINDS)
    for each in content["times"]:
        each["kept_bytes"] = 5e9 * each["microbatch_size"]
    plan = find(content, kinds=(OLD,), max_stages=1).plan
    assert plan.stages[0].recompute or plan.stages[0].recompute_layers
    assert plan.prediction is not None
    assert plan.prediction.fits
    with pytest.raises(DoesNotFitError):
        find(content, kinds=(OLD,), max_stages=1, allow_recompute=False)


def test_tied_parameters_are_held_once_in_a_stage_and_exchanged_between_stages():
    tied = deepcopy(TWO_KINDS)
    tied["layers"].insert(0, {**BLOCK, "name": "first"})
    tied["times"] += [{**r, "layer": "first"} for r in tied["times"] if r["layer"] == "head"]
    tied["layers"][-1]["tied_to"] = "first"
    one = find(tied, max_stages=1, kinds=(OLD,), batch=1, devices=1).plan.prediction
    two = find(tied, min_stages=2, kinds=(OLD,), batch=1).plan.prediction
    assert one is not None
    assert two is not None
    held = 4 * (2 * 4e6 + 2.4e7)
    assert (one.stages[0].state_bytes, one.sharing_seconds) == (held, 0.0)
    assert two.sharing_seconds == pytest.approx(2 * (4e6 / LINK.bandwidth + LINK.latency))


def test_layers_tied_to_one_owner_are_held_once_in_a_stage_without_it():
    tied = deepcopy(TWO_KINDS)
    tied["layers"] = [{**BLOCK, "name": name} for name in ("first", "block", "a", "b", "c")]
    tied["layers"][2:] = [{**each, "tied_to": "first"} for each in tied["layers"][2:]]
    tied["times"] = [
        {**each, "layer": layer["name"]}
        for layer in tied["layers"]
        for each in TWO_KINDS["times"]
        if each["layer"] == "head"
    ]
    costs = ForeignCosts(checked_foreign_profile(tied, "made up"), cluster(OLD), 1)
    held = costs.estimate(next(costs.executions(costs._cluster.subclusters[0], (1, 1))))
    own = 2 * 4e6 + 2.4e7
    for run, times in {(2, 3): 1, (2, 4): 1, (2, 5): 1, (1, 5): 2, (0, 2): 2, (0, 5): 2}.items():
        assert held.state_bytes[run] == times * own


def test_a_plan_is_an_ordinary_one():
    found = find()
    plan = found.plan
    assert plan.prediction is not None
    assert simulate(plan).makespan == pytest.approx(plan.prediction.step_time)
    assert Plan.from_json_dict(plan.to_json_dict()) == plan
    best = [told for told in found.step_times.values() if told is not None]
    assert plan.prediction.step_time == pytest.approx(min(best)[0])
    assert set(found.step_times) == {1, 2, 4, 8}


def enumerated(content: Any, devices: Cluster, count: int, size: int) -> Iterator[float]:
    """The step of every pipeline by 1F1B, from the rows of a profile themselves."""
    profile = checked_foreign_profile(content, "")
    names = [each.name for each in devices.subclusters]
    pieces = [[(1,), (2,), (1, 1)]] * len(names)
    for used in range(1, len(names) + 1):
        for order in itertools.permutations(names, used):
            for parts in itertools.product(*pieces[:used]):
                stages = [(n, s) for n, each in zip(order, parts, strict=True) for s in each]
                yield from _timed(profile, devices, stages, count, size)


def _timed(
    profile: ForeignProfile, devices: Cluster, stages: list[Any], count: int, size: int
) -> Iterator[float]:
    num_layers = len(profile.layers)
    for cuts in itertools.combinations(range(1, num_layers), len(stages) - 1):
        runs = list(itertools.pairwise((0, *cuts, num_layers)))
        for tensors in itertools.product((1, 2), repeat=len(stages)):
            figures = [
                _stage(profile, devices.subcluster(name), n, tensor, slice(*run), size)
                for (name, n), tensor, run in zip(stages, tensors, runs, strict=True)
            ]
            if not all(figures):
                continue
            forward, backward, update, exchange = zip(*figures, strict=True)
            crossed = [LINK.seconds(1e5 * size)] * (len(stages) - 1)
            times = StepTimes(forward, backward, crossed, crossed, update)
            clocks = stage_clocks(one_f_one_b(len(stages), count), times)
            ends = [clock.end for clock in clocks]
            told = told_moments(
                [sum(each) for each in zip(ends, exchange, strict=True)], LINK.latency
            )
            yield max(
                max(end, moment - before) + each
                for end, moment, before, each in zip(ends, told, exchange, update, strict=True)
            )


def _stage(
    profile: ForeignProfile, part: Subcluster, devices: int, tensor: int, run: slice, size: int
) -> Any:
    data = devices // tensor
    found = None
    if devices % tensor == 0 and size % data == 0:
        found = profile.times_on(part.kind.name, (data, tensor), size)
    if found is None:
        return None
    count = run.stop - run.start
    exchange = 2 * (data - 1) * (1e-5 + count * 4e6 / tensor / data / 1e9)
    held = count * (4e6 + 4e6 + 2.4e7) / tensor / data
    update = TASK_SECONDS + held / (part.kind.memory_bandwidth / 2) + exchange
    return found.forward_seconds[run].sum(), found.backward_seconds[run].sum(), update, exchange


@given(
    st.sampled_from([1, 2, 4]),
    st.lists(st.floats(0.2, 5), min_size=4, max_size=4),
    st.sampled_from([(OLD,), (OLD, NEW)]),
)
@settings(max_examples=8)
def test_a_plan_is_one_of_all_and_hardly_ever_behind_the_best(
    count: int, factors: list[float], kinds: Any
):
    content = deepcopy(TWO_KINDS)
    groups = [(r, k) for r in ("block", "head") for k in ("old", "new")]
    for each in content["times"]:
        factor = factors[groups.index((each["layer"], each["kind"]))]
        each["forward_seconds"] *= factor
        each["backward_seconds"] *= factor
    devices = cluster(*kinds)
    profile = checked_foreign_profile(content, "")
    options = PlanOptions(schedule="1f1b", allow_recompute=False)
    found = ForeignPlanner(profile, devices, options).find(4, (count,)).plan.prediction
    every = list(enumerated(content, devices, count, 4 // count))
    assert found is not None
    assert any(found.step_time == pytest.approx(each, rel=1e-6) for each in every)
    assert found.step_time <= min(every) * 1.05


def test_the_example_comes_from_its_script(tmp_path: Path):
    write(opt_350m(), tmp_path / "made.json")
    assert (tmp_path / "made.json").read_text() == EXAMPLE.read_text()


def test_the_example_has_as_many_parameters_as_the_model():
    layers = read_foreign_profile(EXAMPLE).layers
    assert len(layers) == 28
    own = sum(each.parameter_bytes for each in layers if each.tied_to is None) / 2
    assert own == pytest.approx(331.2e6, rel=0.005)


def test_two_tables_become_a_profile(tmp_path: Path):
    layers, times = tmp_path / "layers.csv", tmp_path / "times.csv"
    layers.write_text(
        "name,count,parameter_bytes,optimizer_bytes,sent_bytes\nblock,3,4e6,2.4e7,1e5\n"
        "head,,4e6,2.4e7,1e5\n"
    )
    head = "layer,kind,data,tensor,microbatch_size,forward_seconds,backward_seconds,kept_bytes"
    lines = [[r["layer"], r["kind"], *r["mesh"], *list(r.values())[3:]] for r in TWO_KINDS["times"]]
    times.write_text("\n".join([head, *(",".join(map(str, line)) for line in lines)]))
    write(from_tables(layers, times, "four blocks", "made up"), tmp_path / "made.json")
    made = read_foreign_profile(tmp_path / "made.json")
    assert made.layers == PROFILE.layers
    for key, sized in PROFILE.times.items():
        assert made.times[key].sizes == sized.sizes
        assert (made.times[key].times.forward_seconds == sized.times.forward_seconds).all()


@pytest.mark.parametrize(
    ("times", "told"),
    [
        ("layer,kind,dat,tensor\na,T4,1,1\n", "times.csv: row 1: column 'data' is missing"),
        ("layer,data,tensor\na,1,1\na,one,1\n", "times.csv: row 2: data: 'one' is not allowed"),
        ("layer,data,tensor\na,1,1,1\n", "times.csv: row 1: it has more cells"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(times: str, told: str, tmp_path: Path):
    (tmp_path / "times.csv").write_text(times)
    (tmp_path / "layers.csv").write_text("name\na\n")
    with pytest.raises(InputError, match=told):
        from_tables(tmp_path / "layers.csv", tmp_path / "times.csv", "a", "made up")


@pytest.mark.parametrize("counts", [(), (0,), (3,), (-1,), (4.0,), ("4",), 4])
def test_numbers_of_microbatches_divide_the_batch(counts: Any):
    planner = ForeignPlanner(PROFILE, cluster(OLD, NEW), PlanOptions())
    with pytest.raises(InputError, match=r"counts is .* that divide batch_size, 8"):
        planner.find(8, counts)


def plan_command(*arguments: str) -> int:
    return importlib.import_module("hetjax.plan").main(
        ("--config", "opt_350m_by_profile", "--gin", "train.batch_size = 16", *arguments)
    )


def test_the_command_plans_by_a_profile_alone(capsys: Any, tmp_path: Path):
    made, page = tmp_path / "plan.json", tmp_path / "plan.html"
    assert plan_command("--json", "--out", str(made), "--report", str(page)) == 0
    figures = json.loads(capsys.readouterr().out)
    plan = Plan.load(made)
    assert plan.prediction is not None
    assert figures["step_time"] == plan.prediction.step_time
    assert {each["num_microbatches"] for each in figures["tried"]} == {1, 2, 4, 8, 16}
    assert figures["stages"][0]["layer_names"].startswith("words, positions, block 0")
    by_itself = sum(1 / part["step_time"] for part in figures["parts"])
    assert figures["hetero_speedup_ratio"] == pytest.approx(1 / by_itself / figures["step_time"])
    assert "OPT-350M on mixed rack" in page.read_text()
    assert "Does it pay to mix?" in page.read_text()
    assert plan_command() == 0
    assert "hetjax has no such model to train" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--gin", "planner.name = 'hap'"), "planner.name is 'hap'"),
        (("--gin", "planner.num_layers = 3"), "planner.num_layers is 3"),
        (("--gin", "planner.max_pipelines = 2"), "planner.max_pipelines is 2"),
        (("--lost", "3"), "--lost is 3"),
        (("--gin", "planner.profile = 'none.json'"), "planner.profile 'none.json' cannot be read"),
        (("--gin", "planner.schedule = 'search'"), "unknown planner.schedule 'search'"),
    ],
)
def test_the_command_refuses_what_goes_with_no_such_plan(given: Any, told: str, capsys: Any):
    assert plan_command(*given) == 2
    assert told in capsys.readouterr().err
