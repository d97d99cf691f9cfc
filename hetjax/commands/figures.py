"""A plan's figures as plain values, for ``--json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from hetjax.commands.prepare import Prepared
from hetjax.commands.profiling import Profiled
from hetjax.commands.shared_cores import shared_core_lines
from hetjax.commands.words import rate_lines, told_alternatives
from hetjax.planner import (
    Alternative,
    PartAlone,
    Plan,
    StagePlan,
    StagePrediction,
    flops_utilization,
    load_balance,
    side_by_side,
    step_cost,
    step_parts,
)
from hetjax.planner.hap.explain import ProgramReport, explain
from hetjax.planner.hexiseq.context_report import ContextReport, explain_context


def program_report(prepared: Prepared) -> ProgramReport | None:
    """What a synthesised program does.

    Args:
        prepared: what was planned.

    Returns:
        The report; None where the plan has no program, or was given.
    """
    planned, plan = prepared.planned, prepared.plan
    if planned is None or not any(stage.shares.modules for stage in plan.stages):
        return None
    return explain(plan, planned.problem)


def context_report(prepared: Prepared) -> ContextReport | None:
    """How devices share sequences.

    Args:
        prepared: what was planned.

    Returns:
        The report; None where they share none, or the plan was given.
    """
    context = None if prepared.planned is None else prepared.planned.context
    if context is None or context.choice is None:
        return None
    return explain_context(context.choice, context.beside)


def context_figures(prepared: Prepared) -> dict[str, Any]:
    """How devices share sequences as plain values, for ``--json``.

    Args:
        prepared: what was planned.

    Returns:
        Groups, sub-rings, and what other systems are predicted to take; nothing of a plan whose
        devices share none.
    """
    report = context_report(prepared)
    return {} if report is None else {"context": asdict(report)}


def program_figures(prepared: Prepared) -> dict[str, Any]:
    """The figures of a synthesised program as plain values, for ``--json``.

    Args:
        prepared: what was planned.

    Returns:
        How tensors lie, what is moved, and what data parallelism is predicted to take; nothing of
        a plan that has no program.
    """
    report = program_report(prepared)
    if report is None:
        return {}
    return {
        "program_layouts": [asdict(row) for row in report.layouts],
        "program_moves": [asdict(row) for row in report.moves],
        "data_parallel_step_times": dict(report.data_parallel),
        "computed_whole": list(report.without_rule),
    }


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


def cost_figures(prepared: Prepared) -> dict[str, float]:
    """What a plan costs, in the currency of the cluster file; nothing where prices are unknown.

    Args:
        prepared: what was planned.

    Returns:
        Of a step and an example, where the model reads tokens of one of them; and of an hour.
    """
    plan, step_time = prepared.plan, prepared.prediction.step_time
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
    plan, model = prepared.plan, prepared.ingredients.model
    return {
        "model": model.name,
        "parameters": model.num_parameters(),
        "cluster": plan.cluster.name,
        "devices": plan.cluster.num_devices,
        "layers": len(plan.layers) - 1,
        "planner": plan.planner,
        "planning_seconds": prepared.planning_seconds,
        "rates": list(rate_lines(prepared)),
        "notes": [*plan.notes, *shared_core_lines(plan, prepared.ingredients.configuration)],
        **schedule_figures(plan),
        **(_predicted_figures(prepared) if plan.prediction is not None else {}),
    }


def _predicted_figures(prepared: Prepared) -> dict[str, Any]:
    """What is predicted of a plan."""
    plan, prediction = prepared.plan, prepared.prediction
    model = prepared.ingredients.model
    return {
        **_search_figures(prepared),
        "sharing_seconds": prediction.sharing_seconds,
        "step_time": prediction.step_time,
        f"{model.unit}_per_second": prepared.ingredients.units_per_step / prediction.step_time,
        **cost_figures(prepared),
        "lower_bound": prediction.lower_bound,
        "bound_ratio": prediction.step_time / prediction.lower_bound,
        "bubble": mean(stage.bubble for stage in prediction.stages),
        "memory_bytes": max(stage.memory_bytes for stage in prediction.stages),
        "stages": stage_figures(plan),
    }


def schedule_figures(plan: Plan) -> dict[str, Any]:
    """Into what a plan divides a batch, and in which order that is computed, as plain values.

    Args:
        plan: the plan.
    """
    return {
        "batch_size": plan.batch_size,
        "pipelines": len(plan.pipelines),
        "num_microbatches": sum(each.num_microbatches for each in plan.pipelines),
        "microbatch_size": max(each.microbatch_size for each in plan.pipelines),
        "microbatches": [[each.num_microbatches, each.microbatch_size] for each in plan.pipelines],
        "schedule": plan.pipelines[0].schedule.name,
        "warm_up_counts": [n for each in plan.pipelines for n in each.schedule.warm_up_counts],
    }


def stage_figures(plan: Plan) -> list[dict[str, Any]]:
    """What the stages of a plan are, and what is predicted of them, as plain values.

    Args:
        plan: a plan with a prediction.
    """
    predicted, parts = plan.predicted.stages, step_parts(plan)
    return [
        {
            "layers": list(stage.layers),
            "submesh": stage.devices_text,
            "devices": stage.num_devices,
            "mesh_shape": list(stage.mesh_shape) if len(stage.members) == 1 else None,
            "sharding": stage.sharding,
            "recompute": stage.recompute,
            "recompute_layers": [list(run) for run in stage.recompute_layers],
            "pipeline": p,
            "warm_up_count": pipeline.schedule.warm_up_counts[s],
            **asdict(predicted[first + s]),
            "members": _member_figures(stage, predicted[first + s]),
            "step": vars(parts[first + s]),
        }
        for p, (first, pipeline) in enumerate(plan.numbered_pipelines())
        for s, stage in enumerate(pipeline.stages)
    ]


def _search_figures(prepared: Prepared) -> dict[str, Any]:
    """How the plan was found and how good it is; nothing of a plan that was given."""
    if prepared.planned is None:
        return {}
    problem, found = prepared.planned.problem, prepared.planned.found
    missing = prepared.planned.num_to_measure
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


def parts_figures(alone: Sequence[PartAlone], step_time: float | None) -> dict[str, Any]:
    """What parts of the cluster would do alone, as plain values, and what the whole does more."""
    together = side_by_side(alone)
    ratio = None if together is None or step_time is None else together / step_time
    return {"parts": [vars(part) for part in alone], "hetero_speedup_ratio": ratio}
