"""Instructions and the executors that run them, transports, checkpoints, and the trainer."""

from hetjax.runtime.checkpoint_files import CheckpointFolder
from hetjax.runtime.feed import BatchSource
from hetjax.runtime.ray import RayOptions
from hetjax.runtime.ray_measure import measure_cluster
from hetjax.runtime.trainer import StepMetrics, Trainer
from hetjax.runtime.worker import StepReport

__all__ = [
    "BatchSource",
    "CheckpointFolder",
    "RayOptions",
    "StepMetrics",
    "StepReport",
    "Trainer",
    "measure_cluster",
]
