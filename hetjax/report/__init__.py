"""What a run shows of itself: tables, progress, metrics, and timelines in several forms.

The names below are imported when they are first used: to know a writer's name takes no picture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetjax.import_when_used import import_when_used

if TYPE_CHECKING:
    from hetjax.mesh.quantities import format_bytes, format_rate, format_seconds
    from hetjax.report.alignment_page import write_alignment_page
    from hetjax.report.alignment_table import kinds_table, operators_table
    from hetjax.report.alternatives_table import OtherPlan, alternatives_table
    from hetjax.report.annotation_picture import visualize
    from hetjax.report.carrier_table import CarrierRow, carrier_table
    from hetjax.report.context_table import context_table, rings_table, systems_table
    from hetjax.report.layer_table import LayerRow, ModuleRun, layer_rows, layer_table, module_runs
    from hetjax.report.metrics import MetricsWriter, read_metrics
    from hetjax.report.parts_table import parts_table
    from hetjax.report.plan_page import PlanReport, write_plan_page
    from hetjax.report.plan_table import plan_table
    from hetjax.report.prediction_file import write_prediction
    from hetjax.report.profile_table import profile_table
    from hetjax.report.program_table import layouts_table, moves_table, program_lines
    from hetjax.report.progress import TrainingProgress
    from hetjax.report.tables import (
        LinkRow,
        PredictionRow,
        StageRow,
        cluster_table,
        link_table,
        prediction_table,
        stage_table,
    )
    from hetjax.report.timeline_page import write_timeline_page
    from hetjax.report.timeline_picture import draw_timeline
    from hetjax.report.trace_file import write_chrome_trace
    from hetjax.report.writers import WRITERS, check_writers


__all__ = [
    "WRITERS",
    "CarrierRow",
    "LayerRow",
    "LinkRow",
    "MetricsWriter",
    "ModuleRun",
    "OtherPlan",
    "PlanReport",
    "PredictionRow",
    "StageRow",
    "TrainingProgress",
    "alternatives_table",
    "carrier_table",
    "check_writers",
    "cluster_table",
    "context_table",
    "draw_timeline",
    "format_bytes",
    "format_rate",
    "format_seconds",
    "kinds_table",
    "layer_rows",
    "layer_table",
    "layouts_table",
    "link_table",
    "module_runs",
    "moves_table",
    "operators_table",
    "parts_table",
    "plan_table",
    "prediction_table",
    "profile_table",
    "program_lines",
    "read_metrics",
    "rings_table",
    "stage_table",
    "systems_table",
    "visualize",
    "write_alignment_page",
    "write_chrome_trace",
    "write_plan_page",
    "write_prediction",
    "write_timeline_page",
]

import_when_used(
    __name__,
    {
        "CarrierRow": "hetjax.report.carrier_table",
        "LayerRow": "hetjax.report.layer_table",
        "LinkRow": "hetjax.report.tables",
        "MetricsWriter": "hetjax.report.metrics",
        "ModuleRun": "hetjax.report.layer_table",
        "OtherPlan": "hetjax.report.alternatives_table",
        "PlanReport": "hetjax.report.plan_page",
        "PredictionRow": "hetjax.report.tables",
        "StageRow": "hetjax.report.tables",
        "TrainingProgress": "hetjax.report.progress",
        "WRITERS": "hetjax.report.writers",
        "alternatives_table": "hetjax.report.alternatives_table",
        "carrier_table": "hetjax.report.carrier_table",
        "check_writers": "hetjax.report.writers",
        "cluster_table": "hetjax.report.tables",
        "context_table": "hetjax.report.context_table",
        "draw_timeline": "hetjax.report.timeline_picture",
        "format_bytes": "hetjax.mesh.quantities",
        "format_rate": "hetjax.mesh.quantities",
        "format_seconds": "hetjax.mesh.quantities",
        "kinds_table": "hetjax.report.alignment_table",
        "layer_rows": "hetjax.report.layer_table",
        "layer_table": "hetjax.report.layer_table",
        "layouts_table": "hetjax.report.program_table",
        "link_table": "hetjax.report.tables",
        "module_runs": "hetjax.report.layer_table",
        "moves_table": "hetjax.report.program_table",
        "operators_table": "hetjax.report.alignment_table",
        "parts_table": "hetjax.report.parts_table",
        "plan_table": "hetjax.report.plan_table",
        "prediction_table": "hetjax.report.tables",
        "profile_table": "hetjax.report.profile_table",
        "program_lines": "hetjax.report.program_table",
        "read_metrics": "hetjax.report.metrics",
        "rings_table": "hetjax.report.context_table",
        "stage_table": "hetjax.report.tables",
        "systems_table": "hetjax.report.context_table",
        "visualize": "hetjax.report.annotation_picture",
        "write_alignment_page": "hetjax.report.alignment_page",
        "write_chrome_trace": "hetjax.report.trace_file",
        "write_plan_page": "hetjax.report.plan_page",
        "write_prediction": "hetjax.report.prediction_file",
        "write_timeline_page": "hetjax.report.timeline_page",
    },
)
