"""Going on from a run's newest whole checkpoint, whatever plan saved it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hetjax.pipeline.build import PipelinePrograms
from hetjax.pipeline.program.traced_program import Program
from hetjax.runtime.checkpoints.checkpoint import check_leaves
from hetjax.runtime.checkpoints.manifest import DataPosition
from hetjax.runtime.checkpoints.saving import RunCheckpoints
from hetjax.runtime.checkpoints.traced_model import TracedModel
from hetjax.runtime.workers.job import Job, trace_job


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
    job: Job,
    pipelines: PipelinePrograms,
    *,
    or_start: bool,
    allow_changed_data: bool,
) -> Restored:
    """Read the newest whole checkpoint of a run.

    Args:
        checkpoints: the run's.
        reader: who takes over the state.
        job: what goes on.
        pipelines: what computes it.
        or_start: whether there may be no checkpoint.
        allow_changed_data: whether other data than before will do.

    Returns:
        Where it goes on.

    Raises:
        CheckpointError: there is no checkpoint, or none is whole, or it is of another model or
            other data.
    """
    found = checkpoints.find(
        _model_of(job, pipelines.program),
        job.source,
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
    batch_size = job.plan.batch_size
    data = found.data or DataPosition(found.step * batch_size, batch_size)
    messages += [*found.messages, f"resumed from step {found.step} ({found.path})"]
    if data.batch_size != batch_size:
        messages.append(
            f"the batch size is {batch_size} (was {data.batch_size}): the data go on at example "
            f"{data.examples}"
        )
    return Restored(found.step, data.examples, messages)


def _model_of(job: Job, program: Program) -> TracedModel:
    """The loss that goes on, which was traced to a program for its own number of examples."""

    def fingerprint_for(num_examples: int) -> str:
        is_known = num_examples == program.num_examples
        return (program if is_known else trace_job(job, num_examples)).model

    return TracedModel(program.num_examples, fingerprint_for)
