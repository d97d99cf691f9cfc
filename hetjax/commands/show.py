"""A plan and its run as people read them: tables, and figures as JSON."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import mean
from typing import TYPE_CHECKING, Any

from hetjax.commands.prepare import Planned, Prepared
from hetjax.commands.profiling import Profiled
from hetjax.commands.published import Published, published_lines
from hetjax.commands.shared_cores import shared_core_lines
from hetjax.mesh.kinds import ASSUMED_EFFICIENCY, USUAL_SHARE, DeviceKind
from hetjax.models import Model
from hetjax.planner import (
    Alternative,
    PartAlone,
    Plan,
    Prediction,
    StagePlan,
    StagePrediction,
    StepParts,
    differences,
    flops_utilization,
    limits,
    load_balance,
    step_cost,
    step_parts,
)
from hetjax.planner.hap.explain import ProgramReport, explain
from hetjax.planner.profiler import num_to_measure
from hetjax.report import (
    OtherPlan,
    alternatives_table,
    cluster_table,
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
)

if TYPE_CHECKING:
    from rich.console import Console

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
        return
    console.print(plan_table(plan))
    console.print(lines[1], highlight=False)
    report = _program_report(prepared)
    if report is not None:
        console.print(layouts_table(report))
        console.print(moves_table(report))
    quality = (
        *_quality_lines(prepared, published),
        *(program_lines(report, _prediction(plan).step_time) if report else ()),
        *plan.notes,
        *rate_lines(prepared),
        *_cost_lines(prepared),
        *shared_core_lines(plan, prepared.ingredients.configuration),
        *_union_lines(prepared),
    )
    for line in (*quality, *_limit_lines(plan)):
        console.print(line, highlight=False, markup=False)
    if alternatives:
        console.print()
        console.print(alternatives_table(told_alternatives(prepared, alternatives)))
    if alone:
        console.print()
        used = sum(stage.num_devices for stage in plan.stages)
        console.print(parts_table(alone, plan.cluster, _prediction(plan).step_time, used))
    console.print()


def _program_report(prepared: Prepared) -> ProgramReport | None:
    """What a synthesised program does; None where the plan has none, or was given."""
    planned, plan = prepared.planned, prepared.plan
    if planned is None or not any(stage.shares.modules for stage in plan.stages):
        return None
    return explain(plan, planned.problem)


def program_figures(prepared: Prepared) -> dict[str, Any]:
    """The figures of a synthesised program as plain values, for ``--json``.

    Args:
        prepared: what was planned.

    Returns:
        How tensors lie, what is moved, and what data parallelism is predicted to take; nothing of
        a plan that has no program.
    """
    report = _program_report(prepared)
    if report is None:
        return {}
    return {
        "program_layouts": [asdict(row) for row in report.layouts],
        "program_moves": [asdict(row) for row in report.moves],
        "data_parallel_step_times": dict(report.data_parallel),
        "computed_whole": list(report.without_rule),
    }


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


def profile_figures(profiled: Profiled) -> dict[str, Any]:
    """The figures of a profile as plain values, for ``--json``.

    Args:
        profiled: the profile.

    Returns:
        Numbers by name, times in seconds.
    """
    surveyed, profile = profiled.surveyed, profiled.profile
    return {
        "layers": len(surveyed.classes),
        "layer_structures": len(set(surveyed.classes)),
        "structures": surveyed.structures,
        "candidates": surveyed.candidates,
        "candidates_pruned": surveyed.pruned,
        "candidates_to_measure": len(surveyed.wanted),
        "share_to_measure": surveyed.share(len(surveyed.wanted)),
        "candidates_measured": profiled.measured,
        "measurements": profile.measurements,
        "seconds": profiled.seconds,
        "composition_error": profile.composition_error,
    }


def batches(plan: Plan) -> str:
    """How many microbatches each pipeline of a plan computes, and by which schedule, in words."""
    said = []
    for first, each in plan.numbered_pipelines():
        last = first + len(each.stages) - 1
        stages = f"stages {first} to {last}" if last > first else f"stage {first}"
        where = f"{stages}: " if len(plan.pipelines) > 1 else ""
        count = f"{each.num_microbatches} microbatch{'es' if each.num_microbatches > 1 else ''}"
        said.append(f"{where}{count} of {each.microbatch_size}, schedule {each.schedule.name}")
    return "; ".join(said)


def batch_words(batch_size: int, model: Model) -> str:
    """What a batch has, in words."""
    count = model.units_per_example
    return f"{batch_size} x {count} {model.unit}" if count > 1 else f"{batch_size} {model.unit}"


def _quality_lines(prepared: Prepared, published: Published | None) -> Iterator[str]:
    if prepared.planned is not None:
        problem, found = prepared.planned.problem, prepared.planned.found
        balance = load_balance(prepared.plan, problem.dtype)
        utilization = flops_utilization(prepared.plan, problem)
        yield (
            f"load balance {balance:.0%}, MFU {utilization:.0%}; {found.candidates:,} candidates, "
            f"profile {format_seconds(found.profile_seconds)}, search "
            f"{format_seconds(found.search_seconds)}"
        )
        yield from _profile_lines(prepared.planned)
    yield from published_lines(published, _prediction(prepared.plan).step_time)


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


def rate_lines(prepared: Prepared) -> Iterator[str]:
    """What is to be known of the rates that a plan was made with.

    Args:
        prepared: a plan.

    Yields:
        A line for each kind without a rate for the model's dtype; how near to their peaks kinds are
        taken to come.
    """
    if prepared.planned is None:
        return
    problem = prepared.planned.problem
    kinds = dict.fromkeys(subcluster.kind for subcluster in problem.cluster.subclusters)
    for kind in kinds:
        said = kind.slow_path(problem.dtype)
        if said is not None:
            yield said
    if not problem.profile.measurements:
        yield from _efficiency_lines(tuple(kinds), problem.dtype)


def _efficiency_lines(kinds: Sequence[DeviceKind], dtype: str) -> Iterator[str]:
    """How near to the peak products are taken to come, of each kind; where that is known from."""
    assumed = [kind for kind in kinds if kind.assumes_efficiency(dtype)]
    if assumed:
        yield (
            f"nothing was measured: matrix products are assumed to reach "
            f"{ASSUMED_EFFICIENCY:.0%} of the peak on {', '.join(kind.name for kind in assumed)}"
        )
    for kind in kinds:
        if kind not in assumed:
            yield (
                f"matrix products are taken to reach {kind.product_efficiency(dtype):.0%} of the "
                f"peak on {kind.name}, {USUAL_SHARE:.0%} of the best one that was measured "
                f"({kind.product_source or 'the cluster file'})"
            )


def _profile_lines(planned: Planned) -> Iterator[str]:
    profile, missing = planned.problem.profile, _to_measure(planned)
    if profile.measurements:
        error = profile.composition_error
        within = "" if error is None else f", composed to within {error:.1%}"
        yield f"costs of {profile.measurements} measurements{within}"
    elif missing is not None:
        yield (
            f"costs are computed; a profile would measure {missing:,} candidates and compose the "
            f"others of them"
        )


def _to_measure(planned: Planned) -> int | None:
    """How many candidates a profile would measure; None where some of it was made."""
    problem, table = planned.problem, planned.found.table
    if problem.profile.measurements or table is None:
        return None
    return num_to_measure(problem, table)


def told_alternatives(prepared: Prepared, alternatives: Sequence[Alternative]) -> list[OtherPlan]:
    """What other plans do differently.

    Args:
        prepared: the plan that was chosen.
        alternatives: the others.

    Returns:
        What is different of each, and what it costs.
    """
    if prepared.planned is None:
        return []
    found = prepared.planned.found
    # The chosen plan's prediction knows more than the search; the others' is scaled alike.
    scale = _prediction(prepared.plan).step_time / found.step_time
    return [
        OtherPlan(
            differences(found.plan, each.plan), scale * each.step_time, each.score / found.score
        )
        for each in alternatives
    ]


def _limit_lines(plan: Plan) -> Iterator[str]:
    found = limits(plan)
    stage, fullest = plan.stages[found.stage], plan.stages[found.fullest]
    yield (
        f"what limits it: stage {found.stage} on {stage.devices_text} computes for "
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
        f"the fullest devices, stage {found.fullest} on {fullest.devices_text}, use "
        f"{found.memory:.0%} of their memory"
    )


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


def cost_figures(prepared: Prepared) -> dict[str, float]:
    """What a plan costs, in the currency of the cluster file; nothing where prices are unknown.

    Args:
        prepared: what was planned.

    Returns:
        Of a step and an example, where the model reads tokens of one of them; and of an hour.
    """
    plan, step_time = prepared.plan, _prediction(prepared.plan).step_time
    cost = step_cost(plan, step_time)
    if cost is None:
        return {}
    figures = {
        "price_per_hour": cost / step_time * 3600,
        "cost_per_step": cost,
        "cost_per_example": cost / plan.batch_size,
    }
    if prepared.ingredients.model.unit == "tokens":
        figures["cost_per_token"] = cost / prepared.ingredients.units_per_step
    return figures


def _member_figures(stage: StagePlan, predicted: StagePrediction) -> list[dict[str, Any]]:
    """What is said of each member of a stage; nothing of a stage of one."""
    if len(stage.members) == 1:
        return []
    return [
        {
            "submesh": str(member.submesh),
            "mesh_shape": list(member.mesh_shape),
            "examples": examples,
            **vars(each),
        }
        for member, examples, each in zip(
            stage.members, stage.shares.batch, predicted.members, strict=False
        )
    ]


def plan_figures(prepared: Prepared) -> dict[str, Any]:
    """A plan's figures as plain values, for ``--json``.

    Args:
        prepared: what was planned.

    Returns:
        Numbers in SI units, by name; ``"stages"`` holds one object a stage.
    """
    plan, prediction = prepared.plan, _prediction(prepared.plan)
    model, parts = prepared.ingredients.model, step_parts(plan)
    return {
        "model": model.name,
        "parameters": model.num_parameters(),
        "cluster": plan.cluster.name,
        "devices": plan.cluster.num_devices,
        "layers": len(plan.layers) - 1,
        "planner": plan.planner,
        "planning_seconds": prepared.planning_seconds,
        **_search_figures(prepared),
        "rates": list(rate_lines(prepared)),
        "notes": [*plan.notes, *shared_core_lines(plan, prepared.ingredients.configuration)],
        "batch_size": plan.batch_size,
        "pipelines": len(plan.pipelines),
        "num_microbatches": sum(each.num_microbatches for each in plan.pipelines),
        "microbatch_size": max(each.microbatch_size for each in plan.pipelines),
        "microbatches": [[each.num_microbatches, each.microbatch_size] for each in plan.pipelines],
        "schedule": plan.pipelines[0].schedule.name,
        "warm_up_counts": [n for each in plan.pipelines for n in each.schedule.warm_up_counts],
        "sharing_seconds": prediction.sharing_seconds,
        "step_time": prediction.step_time,
        f"{model.unit}_per_second": prepared.ingredients.units_per_step / prediction.step_time,
        **cost_figures(prepared),
        "lower_bound": prediction.lower_bound,
        "bound_ratio": prediction.step_time / prediction.lower_bound,
        "bubble": mean(stage.bubble for stage in prediction.stages),
        "memory_bytes": max(stage.memory_bytes for stage in prediction.stages),
        "stages": [
            {
                "layers": list(stage.layers),
                "submesh": stage.devices_text,
                "devices": stage.num_devices,
                "mesh_shape": list(stage.mesh_shape) if len(stage.members) == 1 else None,
                "sharding": stage.sharding,
                "recompute": stage.recompute,
                "pipeline": p,
                "warm_up_count": pipeline.schedule.warm_up_counts[s],
                **vars(prediction.stages[first + s]),
                "members": _member_figures(stage, prediction.stages[first + s]),
                "step": vars(parts[first + s]),
            }
            for p, (first, pipeline) in enumerate(plan.numbered_pipelines())
            for s, stage in enumerate(pipeline.stages)
        ],
    }


def _search_figures(prepared: Prepared) -> dict[str, Any]:
    """How the plan was found and how good it is; nothing of a plan that was given."""
    if prepared.planned is None:
        return {}
    problem, found = prepared.planned.problem, prepared.planned.found
    missing = _to_measure(prepared.planned)
    return {
        "profile_seconds": found.profile_seconds,
        "search_seconds": found.search_seconds,
        "candidates": found.candidates,
        "candidates_measured": problem.profile.measurements,
        **({} if missing is None else {"candidates_a_profile_would_measure": missing}),
        "load_balance": load_balance(prepared.plan, problem.dtype),
        "mfu": flops_utilization(prepared.plan, problem),
    }


def alternatives_figures(prepared: Prepared, alternatives: Sequence[Alternative]) -> dict[str, Any]:
    """The next best plans as plain values."""
    return {"alternatives": [vars(each) for each in told_alternatives(prepared, alternatives)]}


def parts_figures(alone: Sequence[PartAlone]) -> dict[str, Any]:
    """What parts of the cluster would do alone, as plain values."""
    return {"parts": [vars(part) for part in alone]}


def _prediction(plan: Plan) -> Prediction:
    assert plan.prediction is not None, "a plan that was prepared has a prediction"
    return plan.prediction
