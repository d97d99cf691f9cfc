"""What runs the instruction lists of all stages, as the trainer asks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import PyTree

from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.runtime.checkpoints.checkpoint_files import SaveFailure, StageRecord
from hetjax.runtime.workers.step_report import StepReport


class Executor(Protocol):
    """What runs the instruction lists of all stages; see `LocalExecutor` and `RayExecutor`."""

    @property
    def is_cut_off(self) -> bool:
        """Whether a step, a load or a start has not ended: the state is then that of no step."""
        ...

    def start(self) -> None:
        """Make the initial state on every stage, in the place of any that it has."""
        ...

    def train_step(
        self, first_example: int, batch: PyTree | None = None, *, timed: bool = False
    ) -> list[StepReport]:
        """Run one training step on all stages."""
        ...

    def use_schedule(self, schedule: Schedule) -> None:
        """Run the following training steps in another order."""
        ...

    def num_held_out(self) -> int:
        """How many held-out batches there are."""
        ...

    def evaluate(self, index: int) -> tuple[float, ...]:
        """The summed loss of a held-out batch, the count, and sums of figures."""
        ...

    def save(self, folder: str) -> None:
        """Start saving the state into a folder."""
        ...

    def wait_saved(self) -> Sequence[StageRecord | SaveFailure | None]:
        """Finish saving; what each worker wrote, None for nothing, or why it could not."""
        ...

    def load(self, folder: str) -> None:
        """Take over the state of a checkpoint."""
        ...

    def parameters(self) -> list[tuple[ParameterPart, np.ndarray]]:
        """Every parameter part."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...
