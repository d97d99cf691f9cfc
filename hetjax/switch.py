"""``python -m hetjax.switch``: what a switch between two plans would move, without a device.

python -m hetjax.switch --config X.gin --from A.json --to B.json
python -m hetjax.switch --config X.gin --from A.json --to B.json --lost 31 --json

Devices that the file of the destination names as lost (`lost_devices`) need not be named again.
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
from hetjax.commands.signals import doing, run_process
from hetjax.errors import InputError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its options; None for this process's.

    Returns:
        The exit code; see `hetjax.commands.command_line`.
    """
    return run_command(_switch, _parser, argv)


def _parser() -> Parser:
    parser = Parser("hetjax.switch", "Show what a switch from one plan to another would move.")
    parser.add_argument(
        "--from", type=named, dest="source", metavar="FILE", help="the plan that is left"
    )
    parser.add_argument(
        "--to", type=named, dest="destination", metavar="FILE", help="the plan to switch to"
    )
    parser.add_argument(
        "--lost",
        type=device_number,
        nargs="+",
        action="extend",
        default=[],
        metavar="N",
        help="devices of the cluster that are gone, and send nothing; those that the plan to "
        "switch to names in lost_devices need not be given; may be given again",
    )
    parser.add_argument(
        "--bytes-per-parameter",
        type=int,
        metavar="N",
        help="count the parameters alone, each with so many bytes (default: parameters and "
        "optimizer state, as they are)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    return parser


def _switch(arguments: argparse.Namespace) -> int:
    for option in ("source", "destination"):
        if getattr(arguments, option) is None:
            name = {"source": "--from", "destination": "--to"}[option]
            raise InputError(f"{name} is missing; name a plan file")
    if arguments.bytes_per_parameter is not None and arguments.bytes_per_parameter < 1:
        raise InputError(f"--bytes-per-parameter is {arguments.bytes_per_parameter}; 1 or more")
    configuration = configuration_of(arguments)
    # What is heavier to import comes after what can be checked without it.
    from hetjax.planner.plan.plan import Plan
    from hetjax.runtime.moves.state_switch import all_lost

    plans = Plan.load(arguments.source), Plan.load(arguments.destination)
    with as_option():
        lost = all_lost(frozenset(arguments.lost), plans[1])
    from hetjax.configuration.make import make_ingredients

    doing("preparing the model and the data")
    ingredients = make_ingredients(configuration)

    from hetjax.commands.switch_report import switch_figures, switch_table

    doing("working out what moves")
    figures = switch_figures(
        ingredients,
        *plans,
        lost=lost,
        bytes_per_parameter=arguments.bytes_per_parameter,
    )
    if arguments.json:
        print(json.dumps(figures, indent=1))
    else:
        from hetjax.commands.show import make_console

        make_console().print(switch_table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(run_process(main))
