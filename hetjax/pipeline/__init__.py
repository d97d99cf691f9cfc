"""From a plain JAX loss to stages, their programs, schedules, and the timeline model."""

from hetjax.pipeline.build import PipelineProgram, build_pipeline
from hetjax.pipeline.program import Program, trace
from hetjax.pipeline.schedule import (
    SCHEDULES,
    Schedule,
    Task,
    eager_1f1b,
    from_warm_up_counts,
    gpipe,
    h_1f1b,
    h_1f1b_counts,
    make_schedule,
    one_f_one_b,
)
from hetjax.pipeline.stages import ParameterPart, Stage, cut
from hetjax.pipeline.timeline import (
    Event,
    Timeline,
    harp_latency,
    lower_bound,
    simulate_schedule,
)

__all__ = [
    "SCHEDULES",
    "Event",
    "ParameterPart",
    "PipelineProgram",
    "Program",
    "Schedule",
    "Stage",
    "Task",
    "Timeline",
    "build_pipeline",
    "cut",
    "eager_1f1b",
    "from_warm_up_counts",
    "gpipe",
    "h_1f1b",
    "h_1f1b_counts",
    "harp_latency",
    "lower_bound",
    "make_schedule",
    "one_f_one_b",
    "simulate_schedule",
    "trace",
]
