"""From a plain JAX loss to stages, their programs, schedules, and the timeline model."""

from hetjax.pipeline.build import PipelineCut, PipelinePrograms, build_pipelines
from hetjax.pipeline.layers.modules import find_modules
from hetjax.pipeline.layers.structural_layers import StructuralLayers, structural_layers
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedule_search.interleaved_search import search_interleaved
from hetjax.pipeline.schedule_search.named_schedules import make_schedule
from hetjax.pipeline.schedule_search.schedule_search import (
    fixed_schedules,
    search_schedule,
    warm_up_rule,
)
from hetjax.pipeline.schedule_search.zero_bubble import h_1f1b_split, zb_h1, zb_h2
from hetjax.pipeline.schedules.interleaved import interleaved
from hetjax.pipeline.schedules.schedule import (
    SCHEDULES,
    SPLIT_SCHEDULES,
    WARM_UP_SCHEDULES,
    Schedule,
    Task,
)
from hetjax.pipeline.schedules.warm_up import (
    eager_1f1b,
    from_warm_up_counts,
    gpipe,
    h_1f1b,
    h_1f1b_counts,
    one_f_one_b,
)
from hetjax.pipeline.stages.cutting import ParameterPart, Stage, cut
from hetjax.pipeline.timeline.lower_bound import harp_latency, lower_bound
from hetjax.pipeline.timeline.overlap import overlap
from hetjax.pipeline.timeline.sensitivity import Sensitivity, sensitivity
from hetjax.pipeline.timeline.simulate import simulate_schedule, warm_up_makespan
from hetjax.pipeline.timeline.timeline import Event, Timeline
from hetjax.pipeline.timeline.times import StepTimes

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
    "interleaved",
    "lower_bound",
    "make_schedule",
    "one_f_one_b",
    "overlap",
    "search_interleaved",
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
