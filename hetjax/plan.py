"""``python -m hetjax.plan``: plan a training run without training.

python -m hetjax.plan --config configs/quickstart.gin
python -m hetjax.plan --config configs/quickstart.gin --json --out plan.json
python -m hetjax.plan --config configs/quickstart.gin --report plan.html
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from hetjax.commands.command_line import (
    Parser,
    as_option,
    configuration_of,
    device_number,
    named,
    run_command,
)
from hetjax.commands.output import AskedFiles
from hetjax.commands.signals import doing, run_process
from hetjax.errors import InputError
from hetjax.files import check_writable


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its options; None for this process's.

    Returns:
        The exit code; see `hetjax.commands.command_line`.
    """
    return run_command(_plan, _parser, argv)


def _parser() -> Parser:
    parser = Parser("hetjax.plan", "Plan a training run without training.")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.add_argument("--out", type=named, metavar="FILE", help="write the plan to this file")
    parser.add_argument(
        "--lost",
        metavar="N",
        type=device_number,
        nargs="+",
        action="extend",
        default=[],
        help="devices to do without; may be given again",
    )
    parser.add_argument(
        "--report", type=named, metavar="FILE", help="write a page about the plan (HTML)"
    )
    return parser


def _plan(arguments: argparse.Namespace) -> int:
    configuration = configuration_of(arguments)
    for option, path in (("--out", arguments.out), ("--report", arguments.report)):
        if path:
            check_writable(path, option)
    # What is heavier to import comes after what can be checked without it.
    from hetjax.commands.devices import configured_cluster
    from hetjax.planner.harp.lost_devices import check_lost

    cluster = configured_cluster(configuration.cluster, configuration.runtime)
    with as_option():
        check_lost(cluster, arguments.lost)
    from hetjax.commands.foreign import is_foreign, plan_of_foreign_profile

    if is_foreign(configuration):
        plan_of_foreign_profile(configuration, cluster, arguments)
        return 0
    from hetjax.configuration.make import make_ingredients

    doing("preparing the model and the data")
    ingredients = make_ingredients(configuration)

    from hetjax.commands import figures, show
    from hetjax.commands.plan_report import plan_report
    from hetjax.commands.prepare import alternatives, parts, prepare, published_plan
    from hetjax.commands.published import published_figures, rated
    from hetjax.report import write_plan_page
    from hetjax.report.progress import MeasuringProgress

    doing("planning")
    given = published_plan(ingredients, cluster)
    with MeasuringProgress("planned") as progress:
        prepared = prepare(ingredients, cluster, frozenset(arguments.lost), progress.update)
    published = rated(prepared, given)
    alone, others = parts(prepared), alternatives(prepared)
    told = prepared.plan.prediction
    if arguments.report and told is None:
        raise InputError("--report: nothing is predicted of this plan; leave it out")
    files = AskedFiles()
    files.write(
        "report",
        arguments.report,
        lambda path: write_plan_page(path, plan_report(prepared, published, alone, others)),
    )
    files.write("plan", arguments.out, prepared.plan.save)
    if arguments.json:
        content = {
            **figures.plan_figures(prepared),
            **figures.program_figures(prepared),
            **figures.context_figures(prepared),
            **published_figures(published),
            **figures.alternatives_figures(prepared, others),
            **figures.parts_figures(alone, told and told.step_time),
        }
        print(json.dumps(content, indent=1))
    else:
        show.show_plan(show.make_console(), prepared, published, alone, others)
    files.tell()
    return 0


if __name__ == "__main__":
    sys.exit(run_process(main))
