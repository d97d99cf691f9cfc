"""``python -m hetjax.profile``: measure a model's layers on a cluster, for plans to come."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hetjax.commands.command_line import Parser, configuration_of, named, run_command
from hetjax.commands.signals import doing, run_process
from hetjax.errors import InputError
from hetjax.files import check_folder


def main(argv: Sequence[str] | None = None) -> int:
    """The command.

    Args:
        argv: its options; None for this process's.

    Returns:
        The exit code; see `hetjax.commands.command_line`.
    """
    return run_command(_profile, _parser, argv)


def _parser() -> Parser:
    parser = Parser("hetjax.profile", "Measure a model's layers on the devices of a cluster.")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.add_argument(
        "--merge",
        type=named,
        metavar="FOLDER",
        action="append",
        default=[],
        help="take over first what another profile database has; may be given again",
    )
    return parser


def _profile(arguments: argparse.Namespace) -> int:
    configuration = configuration_of(arguments)
    folder = configuration.planner.profile
    if folder is None:
        raise InputError("planner.profile is None; name the folder where measurements are kept")
    for other in arguments.merge:
        if not os.path.isdir(other):
            raise InputError(f"--merge is {other!r}; there is no such folder")

    # What is heavier to import comes after what can be checked without it.
    from hetjax.commands.devices import check_ray_address, configured_cluster

    check_ray_address(configuration.runtime)
    doing("looking at the devices")
    cluster = configured_cluster(configuration.cluster, configuration.runtime)

    from hetjax.commands.profiling import measure_profile, profile_database
    from hetjax.planner.profiler import ProfileDatabase

    database = profile_database(folder)
    check_folder(folder, "planner.profile")
    merged = sum(database.merge(ProfileDatabase(Path(other))) for other in arguments.merge)

    from hetjax.commands.prepare import problem_to_profile
    from hetjax.configuration.make import make_ingredients

    doing("preparing the model and the data")
    ingredients = make_ingredients(configuration)

    from hetjax.commands import figures, show
    from hetjax.report.progress import MeasuringProgress

    problem = problem_to_profile(ingredients, cluster)
    doing("measuring layers; what was measured is kept")
    with MeasuringProgress() as progress:
        profiled = measure_profile(ingredients, problem, database, progress.update)
    if arguments.json:
        print(json.dumps({**figures.profile_figures(profiled), "merged": merged}, indent=1))
    else:
        show.show_profile(show.make_console(), profiled)
    return 0


if __name__ == "__main__":
    sys.exit(run_process(main))
