"""The instructions that take microbatches' activations to the hosts' memory and bring them back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetjax.pipeline.schedules.activation_copies import activation_copies
from hetjax.pipeline.schedules.schedule import Task
from hetjax.pipeline.stages.backward import StagePrograms
from hetjax.pipeline.stages.cutting import Stage
from hetjax.pipeline.stages.offloaded_values import offloaded_values
from hetjax.runtime.instructions.buffers import (
    BatchLeaf,
    Offloadable,
    Offloaded,
    ReceivedValue,
    Residual,
)
from hetjax.runtime.instructions.instruction import Await, Fetch, Instruction, Store


class ActivationCopies:
    """Writes what comes before and after a stage's tasks where its activations are offloaded.

    Args:
        programs: the stage's programs.
        stage: its parameters and values.
        tasks: what it runs, in order.
    """

    def __init__(self, programs: StagePrograms, stage: Stage, tasks: Sequence[Task]):
        self._values, self._stage = offloaded_values(programs), stage
        self._copies = activation_copies(tasks)

    def before(self, place: int) -> Iterator[Instruction]:
        """What comes before a task, by its place in the order."""
        yield from self._awaiting(self._copies[place].awaited)
        yield from self._fetching(self._copies[place].fetched)

    def after(self, place: int) -> Iterator[Instruction]:
        """What comes after it."""
        copies = self._copies[place]
        for microbatch in copies.stored:
            if buffers := self._buffers(microbatch):
                yield Store(buffers, microbatch)
        yield from self._awaiting(copies.awaited_after)
        yield from self._fetching(copies.fetched_after)

    def _awaiting(self, microbatches: Sequence[int]) -> Iterator[Instruction]:
        buffers = tuple(Offloaded(each) for m in microbatches for each in self._buffers(m))
        if buffers:
            yield Await(buffers)

    def _fetching(self, microbatches: Sequence[int]) -> Iterator[Instruction]:
        for microbatch in microbatches:
            if buffers := self._buffers(microbatch):
                yield Fetch(buffers, microbatch)

    def _buffers(self, microbatch: int) -> tuple[Offloadable, ...]:
        stage, values = self._stage, self._values
        return (
            *(BatchLeaf(microbatch, stage.batch[place]) for place in values.batch),
            *(ReceivedValue(microbatch, stage.receives[place]) for place in values.received),
            *(Residual(microbatch, place) for place in values.residuals),
        )
