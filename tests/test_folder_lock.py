"""One writer to a folder, whoever holds it and however the holder ended."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetjax import folder_lock
from hetjax.errors import InputError
from hetjax.folder_lock import LOCK_FILE, FolderLock, Holder, holder_of

HOLD = """
import sys, time
from hetjax.folder_lock import FolderLock
lock = FolderLock(sys.argv[1], "the folder")
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def holder(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the lock until it is killed."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_the_holder_is_named_and_a_killed_one_holds_nothing(tmp_path: Path):
    with holder(tmp_path) as process:
        named = rf"in use by process {process.pid} on host \S+, since 20\d\d-.* UTC; wait until"
        with pytest.raises(InputError, match=named):
            FolderLock(tmp_path, "the folder")
        assert holder_of(tmp_path) is not None
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert holder_of(tmp_path) is None
        began = time.monotonic()
        with FolderLock(tmp_path, "the folder") as lock:
            assert lock.taken_over is not None
            assert f"process {process.pid} on host" in lock.taken_over
        assert time.monotonic() - began < folder_lock.WATCH_SECONDS / 2  # it was on this host


def test_what_is_no_file_is_no_lock_and_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / LOCK_FILE)
    for take in (holder_of, lambda folder: FolderLock(folder, "the folder")):
        with pytest.raises(InputError, match=r"\.lock cannot be locked: it is a pipe, not a file"):
            take(tmp_path)


def test_two_in_one_process_exclude_each_other(tmp_path: Path):
    lock = FolderLock(tmp_path, "the folder")
    with pytest.raises(InputError, match="in use by this very process"):
        FolderLock(tmp_path, "the folder")
    lock.release()
    lock.release()
    with FolderLock(tmp_path, "the folder") as lock:
        assert lock.taken_over is None
    assert (tmp_path / LOCK_FILE).read_bytes() == b""


def test_a_lock_that_is_forgotten_is_released(tmp_path: Path):
    lock = FolderLock(tmp_path, "the folder")
    del lock
    FolderLock(tmp_path, "the folder").release()


def test_a_question_writes_nothing(tmp_path: Path):
    assert holder_of(tmp_path) is None
    assert holder_of(tmp_path / "nowhere") is None
    assert not list(tmp_path.iterdir())


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Holder:
    """A holder on another host, of whom no lock tells here; waiting is short."""
    monkeypatch.setattr(folder_lock, "WATCH_SECONDS", 1.0)
    there = Holder("other", 7, "2026-01-01 00:00:00 UTC", "another boot")
    (tmp_path / LOCK_FILE).write_text(json.dumps(dataclasses.asdict(there)))
    return there


def test_a_dead_holder_on_another_host_is_taken_over(tmp_path: Path, elsewhere: Holder):
    with FolderLock(tmp_path, "the folder") as lock:
        assert str(lock.taken_over).startswith(f"the run of {elsewhere}, ended without a word")


def test_a_holder_on_another_host_that_lives_is_left_alone(tmp_path: Path, elsewhere: Holder):
    code = "import os, sys, time\nwhile True: os.utime(sys.argv[1]); time.sleep(0.1)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / LOCK_FILE)]) as toucher:
        time.sleep(0.3)
        try:
            with pytest.raises(InputError, match="in use by process 7 on host other"):
                FolderLock(tmp_path, "the folder")
        finally:
            toucher.kill()


def test_a_holder_touches_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folder_lock, "TOUCH_SECONDS", 0.05)
    with FolderLock(tmp_path, "the folder") as lock:
        os.utime(lock.path, (0, 0))
        end = time.monotonic() + 30
        while lock.path.stat().st_mtime == 0:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written to"):
        FolderLock(tmp_path / "file" / "folder", "the folder")
