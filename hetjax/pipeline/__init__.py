"""From a plain JAX loss to stages, their programs, schedules, and the timeline model."""

from hetjax.pipeline.build import PipelineCut, PipelinePrograms, build_pipelines
from hetjax.pipeline.lower_bound import harp_latency, lower_bound
from hetjax.pipeline.modules import find_modules
from hetjax.pipeline.named_schedules import make_schedule
from hetjax.pipeline.overlap import overlap
from hetjax.pipeline.program import Program, trace
from hetjax.pipeline.schedule import (
    SCHEDULES,
    SPLIT_SCHEDULES,
    WARM_UP_SCHEDULES,
    Schedule,
    Task,
)
from hetjax.pipeline.schedule_search import fixed_schedules, search_schedule, warm_up_rule
from hetjax.pipeline.sensitivity import Sensitivity, sensitivity
from hetjax.pipeline.simulate import simulate_schedule, warm_up_makespan
from hetjax.pipeline.stages import ParameterPart, Stage, cut
from hetjax.pipeline.structural_layers import StructuralLayers, structural_layers
from hetjax.pipeline.timeline import Event, Timeline
from hetjax.pipeline.times import StepTimes
from hetjax.pipeline.warm_up import (
    eager_1f1b,
    from_warm_up_counts,
    gpipe,
    h_1f1b,
    h_1f1b_counts,
    one_f_one_b,
)
from hetjax.pipeline.zero_bubble import h_1f1b_split, zb_h1, zb_h2

__all__ = [
    "SCHEDULES",
    "SPLIT_SCHEDULES",
    "WARM_UP_SCHEDULES",
    "Event",
    "ParameterPart",
    "PipelineCut",
    "PipelinePrograms",
    "Program",
    "Schedule",
    "Sensitivity",
    "Stage",
    "StepTimes",
    "StructuralLayers",
    "Task",
    "Timeline",
    "build_pipelines",
    "cut",
    "eager_1f1b",
    "find_modules",
    "fixed_schedules",
    "from_warm_up_counts",
    "gpipe",
    "h_1f1b",
    "h_1f1b_counts",
    "h_1f1b_split",
    "harp_latency",
    "lower_bound",
    "make_schedule",
    "one_f_one_b",
    "overlap",
    "search_schedule",
    "sensitivity",
    "simulate_schedule",
    "structural_layers",
    "trace",
    "warm_up_makespan",
    "warm_up_rule",
    "zb_h1",
    "zb_h2",
]
