"""A plan as people read it: tables, and what is to be known of it in words."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hetjax.commands.figures import context_report, cost_figures, program_report
from hetjax.commands.planning import Planned
from hetjax.commands.prepare import Prepared
from hetjax.commands.profiling import Profiled
from hetjax.commands.published import Published, published_lines
from hetjax.commands.shared_cores import shared_core_lines
from hetjax.commands.words import batch_words, batches, rate_lines, told_alternatives
from hetjax.planner import (
    Alternative,
    PartAlone,
    Plan,
    StepParts,
    flops_utilization,
    limits,
    load_balance,
    step_parts,
)
from hetjax.report import (
    alternatives_table,
    cluster_table,
    context_table,
    format_rate,
    format_seconds,
    layer_rows,
    layer_table,
    layouts_table,
    moves_table,
    parts_table,
    plan_table,
    profile_table,
    program_lines,
    rings_table,
    systems_table,
)

if TYPE_CHECKING:
    from rich.console import Console

    from hetjax.planner.plan.prediction import StagePrediction
    from hetjax.planner.plan.stage_plan import StagePlan

_FILE_WIDTH = 110


def make_console() -> Console:
    """Where a command prints: wide enough for its tables where the output is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)


def show_plan(
    console: Console,
    prepared: Prepared,
    published: Published | None = None,
    alone: Sequence[PartAlone] = (),
    alternatives: Sequence[Alternative] = (),
) -> None:
    """Print the model, the cluster and the plan.

    Args:
        console: where to.
        prepared: what was planned.
        published: a plan to show beside it.
        alone: what parts of the cluster would do.
        alternatives: the next best plans.
    """
    plan, model = prepared.plan, prepared.ingredients.model
    train = prepared.ingredients.configuration.train
    lines = (
        f"{model.name}: {format_rate(model.num_parameters(), ' parameters')}, "
        f"{train.steps} steps of {batch_words(train.batch_size, model)}",
        f"{batches(plan)}, plan: {plan.planner} ({format_seconds(prepared.planning_seconds)})",
    )
    console.print(lines[0], highlight=False)
    console.print()
    dtype = prepared.planned.problem.dtype if prepared.planned else "float32"
    console.print(cluster_table(plan.cluster, dtype))
    console.print()
    if prepared.planned is not None and (sections := prepared.planned.problem.sections):
        console.print(layer_table(layer_rows(sections), len(plan.layers) - 1))
        console.print()
    if plan.prediction is None:
        console.print(str(plan), highlight=False, markup=False, soft_wrap=True)
        console.print()
        _show_context(console, prepared)
        return
    console.print(plan_table(plan))
    console.print(lines[1], highlight=False)
    _show_context(console, prepared)
    report = program_report(prepared)
    if report is not None:
        console.print(layouts_table(report))
        console.print(moves_table(report))
    quality = (
        *_quality_lines(prepared, published),
        *(program_lines(report, prepared.prediction.step_time) if report else ()),
        *plan.notes,
        *rate_lines(prepared),
        *_cost_lines(prepared),
        *shared_core_lines(plan, prepared.ingredients.configuration),
        *_union_lines(prepared),
    )
    for line in (*quality, *limit_lines(plan)):
        console.print(line, highlight=False, markup=False)
    if alternatives:
        console.print()
        console.print(alternatives_table(told_alternatives(prepared, alternatives)))
    if alone:
        console.print()
        used = plan.num_devices
        console.print(parts_table(alone, plan.cluster, prepared.prediction.step_time, used))
    console.print()


def _show_context(console: Console, prepared: Prepared) -> None:
    """Print how devices share sequences, where a plan was found in which they do."""
    report = context_report(prepared)
    if report is None:
        return
    console.print(context_table(report))
    console.print()
    if report.rings:
        console.print(rings_table(report))
        console.print()
    console.print(systems_table(report))
    if report.left_out:
        console.print(
            f"left out, since the step is faster without them: {', '.join(report.left_out)}",
            markup=False,
            highlight=False,
        )
    console.print()


def show_profile(console: Console, profiled: Profiled) -> None:
    """Print what a profile consists of.

    Args:
        console: where to.
        profiled: the profile.
    """
    surveyed, profile = profiled.surveyed, profiled.profile
    counts = Counter(each.way for each in surveyed.wanted)
    console.print(profile_table(profile, counts))
    kept = surveyed.candidates - surveyed.pruned
    console.print(
        f"{surveyed.candidates:,} candidate stages: {surveyed.pruned:,} fit nowhere, "
        f"{kept - len(surveyed.wanted):,} are composed of {len(surveyed.wanted):,} measurements "
        f"({surveyed.share(len(surveyed.wanted)):.2%}), {profiled.measured:,} of them made now in "
        f"{format_seconds(profiled.seconds)}",
        highlight=False,
    )


def _quality_lines(prepared: Prepared, published: Published | None) -> Iterator[str]:
    if prepared.planned is not None:
        problem, found = prepared.planned.problem, prepared.planned.found
        balance = load_balance(prepared.plan, problem.dtype)
        utilization = flops_utilization(prepared.plan, problem)
        looked = f"{found.candidates:,} candidates, " if found.candidates else ""
        profile, search = map(format_seconds, (found.profile_seconds, found.search_seconds))
        yield (
            f"load balance {balance:.0%}, MFU {utilization:.0%}; {looked}profile {profile}, search "
            f"{search}"
        )
        yield from _profile_lines(prepared.planned)
    yield from published_lines(published, prepared.prediction.step_time)


def _union_lines(prepared: Prepared) -> Iterator[str]:
    """Whether unlike devices share a stage, and what it would cost to have it otherwise."""
    if prepared.planned is None:
        return
    found = prepared.planned.found
    is_shared = found.plan.has_unions
    others = [*found.runners_up, *prepared.planned.others]
    contrary = [each for each in others if each.plan.has_unions != is_shared]
    if not contrary:
        return
    best = min(contrary, key=lambda each: each.score)
    ratio = best.score / found.score
    if is_shared:
        yield (
            f"unlike devices share a stage, each with as many examples as it has time for; the "
            f"best plan found in which none do takes {ratio:.2f} times as long"
        )
    else:
        yield (
            f"a stage shared by unlike devices, {_shared_stage(best.plan)}, was considered: it "
            f"takes {ratio:.2f} times as long"
        )


def _shared_stage(plan: Plan) -> str:
    stage = next(stage for stage in plan.stages if len(stage.members) > 1)
    return f"{stage.subclusters_text} with {stage.sharding_text}"


def _profile_lines(planned: Planned) -> Iterator[str]:
    profile, missing = planned.problem.profile, planned.num_to_measure
    if profile.measurements:
        error = profile.composition_error
        within = "" if error is None else f", composed to within {error:.1%}"
        yield f"costs of {profile.measurements} measurements{within}"
    elif profile.calibration:
        yield "costs are computed, and corrected by what other models took on these devices"
    elif missing is not None:
        yield (
            f"costs are computed; a profile would measure {missing:,} candidates and compose the "
            f"others of them"
        )


def limit_lines(plan: Plan) -> Iterator[str]:
    """What limits a plan, in words.

    Args:
        plan: a plan with a prediction.
    """
    found = limits(plan)
    stage, fullest = plan.stages[found.stage], plan.stages[found.fullest]
    yield (
        f"what limits it: stage {found.stage} on {_place(stage)} computes for "
        f"{found.stage_busy:.0%} of the step"
    )
    yield f"its step: {_parts_words(step_parts(plan)[found.stage])}"
    if found.link is not None:
        a, b = found.link
        ends = f"{plan.stages[a].subclusters_text} to {plan.stages[b].subclusters_text}"
        yield (
            f"the busiest link, stage {a} to {b} ({ends}), is in use for {found.link_busy:.0%} of "
            f"it"
        )
    if found.sharing > 0:
        yield (
            f"the exchange of what several stages hold, gradients and new parameters, takes "
            f"{found.sharing:.0%} of it"
        )
    yield (
        f"the fullest devices, stage {found.fullest} on "
        f"{_fullest(fullest, plan.predicted.stages[found.fullest])}, use {found.memory:.0%} of "
        f"their memory"
    )


def _place(stage: StagePlan) -> str:
    """Where a stage is, in short."""
    if len(stage.members) <= _NAMED_MEMBERS:
        return stage.devices_text
    return f"{len(stage.members)} members on {stage.subclusters_text}"


_NAMED_MEMBERS = 4
"""Of how many members a sentence says the devices of each."""


def _fullest(stage: StagePlan, predicted: StagePrediction) -> str:
    """The devices of a stage, or of its member that is the fullest."""
    if not predicted.members:
        return stage.devices_text
    shares = [each.memory_bytes / each.memory_limit_bytes for each in predicted.members]
    return str(stage.submeshes[shares.index(max(shares))])


def _parts_words(parts: StepParts) -> str:
    """What a stage's step is spent on; rounded so that the shares add up."""
    seconds = vars(parts)
    shares = dict(zip(seconds, _percentages(list(seconds.values())), strict=True))
    return ", ".join(f"{share}% {name}" for name, share in shares.items() if seconds[name] > 0)


def _percentages(parts: Sequence[float]) -> list[int]:
    """Whole percentages that add up to 100: the largest remainders are rounded up."""
    exact = [100 * part / sum(parts) for part in parts]
    whole = [int(each) for each in exact]
    for place in sorted(range(len(exact)), key=lambda p: whole[p] - exact[p])[: 100 - sum(whole)]:
        whole[place] += 1
    return whole


def _cost_lines(prepared: Prepared) -> Iterator[str]:
    """What a step costs, where prices are known."""
    figures = cost_figures(prepared)
    if figures:
        ingredients = prepared.ingredients
        millions = 1e6 * figures["cost_per_step"] / ingredients.units_per_step
        yield (
            f"cost: {figures['cost_per_step']:.3g} a step, {millions:.3g} a million "
            f"{ingredients.model.unit}, at "
            f"{figures['price_per_hour']:.3g} an hour for the nodes that are used"
        )
