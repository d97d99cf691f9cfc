import errno
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_files import TWO_AND_TWO
from full_disk import small_disk

from hetjax.commands.command_line import NOT_WRITTEN
from hetjax.commands.devices import check_devices, host_device_flags, use_devices
from hetjax.configuration import Configuration, RuntimeSettings, read_configuration, settings
from hetjax.errors import InputError, WorkerLostError
from hetjax.folder_lock import FolderLock
from hetjax.mesh import Cluster, SubMesh
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import Member, PipelinePlan, Plan, Shares, StagePlan
from hetjax.report import read_metrics
from hetjax.runtime import CheckpointFolder
from hetjax.train import main

CONFIGURATION = """
cluster.file = "cluster.yaml"
model.recipe = "gpt-quickstart"
model.blocks = 1
model.width = 16
model.heads = 2
model.sequence = 16
data.kind = "synthetic"
data.size = 4000
train.steps = 4
train.batch_size = 8
train.microbatches = 2
train.evaluate_every = 2
train.evaluation_batches = 1
planner.min_stages = 2
planner.max_pipelines = 1
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "cluster.yaml").write_text(TWO_AND_TWO)
    file = tmp_path / "run.gin"
    file.write_text(CONFIGURATION)
    return file


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command prints when it refuses its input."""
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "pieces"),
    [
        (["--bogus"], ["--bogus", "--help"]),
        (["--workdir", ""], ["--workdir: '' names nothing"]),
        (["--plan", ""], ["--plan: '' names nothing"]),
        (["--ray-address", ""], ["--ray-address: '' names nothing"]),
        (["--gin", "train.stepz = 1"], ["'train.stepz'", "'train.steps'"]),
        (["--gin", "train.microbatches = 3"], ["train.batch_size is 8", "1, 2, 4, 8"]),
        (["--gin", "cluster.file = 'nowhere.yaml'"], ["nowhere.yaml", "cannot be read"]),
        (["--gin", "cluster.file = 'broken.yaml'"], ["broken.yaml", "subclusters"]),
        (
            ["--gin", "cluster.file = 'kind.yaml'"],
            ["unknown device kind 'TPU5e'", "did you mean 'TPUv5e'?"],
        ),
        (["--gin", "model.recipe = 'gpt3'"], ["unknown model recipe 'gpt3'", "gpt-quickstart"]),
        (["--gin", "model.heads = 3"], ["heads is 3", "16"]),
        (["--gin", "model.width = 2**20"], ["name = value"]),
        (
            ["--gin", "model.width = 1048576"],
            ["is too large for any device of cluster 'test'", "TB"],
        ),
        (["--gin", "optimizer.name = 'adamx'"], ["'adamx'", "did you mean"]),
        (["--gin", "data.kind = 'text'", "--gin", "data.paths = 'latin.txt'"], ["not UTF-8"]),
        (["--gin", "data.kind = 'text'", "--gin", "data.paths = 'no.txt'"], ["'no.txt'"]),
        (["--gin", "train.writers = 'wand'"], ["train.writers 'wand'", "did you mean 'wandb'?"]),
        (["--runtime", "rya"], ["'rya'", "did you mean 'ray'?"]),
        (["--runtime", "ray", "--ray-address", "here"], ["'here'", "host:port"]),
        (["--runtime", "ray", "--ray-address", "127.0.0.1:1"], ["127.0.0.1:1", "nothing answers"]),
        (
            ["--gin", "cluster.file = None", "--gin", "cluster.measure = True"],
            ["cluster.measure is True", "runtime.name = 'ray'"],
        ),
        (["--plan", "nowhere.json"], ["nowhere.json", "cannot be read"]),
        (["--plan", "cluster.yaml"], ["cluster.yaml", "not JSON"]),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(
    config: Path,
    arguments: list[str],
    pieces: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(config.parent)
    Path("broken.yaml").write_text("name: broken\n")
    Path("kind.yaml").write_text(TWO_AND_TWO.replace("kind: slow", "kind: TPU5e"))
    Path("latin.txt").write_bytes(b"caf\xe9")
    before = sorted(config.parent.iterdir())
    line = fails(capsys, "--config", str(config), "--workdir", "run", *arguments)
    assert all(piece in line for piece in pieces), line
    assert sorted(config.parent.iterdir()) == before


def test_a_configuration_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--config is missing" in fails(capsys)
    assert "nowhere.gin" in fails(capsys, "--config", "nowhere.gin")


def test_a_work_folder_is_never_overwritten(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    line = fails(capsys, "--config", str(config), "--workdir", str(run))
    assert "holds a run already (metrics.jsonl)" in line
    assert "--resume" in line
    assert "is a file" in fails(capsys, "--config", str(config), "--workdir", str(config / "run"))
    assert "--workdir" in fails(capsys, "--config", str(config), "--resume")


def test_help_lists_options_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, _ in settings(Configuration()):
        assert f" {name} = " in text
    for option in ("--config", "--gin", "--workdir", "--resume", "--plan", "--dry-run"):
        assert option in text


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = config.parent / "run"
    arguments = ["--config", str(config), "--workdir", str(workdir), "--dry-run"]
    assert main([*arguments, "--gin", "train.steps = 7"]) == 0
    out = capsys.readouterr().out
    for piece in ("Cluster test", "7 steps", "quick[0:2] 1x2", "predicted step time"):
        assert piece in out
    assert not workdir.exists()


@pytest.mark.slow
def test_training_resuming_and_replaying(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = config.parent / "whole", config.parent / "parts"
    assert main(["--config", str(config), "--workdir", str(whole)]) == 0
    out = capsys.readouterr().out
    for piece in ("step 4/4", "held-out loss", "Predicted and measured", "live microbatches"):
        assert piece in out
    expected = read_metrics(whole)
    assert [record["step"] for record in expected] == [1, 2, 3, 4]
    for record in expected:
        assert {"loss", "grad_norm", "tokens_per_second", "step_time"} <= set(record)
        assert record["learning_rate"] > 0
    assert [record["step"] for record in expected if "evaluation_loss" in record] == [2, 4]
    for name in ("plan.json", "timeline.png", "timeline.html", "checkpoints", "tensorboard"):
        assert (whole / name).exists()
    assert json.loads((whole / "timeline.json").read_text())["traceEvents"]
    assert read_configuration(whole / "config.gin") == read_configuration(config)

    arguments = ["--config", str(config), "--workdir", str(parts), "--resume-or-start"]
    assert main([*arguments, "--gin", "train.steps = 2"]) == 0
    assert "starting at step 0" in capsys.readouterr().out
    arguments[-1] = "--resume"
    (parts / "carriers.json").write_text("what only Ray has a use for")
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "resumed from step 2" in out
    assert "changed since the run began: train.steps = 4 (was 2)" in out
    assert losses(parts) == losses(whole)
    assert (parts / "plan.json").read_text() == (whole / "plan.json").read_text()

    plan = json.loads((whole / "plan.json").read_text())
    plan["pipelines"][0]["schedule"] = {"name": "gpipe", "warm_up_counts": [2, 2]}
    edited = config.parent / "edited.json"
    edited.write_text(json.dumps(plan))
    replay = config.parent / "replay"
    arguments = ["--config", str(config), "--workdir", str(replay), "--plan", str(edited)]
    assert main([*arguments, "--gin", "train.steps = 1"]) == 0
    assert Plan.load(replay / "plan.json").pipeline.schedule.warm_up_counts == (2, 2)
    assert losses(replay)[0] == pytest.approx(losses(whole)[0], rel=1e-6)


def test_writers_need_a_work_folder(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = fails(capsys, "--config", str(config), "--gin", "train.writers = 'mlflow'")
    assert "train.writers is ('mlflow',) without --workdir" in line


@pytest.mark.filterwarnings("default")  # Those of the package are not ours to mend.
def test_a_writer_that_nobody_answers_ends_no_run(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    workdir = config.parent / "run"
    arguments = ["--config", str(config), "--workdir", str(workdir)]
    assert main([*arguments, "--gin", "train.writers = 'mlflow'"]) == NOT_WRITTEN
    output = capsys.readouterr().out
    assert "what mlflow was to hold was not written" in output
    assert "4 steps are done" in output
    assert [record["step"] for record in read_metrics(workdir)] == [1, 2, 3, 4]


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_a_run_that_diverges_ends_with_its_error_and_keeps_finite_checkpoints(
    config: Path, capsys: pytest.CaptureFixture[str], runtime: str
) -> None:
    workdir = config.parent / "run"
    arguments = [f"--config={config}", f"--workdir={workdir}", f"--runtime={runtime}"]
    settings = ("train.steps = 120", "train.checkpoint_every = 1", "train.max_nonfinite = 4")
    overrides = [f"--gin={setting}" for setting in (*settings, "optimizer.learning_rate = 1e9")]
    assert main([*arguments, *overrides]) == 4
    output = capsys.readouterr()
    assert re.search(r"error: 4 steps in a row up to step \d+ were not finite", output.err)
    bad = [int(step) for step in re.findall(r"step (\d+) was not applied", output.out)]
    assert len(bad) >= 4
    saved = CheckpointFolder(workdir / "checkpoints").steps()
    assert saved
    assert not set(bad).intersection(saved)
    steps = read_metrics(workdir)
    assert {step["step"] for step in steps if step["grad_norm"] is None} == set(bad)
    assert (workdir / "carriers.json").exists() == (runtime == "ray")


@pytest.mark.slow
def test_an_image_model_trains_on_a_folder_of_images(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, workdir = config.parent / "data", config.parent / "run"
    folder.mkdir()
    rng = np.random.default_rng(0)
    np.save(folder / "images.npy", rng.integers(0, 256, (40, 8, 8, 3), np.uint8))
    np.save(folder / "labels.npy", rng.integers(0, 3, 40))
    file = config.parent / "images.gin"
    file.write_text(
        'cluster.file = "cluster.yaml"\nmodel.recipe = "vit-quickstart"\nmodel.blocks = 1\n'
        "model.image_size = 8\nmodel.patch_size = 4\nmodel.width = 8\nmodel.heads = 2\n"
        'model.ffn_width = 8\nmodel.classes = 3\ndata.kind = "images"\ndata.paths = "data"\n'
        "data.held_out_fraction = 0.2\ntrain.steps = 2\ntrain.batch_size = 8\n"
        "train.microbatches = 2\ntrain.evaluate_every = 2\nplanner.min_stages = 2\n"
        "planner.max_pipelines = 1\n"
    )
    assert main(["--config", str(file), "--workdir", str(workdir)]) == 0
    out = capsys.readouterr().out
    for piece in ("vit-1x8/4", "2 steps of 8 images", "images/s", "held-out loss"):
        assert piece in out
    assert all(record["images_per_second"] > 0 for record in read_metrics(workdir))


@pytest.mark.slow
def test_a_run_makes_its_schedule_of_measured_times(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = []
    for tune in (False, True):
        workdir = config.parent / f"tune {tune}"
        changes = ["planner.schedule = 'search'", f"train.tune = {tune}", "train.steps = 8"]
        overrides = [word for change in changes for word in ("--gin", change)]
        assert main(["--config", str(config), "--workdir", str(workdir), *overrides]) == 0
        assert "Predicted and measured" in capsys.readouterr().out
        plans.append(Plan.load(workdir / "plan.json"))
    assert [plan.pipeline.schedule.name for plan in plans] == ["search", "search"]
    assert plans[0].prediction != plans[1].prediction


def test_a_played_run_tells_predicted_and_measured_in_the_seconds_of_its_cluster(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for played in (False, True):
        changes = [f"cluster.play = {played}", "train.beside = 'gpipe'", "train.steps = 10"]
        overrides = [word for change in changes for word in ("--gin", change)]
        workdir = config.parent / f"played {played}"
        assert main(["--config", str(config), "--workdir", str(workdir), *overrides]) == 0
        output = capsys.readouterr().out
        told = json.loads((workdir / "prediction.json").read_text())
        rows = {row["name"]: row for row in told["rows"]}
        assert told["version"] == 1
        assert told["schedule"] == "h_1f1b"
        assert all(row["error"] == row["measured"] / row["predicted"] - 1 for row in rows.values())
        assert told["largest_error"] == max(abs(row["error"]) for row in rows.values())
        assert {"step time", "step time by gpipe", "stage 1 update"} < set(rows)
        assert all(name in output for name in rows)
        assert (workdir / "timeline_gpipe.png").exists()
        assert ("Does it pay to mix?" in output) == played
        assert (told["scale"] is not None) == played
        assert ("the cluster is played at" in output) == played
    # A process may sleep longer than it was told to, never shorter.
    assert rows["step time"]["error"] > -0.01
    assert losses(config.parent / "played True") == losses(config.parent / "played False")


def test_a_played_cluster_needs_none_of_its_devices(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPUs are played on host devices; what would take hours is refused."""
    cluster = TWO_AND_TWO.replace("kind: quick", "kind: RTX4090").replace("kind: slow", "kind: T4")
    (config.parent / "cluster.yaml").write_text(cluster)
    overrides = ["--gin", "cluster.play = True", "--gin", "train.steps = 10000000"]
    line = fails(capsys, "--config", str(config), *overrides)
    assert re.search(
        r"train\.steps is 10000000; .* more than an hour: set train\.steps = \d+", line
    )


def losses(workdir: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(workdir)]


@pytest.mark.parametrize(
    ("change", "pieces"),
    [
        (lambda plan: plan.update(model="0" * 16), ["another model"]),
        (lambda plan: stages(plan)[1]["layers"].__setitem__(0, 0), ["overlaps"]),
        (lambda plan: stages(plan)[0]["layers"].__setitem__(0, 1), ["in no stage"]),
        (lambda plan: stages(plan)[0]["members"][0]["submesh"].update(start=4), ["is not there"]),
        (lambda plan: plan["pipelines"][0].update(microbatch_size=8), ["16 examples", "is 8"]),
        (lambda plan: plan.update(bogus=1), ["unknown field 'bogus'"]),
        (
            lambda plan: [kind.update(memory=1000) for kind in plan["cluster"]["kinds"].values()],
            ["does not fit", "1 kB"],
        ),
    ],
)
def test_plans_that_do_not_fit_are_refused(
    config: Path, change: Any, pieces: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = config.parent / "plan.json"
    file.write_text(json.dumps(PLANS.setdefault("plan", planned(config))))
    plan = json.loads(file.read_text())
    change(plan)
    file.write_text(json.dumps(plan))
    line = fails(capsys, "--config", str(config), "--plan", str(file))
    assert all(piece in line for piece in pieces), line


PLANS: dict[str, dict[str, Any]] = {}


def stages(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return plan["pipelines"][0]["stages"]


def planned(config: Path) -> dict[str, Any]:
    from hetjax.commands.prepare import prepare
    from hetjax.configuration.make import make_ingredients

    configuration = read_configuration(config)
    cluster = Cluster.from_file(str(configuration.cluster.file))
    file = config.parent / "made.json"
    prepare(make_ingredients(configuration), cluster).plan.save(file)
    return json.loads(file.read_text())


def test_a_lost_worker_is_one_line(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose_a_worker(*_: object, **__: object) -> None:
        raise WorkerLostError("stage 1, host 0", "its process has died")

    monkeypatch.setattr("hetjax.commands.run.Trainer", lose_a_worker)
    assert main(["--config", str(config)]) == 3
    assert capsys.readouterr().err == "error: stage 1, host 0 is lost: its process has died\n"


@pytest.mark.slow
def test_a_signal_saves_and_ends_with_its_code(config: Path) -> None:
    """In a process of its own: it is the process that is signalled, and that ends."""
    workdir = config.parent / "run"
    options = ["--config", str(config), "--workdir", str(workdir)]
    command = [sys.executable, "-m", "hetjax.train", *options, "--gin", "train.steps = 100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.decode())
            if lines[-1].startswith("step 10/"):
                process.terminate()
        assert process.wait() == 143, "".join(lines)
    text = "".join(lines)
    assert "SIGTERM: stopping after this step" in text
    stopped = re.search(r"stopped after step (\d+)", text)
    assert stopped is not None
    assert len(read_metrics(workdir)) == int(stopped[1])
    assert [int(each.name) for each in (workdir / "checkpoints").iterdir()] == [int(stopped[1])]


def test_host_devices_are_asked_for_before_jax_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2 --xla_other=1")
    cluster = Cluster.from_file(Path(__file__).parent.parent / "configs/clusters/quickstart.yaml")
    use_devices(cluster, RuntimeSettings())
    assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=12 --xla_other=1"
    assert host_device_flags(os.environ["XLA_FLAGS"], 4) == os.environ["XLA_FLAGS"]


def test_devices_that_are_not_there_are_missed_before_anything_is_planned() -> None:
    clusters = Path(__file__).parent.parent / "configs/clusters"
    cards = Cluster.from_file(clusters / "two_islands_of_cards.yaml")
    with pytest.raises(InputError, match="has 16 devices, and 8 are given"):
        check_devices(cards, RuntimeSettings())
    check_devices(cards, RuntimeSettings(name="ray"))


@pytest.mark.slow
def test_a_full_disk_costs_lines_and_no_state(config: Path, tmp_path: Path) -> None:
    """In processes of its own: what they print is what a person sees."""
    wide = ["--gin", "model.width = 128", "--gin", "train.steps = 8"]
    saving = [*wide, "--gin", "train.checkpoint_every = 2"]

    def command(workdir: Path, *options: str) -> "subprocess.CompletedProcess[str]":
        words = ["--config", str(config), "--workdir", str(workdir), *saving, *options]
        command = [sys.executable, "-m", "hetjax.train", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    whole = tmp_path / "whole"
    assert command(whole).returncode == 0
    with small_disk(tmp_path / "disk") as disk:
        ended = command(disk / "run")
        assert ended.returncode == 5, ended.stderr
        assert "Traceback" not in ended.stdout + ended.stderr
        assert "was not saved: stage 0: No space left on device; training goes on" in ended.stdout
        assert "8 steps are done" in ended.stdout
        assert losses(disk / "run") == losses(whole)
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        ended = command(disk / "run", "--resume")
        assert ended.returncode == 0, ended.stderr
        assert "resumed from step 2" in ended.stdout
        assert losses(disk / "run") == losses(whole)
        for name in ("plan.json", "timeline.png", "checkpoints/00000008/manifest.json"):
            assert (disk / "run" / name).stat().st_size > 0


class FullAfterAStep(io.StringIO):
    """Stands for a standard output on a disk that fills up in mid-run."""

    def write(self, text: str) -> int:
        if "step 2" in self.getvalue():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_a_standard_output_that_fails_costs_no_state(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdout", FullAfterAStep())
    words = ["--config", str(config), "--workdir", str(tmp_path / "run")]
    assert main([*words, "--gin", "train.checkpoint_every = 2"]) == NOT_WRITTEN
    told = "No space left on device; the command goes on without it\n"
    assert capsys.readouterr().err.endswith(told)
    assert CheckpointFolder(tmp_path / "run/checkpoints").steps() == (2, 4)


def test_a_folder_in_use_is_refused_with_its_holder(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FolderLock(tmp_path / "run", "the folder"):
        line = fails(capsys, "--config", str(config), "--workdir", str(tmp_path / "run"))
        assert "in use by this very process, since 20" in line


def test_what_cannot_be_resumed_is_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    words = ["--config", str(config), "--workdir", str(run)]
    line = fails(capsys, *words, "--resume")
    assert "there is no checkpoint in" in line
    assert "--resume-or-start" in line
    assert (run / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.0}\n'
    assert "without --resume" in fails(capsys, *words, "--allow-changed-data")


@pytest.mark.slow
def test_changed_data_are_refused_before_anything_is_compiled(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "data.txt"
    text.write_text("".join(f"line {number}\n" for number in range(2000)))
    words = ["--config", str(config), "--workdir", str(tmp_path / "run")]
    words += ["--gin", "data.kind = 'text'", "--gin", f"data.paths = {str(text)!r}"]
    words += ["--gin", "train.evaluate_every = None", "--gin", "train.steps = 2"]
    assert main(words) == 0
    text.write_text(text.read_text().replace("line 1000\n", "line 1009\n"))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    line = fails(capsys, *words, "--resume", "--gin", "train.steps = 4")
    assert "the data are not those of checkpoint 2: text contents is" in line
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    line = fails(capsys, *words, "--resume", "--gin", "train.seed = 7")
    assert "seed is 7 (was 0)" in line
    more = ["--resume", "--allow-changed-data", "--gin", "train.steps = 4"]
    assert main([*words, *more, "--gin", "train.batch_size = 16"]) == 0
    out = capsys.readouterr().out
    assert "the data have changed since checkpoint 2" in out
    assert "the batch size is 16 (was 8): the data go on at example 16" in out


def plan_files(config: Path) -> tuple[Path, Path]:
    """Two plans: one of stages of one member, one of a stage of two that share the examples."""
    plain, union = (config.with_name(f"{name}.json") for name in ("plain", "union"))
    command = [sys.executable, "-m", "hetjax.plan", "--config", str(config), "--out", str(plain)]
    subprocess.run(command, check=True, capture_output=True)
    plan = Plan.load(plain)
    members = (
        Member(SubMesh("quick", 0, (1, 2)), (2, 1)),
        Member(SubMesh("slow", 0, (1, 1)), (1, 1)),
    )
    stage = StagePlan((0, len(plan.layers) - 1), members, shares=Shares(batch=(2, 2)))
    pipeline = PipelinePlan((stage,), 2, 4, one_f_one_b(1, 2))
    replace(plan, pipelines=(pipeline,), prediction=None).save(union)
    return plain, union


def test_a_plan_with_a_stage_of_several_members_trains_and_goes_on(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (plain, union), workdir = plan_files(config), tmp_path / "run"
    run = ["--config", str(config), "--workdir", str(workdir)]
    quickly = ["--gin", "train.steps = 2", "--gin", "train.tune = True"]
    assert main([*run, "--plan", str(union), *quickly]) == 0
    said = capsys.readouterr().out
    assert "predicted step time" in said
    assert "train.tune has no effect: a plan with a stage of several members keeps its" in said
    assert main([*run, "--resume"]) == 0
    assert "resumed from step 2" in capsys.readouterr().out
    assert [figures["step"] for figures in read_metrics(workdir)] == [1, 2, 3, 4]
    trained = Plan.load(workdir / "plan.json")
    assert trained.notes == (f"given by --plan: {str(union)!r}",)
    assert replace(trained, prediction=None, notes=()) == Plan.load(union)
    rows = json.loads((workdir / "prediction.json").read_text())["rows"]
    assert rows[0]["name"] == "step time"
    assert all(row["error"] is not None for row in rows)
    further = ["--plan", str(plain), "--resume", "--gin", "train.steps = 5"]
    assert main([*run, *further]) == 0
    assert "resumed from step 4" in capsys.readouterr().out
    played = ("--plan", str(union), "--gin", "cluster.play = True")
    line = fails(capsys, "--config", str(config), *played)
    assert "which no played cluster holds back; set cluster.play = False" in line


ONE_AND_ONE = TWO_AND_TWO.replace("devices_per_node: 2", "devices_per_node: 1")


def test_devices_that_share_sequences_have_the_losses_of_one(config: Path, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(ONE_AND_ONE.replace("1 Gbit/s", "5 GB/s"))
    alike = (
        "planner.min_stages = 1",
        "train.evaluate_every = 4",
        "train.batch_size = 2",
        "train.microbatches = 1",
        # Of fewer tokens, what is sent would take longer than it saves.
        "model.sequence = 512",
        "data.held_out_fraction = 0.5",
    )
    given = ["--config", str(config), *(part for each in alike for part in ("--gin", each))]
    one, shared = tmp_path / "one", tmp_path / "shared"
    alone = Plan.load(_planned(given, tmp_path, "--lost", "1"))
    alone.save(tmp_path / "alone.json")
    assert main([*given, "--plan", str(tmp_path / "alone.json"), "--workdir", str(one)]) == 0
    name = ("--gin", "planner.name = 'hexiseq'")
    assert main([*given, *name, "--workdir", str(shared)]) == 0
    split = Plan.load(shared / "plan.json").stages[0].shares.context
    assert split is not None
    assert sorted(split.tokens) == [171, 341]
    for field in ("loss", "evaluation_loss"):
        expected, found = (
            [record[field] for record in read_metrics(folder) if field in record]
            for folder in (one, shared)
        )
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def _planned(given: list[str], folder: Path, *options: str) -> Path:
    """The file of the plan for a configuration."""
    from hetjax.plan import main as plan_command

    file = folder / "planned.json"
    assert plan_command([*given, *options, "--out", str(file)]) == 0
    return file
