"""The local executor that plays a cluster: every step goes at the cluster's pace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jaxtyping import PyTree

from hetjax.runtime.compilation.state import StageState
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.local.local_executor import LocalExecutor
from hetjax.runtime.moves.peers import Processes
from hetjax.runtime.moves.transport import InProcessTransport
from hetjax.runtime.workers.job import Job
from hetjax.runtime.workers.playing import (
    Pace,
    Pacing,
    Play,
    PlayedTimes,
    PlayedTransport,
    Player,
    Rehearsal,
)
from hetjax.runtime.workers.step_report import StepReport

_REHEARSED_STEPS = 3
"""Steps of a rehearsal that count; one before them warms up."""


class PlayedExecutor(LocalExecutor):
    """Runs every stage of a plan in this process, as fast as the plan's cluster would.

    What it tells is in the cluster's own seconds. Evaluation and checkpoints go as fast as they
    can.

    Args:
        job: the job; its plan has a prediction.
        placement: its programs and shardings.
        play: how to play.
        devices: the process's devices, as many as the cluster has or more.

    Raises:
        InputError: there are fewer devices than the cluster has, they are of other kinds and not
            host CPU devices, or the plan has no prediction or a stage of several members.
    """

    def __init__(
        self, job: Job, placement: Placement, play: Play, devices: Sequence[Any] | None = None
    ):
        self._times, self._play = PlayedTimes.of(job.plan), play
        self.player: Player | None = None
        super().__init__(job, placement, devices)

    def _make_transport(self, processes: Processes) -> InProcessTransport:
        deadline = self._job.deadline
        self._played_transport = PlayedTransport(self._placement, processes, deadline)
        return self._played_transport

    def rehearse(self, step: int, batch: PyTree | None = None) -> Player:
        """Find the scale, where it is not known yet; the training state is the same afterwards.

        Args:
            step: the training step that comes next.
            batch: its batch, where it does not come from the job's source.

        Returns:
            What paces the steps from now on.
        """
        if self.player is None:
            states = [_copied(worker.state()) for worker in self.workers]
            warm_up, rehearsal = Rehearsal(), Rehearsal()
            try:
                for each in (warm_up, *[rehearsal] * _REHEARSED_STEPS):
                    with self._paced(each):
                        super().train_step(step, batch)
            finally:
                wait(self._running)
                for worker, state in zip(self.workers, states, strict=True):
                    worker.restore(state)
                self.is_cut_off = False
            pacing = Pacing(self._times, rehearsal.usual())
            self.player = Player(pacing, self._play.scale or pacing.least_scale)
            self._played_transport.set_deadline(self._job.deadline * max(1.0, self.player.scale))
        return self.player

    def train_step(
        self, first_example: int, batch: PyTree | None = None, *, timed: bool = False
    ) -> list[StepReport]:
        """Run one training step on all stages, at the cluster's pace.

        Args:
            first_example: the number of its first example.
            batch: the batch, where it does not come from the job's source.
            timed: whether to record when each operation ran.

        Returns:
            The report of each stage, in the cluster's seconds.
        """
        player = self.rehearse(first_example, batch)
        player.begin()
        self._played_transport.player = player
        try:
            with self._paced(player):
                reports = super().train_step(first_example, batch, timed=timed)
        finally:
            self._played_transport.player = None
        return [in_cluster_seconds(report, player) for report in reports]

    @contextmanager
    def _paced(self, pace: Pace) -> Iterator[None]:
        for worker in self.workers:
            worker.pace = pace
        try:
            yield
        finally:
            for worker in self.workers:
                worker.pace = None


def in_cluster_seconds(report: StepReport, player: Player) -> StepReport:
    """A report of a played step with all durations in the cluster's own seconds.

    Args:
        report: what a worker saw, in seconds of this machine.
        player: what paced the step.

    Returns:
        The report; a transfer was sent when it entered its link.
    """
    scale = player.scale
    return replace(
        report,
        seconds=report.seconds / scale,
        sends={tag: player.span(tag)[0] / scale for tag in report.sends},
        arrivals={
            tag: arrival._replace(at=arrival.at / scale) for tag, arrival in report.arrivals.items()
        },
        waits={tag: seconds / scale for tag, seconds in report.waits.items()},
        events=[
            replace(event, start=event.start / scale, end=event.end / scale)
            for event in report.events
        ],
    )


def _copied(state: StageState) -> StageState:
    """A state in arrays of its own, which no step gives away."""
    return StageState(
        [array.copy() for array in state.parameters], [array.copy() for array in state.optimizer]
    )
