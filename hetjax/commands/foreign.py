"""``python -m hetjax.plan`` by the profile of another tool: plans to look at, without a model."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from hetjax.commands.figures import parts_figures, schedule_figures, stage_figures
from hetjax.commands.output import AskedFiles
from hetjax.commands.plan_report import limit_shares
from hetjax.commands.show import limit_lines, make_console
from hetjax.commands.words import batches
from hetjax.configuration import Configuration
from hetjax.errors import InputError
from hetjax.mesh import Cluster
from hetjax.planner import PartAlone, Plan, PlanOptions, parts_alone, simulate
from hetjax.planner.foreign.foreign_planner import ForeignFound, ForeignPlanner
from hetjax.planner.foreign.foreign_profile import ForeignLayer, read_foreign_profile
from hetjax.planner.harp.microbatches import divisors
from hetjax.report import PlanReport, format_seconds, parts_table, plan_table, write_plan_page

if TYPE_CHECKING:
    from rich.console import Console

_SUFFIX = ".json"


def is_foreign(configuration: Configuration) -> bool:
    """Whether a configuration names a profile of another tool, a file, and no folder.

    Args:
        configuration: the configuration.
    """
    profile = configuration.planner.profile
    return profile is not None and (profile.endswith(_SUFFIX) or os.path.isfile(profile))


def plan_of_foreign_profile(
    configuration: Configuration, cluster: Cluster, arguments: argparse.Namespace
) -> None:
    """Make a plan by a profile alone, and print it as the options say.

    Args:
        configuration: names the profile, the batch and what a plan may be; its model is not used.
        cluster: the devices.
        arguments: what ``python -m hetjax.plan`` was given.

    Raises:
        InputError: something is asked for that such a plan does not have, or the profile is wrong
            or lacks what is needed.
    """
    _check_plain(configuration, arguments)
    found = find_foreign_plan(configuration, cluster)
    alone = _parts(configuration, cluster)
    step_time = found.plan.predicted.step_time
    files = AskedFiles()
    files.write(
        "report", arguments.report, lambda path: write_plan_page(path, _report(found, alone))
    )
    files.write("plan", arguments.out, found.plan.save)
    if arguments.json:
        content = {**foreign_figures(found), **parts_figures(alone, step_time)}
        print(json.dumps(content, indent=1))
    else:
        _show(make_console(), found, alone)
    files.tell()


def _check_plain(configuration: Configuration, arguments: argparse.Namespace) -> None:
    """Check that nothing is asked for that a plan by a foreign profile does not have."""
    planner = configuration.planner
    refused = {
        "planner.name": planner.name != "harp" and repr(planner.name),
        "planner.published": planner.published and repr(planner.published),
        "planner.num_layers": planner.num_layers and str(planner.num_layers),
        "planner.max_pipelines": (planner.max_pipelines or 1) > 1 and str(planner.max_pipelines),
        "planner.synthesised_stages": planner.synthesised_stages and "True",
        "--lost": arguments.lost and " ".join(map(str, arguments.lost)),
    }
    for name, value in refused.items():
        if value:
            raise InputError(
                f"{name} is {value}, and planner.profile is {planner.profile!r}, a file of another "
                f"tool, by which plans are those of Harp's search on whole layers and all devices, "
                f"of one pipeline; leave it out"
            )


def find_foreign_plan(configuration: Configuration, cluster: Cluster) -> ForeignFound:
    """The plan that a foreign profile leads to.

    Args:
        configuration: names the profile, the batch and what a plan may be.
        cluster: the devices.

    Raises:
        InputError: the profile is wrong or lacks what is needed, or the model does not fit.
    """
    planner, train = configuration.planner, configuration.train
    assert planner.profile is not None, "a profile is named"
    options = PlanOptions(
        schedule=planner.schedule,
        allow_recompute=planner.allow_recompute,
        min_stages=planner.min_stages,
        max_stages=planner.max_stages,
        max_pipelines=1,
        union_stages=False,
        objective=planner.objective,
    )
    counts = divisors(train.batch_size) if train.microbatches is None else (train.microbatches,)
    profile = read_foreign_profile(planner.profile)
    return ForeignPlanner(profile, cluster, options).find(train.batch_size, counts)


def _parts(configuration: Configuration, cluster: Cluster) -> tuple[PartAlone, ...]:
    """What parts of the cluster would do alone, planned for alike."""
    planner = configuration.planner

    def plan_on(part: Cluster) -> Plan | None:
        fewest = {"min_stages": min(planner.min_stages, part.num_devices)}
        asked = configuration.model_copy(update={"planner": planner.model_copy(update=fewest)})
        try:
            return find_foreign_plan(asked, part).plan
        except InputError:
            return None

    return parts_alone(cluster, plan_on)


def foreign_figures(found: ForeignFound) -> dict[str, Any]:
    """The figures of a plan by a foreign profile as plain values, for ``--json``.

    Args:
        found: the plan.

    Returns:
        Numbers in SI units, by name.
    """
    plan, prediction = found.plan, found.plan.predicted
    stages = [
        {"layer_names": names_of_layers(found.profile.layers[slice(*stage.layers)]), **figures}
        for stage, figures in zip(plan.stages, stage_figures(plan), strict=True)
    ]
    return {
        "model": found.profile.model,
        "profile": found.profile.path,
        "source": found.profile.source,
        "cluster": plan.cluster.name,
        "devices": plan.cluster.num_devices,
        "layers": len(found.profile.layers),
        "planner": plan.planner,
        "planning_seconds": found.seconds,
        "candidates": found.candidates,
        "notes": list(plan.notes),
        **schedule_figures(plan),
        "tried": list(_tried(found)),
        "sharing_seconds": prediction.sharing_seconds,
        "step_time": prediction.step_time,
        "examples_per_second": plan.batch_size / prediction.step_time,
        "lower_bound": prediction.lower_bound,
        "bound_ratio": prediction.step_time / prediction.lower_bound,
        "bubble": mean(stage.bubble for stage in prediction.stages),
        "memory_bytes": max(stage.memory_bytes for stage in prediction.stages),
        "stages": stages,
    }


def _tried(found: ForeignFound) -> Iterator[dict[str, Any]]:
    """What was found for each number of microbatches."""
    for count, told in found.step_times.items():
        step_time, widths = told or (None, ())
        yield {"num_microbatches": count, "step_time": step_time, "data_widths": list(widths)}


def names_of_layers(layers: Sequence[ForeignLayer]) -> str:
    """The names of some layers that follow each other, alike ones as a range.

    Args:
        layers: the layers.

    Example:
        >>> names = ("embedding", "block 0", "block 1")
        >>> kinds = ("embedding", "block", "block")
        >>> names_of_layers(
        ...     [ForeignLayer(a, b, 1, 1, 1, 1, 1) for a, b in zip(names, kinds, strict=True)]
        ... )
        'embedding, block 0 to block 1'
    """
    told = []
    for _, alike in itertools.groupby(layers, lambda layer: layer.figures):
        names = [layer.name for layer in alike]
        told.append(names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}")
    return ", ".join(told)


def _show(console: Console, found: ForeignFound, alone: Sequence[PartAlone]) -> None:
    plan, profile = found.plan, found.profile
    console.print(f"{_summary(found)}", highlight=False, markup=False)
    console.print(plan_table(plan))
    for s, stage in enumerate(plan.stages):
        names = names_of_layers(profile.layers[slice(*stage.layers)])
        console.print(f"stage {s}: {names}", highlight=False, markup=False)
    lines = (
        f"{found.candidates:,} candidates; {_told_counts(found)}",
        *plan.notes,
        f"{profile.path} says of its figures: {profile.source}",
        *limit_lines(plan),
    )
    for line in lines:
        console.print(line, highlight=False, markup=False)
    if alone:
        used = plan.num_devices
        console.print()
        console.print(parts_table(alone, plan.cluster, found.plan.predicted.step_time, used))
    console.print()


def _summary(found: ForeignFound) -> str:
    return (
        f"{found.profile.model}: {found.plan.batch_size} examples a step, {batches(found.plan)}, "
        f"planned in {format_seconds(found.seconds)}"
    )


def _told_counts(found: ForeignFound) -> str:
    """What the numbers of microbatches take that were tried."""
    told = (
        f"{count}: {'fits nowhere' if each is None else format_seconds(each[0])}"
        for count, each in found.step_times.items()
    )
    return f"a step by microbatches: {', '.join(told)}"


def _report(found: ForeignFound, alone: Sequence[PartAlone]) -> PlanReport:
    plan, prediction = found.plan, found.plan.predicted
    first = plan.stages[0]
    kind = plan.cluster.subcluster(first.submesh.subcluster).kind.name
    times = found.profile.times_on(kind, first.mesh_shape, plan.pipeline.microbatch_size)
    assert times is not None, "the plan was made of them"
    return PlanReport(
        title=f"{found.profile.model} on {plan.cluster.name}",
        summary=f"{_summary(found)}; its figures: {found.profile.source}",
        plan=plan,
        timeline=simulate(plan),
        dtype="float32",
        figures={
            "predicted step time": format_seconds(prediction.step_time),
            "bubble": f"{mean(stage.bubble for stage in prediction.stages):.0%}",
            "over the lower bound": f"{prediction.step_time / prediction.lower_bound:.2f} times",
        },
        limits=list(limit_shares(plan)),
        costs=list(times.forward_seconds + times.backward_seconds),
        alone=alone,
    )
