"""Tests of what all commands share."""

import subprocess
import sys

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
