"""``python -m hetjax.train``: train a model across a union of unlike meshes.

    python -m hetjax.train --config configs/quickstart.gin --workdir runs/first
    python -m hetjax.train --config configs/quickstart.gin --gin "train.steps = 20" --runtime ray

Ctrl-C, SIGTERM and SIGHUP (a terminal that is closed, a connection that is lost) end the command
with 130, 143 or 129. While it trains it finishes the step first, and saves a checkpoint where there
is a work folder; a second one ends it at once. What it was started to ignore, as the shell of a
script starts what goes on in the background to ignore Ctrl-C, and nohup SIGHUP, ends nothing. The
exit codes are listed in `hetjax.commands.command_line`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hetjax.commands.command_line import Parser, configuration_of, named, run_command
from hetjax.commands.signals import doing, run_process
from hetjax.errors import InputError, shown

if TYPE_CHECKING:
    from hetjax.commands.work_folder import Resumption
    from hetjax.configuration import Configuration
    from hetjax.mesh import Cluster


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its options; None for this process's.

    Returns:
        The exit code.
    """
    return run_command(_train, _parser, argv, outlives_output=True)


def _parser() -> Parser:
    parser = Parser("hetjax.train", "Train a model across a union of unlike meshes.")
    parser.add_argument(
        "--workdir", type=named, metavar="DIR", help="folder for all that the run writes"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in --workdir")
    parser.add_argument(
        "--resume-or-start",
        action="store_true",
        help="as --resume, and begin at step 0 where there is no checkpoint",
    )
    parser.add_argument(
        "--allow-changed-data",
        action="store_true",
        help="with --resume: go on also where the data or their seed have changed",
    )
    parser.add_argument(
        "--plan", type=named, metavar="FILE", help="follow this plan instead of making one"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the cluster and the plan, and end"
    )
    parser.add_argument(
        "--runtime", type=named, metavar="NAME", help="'local' or 'ray': runtime.name"
    )
    parser.add_argument("--ray-address", type=named, metavar="ADDRESS", help="runtime.ray_address")
    return parser


def _train(arguments: argparse.Namespace) -> int:
    for option, setting in (("runtime", "name"), ("ray_address", "ray_address")):
        if getattr(arguments, option) is not None:
            arguments.gin.append(f"runtime.{setting} = {getattr(arguments, option)!r}")
    configuration = configuration_of(arguments)

    # What is heavier to import comes after what can be checked without it.
    from hetjax.commands.work_folder import (
        check_kept,
        check_unused,
        check_work_folder,
        reusable_plan,
    )

    workdir = Path(arguments.workdir) if arguments.workdir else None
    plan_file = Path(arguments.plan) if arguments.plan else None
    resumption = _resumption(arguments)
    if workdir is not None:
        check_work_folder(workdir, resumption)
        check_kept(configuration)
        if not arguments.dry_run:
            check_unused(workdir)
        if resumption.wanted and plan_file is None:
            plan_file = reusable_plan(workdir, configuration)
    elif resumption.wanted:
        raise InputError("--resume is given without --workdir; name the folder of the run")
    if writers := configuration.train.writers:
        from hetjax.report import check_writers

        if workdir is None:
            raise InputError(
                f"train.writers is {shown(writers)} without --workdir; name a folder for the run"
            )
        check_writers(writers, "train.writers")

    from hetjax.commands.devices import check_devices, check_ray_address, configured_cluster

    if not arguments.dry_run:
        check_ray_address(configuration.runtime)
    doing("looking at the devices")
    cluster = None
    if plan_file is not None:
        cluster = _cluster_of(plan_file, configuration, is_given=arguments.plan is not None)
    if cluster is None:
        plan_file = None
        cluster = configured_cluster(configuration.cluster, configuration.runtime)
    if not arguments.dry_run:
        check_devices(cluster, configuration.runtime, play=configuration.cluster.play)

    from hetjax.configuration.make import make_ingredients

    doing("preparing the model and the data")
    ingredients = make_ingredients(configuration)

    from hetjax.commands.prepare import parts, prepare

    doing("planning")
    prepared = prepare(ingredients, plan_file or cluster)
    if arguments.plan is not None:
        told = f"{_GIVEN}{shown(arguments.plan, 200)}"
        notes = [note for note in prepared.plan.notes if not note.startswith(_GIVEN)]
        prepared = replace(prepared, plan=replace(prepared.plan, notes=(*notes, told)))

    from hetjax.commands.run import run
    from hetjax.commands.show import make_console, show_plan

    console = make_console()
    # Who plays a cluster wants to know what it is good for.
    show_plan(console, prepared, alone=parts(prepared) if configuration.cluster.play else ())
    if arguments.dry_run:
        return 0
    return run(prepared, console, workdir, resumption)


_GIVEN = "given by --plan: "
"""What the note of a plan begins with that was not found for the configured cluster."""


def _cluster_of(path: Path, configuration: Configuration, *, is_given: bool) -> Cluster | None:
    """The cluster of a plan; None where an earlier one was found for devices that are not there."""
    from hetjax.commands.devices import has_changed
    from hetjax.planner import Plan

    plan = Plan.load(path)
    is_given = is_given or any(note.startswith(_GIVEN) for note in plan.notes)
    if is_given or not has_changed(plan.cluster, configuration.cluster, configuration.runtime):
        return plan.cluster
    print(f"the cluster has changed since {path} was made: planning anew", file=sys.stderr)
    return None


def _resumption(arguments: argparse.Namespace) -> Resumption:
    from hetjax.commands.work_folder import Resumption

    or_start = arguments.resume_or_start
    wanted = arguments.resume or or_start
    if arguments.allow_changed_data and not wanted:
        raise InputError(
            "--allow-changed-data is given without --resume; a new run has no data yet"
        )
    return Resumption(wanted, or_start, arguments.allow_changed_data)


if __name__ == "__main__":
    sys.exit(run_process(main))
