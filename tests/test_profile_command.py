"""``python -m hetjax.profile``, and plans by what it measured."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from hetjax import profile
from hetjax.commands.command_line import WRONG_INPUT

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.gin"
CLUSTER = """\
name: one
subclusters:
  - name: only
    kind: host-cpu
    nodes: 1
    devices_per_node: 1
    intra_node: {bandwidth: 5 GB/s, latency: 20 us}
"""
TINY = {"blocks": 1, "width": 16, "heads": 2, "sequence": 16}


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Of a tiny model on one device, and a database."""
    cluster = tmp_path / "one.yaml"
    cluster.write_text(CLUSTER)
    settings = {
        "cluster.file": str(cluster),
        "train.microbatches": 4,
        "planner.num_layers": 2,
        "planner.profile": str(tmp_path / "profiles"),
        **{f"model.{name}": value for name, value in TINY.items()},
    }
    overrides = [f"{name} = {value!r}" for name, value in settings.items()]
    pairs = [("--gin", override) for override in overrides]
    return ["--config", str(QUICKSTART), *(part for pair in pairs for part in pair)]


def plan_main(arguments: list[str]) -> int:
    """The plan command; the package's own name ``plan`` is a function."""
    return importlib.import_module("hetjax.plan").main(arguments)


def run(main, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_model_is_measured_once_and_planned_with_it(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, _, error = run(plan_main, capsys, *options)
    assert code == WRONG_INPUT
    assert "has no measurement of this model" in error

    code, out, error = run(profile.main, capsys, *options, "--json")
    assert code == 0
    figures = json.loads(out)
    assert figures["candidates_measured"] == figures["measurements"] == 3
    assert figures["candidates"] >= figures["candidates_to_measure"] == figures["measurements"]
    assert "measured" in error

    code, out, _ = run(profile.main, capsys, *options)
    assert code == 0
    assert "0 of them made now" in " ".join(out.split())

    code, out, _ = run(plan_main, capsys, *options, "--json")
    assert code == 0
    planned = json.loads(out)
    assert planned["candidates_measured"] == figures["measurements"]
    assert "candidates_a_profile_would_measure" not in planned

    code, out, _ = run(plan_main, capsys, *options, "--gin", "planner.profile = None", "--json")
    assert code == 0
    planned = json.loads(out)
    assert planned["candidates_measured"] == 0
    assert planned["candidates_a_profile_would_measure"] == figures["candidates_to_measure"]

    other = [*options, "--gin", f"planner.profile = {str(tmp_path / 'other')!r}"]
    merge = ["--merge", str(tmp_path / "profiles"), "--json"]
    code, out, _ = run(profile.main, capsys, *other, *merge)
    assert code == 0
    assert json.loads(out)["merged"] == figures["measurements"]
    assert json.loads(out)["candidates_measured"] == 0

    broken = next((tmp_path / "profiles").glob("*/*.json"))
    broken.write_text("{")
    code, _, error = run(plan_main, capsys, *options)
    assert code == WRONG_INPUT
    assert str(broken) in error


def test_devices_that_share_sequences_are_planned_by_what_shorter_ones_took(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    head, _, figures = CLUSTER.partition("  - name: only")
    parts = "".join(f"  - name: {name}{figures}" for name in ("only", "other"))
    link = "links:\n  - {between: [only, other], bandwidth: 1 GB/s, latency: 50 us}\n"
    (tmp_path / "one.yaml").write_text(head + parts + link)
    changes = {"planner.name": "hexiseq", "cluster.play": False, "planner.num_layers": 3}
    shared = [f"{name} = {value!r}" for name, value in changes.items()]
    options = [*options, *(part for each in shared for part in ("--gin", each))]
    assert run(profile.main, capsys, *options, "--json")[0] == 0
    options += ["--json", "--gin", "model.sequence = 64"]
    code, out, error = run(plan_main, capsys, *options)
    assert code == 0, error
    by_figures = [*options, "--gin", "planner.profile = None"]
    code, told, _ = run(plan_main, capsys, *by_figures)
    assert code == 0
    assert json.loads(out)["step_time"] != json.loads(told)["step_time"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--gin", "planner.profile = None"], "planner.profile is None"),
        (["--gin", f"planner.profile = {str(QUICKSTART)!r}"], "which is a file"),
        (["--gin", "planner.profile = '/proc/hx'"], "/proc/hx: /proc cannot be written to"),
        (["--merge", "/nowhere/at/all"], "there is no such folder"),
    ],
)
def test_wrong_input_is_named(
    options: list[str], extra: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    code, _, error = run(profile.main, capsys, *options, *extra)
    assert code == WRONG_INPUT
    assert message in error
