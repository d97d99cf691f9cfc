"""A plan as a table."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING

from hetjax.report.tables import StageRow, stage_table

if TYPE_CHECKING:
    from rich.table import Table

    from hetjax.planner.plan.plan import Plan
    from hetjax.planner.plan.prediction import StagePrediction
    from hetjax.planner.plan.stage_plan import PipelinePlan


def plan_table(plan: Plan) -> Table:
    """A plan: one row a stage, what is predicted of the whole below.

    Args:
        plan: a plan with a prediction.

    Returns:
        A table for rich to print.

    Raises:
        InputError: the plan has no prediction.
    """
    prediction = plan.predicted
    return stage_table(
        [
            _row(pipeline, s, first, prediction.stages[first + s])
            for first, pipeline in plan.numbered_pipelines()
            for s in range(len(pipeline.stages))
        ],
        predicted_step_time=prediction.step_time,
        lower_bound=prediction.lower_bound,
        bubble=mean(stage.bubble for stage in prediction.stages),
    )


MOST_MEMBERS = 4
"""A stage of more members that share the context is told in short, as all would fill pages."""


def _row(pipeline: PipelinePlan, index: int, first: int, predicted: StagePrediction) -> StageRow:
    stage = pipeline.stages[index]
    submesh, sharding = stage.devices_text, stage.sharding_text
    if stage.shares.context is not None and len(stage.members) > MOST_MEMBERS:
        submesh = f"{len(stage.members)} members on {stage.subclusters_text}"
        sharding = ", ".join(("tokens and heads", *stage.rule_words))
    return StageRow(
        stage=first + index,
        layers=f"{stage.layers[0]}-{stage.layers[1] - 1}",
        submesh=submesh,
        sharding=sharding,
        warm_up=pipeline.schedule.warm_up_counts[index],
        compute_seconds=predicted.compute_seconds,
        communication_seconds=predicted.communication_seconds,
        memory_bytes=predicted.memory_bytes,
        memory_limit_bytes=predicted.memory_limit_bytes,
    )
