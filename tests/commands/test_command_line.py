"""Tests of what all commands share."""

import argparse
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetjax.commands.command_line import (
    NOT_FINITE,
    NOT_WRITTEN,
    WRONG_INPUT,
    Parser,
    configuration_of,
    run_command,
)
from hetjax.configuration.make import make_ingredients
from hetjax.errors import InputError, NonfiniteError

NOISY = """
import os
from hetjax.commands.command_line import Parser, run_command

def parser():
    parser = Parser("hetjax.noisy", "A noisy command.", configured=False)
    parser.add_argument("--json", action="store_true")
    return parser

def command(arguments):
    os.write(1, b"solving\\n")
    print("{}")
    return 0

code = run_command(command, parser, OPTIONS)
print("after")
raise SystemExit(code)
"""


def run(options: list[str]) -> subprocess.CompletedProcess[str]:
    source = NOISY.replace("OPTIONS", repr(options))
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)


def test_what_libraries_print_is_not_among_the_figures_of_json():
    found = run(["--json"])
    assert (found.returncode, found.stdout, found.stderr) == (0, "{}\nafter\n", "solving\n")
    assert run([]).stdout == "solving\n{}\nafter\n"


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EACCES, WRONG_INPUT), (errno.ENOSPC, NOT_WRITTEN)]
)
def test_a_file_that_may_not_be_used_is_one_line(
    number: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(_: argparse.Namespace) -> int:
        raise OSError(number, os.strerror(number), "/somewhere/plan.json")

    assert run_command(command, lambda: Parser("hetjax.plan", "Plan."), []) == code
    assert capsys.readouterr().err == f"error: /somewhere/plan.json: {os.strerror(number)}\n"


PRINTING = """
import os, sys
from hetjax.commands.command_line import Parser, run_command
from hetjax.commands.signals import run_process

def parser():
    parser = Parser("hetjax.printing", "A command that prints.", configured=False)
    parser.add_argument("--json", action="store_true")
    return parser

def command(arguments):
    for _ in range(3):
        print("a line", flush=not arguments.json)
    print("done", file=sys.stderr)
    return 0

sys.exit(run_process(lambda: run_command(command, parser, OPTIONS, outlives_output=OUTLIVES)))
"""


def run_printing(output: int, options: list[str], *, outlives: bool) -> tuple[int, list[str]]:
    """The exit code of a command that prints to a descriptor, and its lines of standard error."""
    source = PRINTING.replace("OPTIONS", repr(options)).replace("OUTLIVES", repr(outlives))
    words = [sys.executable, "-c", source]
    found = subprocess.run(words, stdout=output, stderr=subprocess.PIPE, text=True)
    return found.returncode, sorted(found.stderr.splitlines())


@pytest.mark.parametrize(
    ("options", "outlives", "end"),
    [([], False, ""), (["--json"], False, ""), ([], True, "; the command goes on without it")],
)
def test_a_standard_output_on_a_full_disk_ends_no_command_and_is_told(
    options: list[str], outlives: bool, end: str
) -> None:
    with open("/dev/full", "w") as full:
        code, lines = run_printing(full.fileno(), options, outlives=outlives)
    told = f"error: the standard output cannot be written to: No space left on device{end}"
    assert (code, lines) == (NOT_WRITTEN, ["done", told])


@pytest.mark.parametrize(("options", "lines"), [([], ["done"]), (["--help"], [])])
def test_a_reader_that_went_away_is_not_told_of_a_command_that_only_prints(
    options: list[str], lines: list[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert run_printing(writer, options, outlives=False) == (NOT_WRITTEN, lines)
    finally:
        os.close(writer)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_command_that_was_started_without_standard_streams_prints_nowhere(
    options: list[str],
) -> None:
    source = PRINTING.replace("OPTIONS", repr(options)).replace("OUTLIVES", "False")
    words = ["sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, source]
    found = subprocess.run(words, capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "done\n")


def test_what_failed_after_an_error_stands_behind_it(capsys: pytest.CaptureFixture[str]) -> None:
    def command(_: argparse.Namespace) -> int:
        error = NonfiniteError("3 steps were not finite")
        error.add_note("checkpoint 3 was not saved: No space left on device")
        raise error

    assert run_command(command, lambda: Parser("hetjax.train", "Train."), []) == NOT_FINITE
    line = "3 steps were not finite; checkpoint 3 was not saved: No space left on device"
    assert capsys.readouterr().err == f"error: {line}\n"


def test_an_error_of_a_socket_is_not_one_of_a_file() -> None:
    def command(_: argparse.Namespace) -> int:
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    with pytest.raises(ConnectionResetError):
        run_command(command, lambda: Parser("hetjax.plan", "Plan."), [])


def test_a_text_that_is_too_short_is_told_with_the_models_sequence(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    settings = [f"data.paths = ['{tmp_path}/empty.txt']", "data.kind = 'text'"]
    options = argparse.Namespace(config="quickstart", gin=[*settings, "model.sequence = 16"])
    with pytest.raises(InputError, match=r"has 0 tokens .* sequence 16 needs at least 17"):
        make_ingredients(configuration_of(options))
