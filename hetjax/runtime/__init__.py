"""Instructions and the executors that run them, transports, checkpoints, and the trainer."""

from hetjax.runtime.checkpoints.checkpoint_files import CheckpointFolder
from hetjax.runtime.checkpoints.saving import CheckpointOptions
from hetjax.runtime.local.annotated_function import AnnotatedFunction
from hetjax.runtime.local.local_options import LocalOptions
from hetjax.runtime.moves.carrier_curves import CarrierCurves
from hetjax.runtime.moves.union_array import HArray, reshard
from hetjax.runtime.ray.ray_executor import RayOptions
from hetjax.runtime.ray.ray_measure import measure_cluster
from hetjax.runtime.step_metrics import StepMetrics
from hetjax.runtime.trainer import Trainer
from hetjax.runtime.workers.feed import BatchSource
from hetjax.runtime.workers.playing import Play
from hetjax.runtime.workers.step_report import LinkUse, StepReport

__all__ = [
    "AnnotatedFunction",
    "BatchSource",
    "CarrierCurves",
    "CheckpointFolder",
    "CheckpointOptions",
    "HArray",
    "LinkUse",
    "LocalOptions",
    "Play",
    "RayOptions",
    "StepMetrics",
    "StepReport",
    "Trainer",
    "measure_cluster",
    "reshard",
]
