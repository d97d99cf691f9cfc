"""Optional writers: W&B and MLflow hold the figures of a run, and none of them ends or slows it."""

import importlib
import importlib.util
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hetjax.errors import InputError
from hetjax.report import MetricsWriter, check_writers, read_metrics, writers
from hetjax.report.writers import BackgroundWriter, Destination

NAN = float("nan")
OWN_WARNINGS = pytest.mark.filterwarnings("default")  # Those of the packages are not ours to mend.


class Kept:
    """A tracker that keeps what it is given."""

    def __init__(self, destination: Destination):
        self.destination, self.figures, self.finished = destination, dict[int, Any](), False

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        if step == 2:
            raise ConnectionError("nobody answers")
        self.figures[step] = dict(figures)

    def finish(self) -> None:
        self.finished = True


def background(opening: Callable[[Destination], Any]) -> BackgroundWriter:
    return BackgroundWriter("test", opening, Destination(Path("run")))


def test_a_step_that_a_writer_refuses_is_told_and_the_others_are_written() -> None:
    made: list[Kept] = []

    def opening(destination: Destination) -> Kept:
        made.append(Kept(destination))
        return made[0]

    writer = background(opening)
    for step in (1, 2, 3):
        writer.write(step, {"loss": 0.5, "grad_norm": NAN})
    writer.close()
    writer.close()
    assert made[0].figures == {1: {"loss": 0.5}, 3: {"loss": 0.5}}
    assert made[0].finished
    assert writer.failure == "step 2: ConnectionError: nobody answers"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SystemExit(1)])
def test_a_writer_that_cannot_be_opened_is_told(error: BaseException) -> None:
    def opening(destination: Destination) -> Kept:
        raise error

    writer = background(opening)
    for step in range(3):
        writer.write(step, {"loss": 1.0})
    writer.close()
    assert writer.failure is not None
    assert "No space left" in writer.failure or "SystemExit" in writer.failure


def test_a_writer_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "_CLOSING_SECONDS", 0.2)
    monkeypatch.setattr(writers, "_MOST_WAITING", 50)
    for_ever = threading.Event()

    def opening(destination: Destination) -> Kept:
        for_ever.wait()
        return Kept(destination)

    writer = background(opening)
    began = time.perf_counter()
    for step in range(60):
        writer.write(step, {"loss": 1.0})
    assert "too slow" in str(writer.failure)
    writer.close()
    assert time.perf_counter() - began < 5
    for_ever.set()


def test_what_cannot_be_had_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'hetjax\[wandb\]'"):
        check_writers(["wandb"])
    with pytest.raises(InputError, match=r"train.writers 'wandbs'; did you mean 'wandb'\?"):
        check_writers(["wandbs"], "train.writers")
    with pytest.raises(InputError, match="names 'mlflow' twice"):
        check_writers(["mlflow", "mlflow"])


def test_a_writer_that_is_not_there_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="not installed"):
        MetricsWriter(tmp_path, writers=["mlflow"])
    assert not list(tmp_path.iterdir())


def write(workdir: Path, name: str, first_step: int = 0) -> MetricsWriter:
    settings = {f"train.{number}": number for number in range(150)}
    with MetricsWriter(workdir, first_step=first_step, writers=[name], settings=settings) as made:
        for step in range(max(first_step, 1), first_step + 4):
            made.write(step, {"loss": 1 / step, "grad_norm": NAN if step == 2 else 1.0})
    return made


@OWN_WARNINGS
def test_mlflow_holds_a_run_and_the_one_that_resumes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    workdir = tmp_path / "first"
    workdir.mkdir()
    assert [write(workdir, "mlflow", first).lost for first in (0, 3)] == [{}, {}]
    client = mlflow.MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    found = client.get_experiment_by_name("hetjax")
    runs = {run.info.run_name: run for run in client.search_runs([found.experiment_id])}
    assert sorted(runs) == ["first", "first from step 3"]
    run = runs["first"]
    assert run.info.status == "FINISHED"
    assert (len(run.data.params), run.data.params["train.149"]) == (150, "149")
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert [m.step for m in client.get_metric_history(run.info.run_id, "grad_norm")] == [1, 3]


@OWN_WARNINGS
def test_mlflow_writes_to_the_work_folder_or_tells_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, refused in (("a b%c", False), ("q?x=1", True), ("n#1", True)):
        (tmp_path / name).mkdir()
        lost = write(tmp_path / name, "mlflow").lost
        assert ("'?' or '#'" in lost.get("mlflow", "")) == refused
        assert (tmp_path / name / "mlflow.db").exists() != refused
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a b%c", "n#1", "q?x=1"]


@OWN_WARNINGS
def test_mlflow_that_cannot_be_reached_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    made = write(tmp_path, "mlflow")
    assert "127.0.0.1" in made.lost["mlflow"]
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    assert made.failure is None


@OWN_WARNINGS
def test_wandb_holds_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert write(tmp_path, "wandb").lost == {}
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    data = file.read_bytes()
    assert b"loss" in data
    assert b"train.149" in data
