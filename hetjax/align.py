"""``python -m hetjax.align``: compare what unlike kinds of devices compute, operator by operator.

python -m hetjax.align --config quickstart --kinds cpu:float32 cpu:bfloat16
python -m hetjax.align --config my.gin --kinds cpu gpu --steps 0 --html alignment.html
python -m hetjax.align --config my.gin --kinds H100 --capture captured
python -m hetjax.align --config my.gin --kinds MI300X --replay captured

A kind is written [NAME=]DEVICE[:DTYPE]; the first one is the reference.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from hetjax.commands.command_line import Parser, configuration_of, named, run_command
from hetjax.commands.output import AskedFiles
from hetjax.commands.signals import doing, run_process
from hetjax.files import check_folder, check_writable


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its options; None for this process's.

    Returns:
        The exit code; see `hetjax.commands.command_line`.
    """
    return run_command(_align, _parser, argv)


def _parser() -> Parser:
    parser = Parser("hetjax.align", "Compare what kinds of devices compute, operator by operator.")
    parser.add_argument(
        "--kinds",
        nargs="+",
        action="extend",
        default=[],
        metavar="KIND",
        help="what is compared, the reference first: [NAME=]DEVICE[:DTYPE], where DEVICE is cpu, "
        "gpu, tpu or a device kind such as H100, and DTYPE is what operands of products are "
        "rounded to: float32, bfloat16, float16; without it products are the platform's own; "
        "may be given again",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        metavar="X",
        help="the largest error of an operator that is rounding (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=300,
        metavar="N",
        help="training steps whose losses are compared; 0 for none (default: %(default)s)",
    )
    parser.add_argument(
        "--operators",
        nargs="+",
        action="extend",
        default=[],
        metavar="N",
        help="the operators to compare, capture or replay, by number: 17, or 10-20 (default: all); "
        "may be given again",
    )
    parser.add_argument(
        "--capture",
        type=named,
        metavar="DIR",
        help="write what the reference's operators take and give there",
    )
    parser.add_argument(
        "--limit",
        default="1 GB",
        metavar="SIZE",
        help="the most that --capture writes (default: %(default)s)",
    )
    parser.add_argument(
        "--replay",
        type=named,
        metavar="DIR",
        help="compare with a capture in the place of a reference",
    )
    parser.add_argument(
        "--inject",
        nargs=3,
        metavar=("KIND", "OPERATOR", "SIZE"),
        help="put an error into one operator of one kind, to see that it is found: SIZE is "
        "relative, or inf, or nan",
    )
    parser.add_argument(
        "--inject-step", type=int, metavar="N", help="in training step N alone (default: in all)"
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=20,
        metavar="N",
        help="operators shown, the largest error first (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.add_argument(
        "--html", type=named, metavar="FILE", help="write a page about the alignment (HTML)"
    )
    return parser


def _align(arguments: argparse.Namespace) -> int:
    # Imports no JAX: what is wrong with the options is said at once.
    from hetjax.commands.alignment_options import alignment_options

    options = alignment_options(arguments)
    configuration = configuration_of(arguments)
    if arguments.html:
        check_writable(arguments.html, "--html")
    if arguments.capture:
        check_folder(arguments.capture, "--capture")
    # What is heavier to import comes after what can be checked without it.
    from hetjax.commands.aligning import align
    from hetjax.commands.alignment_report import alignment_figures, show_alignment
    from hetjax.commands.show import make_console
    from hetjax.report import write_alignment_page
    from hetjax.report.progress import MeasuringProgress

    doing("comparing operators")
    with MeasuringProgress("done") as progress:
        aligned = align(configuration, options, progress.update)
    files = AskedFiles()
    files.write("report", arguments.html, lambda path: write_alignment_page(path, aligned))
    if arguments.json:
        print(json.dumps(alignment_figures(aligned, arguments.rows), indent=1))
    else:
        show_alignment(make_console(), aligned, arguments.rows)
    files.tell()
    return 0


if __name__ == "__main__":
    sys.exit(run_process(main))
