"""Tests of what all commands share."""

import argparse
import errno
import os
import subprocess
import sys

import pytest

from hetjax.commands.command_line import NOT_WRITTEN, WRONG_INPUT, Parser, run_command

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


def test_an_error_of_a_socket_is_not_one_of_a_file() -> None:
    def command(_: argparse.Namespace) -> int:
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    with pytest.raises(ConnectionResetError):
        run_command(command, lambda: Parser("hetjax.plan", "Plan."), [])
