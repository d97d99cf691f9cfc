"""Going on from a run's newest whole checkpoint, whatever plan saved it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hetjax.pipeline.build import PipelinePrograms
from hetjax.runtime.checkpoints.checkpoint import check_leaves
from hetjax.runtime.checkpoints.manifest import DataPosition
from hetjax.runtime.checkpoints.saving import RunCheckpoints
from hetjax.runtime.workers.feed import BatchSource


class Reader(Protocol):
    """Who reads the state: an executor."""

    def load(self, folder: str) -> None:
        """Take over the state of a checkpoint."""
        ...


@dataclass(frozen=True)
class Restored:
    """Where training goes on.

    Args:
        step: after how many steps; None where there was no checkpoint.
        examples: after how many examples of the data.
        messages: what was done, in sentences for people.
    """

    step: int | None
    examples: int
    messages: list[str]


def restore(
    checkpoints: RunCheckpoints,
    reader: Reader,
    pipelines: PipelinePrograms,
    source: BatchSource | None,
    batch_size: int,
    *,
    or_start: bool,
    allow_changed_data: bool,
) -> Restored:
    """Read the newest whole checkpoint of a run.

    Args:
        checkpoints: the run's.
        reader: who takes over the state.
        pipelines: what goes on.
        source: where its batches come from.
        batch_size: examples of its steps.
        or_start: whether there may be no checkpoint.
        allow_changed_data: whether other data than before will do.

    Returns:
        Where it goes on.

    Raises:
        CheckpointError: there is no checkpoint, or none is whole, or it is of another model or
            other data.
    """
    found = checkpoints.find(
        pipelines.program.model,
        source,
        or_start=or_start,
        allow_changed_data=allow_changed_data,
    )
    messages = list(checkpoints.messages)
    if found is None:
        checkpoints.go_on()
        messages.append(f"there is no checkpoint in {checkpoints.path}; starting at step 0")
        return Restored(None, 0, messages)
    check_leaves(found.path, pipelines)
    with checkpoints.reading(found.step):
        reader.load(str(found.path))
    checkpoints.go_on()
    data = found.data or DataPosition(found.step * batch_size, batch_size)
    messages += [*found.messages, f"resumed from step {found.step} ({found.path})"]
    if data.batch_size != batch_size:
        messages.append(
            f"the batch size is {batch_size} (was {data.batch_size}): the data go on at example "
            f"{data.examples}"
        )
    return Restored(found.step, data.examples, messages)
