"""Odd inputs, through the real commands: one line, code 2, and nothing is waited for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.gin"

CASES: dict[str, tuple[list[str], str]] = {
    "a pipe": (["--config", "pipe"], "'pipe', which is no regular file"),
    "a folder": (["--config", "."], "'.', which is no regular file"),
    "links in a circle": (["--config", "circle"], "circle"),
    "a device": (["--plan", "/dev/zero"], "it is a device, not a file"),
    "a name that is too long": (["--workdir", "w" * 5000], "File name too long"),
    "a plan in a pipe": (["--plan", "pipe"], "it is a pipe, not a file"),
    "deep brackets": (["--plan", "deep.json"], "nested more than 32 levels deep"),
    "a key twice": (["--plan", "twice.json"], "the key 'version' is given twice"),
    "macros in a circle": (["--config", "circle.gin"], "macro"),
    "a bomb of macros": (["--config", "bomb.gin"], "at most 10000 values"),
    "a rate without an end": (["--gin", "optimizer.learning_rate = 1e999"], "finite"),
    "an option in quotes": (["--gin", "optimizer.options = {'eps': '1'}"], "must be a number"),
    "an unhashable key": (["--gin", "optimizer.options = {[]: 1}"], "key"),
    "digits": (["--gin", "train.steps = " + "9" * 6000], "6000 digits"),
    "a batch without an end": (["--gin", "train.batch_size = 1000000000000"], "1048576"),
    "a NUL in a path": (["--gin", r"cluster.file = 'a\0b'"], "cannot be read"),
    "a tag": (["--gin", "cluster.file = 'tag.yaml'"], "tag"),
    "a terminal's commands": (["--gin", r"cluster.file = '\x1b[2J'"], r"\x1b[2J"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "twice.json").write_text(json.dumps({"version": 1})[:-1] + ', "version": 2}')
    (tmp_path / "circle.gin").write_text("a = %b\nb = %a\ntrain.steps = %a\n")
    bomb = [f"a{n + 1} = [{', '.join([f'%a{n}'] * 10)}]" for n in range(20)]
    (tmp_path / "bomb.gin").write_text("\n".join(["a0 = 1", *bomb, "data.weights = %a20"]))
    (tmp_path / "tag.yaml").write_text("name: !!bool x\n")
    given, piece = CASES[name]
    config = [] if "--config" in given else ["--config", str(QUICKSTART)]
    command = [sys.executable, "-m", "hetjax.train", "--dry-run", *config, *given]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert piece in line
