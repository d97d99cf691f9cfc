"""The plan command; the package's own name ``plan`` is a function."""

import gc
import importlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_files import TWO_AND_TWO
from full_disk import fill, small_disk

from hetjax import planner
from hetjax.commands.command_line import INTERRUPTED, NOT_WRITTEN
from hetjax.commands.figures import stage_figures
from hetjax.mesh import SubMesh
from hetjax.pipeline.timeline.streamed_update import GroupTimes
from hetjax.planner import Member, Plan, PlanningProblem
from hetjax.planner.h2.refine import Refined, refine

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.gin"


def plan_command(*arguments: str) -> int:
    return importlib.import_module("hetjax.plan").main(arguments)


@pytest.fixture(scope="module")
def quickstart_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the plan of the quickstart."""
    file = tmp_path_factory.mktemp("quickstart") / "plan.json"
    assert plan_command("--config", str(QUICKSTART), "--out", str(file)) == 0
    return file


def test_figures_of_streamed_updates_are_plain_values(quickstart_plan: Path) -> None:
    plan = Plan.load(quickstart_plan)
    assert plan.prediction is not None
    first, *rest = plan.prediction.stages
    streamed = replace(first, update_groups=(GroupTimes(0.1, 0.2, 0.3),))
    told = replace(plan, prediction=replace(plan.prediction, stages=(streamed, *rest)))
    (of_first, *_) = json.loads(json.dumps(stage_figures(told)))
    assert of_first["update_groups"] == [{"fetch": 0.1, "update": 0.2, "store": 0.3}]


def test_json_is_one_object_with_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "made" / "plan.json"
    arguments = ["--config", str(QUICKSTART), "--json", "--out", str(file)]
    assert plan_command(*arguments, "--gin", "train.batch_size = 32") == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert str(file) in captured.err
    plan = Plan.load(file)
    assert plan.prediction is not None
    assert figures["step_time"] == plan.prediction.step_time
    assert figures["bound_ratio"] == pytest.approx(figures["step_time"] / figures["lower_bound"])
    assert figures["bound_ratio"] >= 1
    assert figures["batch_size"] == 32
    assert figures["devices"] == 6
    assert figures["layers"] == len(plan.layers) - 1
    assert figures["planning_seconds"] > 0
    assert figures["candidates"] > 100
    assert figures["planning_seconds"] > figures["search_seconds"] > 0
    assert figures["profile_seconds"] > 0
    assert 0 < figures["load_balance"] <= 1
    assert 0 < figures["mfu"] < 1
    assert "published_step_time" not in figures
    assert figures["candidates_measured"] == 0
    assert 0 < figures["candidates_a_profile_would_measure"] < figures["candidates"]
    assert [part["subclusters"] for part in figures["parts"]] == [["fast"], ["slow"]]
    assert all(part["step_time"] > 0 for part in figures["parts"])
    assert 0 <= figures["bubble"] < 1
    assert len(figures["stages"]) == len(plan.pipeline.stages)
    for stage in figures["stages"]:
        assert stage["memory_bytes"] <= stage["memory_limit_bytes"]
    assert figures["memory_bytes"] == max(stage["memory_bytes"] for stage in figures["stages"])


def test_a_published_plan_and_the_best_number_of_microbatches(
    quickstart_plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--config", str(QUICKSTART), "--json"]
    theirs = Plan.load(quickstart_plan)
    step_time = theirs.predicted.step_time
    published = f"planner.published = {str(quickstart_plan)!r}"
    free = ("--gin", "train.microbatches = None", "--gin", published)
    assert plan_command(*given, *free) == 0
    captured = capsys.readouterr()
    assert "planned 1 of " in captured.err
    ours = json.loads(captured.out)
    assert any("assumed" in line for line in ours["rates"])
    assert ours["published_step_time"] == step_time
    assert ours["published_fits"] is True
    assert ours["published_recomputing_stages"] == 0
    # Of what it gives itself, other ways to run its stages change little.
    for rating in ("refitted", "keeping_all"):
        seconds = ours[f"published_{rating}_step_time"]
        assert 0.97 * step_time < seconds <= step_time
        assert ours[f"published_{rating}_recomputing_stages"] == 0
    assert ours["step_time"] <= step_time
    assert ours["num_microbatches"] * ours["microbatch_size"] == theirs.batch_size


def test_a_published_plan_of_several_members_is_refused_at_once(
    quickstart_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plan = tmp_path / "published.json", Plan.load(quickstart_plan)
    stage = max(plan.stages, key=lambda each: each.num_devices)
    name, start = stage.submesh.subcluster, stage.submesh.start
    members = tuple(Member(SubMesh(name, start + i, (1, 1)), (1, 1)) for i in range(2))
    union = replace(stage, members=members, parameters={}, values={})
    stages = tuple(union if each is stage else each for each in plan.stages)
    replace(plan, pipelines=(replace(plan.pipeline, stages=stages),)).save(file)
    published = ("--gin", f"planner.published = {str(file)!r}")
    assert plan_command("--config", str(QUICKSTART), *published) == 2
    captured = capsys.readouterr()
    assert not captured.out
    line = captured.err.splitlines()[-1]
    place = f"stages[{plan.stages.index(stage)}] has 2 members, and its shares are not those of the"
    assert line.startswith(f"error: planner.published: {file}: pipelines[0].{place}")


def test_a_published_plan_is_rated_by_what_was_traced_for_the_search(
    quickstart_plan: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--config", str(QUICKSTART), "--json"]
    stated: list[int] = []

    def make_problem(*arguments: Any, **options: Any) -> PlanningProblem:
        stated.append(options["num_microbatches"])
        return planner.make_problem(*arguments, **options)

    seldom: list[bool] = []

    def predict(plan: Plan, problem: PlanningProblem) -> Plan:
        seldom.append(gc.get_threshold() > usual)
        return planner.predict(plan, problem)

    usual = gc.get_threshold()
    monkeypatch.setattr("hetjax.commands.problems.make_problem", make_problem)
    monkeypatch.setattr("hetjax.commands.published.predict", predict)
    published = ("--gin", f"planner.published = {str(quickstart_plan)!r}")
    assert plan_command(*given, *published) == 0
    figures = json.loads(capsys.readouterr().out)
    assert stated == [figures["num_microbatches"]]
    assert figures["published_step_time"] == figures["step_time"]
    # The traces of the search are not walked again and again for what could be thrown away.
    assert seldom == [True]


def test_what_a_published_plan_has_to_recompute_is_told_and_shown_without(
    quickstart_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--config", str(QUICKSTART)]
    file, plan = tmp_path / "published.json", Plan.load(quickstart_plan)
    stages = tuple(replace(stage, recompute=True) for stage in plan.stages)
    pipeline = replace(plan.pipeline, stages=stages)
    replace(plan, pipelines=(pipeline,), planner="a paper").save(file)
    published = ("--gin", f"planner.published = {str(file)!r}")
    assert plan_command(*given, *published, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["published_recomputing_stages"] == len(stages)
    assert figures["published_refitted_recomputing_stages"] == 0
    assert figures["published_keeping_all_fits"] is True
    assert figures["published_refitted_step_time"] < 0.9 * figures["published_step_time"]
    assert plan_command(*given, *published) == 0
    out = capsys.readouterr().out
    assert "published plan (a paper), as given: " in out
    assert f"{len(stages)} of {len(stages)} stages recompute" in out
    assert "its stages run as the planner would: " in out


def test_a_published_plan_is_checked_before_anything_is_planned(
    quickstart_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--config", str(QUICKSTART)]
    missing = ("--gin", f"planner.published = {str(tmp_path / 'published.json')!r}")
    assert plan_command(*given, *missing) == 2
    assert "planner.published" in capsys.readouterr().err
    published = ("--gin", f"planner.published = {str(quickstart_plan)!r}")
    other = ("--gin", f"cluster.file = {str(QUICKSTART.parent / 'clusters/two_hosts.yaml')!r}")
    assert plan_command(*given, *published, *other) == 2
    assert "a plan for the cluster 'quickstart'" in capsys.readouterr().err


def test_the_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command("--config", str(QUICKSTART)) == 0
    out = capsys.readouterr().out
    pieces = (
        *("Cluster quickstart", "fast to slow", "warm-up", "predicted step time", "bound"),
        *("Layers by structure", "load balance", "what limits it", "busiest link"),
        *("Does it pay to mix?", "fast (", "slow ("),
        "a profile would measure",
    )
    for piece in pieces:
        assert piece in out


def test_an_image_model_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    config = QUICKSTART.parent / "vgg19_home_laboratory.gin"
    assert plan_command("--config", str(config), "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["model"], figures["layers"]) == ("vgg-19", 16)
    assert figures["images_per_second"] == pytest.approx(1024 / figures["step_time"])


def test_wrong_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command("--config", str(QUICKSTART), "--gin", "train.stepz = 1") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: --gin")
    assert captured.err.count("\n") == 1
    assert not captured.out


PRICED = """
name: priced
kinds:
  quick: {peak_flops: {float32: 50 GFLOP/s}, memory: 8 GB, memory_bandwidth: 10 GB/s, platform: cpu}
  lame: {peak_flops: {float32: 20 GFLOP/s}, memory: 8 GB, memory_bandwidth: 5 GB/s, platform: cpu}
subclusters:
  - name: fast
    kind: quick
    nodes: 1
    devices_per_node: 4
    intra_node: {bandwidth: 5 GB/s, latency: 20 us}
    price_per_device_hour: 2
  - name: slow
    kind: lame
    nodes: 1
    devices_per_node: 2
    intra_node: {bandwidth: 5 GB/s, latency: 20 us}
    price_per_device_hour: 0.5
links:
  - {between: [fast, slow], bandwidth: 5 GB/s, latency: 20 us}
"""


def test_a_plan_of_several_pipelines_with_its_price_and_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, page = tmp_path / "priced.yaml", tmp_path / "made" / "plan.html"
    cluster.write_text(PRICED)
    settings = (
        f"cluster.file = {str(cluster)!r}",
        "train.microbatches = 8",
        "train.batch_size = 32",
        "planner.max_pipelines = 2",
        "planner.max_stages = 1",
    )
    arguments = [each for setting in settings for each in ("--gin", setting)]
    given = ["--config", str(QUICKSTART), "--json", "--report", str(page), *arguments]
    assert plan_command(*given) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["pipelines"] == 2
    assert figures["num_microbatches"] == 8
    assert [size for _, size in figures["microbatches"]] == [4, 4]
    assert figures["sharing_seconds"] > 0
    assert [stage["pipeline"] for stage in figures["stages"]] == [0, 1]
    assert figures["price_per_hour"] == pytest.approx(4 * 2 + 2 * 0.5)
    assert figures["cost_per_step"] == pytest.approx(9 * figures["step_time"] / 3600)
    assert figures["cost_per_example"] == pytest.approx(figures["cost_per_step"] / 32)
    one = figures["alternatives"][0]
    assert one["difference"].startswith("1 pipeline instead of 2")
    assert one["step_time"] > figures["step_time"]
    text = page.read_text("utf-8")
    for part in ("gpt-4x192 on priced", "pipeline 1", "a million tokens", "1 pipeline instead"):
        assert part in text


def test_a_file_that_cannot_be_written_is_told_before_anything_is_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option in ("--report", "--out"):
        assert plan_command(option, "", "--config", str(QUICKSTART)) == 2
        assert f"{option}: '' names nothing" in capsys.readouterr().err
        wrong = [option, "/dev/null/plan.html", "--config", str(QUICKSTART)]
        assert plan_command(*wrong) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(f"error: {option} /dev/null/plan.html cannot be written")
        assert not captured.out


class Interrupted(io.StringIO):
    """A standard output that is left by whoever waits for it."""

    def write(self, text: str) -> int:
        raise KeyboardInterrupt


def test_files_are_written_before_anything_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, page = tmp_path / "plan.json", tmp_path / "plan.html"
    monkeypatch.setattr(sys, "stdout", Interrupted())
    given = ["--config", str(QUICKSTART), "--gin", "planner.max_stages = 1"]
    assert plan_command(*given, "--out", str(plan), "--report", str(page)) == INTERRUPTED
    assert plan.exists()
    assert page.exists()


def test_files_that_cannot_be_written_cost_no_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", megabytes=1) as disk:
        fill(disk)
        given = ["--config", "quickstart", "--gin", "planner.max_stages = 1", "--json"]
        paths = [str(disk / "plan.json"), str(disk / "plan.html")]
        assert plan_command(*given, "--out", paths[0], "--report", paths[1]) == NOT_WRITTEN
    captured = capsys.readouterr()
    assert json.loads(captured.out)["step_time"] > 0
    assert "Traceback" not in captured.err
    assert f"error: {paths[1]}: No space left on device" in captured.err
    assert paths[0] in captured.err


def test_lost_devices_are_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    given = ["--config", str(QUICKSTART), "--out", str(file)]
    assert plan_command(*given, "--lost", "1", "4") == 0
    plan = Plan.load(file)
    used = {device for stage in plan.stages for device in plan.cluster.device_ids(stage.submesh)}
    assert used
    assert not used & {1, 4}
    capsys.readouterr()
    assert plan_command(*given, "--lost", "6", "--lost", "1") == 2
    assert "--lost: device 6 is not in cluster 'quickstart'" in capsys.readouterr().err


HAP = ("--gin", "planner.name = 'hap'", "--gin", "train.microbatches = 1")


def test_a_program_is_told_tensor_by_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    unplayed = ("--gin", "cluster.play = False")
    assert plan_command("--config", str(QUICKSTART), "--json", *HAP, *unplayed) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["step_time"] <= min(figures["data_parallel_step_times"].values())
    lies = {row["what"]: row["layout"] for row in figures["program_layouts"]}
    assert "embedding" in " ".join(lies)
    for row in figures["program_moves"]:
        assert row["form"] in ("gather", "scatter", "sum", "exchange")
        assert row["num_bytes"] > 0
        assert row["seconds"] > 0
    assert plan_command("--config", str(QUICKSTART), *HAP, *unplayed) == 0
    shown = capsys.readouterr().out
    assert "Program: how tensors lie" in shown
    assert "Does it pay to mix?" in shown
    assert "data parallelism with even shares is predicted to take" in shown


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("cluster.play = True", "set cluster.play = False"),
        ("train.tune = True", "train.tune is given"),
        ("train.beside = '1f1b'", "train.beside is given"),
        ("planner.objective = 'cost'", "set planner.name = 'harp'"),
        ("planner.min_stages = 2", "planner.min_stages is 2, and planner.name is 'hap'"),
    ],
)
def test_a_program_cannot_be_played_or_scheduled(
    setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unplayed = ("--gin", "cluster.play = False", "--gin", setting)
    assert plan_command("--config", str(QUICKSTART), *HAP, *unplayed) == 2
    assert message in capsys.readouterr().err


HETERO_AUTO = ("--gin", "planner.name = 'heteroauto'")


def test_a_plan_of_hetero_auto_that_does_not_fit_after_all_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def over_memory(plan: Plan, problem: PlanningProblem) -> Refined:
        made = refine(plan, problem).refined
        first, *others = made.predicted.stages
        over = replace(first, memory_limit_bytes=first.memory_bytes - 1)
        return Refined(
            made, replace(made, prediction=replace(made.predicted, stages=(over, *others)))
        )

    monkeypatch.setattr("hetjax.planner.h2.heteroauto_planner.refine", over_memory)
    chosen = ("--gin", "train.microbatches = 8")
    assert plan_command("--config", str(QUICKSTART), *HETERO_AUTO, *chosen) == 2
    told = capsys.readouterr().err
    assert "HeteroAuto's best plan does not fit: stage 0 needs" in told
    assert "set planner.name = 'harp'" in told


def test_hetero_auto_is_told_as_found_and_refined(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ("--gin", "train.microbatches = 8")
    assert plan_command("--config", str(QUICKSTART), *HETERO_AUTO, *chosen) == 0
    shown = capsys.readouterr().out
    assert "plan: HeteroAuto" in shown
    assert "by the timeline of its 1F1B schedule" in shown
    assert "refined, which is this plan" in " ".join(shown.split())
    assert "Does it pay to mix?" in shown
    assert "each kind by itself, side by side" in shown
    assert plan_command("--config", str(QUICKSTART), *HETERO_AUTO, *chosen, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    by_itself = sum(1 / part["step_time"] for part in figures["parts"])
    assert len(figures["parts"]) == 2
    assert figures["hetero_speedup_ratio"] == pytest.approx(1 / by_itself / figures["step_time"])
    cost = ("--gin", "planner.objective = 'cost'")
    assert plan_command("--config", str(QUICKSTART), *HETERO_AUTO, *cost) == 2
    assert "set planner.name = 'harp'" in capsys.readouterr().err
    fewer = ("--gin", "planner.max_stages = 2")
    assert plan_command("--config", str(QUICKSTART), *HETERO_AUTO, *fewer) == 2
    assert "planner.max_stages is 2, and planner.name is 'heteroauto'" in capsys.readouterr().err
    assert plan_command("--config", str(QUICKSTART), *HETERO_AUTO, *chosen, "--lost", "1") == 2
    assert "uses all devices, and 1 are lost" in capsys.readouterr().err


CONTEXT = """
cluster.file = "cluster.yaml"
planner.name = "hexiseq"
model.recipe = "gpt-quickstart"
model.blocks = 1
model.width = 32
model.heads = 4
model.sequence = 64
data.kind = "synthetic"
data.size = 4000
train.batch_size = 2
train.microbatches = 1
"""


@pytest.fixture
def context_config(tmp_path: Path) -> str:
    (tmp_path / "cluster.yaml").write_text(TWO_AND_TWO)
    file = tmp_path / "context.gin"
    file.write_text(CONTEXT)
    return str(file)


def test_a_context_split_is_told_beside_other_systems(
    context_config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_command("--config", context_config) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "Who shares 64 tokens, 4 query heads and 4 heads of keys and values",
        "Beside other systems, each at its best settings",
        "predicted by the scheduler's model",
        "ring attention",
        "Ulysses",
    ):
        assert part in shown, part
    file = str(tmp_path / "plan.json")
    assert plan_command("--config", context_config, "--json", "--out", file) == 0
    context = json.loads(capsys.readouterr().out)["context"]
    devices = [device for group in context["groups"] for device in group["devices"]]
    split = Plan.load(file).stages[0].shares.context
    assert split is not None
    assert [device["tokens"] for device in devices] == list(split.tokens)
    assert [tuple(device["heads"]) for device in devices] == list(split.head_ranges)
    ours, *others = (system["seconds"] for system in context["systems"])
    assert all(ours <= seconds for seconds in others if seconds is not None)


SHORT = """
name: short of memory
kinds:
  card:
    peak_flops: {float32: 30 GFLOP/s}
    memory: MEMORY
    memory_bandwidth: 3 GB/s
    platform: gpu
    source: made up
subclusters:
  - name: cards
    kind: card
    nodes: 2
    devices_per_node: 2
    intra_node: {bandwidth: 10 GB/s, latency: 1 us}
    inter_node: {bandwidth: 10 MB/s, latency: 1 us}
"""


@pytest.mark.parametrize(("memory", "shared"), [("2 MB", 2), ("1.5 MB", 1), ("1.44 MB", 0)])
def test_where_memory_is_short_stages_are_of_other_kinds(
    memory: str, shared: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text(SHORT.replace("MEMORY", memory))
    sizes = ("blocks = 2", "width = 64", "key_value_heads = 4", "ffn_width = 256")
    changes = [f"model.{each}" for each in sizes]
    changes += ["model.recipe = 'llama-tiny'", "train.microbatches = None", "train.batch_size = 4"]
    (tmp_path / "context.gin").write_text(CONTEXT)
    file = tmp_path / "short.gin"
    file.write_text("\n".join(["include 'context.gin'", *changes, "optimizer.name = 'adamw'"]))
    saved = str(tmp_path / "plan.json")
    assert plan_command("--config", str(file), "--out", saved) == 0
    stages = Plan.load(saved).stages
    assert sum(stage.members_share_context for stage in stages) == shared
    assert ("no stage shares sequences" in capsys.readouterr().out) == (shared == 0)


def test_a_system_can_be_asked_for(context_config: str, capsys: pytest.CaptureFixture[str]) -> None:
    for system, groups in (("ring", 4), ("ulysses", 1)):
        one = ("--json", "--gin", f"planner.context = {system!r}")
        assert plan_command("--config", context_config, *one) == 0
        context = json.loads(capsys.readouterr().out)["context"]
        assert context["systems"][0]["system"] == system
        assert len(context["groups"]) <= groups
        assert len({d["tokens"] for g in context["groups"] for d in g["devices"]}) == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("planner.objective = 'cost'", "set planner.name = 'harp'"),
        ("cluster.play = True", "set cluster.play = False"),
        ("train.tune = True", "train.tune is given"),
        ("train.beside = '1f1b'", "train.beside is given"),
        ("planner.min_stages = 2", "planner.min_stages is 2"),
        ("planner.profile = 'profile'", "has no measurement of this model"),
        ("model.dropout = 0.1", "set model.dropout = 0"),
        ("model.recipe = 'resnet-quickstart'", "no attention whose context members could share"),
        ("planner.name = 'harp'", "planner.context is 'ring', and planner.name is 'harp'"),
        ("planner.context = 'rings'", "did you mean 'ring'?"),
    ],
)
def test_what_no_context_split_has_is_refused(
    setting: str, message: str, context_config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--gin", setting]
    if "harp" in setting:
        more += ["--gin", "planner.context = 'ring'"]
    if "resnet" in setting:
        shapes = ("blocks", "width", "heads", "sequence")
        more += [each for name in shapes for each in ("--gin", f"model.{name} = None")]
        more += ["--gin", "data.kind = 'shapes'", "--gin", "data.size = 8"]
    assert plan_command("--config", context_config, *more) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
