"""Plans, and the planners that make them.

A plan is data: `Plan` and the file that holds it. A planner is anything that makes one from a
`PlanningProblem`; `DynamicProgram` is the default.

The names below are imported when they are first used: workers know plans, but make none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetjax.import_when_used import import_when_used

if TYPE_CHECKING:
    from hetjax.planner.foreign.foreign_planner import ForeignFound, ForeignPlanner
    from hetjax.planner.foreign.foreign_profile import ForeignProfile, read_foreign_profile
    from hetjax.planner.h2.heteroauto_planner import HeteroAuto
    from hetjax.planner.hap.hap_planner import HapPlanner
    from hetjax.planner.harp.alternatives import differences, next_best
    from hetjax.planner.harp.dynamic_program import Alternative, DynamicProgram, Found
    from hetjax.planner.harp.microbatches import Choice, choose_microbatches
    from hetjax.planner.harp.mixing import PartAlone, parts_alone, side_by_side
    from hetjax.planner.harp.no_fit import does_not_fit
    from hetjax.planner.hexiseq.hexiseq_planner import HexiSeqPlanner
    from hetjax.planner.plan.module_shares import ModuleShares, OperandShare, Share
    from hetjax.planner.plan.plan import Plan, validate, validate_for
    from hetjax.planner.plan.prediction import Prediction, StagePrediction
    from hetjax.planner.plan.prices import OBJECTIVES, step_cost
    from hetjax.planner.plan.stage_plan import Member, PipelinePlan, Shares, StagePlan
    from hetjax.planner.predictions.complete import complete
    from hetjax.planner.predictions.predict import predict
    from hetjax.planner.predictions.predicted_timeline import simulate
    from hetjax.planner.predictions.quality import (
        Limits,
        StepParts,
        flops_utilization,
        limits,
        load_balance,
        peak_flops,
        step_parts,
    )
    from hetjax.planner.predictions.schedule_choice import choose_schedule, live_limits, reschedule
    from hetjax.planner.problem.options import MAX_PIPELINES, PlanOptions
    from hetjax.planner.problem.problem import Planner, PlanningProblem, make_problem
    from hetjax.planner.solving import plan, solve


__all__ = [
    "MAX_PIPELINES",
    "OBJECTIVES",
    "Alternative",
    "Choice",
    "DynamicProgram",
    "ForeignFound",
    "ForeignPlanner",
    "ForeignProfile",
    "Found",
    "HapPlanner",
    "HeteroAuto",
    "HexiSeqPlanner",
    "Limits",
    "Member",
    "ModuleShares",
    "OperandShare",
    "PartAlone",
    "PipelinePlan",
    "Plan",
    "PlanOptions",
    "Planner",
    "PlanningProblem",
    "Prediction",
    "Share",
    "Shares",
    "StagePlan",
    "StagePrediction",
    "StepParts",
    "choose_microbatches",
    "choose_schedule",
    "complete",
    "differences",
    "does_not_fit",
    "flops_utilization",
    "limits",
    "live_limits",
    "load_balance",
    "make_problem",
    "next_best",
    "parts_alone",
    "peak_flops",
    "plan",
    "predict",
    "read_foreign_profile",
    "reschedule",
    "side_by_side",
    "simulate",
    "solve",
    "step_cost",
    "step_parts",
    "validate",
    "validate_for",
]

import_when_used(
    __name__,
    {
        "Alternative": "hetjax.planner.harp.dynamic_program",
        "Choice": "hetjax.planner.harp.microbatches",
        "DynamicProgram": "hetjax.planner.harp.dynamic_program",
        "ForeignFound": "hetjax.planner.foreign.foreign_planner",
        "ForeignPlanner": "hetjax.planner.foreign.foreign_planner",
        "ForeignProfile": "hetjax.planner.foreign.foreign_profile",
        "Found": "hetjax.planner.harp.dynamic_program",
        "HapPlanner": "hetjax.planner.hap.hap_planner",
        "HeteroAuto": "hetjax.planner.h2.heteroauto_planner",
        "HexiSeqPlanner": "hetjax.planner.hexiseq.hexiseq_planner",
        "Limits": "hetjax.planner.predictions.quality",
        "MAX_PIPELINES": "hetjax.planner.problem.options",
        "Member": "hetjax.planner.plan.stage_plan",
        "ModuleShares": "hetjax.planner.plan.module_shares",
        "OBJECTIVES": "hetjax.planner.plan.prices",
        "OperandShare": "hetjax.planner.plan.module_shares",
        "PartAlone": "hetjax.planner.harp.mixing",
        "PipelinePlan": "hetjax.planner.plan.stage_plan",
        "Plan": "hetjax.planner.plan.plan",
        "PlanOptions": "hetjax.planner.problem.options",
        "Planner": "hetjax.planner.problem.problem",
        "PlanningProblem": "hetjax.planner.problem.problem",
        "Prediction": "hetjax.planner.plan.prediction",
        "Share": "hetjax.planner.plan.module_shares",
        "Shares": "hetjax.planner.plan.stage_plan",
        "StagePlan": "hetjax.planner.plan.stage_plan",
        "StagePrediction": "hetjax.planner.plan.prediction",
        "StepParts": "hetjax.planner.predictions.quality",
        "choose_microbatches": "hetjax.planner.harp.microbatches",
        "choose_schedule": "hetjax.planner.predictions.schedule_choice",
        "complete": "hetjax.planner.predictions.complete",
        "differences": "hetjax.planner.harp.alternatives",
        "does_not_fit": "hetjax.planner.harp.no_fit",
        "flops_utilization": "hetjax.planner.predictions.quality",
        "limits": "hetjax.planner.predictions.quality",
        "live_limits": "hetjax.planner.predictions.schedule_choice",
        "load_balance": "hetjax.planner.predictions.quality",
        "make_problem": "hetjax.planner.problem.problem",
        "next_best": "hetjax.planner.harp.alternatives",
        "parts_alone": "hetjax.planner.harp.mixing",
        "peak_flops": "hetjax.planner.predictions.quality",
        "plan": "hetjax.planner.solving",
        "predict": "hetjax.planner.predictions.predict",
        "read_foreign_profile": "hetjax.planner.foreign.foreign_profile",
        "reschedule": "hetjax.planner.predictions.schedule_choice",
        "side_by_side": "hetjax.planner.harp.mixing",
        "simulate": "hetjax.planner.predictions.predicted_timeline",
        "solve": "hetjax.planner.solving",
        "step_cost": "hetjax.planner.plan.prices",
        "step_parts": "hetjax.planner.predictions.quality",
        "validate": "hetjax.planner.plan.plan",
        "validate_for": "hetjax.planner.plan.plan",
    },
)
