"""A signal ends a command at any moment, with its code, one line and nothing left behind."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetjax.commands.signals import StopRequest
from hetjax.draws import MAX_LENGTH
from hetjax.processes import descendants

CONFIG = Path(__file__).parents[2] / "configs/quickstart.gin"
LARGER = ["--gin", "model.blocks = 8", "--gin", "train.steps = 100000"]
STOPPING = "stopping after this step"


def test_signals_that_come_together_are_one_wish():
    stop = StopRequest(clock=lambda: 5.0)
    assert not stop()
    assert stop.hear(signal.SIGINT) == "Ctrl-C: " + STOPPING + "; once more to end at once"
    assert stop.hear(signal.SIGTERM) == ""
    assert stop()
    assert stop.signal == signal.SIGINT


def test_a_later_signal_is_no_wish():
    times = itertools.count(step=2.0)
    stop = StopRequest(clock=lambda: next(times))
    assert stop.hear(signal.SIGTERM)
    assert stop.hear(signal.SIGTERM) is None


ENDS_SLOWLY = """
import atexit, os, signal, sys, time
from hetjax.commands import signals

signals.end_descendants = lambda: time.sleep(1)

def main():
    {main}
    return 0

sys.exit(signals.run_process(main))
"""
SIGNAL = "os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_done_while_it_is_ended_has_the_signals_code(number: signal.Signals):
    """Its workers are gone before it is, and it may come to its own end, with its own words."""
    main = f"os.kill(os.getpid(), {number:d}); time.sleep(0.5); print('done', flush=True)"
    words = [sys.executable, "-c", ENDS_SLOWLY.format(main=main)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert done.stderr == f"{number.name}: ended while starting\n"


def test_a_signal_that_comes_when_a_command_is_done_says_nothing():
    main = f"atexit.register(lambda: ({SIGNAL}, time.sleep(0.5)))"
    words = [sys.executable, "-c", ENDS_SLOWLY.format(main=main)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("ignored", "after", "code"), [("INT", "0.2", 0), ("TERM", "60", 128 + signal.SIGINT)]
)
def test_a_signal_that_a_command_was_started_to_ignore_ends_nothing(
    ignored: str, after: str, code: int
):
    main = f"os.kill(os.getpid(), signal.SIGINT); time.sleep({after})"
    ended = ENDS_SLOWLY.replace("lambda: time.sleep(1)", "lambda: None").format(main=main)
    words = ["sh", "-c", f'trap "" {ignored}; exec "$0" -c "$1"', sys.executable, ended]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr


def test_processes_of_processes_are_found():
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        end = time.monotonic() + 30
        while len(found := descendants(process.pid)) != 1 and time.monotonic() < end:
            time.sleep(0.01)
        assert len(found) == 1
        assert found[0] in descendants(os.getpid())
        assert process.stdin is not None
        process.stdin.write(b"\n")
    assert not descendants(process.pid)


def wait_until_it_hears(process: subprocess.Popen[bytes]) -> None:
    """Wait for a command's first lines: before them there is only Python."""
    status, wanted = Path(f"/proc/{process.pid}/status"), 1 << (signal.SIGTERM - 1)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        blocked = status.read_text().partition("SigBlk:")[2].split()
        if blocked and int(blocked[0], 16) & wanted:
            return
        time.sleep(0.005)
    raise AssertionError("the command does not hear signals")


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work folder of a run of one step."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    changes = ("model.blocks = 2", "train.steps = 1", "train.evaluate_every = None")
    options = [word for change in (*changes, "cluster.play = False") for word in ("--gin", change)]
    command = [sys.executable, "-m", "hetjax.train", "--config", str(CONFIG), *options]
    done = subprocess.run([*command, "--workdir", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after", [0.1, 3.0, 8.0])
def test_a_signal_ends_generation_at_any_moment(
    number: signal.Signals, after: float, finished_run: Path
):
    options = ["--workdir", str(finished_run), "--prompt", "def ", "--length", str(MAX_LENGTH)]
    words = ["hetjax.generate", *options]
    *told, line = told_until_the_end(words, number, after, finished_run)
    assert line.startswith(f"{called(number)}: ended while ")
    assert all(" at step 1 " in each for each in told)


def called(number: signal.Signals) -> str:
    return "Ctrl-C" if number == signal.SIGINT else number.name


def told_until_the_end(
    words: list[str], number: signal.Signals, after: float, folder: Path
) -> list[str]:
    """The lines that a command prints to standard error, which a signal ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd=folder,
    )
    wait_until_it_hears(process)
    time.sleep(after)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    text = error.decode()
    assert process.returncode == 128 + number, text
    return text.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("command", "options", "after"),
    [
        ("train", LARGER, 0.1),
        ("train", LARGER, 1.0),
        ("train", LARGER, 4.0),
        ("train", LARGER, 7.0),
        ("plan", [], 0.1),
        ("plan", ["--gin", "model.blocks = 40"], 3.0),
        ("profile", ["--gin", "planner.profile = 'profile'"], 5.0),
        ("switch", ["--from", "none", "--to", "none"], 0.1),
    ],
)
def test_a_signal_ends_a_command_at_any_moment(
    number: signal.Signals, command: str, options: list[str], after: float, tmp_path: Path
):
    """The moments are spread over a start: imports, planning, compiling, measuring."""
    words = [f"hetjax.{command}", "--config", str(CONFIG), *options]
    (line,) = told_until_the_end(words, number, after, tmp_path)
    assert line.startswith((f"{called(number)}: ended while ", f"{called(number)}: {STOPPING}"))
