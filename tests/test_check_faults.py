"""The script of faults at random moments: when they are, and one try."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import check_faults
import pytest
from check_faults import FIRST_SECONDS, KINDS, SAVE_EVERY, STEPS, Undisturbed

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_faults.py"


def test_moments_are_inside_a_run():
    run, chooser = Undisturbed(40.0, 15.0, ()), random.Random(0)
    moments = {since: [run.draw(since, chooser) for _ in range(200)] for since in since_all()}
    assert all(FIRST_SECONDS <= each <= 36 for each in moments["start"])
    assert all(0 <= each <= 36 - 15 for each in moments["worker"])
    # The disk is full while the run trains, and a checkpoint is yet to be written.
    assert all(1 <= each <= STEPS - SAVE_EVERY for each in moments["step"])
    assert len(set(moments["step"])) > 60


def since_all() -> list[str]:
    found = sorted({kind.since for kind in KINDS.values()})
    assert found == ["start", "step", "worker"]
    return found


def test_a_run_that_ended_before_its_moment_is_told(tmp_path: Path):
    """A configuration that is not there ends the command at once."""
    for since in since_all():
        run = check_faults.Run(tmp_path, tmp_path / "run", "local")
        assert not run.reaches(since, 60)
        code, text = run.end()
        assert code == 2
        assert text.startswith("error: ")


def can_mount(folder: Path) -> bool:
    if os.geteuid() != 0:
        return False
    try:
        with check_faults._small_disk(folder):
            return True
    except subprocess.CalledProcessError:
        return False


@pytest.mark.ray
@pytest.mark.slow
def test_a_try_loses_nothing(tmp_path: Path):
    """Of a full disk, where this process may mount a small one; lost workers have other tests."""
    kinds = ["full-disk" if can_mount(tmp_path / "disk") else "kill-worker"]
    done = subprocess.run(
        [sys.executable, SCRIPT, "--tries", "1", "--json", "--kinds", *kinds],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["kind"] for row in rows] == kinds
    assert all(row["as_expected"] and row["bitwise"] and not row["left"] for row in rows), rows
