"""What is said of stages that share the cores of one process, and where nothing is."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from cluster_files import TWO_AND_TWO

CONFIGURATION = """
cluster.file = "cluster.yaml"
model.recipe = "gpt-quickstart"
model.blocks = 1
model.width = 16
model.heads = 2
model.sequence = 16
data.kind = "synthetic"
data.size = 4000
train.batch_size = 8
train.microbatches = 2
"""


def planned(folder: Path, capsys: pytest.CaptureFixture[str], *settings: str) -> str:
    """What the plan command prints, as JSON and as text."""
    (folder / "cluster.yaml").write_text(TWO_AND_TWO)
    (folder / "run.gin").write_text("\n".join([CONFIGURATION, *settings]) + "\n")
    main = importlib.import_module("hetjax.plan").main
    given = ["--config", str(folder / "run.gin")]
    assert main([*given, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert main(given) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(note in text for note in notes)
    return "\n".join(notes)


def test_stages_on_the_same_cores_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    said = planned(tmp_path, capsys, "planner.min_stages = 2")
    assert "2 stages of this process share" in said
    assert "can be slower than '1f1b'" in said


@pytest.mark.parametrize(
    "settings",
    [
        ("planner.min_stages = 2", "cluster.play = True"),
        ("planner.min_stages = 2", 'runtime.name = "ray"'),
        ("planner.max_stages = 1", "planner.max_pipelines = 1"),
    ],
    ids=["played", "workers of their own", "one stage"],
)
def test_nothing_is_said_where_it_does_not_hold(
    settings: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert planned(tmp_path, capsys, *settings) == ""
