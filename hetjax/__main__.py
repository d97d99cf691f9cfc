"""The console command: ``hetjax train|plan|profile|switch|align|generate``.

The same is ``python -m hetjax``. Each word runs the command of the same name, so ``hetjax train``
is ``python -m hetjax.train``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import hetjax
from hetjax.commands.command_line import WRONG_INPUT, with_output
from hetjax.commands.output import Output
from hetjax.commands.signals import run_process
from hetjax.errors import unknown_name

COMMANDS = {
    "train": "train a model across a union of unlike meshes",
    "plan": "plan a training run without training",
    "profile": "measure a model's layers, for plans to come",
    "switch": "show what a switch between two plans would move",
    "align": "compare what unlike kinds of devices compute, operator by operator",
    "generate": "go on with a text, by a checkpoint of a run",
}
"""What each command does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names.

    Args:
        argv: the command line; None for this process's.

    Returns:
        The exit code; see `hetjax.commands.command_line`.
    """
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name == "--version":
        return _show(f"hetjax {hetjax.__version__}")
    if name in ("--help", "-h"):
        return _show(_help())
    if name not in COMMANDS:
        print(f"error: {unknown_name('command', name, COMMANDS)}", file=sys.stderr)
        return WRONG_INPUT
    return importlib.import_module(f"hetjax.{name}").main(rest)


def _show(text: str) -> int:
    def show(_: Output) -> int:
        print(text)
        return 0

    return with_output(show)


def console() -> int:
    """Run the command as this process, which hears signals from its first line on.

    Returns:
        The exit code.
    """
    return run_process(main)


def _help() -> str:
    lines = [f"  {name:<9} {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: hetjax [--help] [--version] COMMAND ...",
            "",
            "One training job out of unlike accelerators.",
            "",
            "commands:",
            *lines,
            "",
            "hetjax COMMAND --help tells a command's options, and all settings where it has some.",
        ]
    )


if __name__ == "__main__":
    sys.exit(console())
