"""``python -m hetjax.align``: compared, captured and replayed from the command line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hetjax.align import main
from hetjax.commands.command_line import WRONG_INPUT

SETTINGS = {
    "model.blocks": 1,
    "model.width": 8,
    "model.heads": 1,
    "model.sequence": 8,
    "model.vocabulary": 16,
    "data.kind": "synthetic",
    "data.size": 1000,
    "train.batch_size": 2,
    "train.microbatches": 1,
    "optimizer.name": "sgd",
    "optimizer.options": {},
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "optimizer.clip_norm": None,
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    pairs = [("--gin", f"{name} = {value!r}") for name, value in SETTINGS.items()]
    options = ["--config", "quickstart", *(part for pair in pairs for part in pair)]
    code = main([*options, *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, error = run(capsys, *arguments, "--json")
    assert code == 0, error
    return json.loads(out)


def test_kinds_are_compared_and_an_error_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "alignment.html"
    found = figures(capsys, "--kinds", "cpu:float32", "cpu:bfloat16", "--steps", "0")
    assert len(found["rows"]) == 20
    first = found["rows"][0]
    assert first["kind"] == "cpu:bfloat16"
    assert first["is_named"]
    assert first["equation"].startswith("dot_general(float32[")
    assert "hetjax/models/" in first["line"]

    number = first["operator"]
    injected = ["--kinds", "cpu:float32", "wrong=cpu", "--inject", "wrong", str(number)]
    found = figures(capsys, *injected, "1e-2", "--steps", "0")
    assert [row["operator"] for row in found["rows"] if row["is_named"]] == [number]

    options = ["nan", "--steps", "3", "--inject-step", "2", "--html", str(page)]
    code, out, _ = run(capsys, *injected, *options)
    assert code == 0
    said = " ".join(out.split())
    assert "wrong: step 2 is the first in which" in said
    assert f"is #{number} dot_general" in said
    assert "Operators by error: 0 of" in said
    text = page.read_text()
    assert "wrong: step 2 is the first in which" in text
    assert text.count("<svg") == 2
    assert "://" not in text


def test_a_capture_is_replayed_with_its_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = str(tmp_path / "captured")
    code, _, error = run(capsys, "--kinds", "cpu:float32", "--capture", folder, "--steps", "2")
    assert code == 0, error
    found = figures(capsys, "--kinds", "cpu:float32", "cpu:bfloat16", "--replay", folder)
    name = "cpu:float32, captured"
    assert found["reference"] == {"name": name, "device": "host-cpu", "products": "float32"}
    assert found["capture"]["operators"] == found["operators"]
    other, half = found["kinds"]
    assert (other["named"], other["loss_mre"], other["steps"]) == (0, 0.0, 2)
    assert half["named"] > 0
    assert not half["operators_aligned"]
    assert 0 < half["loss_mre"] < 0.015
    assert half["losses_aligned"]
    assert [len(losses) for losses in found["losses"].values()] == [2, 2, 2]

    options = ["--kinds", "cpu", "--replay", folder]
    code, _, error = run(capsys, *options, "--gin", "optimizer.learning_rate = 0.5")
    assert code == WRONG_INPUT
    assert "the capture's losses are of another training: optimizer.learning_rate" in error
    code, _, error = run(capsys, *options, "--gin", "model.width = 16")
    assert code == WRONG_INPUT
    assert "the capture is of another model: parameter 'blocks/0/attention/key/kernel' is" in error


def test_a_replay_knows_that_the_reference_overflowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = ["--steps", "12", "--gin", "optimizer.learning_rate = 1e18"]
    here = figures(capsys, *options, "--kinds", "cpu", "same=cpu")
    folder = str(tmp_path / "captured")
    assert run(capsys, *options, "--kinds", "cpu", "--capture", folder)[0] == 0
    options = [*options, "--kinds", "same=cpu", "--replay", folder]
    found = figures(capsys, *options)
    assert found["kinds"] == here["kinds"]
    (same,) = found["kinds"]
    assert same["losses_aligned"] is False
    assert (same["steps"], same["steps_asked"]) == (1, 12)
    assert found["overflows"] == {
        name.replace("cpu", "cpu, captured"): overflow
        for name, overflow in here["overflows"].items()
    }
    _, out, _ = run(capsys, *options)
    assert "0% over 1 of 12" in out
    assert "not aligned" in out


def test_a_replay_of_what_was_not_captured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = ["--kinds", "cpu", "--steps", "0"]
    folder = str(tmp_path / "captured")
    assert run(capsys, *options, "--capture", folder, "--operators", "17")[0] == 0
    code, _, error = run(capsys, *options, "--replay", folder, "--operators", "30-40")
    assert code == WRONG_INPUT
    assert "--operators: the capture has none of these; it has [17]" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--kinds names 0; 2 or more are needed"),
        (["--kinds", "cpu", "V100:bfloat16"], "V100 has no bfloat16. Allowed: float16, float32"),
        (["--kinds", "cpu", "--kinds", "V100:bfloat16"], "V100 has no bfloat16"),
        (["--kinds", "cpu", "abacus"], "unknown device of --kinds 'abacus'"),
        (["--kinds", "cpu", "a=cpu", "--tolerance", "nan"], "--tolerance is nan"),
        (["--kinds", "cpu", "a=cpu", "--tolerance", "1e308"], "it must be from 1e-12 to 1e+06"),
        (["--kinds", "cpu", "a=cpu", "--tolerance", "5e-324"], "it must be from 1e-12 to 1e+06"),
        (["--kinds", "cpu", "a=cpu", "--steps", "-1"], "--steps is -1; it must be 0 or more"),
        (["--kinds", "cpu", "a=cpu", "--operators", "9-3"], "--operators: '9-3' is not allowed"),
        (["--kinds", "cpu", "a=cpu", "--operators", "9-3", "--operators", "1"], "'9-3' is not"),
        (["--kinds", "cpu", "a=cpu", "--operators", "0-9999999"], "numbers below 1,000,000"),
        (["--kinds", "cpu", "a=cpu", "--limit", "many"], "--limit: 'many' is not a number"),
        (["--kinds", "cpu", "a=cpu", "--html", ""], "--html: '' names nothing"),
        (["--kinds", "cpu", "--capture", ""], "--capture: '' names nothing"),
        (["--kinds", "cpu", "--replay", "/nowhere"], "there is no such folder"),
        (["--kinds", "cpu", "--capture", "/"], "there is something already"),
        (["--kinds", "cpu", "--capture", "a", "--replay", "b"], "are both given"),
        (["--kinds", "cpu", "a=cpu", "--inject", "cpu", "1", "1"], "the reference is none"),
        (["--kinds", "cpu", "a=cpu", "--inject", "a", "x", "1"], "operator 'x' is not allowed"),
        (["--kinds", "cpu", "a=cpu", "--inject", "a", "1", "x"], "size 'x' is not allowed"),
        (["--kinds", "cpu", "a=cpu", "--inject", "a", "1", "0"], "size '0' is not allowed"),
        (["--kinds", "cpu", "a=cpu", "--inject-step", "1"], "is given without --inject"),
        (
            ["--kinds", "cpu", "a=cpu", "--inject", "a", "1", "1", "--inject-step", "301"],
            "--inject-step is 301; it must be from 1 to --steps 300",
        ),
    ],
)
def test_wrong_options_are_refused_at_once(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    began = time.process_time()
    code, _, error = run(capsys, *arguments)
    assert code == WRONG_INPUT
    assert message in error
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kinds", "cpu", "H100"], "this process has no device of 'H100'"),
        (["--kinds", "cpu", "a=cpu", "--operators", "100000"], "100000 is not allowed: there are"),
        (
            ["--kinds", "cpu", "--capture", "captured", "--limit", "1 kB"],
            "--limit is 1 kB, and the",
        ),
    ],
)
def test_what_a_model_or_this_machine_does_not_have_is_refused(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    monkeypatch.chdir(tmp_path)
    code, _, error = run(capsys, *arguments)
    assert code == WRONG_INPUT
    assert message in error
    assert not (tmp_path / "captured").exists()
