"""The command runs as ``python -m hetjax.plan``: the package's own name ``plan`` is a function."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from hetjax.planner import Plan

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.gin"


def plan_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hetjax.plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("hetjax.plan", run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_json_is_one_object_with_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "made" / "plan.json"
    arguments = ["--config", str(QUICKSTART), "--json", "--out", str(file)]
    assert plan_command(monkeypatch, *arguments, "--gin", "train.batch_size = 32") == 0
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
    assert 0 <= figures["bubble"] < 1
    assert len(figures["stages"]) == len(plan.pipeline.stages)
    for stage in figures["stages"]:
        assert stage["memory_bytes"] <= stage["memory_limit_bytes"]
    assert figures["memory_bytes"] == max(stage["memory_bytes"] for stage in figures["stages"])


def test_the_tables_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_command(monkeypatch, "--config", str(QUICKSTART)) == 0
    out = capsys.readouterr().out
    for piece in ("Cluster quickstart", "fast to slow", "warm-up", "predicted step time", "bound"):
        assert piece in out


def test_wrong_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_command(monkeypatch, "--config", str(QUICKSTART), "--gin", "train.stepz = 1") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: --gin")
    assert captured.err.count("\n") == 1
    assert not captured.out
