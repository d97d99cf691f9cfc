"""The clock of one stage's copies of activations to its hosts' memory and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetjax.pipeline.schedules.activation_copies import TaskCopies, activation_copies
from hetjax.pipeline.schedules.schedule import Task
from hetjax.pipeline.timeline.times import StepTimes

HOST = -1
"""What stands for the hosts' memory where a stage's number says who sends and who receives."""

CopySpan = tuple[int, int, Task, float, float]
"""Who sends, who receives, the forward pass that made what is copied, its start and its end."""


class HostCopies:
    """What copies make of the times of a stage's tasks, which are asked for in order.

    A copy begins when what it copies is there and its direction of the link is free; what comes
    back begins when the task before has ended, which makes its place. A task waits for the copies
    that `TaskCopies` names. Where nothing overlaps, copies take the stage's own time.

    Args:
        stage: the stage.
        copies: what is copied around each of its tasks.
        times: what it takes.
    """

    def __init__(self, stage: int, copies: Sequence[TaskCopies], times: StepTimes):
        self._stage, self._copies = stage, iter(copies)
        self._store, self._fetch = times.stores[stage], times.fetches[stage]
        self._overlaps = bool(times.copies_overlap[stage])
        self._around = TaskCopies()
        self._out = self._in = 0.0
        self._stored: dict[int, float] = {}
        self._fetched: dict[int, float] = {}

    @classmethod
    def of(cls, stage: int, tasks: Sequence[Task], times: StepTimes) -> HostCopies | None:
        """The clock of a stage; None where its activations are not offloaded.

        Args:
            stage: the stage.
            tasks: what it runs, in order.
            times: what it takes.
        """
        if not times.stores or not times.stores[stage]:
            return None
        return cls(stage, activation_copies(tasks), times)

    def before(self, task: Task, now: float) -> tuple[float, list[CopySpan]]:
        """What begins before the next task.

        Args:
            task: the task.
            now: when the one before has ended.

        Returns:
            When the task may begin, as far as copies are concerned; and those that begin before.
        """
        self._around = around = next(self._copies)
        may = max([now, *(self._stored[m] for m in around.awaited)])
        spans = list(self._fetching(around.fetched, may))
        if not self._overlaps:
            may = max([may, *(end for *_, end in spans)])
        return max(may, self._fetched.get(task.microbatch, 0.0)), spans

    def after(self, now: float) -> tuple[float, list[CopySpan]]:
        """What begins after the task.

        Args:
            now: when it ends.

        Returns:
            When the stage is free for the next one; and the copies that begin.
        """
        around, spans = self._around, list[CopySpan]()
        for microbatch in around.stored:
            start = max(now, self._out)
            self._out = self._stored[microbatch] = start + self._store
            spans.append((self._stage, HOST, Task("F", microbatch), start, self._out))
        if not self._overlaps:
            now = max([now, *(end for *_, end in spans)])
        begin = max([now, *(self._stored[m] for m in around.awaited_after)])
        coming = list(self._fetching(around.fetched_after, begin))
        if not self._overlaps:
            now = max([now, *(end for *_, end in coming)])
        return now, [*spans, *coming]

    def _fetching(self, microbatches: Sequence[int], now: float) -> Iterator[CopySpan]:
        for microbatch in microbatches:
            start = max(now, self._in)
            self._in = self._fetched[microbatch] = start + self._fetch
            yield HOST, self._stage, Task("F", microbatch), start, self._in
