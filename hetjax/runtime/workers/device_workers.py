"""The workers of one set of devices: of one stage's member, or of stages that take turns there."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.runtime.instructions.instruction_list import (
    evaluation_instructions,
    training_instructions,
)
from hetjax.runtime.instructions.placement import Placement, reduction_groups
from hetjax.runtime.instructions.turns import TurnList, forward_schedule, in_turns
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

    @property
    def _stages(self) -> tuple[int, ...]:
        return tuple(each.stage for each in self.workers)

    def _turn_list(self) -> TurnList:
        if len(self.workers) == 1:
            return ()
        return turn_lists(self.workers[0].placement)[self._stages]

    @functools.cached_property
    def _evaluation_turns(self) -> TurnList:
        return evaluation_turn_lists(self.workers[0].placement)[self._stages]

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

    def compile_evaluation(self) -> None:
        """Compile what `evaluate` runs; see `StageWorker.compile_evaluation`."""
        for worker in self.workers:
            worker.compile_evaluation()

    def evaluate(self, step: int, feed: Feed) -> list[tuple[float, ...] | None]:
        """Compute the loss of a batch, as `StageWorker.evaluate` does."""
        if len(self.workers) == 1:
            return [self.workers[0].evaluate(step, feed)]
        runs = {each.stage: each.begin_evaluation(step, feed) for each in self.workers}
        for stage, instruction in self._evaluation_turns:
            runs[stage].do(instruction)
        return [each.end_evaluation(runs[each.stage]) for each in self.workers]


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


def evaluation_turn_lists(placement: Placement) -> dict[tuple[int, ...], TurnList]:
    """The instructions of an evaluation of all stages that share devices; see `turn_lists`."""
    schedules = {
        first: forward_schedule(each.schedule)
        for first, each in placement.plan.numbered_pipelines()
    }
    lists = [
        evaluation_instructions(placement.pipelines, placement.pipeline_plan(stage).schedule, stage)
        for stage in range(placement.pipelines.num_stages)
    ]
    return in_turns(lists, schedules)
