"""The workers of one set of devices: of one stage's member, or of stages that take turns there."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.runtime.instructions.instruction_list import training_instructions
from hetjax.runtime.instructions.placement import Placement, reduction_groups
from hetjax.runtime.instructions.turns import TurnList, in_turns
from hetjax.runtime.workers.step_report import StepReport
from hetjax.runtime.workers.worker import Feed, StageWorker


class DeviceWorkers:
    """Runs what all stages on one set of devices do, in one thread, one instruction at a time.

    Args:
        workers: those of the stages, in order.
    """

    def __init__(self, workers: Sequence[StageWorker]):
        self.workers = tuple(workers)
        self._turns = self._turn_list()

    def _turn_list(self) -> TurnList:
        if len(self.workers) == 1:
            return ()
        return turn_lists(self.workers[0].placement)[tuple(each.stage for each in self.workers)]

    def use_schedule(self, schedule: Schedule) -> None:
        """Run the following training steps in another order; see `StageWorker.use_schedule`."""
        for worker in self.workers:
            worker.use_schedule(schedule)
        self._turns = self._turn_list()

    def train_step(self, step: int, feed: Feed, *, timed: bool = False) -> list[StepReport]:
        """Run one training step.

        Args:
            step: the step's number, the same on all workers.
            feed: gives rows of the step's batch.
            timed: wait for each operation and record when it ran.

        Returns:
            What was seen of each stage.
        """
        if len(self.workers) == 1:
            return [self.workers[0].train_step(step, feed, timed=timed)]
        runs = {each.stage: each.begin_step(step, feed, timed=timed) for each in self.workers}
        for stage, instruction in self._turns:
            runs[stage].do(instruction)
        return [each.end_step(runs[each.stage]) for each in self.workers]

    def evaluate(self, step: int, feed: Feed) -> list[tuple[float, ...] | None]:
        """Compute the loss of a batch, as `StageWorker.evaluate` does.

        There are no turns: each stage has a thread, and computes what has come.
        """
        if len(self.workers) == 1:
            return [self.workers[0].evaluate(step, feed)]
        with ThreadPoolExecutor(len(self.workers)) as threads:
            return list(threads.map(lambda worker: worker.evaluate(step, feed), self.workers))


def turn_lists(placement: Placement) -> dict[tuple[int, ...], TurnList]:
    """The instructions of a training step of all stages that share devices.

    Args:
        placement: the programs and the plan.

    Returns:
        For each group of such stages one list.
    """
    schedules = {first: each.schedule for first, each in placement.plan.numbered_pipelines()}
    lists = [
        training_instructions(
            placement.pipelines,
            placement.pipeline_plan(stage).schedule,
            stage,
            reductions=reduction_groups(placement, stage),
        )
        for stage in range(placement.pipelines.num_stages)
    ]
    return in_turns(lists, schedules)
