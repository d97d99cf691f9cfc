"""Instructions and the executors that run them, transports, checkpoints, and the trainer."""

from hetjax.runtime.checkpoint_files import CheckpointFolder
from hetjax.runtime.feed import BatchSource
from hetjax.runtime.playing import Play
from hetjax.runtime.ray import RayOptions
from hetjax.runtime.ray_measure import measure_cluster
from hetjax.runtime.step_report import LinkUse, StepReport
from hetjax.runtime.trainer import StepMetrics, Trainer

__all__ = [
    "BatchSource",
    "CheckpointFolder",
    "LinkUse",
    "Play",
    "RayOptions",
    "StepMetrics",
    "StepReport",
    "Trainer",
    "measure_cluster",
]
