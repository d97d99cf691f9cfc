"""Progress: a bar on a terminal, sparse plain lines in a log."""

import io
import itertools
import re
import sys

import pytest
from rich.console import Console

from hetjax.report.progress import MeasuringProgress, TrainingProgress


def run(console: Console, num_steps: int, steps_done: int = 0, every: int = 10) -> None:
    ticks = itertools.count(step=2.0)
    progress = TrainingProgress(
        num_steps,
        steps_done=steps_done,
        every=every,
        console=console,
        clock=lambda: next(ticks),
    )
    with progress:
        for step in range(steps_done + 1, num_steps + 1):
            progress.update(step, loss=1 / step, rate=1000.0 * step)
        progress.print("checkpoint [saved]")


def log(**arguments: int) -> list[str]:
    output = io.StringIO()
    run(Console(file=output, width=40), **arguments)
    return output.getvalue().splitlines()


def test_a_log_has_a_line_every_few_steps_and_the_last():
    assert log(num_steps=25) == [
        "step 10/25  loss 0.1000  10,000 tokens/s  30 s left",
        "step 20/25  loss 0.0500  20,000 tokens/s  10 s left",
        "step 25/25  loss 0.0400  25,000 tokens/s",
        "checkpoint [saved]",
    ]


def test_the_first_step_of_a_run_says_nothing_about_the_time_left():
    lines = log(num_steps=8, steps_done=6, every=1)
    assert lines[0] == "step 7/8  loss 0.1429  7,000 tokens/s"


def test_a_terminal_has_a_bar_and_lines_above_it():
    output = io.StringIO()
    run(Console(file=output, width=100, force_terminal=True, _environ={}), num_steps=25)
    text = output.getvalue()
    assert "━" in text
    assert "checkpoint [saved]" in text
    assert "step 25/25  loss 0.0400  25,000 tokens/s" in text


def test_leaving_by_an_error_stops_the_bar():
    console = Console(file=io.StringIO(), force_terminal=True, _environ={})
    with pytest.raises(KeyError), TrainingProgress(3, console=console):
        raise KeyError
    with TrainingProgress(3, console=console):
        pass


def test_a_bar_goes_on_with_work_of_another_number_of_pieces(monkeypatch: pytest.MonkeyPatch):
    output = io.StringIO()
    monkeypatch.setattr(sys, "stderr", output)
    terminal = {"TTY_COMPATIBLE": "1", "TERM": "xterm", "COLUMNS": "60", "NO_COLOR": "1"}
    for name, value in terminal.items():
        monkeypatch.setenv(name, value)
    with MeasuringProgress("done") as progress:
        progress.update(3, 3, "step")
        progress.update(179, 358, "operator")
    bar = re.findall("([━╸ ]+) done 179 of 358: operator", output.getvalue())[-1]
    assert bar.count("━") / len(bar) == pytest.approx(0.5, abs=0.1)
