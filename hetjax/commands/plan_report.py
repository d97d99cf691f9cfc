"""What the page about a plan shows, gathered from how the plan was found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean

from hetjax.commands.figures import context_report, cost_figures
from hetjax.commands.prepare import Prepared
from hetjax.commands.published import Published
from hetjax.commands.words import batch_words, batches, told_alternatives
from hetjax.planner import (
    Alternative,
    PartAlone,
    Plan,
    flops_utilization,
    limits,
    load_balance,
    simulate,
)
from hetjax.planner.predictions.context_moves import context_moves
from hetjax.report import PlanReport, format_rate, format_seconds, module_runs


def plan_report(
    prepared: Prepared,
    published: Published | None = None,
    alone: Sequence[PartAlone] = (),
    alternatives: Sequence[Alternative] = (),
) -> PlanReport:
    """Gather what a plan's page shows.

    Args:
        prepared: the plan.
        published: a plan to compare with, and its ratings.
        alone: what parts of the cluster would do.
        alternatives: the next best plans.

    Returns:
        What `hetjax.report.write_plan_page` takes.
    """
    plan, planned = prepared.plan, prepared.planned
    model, train = prepared.ingredients.model, prepared.ingredients.configuration.train
    summary = (
        f"{format_rate(model.num_parameters(), ' parameters')}, "
        f"{batch_words(train.batch_size, model)} a step, {batches(plan)}; planned by "
        f"{plan.planner} in {format_seconds(prepared.planning_seconds)}"
    )
    flops = [1.0] * (len(plan.layers) - 1)
    if planned is not None:
        works = planned.problem.works
        flops = [work.forward.matmul_flops + work.backward.matmul_flops for work in works]
    return PlanReport(
        title=f"{model.name} on {plan.cluster.name}",
        summary=summary,
        plan=plan,
        timeline=simulate(plan),
        dtype=planned.problem.dtype if planned else "float32",
        figures=dict(_figures(prepared, published)),
        limits=list(limit_shares(plan)),
        costs=flops,
        modules=module_runs(planned.problem.sections) if planned else (),
        alternatives=told_alternatives(prepared, alternatives),
        alone=alone,
        context=context_report(prepared),
        moves=context_moves(plan, planned.problem) if planned else {},
    )


def _figures(prepared: Prepared, published: Published | None) -> Iterator[tuple[str, str]]:
    plan, prediction = prepared.plan, prepared.plan.predicted
    yield "predicted step time", format_seconds(prediction.step_time)
    unit = prepared.ingredients.model.unit
    rate = prepared.ingredients.units_per_step / prediction.step_time
    yield f"{unit} per second", format_rate(rate, "")
    if prepared.planned is not None:
        problem = prepared.planned.problem
        yield "MFU", f"{flops_utilization(plan, problem):.0%}"
        yield "load balance", f"{load_balance(plan, problem.dtype):.0%}"
    costs = cost_figures(prepared)
    if costs:
        cost = costs["cost_per_step"] / prepared.ingredients.units_per_step
        yield f"for a million {unit}", f"{cost * 1e6:.3g}"
    yield "bubble", f"{mean(stage.bubble for stage in prediction.stages):.0%}"
    yield "over the lower bound", f"{prediction.step_time / prediction.lower_bound:.2f} times"
    if published is not None:
        ratings = (
            ("the published plan takes", published.given),
            ("if it recomputed nothing", published.keeping),
        )
        for said, rating in ratings:
            if rating is not None and rating.prediction is not None:
                ratio = rating.prediction.step_time / prediction.step_time
                yield said, f"{ratio:.2f} times as long"


def limit_shares(plan: Plan) -> Iterator[tuple[str, float]]:
    """What limits a plan, and what share of it is used.

    Args:
        plan: a plan with a prediction.
    """
    found = limits(plan)
    stage, fullest = plan.stages[found.stage], plan.stages[found.fullest]
    yield f"stage {found.stage} on {stage.devices_text} computing", found.stage_busy
    if found.link is not None:
        a, b = found.link
        ends = f"{plan.stages[a].subclusters_text} to {plan.stages[b].subclusters_text}"
        yield f"link from stage {a} to {b} ({ends}) in use", found.link_busy
    if found.sharing > 0:
        yield "exchange of what several stages hold", found.sharing
    yield f"memory of stage {found.fullest} on {fullest.devices_text}", found.memory
