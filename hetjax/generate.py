"""``python -m hetjax.generate``: go on with a text, by a checkpoint of a run.

python -m hetjax.generate --workdir runs/first --prompt "def "
python -m hetjax.generate --workdir runs/first --prompt "import " --length 400 --temperature 0.7
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hetjax.commands.command_line import Parser, as_option, run_command
from hetjax.commands.signals import doing, run_process
from hetjax.draws import check_draws
from hetjax.errors import InputError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its options; None for this process's.

    Returns:
        The exit code; see `hetjax.commands.command_line`.
    """
    return run_command(_generate, _parser, argv)


def _parser() -> Parser:
    parser = Parser(
        "hetjax.generate", "Go on with a text, by a checkpoint of a run.", configured=False
    )
    parser.add_argument("--workdir", metavar="DIR", help="the run's folder")
    parser.add_argument("--prompt", metavar="TEXT", help="the text to go on with")
    parser.add_argument(
        "--length", type=int, default=200, metavar="N", help="tokens to make (default: 200)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="1 draws tokens as the model says, less keeps to what is likely, 0 always takes the "
        "likeliest (default: 0.8)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)"
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="the checkpoint's step (default: the newest whole)"
    )
    return parser


def _generate(arguments: argparse.Namespace) -> int:
    for option in ("workdir", "prompt"):
        if not getattr(arguments, option):
            what = {"workdir": "name the folder of a run", "prompt": "give a text to go on with"}
            raise InputError(f"--{option} is missing or empty; {what[option]}")
    with as_option():
        check_draws(arguments.length, arguments.temperature, arguments.seed)

    from hetjax.commands.work_folder import configuration_in

    workdir = Path(arguments.workdir)
    configuration = configuration_in(workdir)
    # What is heavier to import comes after what can be checked without it.
    doing("preparing the model")
    from hetjax.commands.generating import Continuation, TextModel

    continuation = Continuation(
        arguments.prompt, arguments.length, arguments.temperature, arguments.seed
    )
    model = TextModel(configuration)
    tokens = model.encode(continuation)
    doing("reading the checkpoint")
    parameters, messages = model.load(workdir, arguments.step)
    if len(tokens) > model.sequence:
        messages.append(
            f"the prompt has {len(tokens)} tokens, and the model sees the last {model.sequence}"
        )
    for message in messages:
        print(message, file=sys.stderr)
    doing("generating")
    print(model.go_on(parameters, tokens, continuation))
    return 0


if __name__ == "__main__":
    sys.exit(run_process(main))
