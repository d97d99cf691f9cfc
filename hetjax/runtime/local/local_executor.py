"""The local executor: all stages in one process, a thread for each set of devices."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import PyTree

from hetjax.errors import reason_of
from hetjax.mesh.device_order import devices_in_order
from hetjax.mesh.hetero import HeteroMesh
from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.pipeline.timeline.timeline import stage_track
from hetjax.runtime.checkpoints.checkpoint import StageSaver, waited
from hetjax.runtime.checkpoints.checkpoint_files import SaveFailure, StageRecord
from hetjax.runtime.compilation.state import put_together
from hetjax.runtime.instructions.buffers import Parameter
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.moves.peers import Processes
from hetjax.runtime.moves.stage_leaves import StageLeaves
from hetjax.runtime.moves.state_move import StateMove
from hetjax.runtime.moves.state_switch import moved_arrays
from hetjax.runtime.moves.transport import InProcessTransport
from hetjax.runtime.workers.device_workers import DeviceWorkers
from hetjax.runtime.workers.feed import BatchReader, feed_of
from hetjax.runtime.workers.job import Job
from hetjax.runtime.workers.step_report import StepReport, stage_report, summed
from hetjax.runtime.workers.worker import Feed, StageWorker
from hetjax.sharding.annotation.rules import MESH_AXES
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.switch_transfers import SwitchPlan, plan_switch

Result = TypeVar("Result")


class LocalExecutor:
    """Runs every stage of a plan in this process.

    Args:
        job: the job.
        placement: its programs and shardings.
        devices: the process's devices, as many as the cluster has or more, in any order: each goes
            where its kind is wanted; ``jax.devices()`` where none are given.

    Attributes:
        is_cut_off: whether a step, a load, a start or a switch did not come to its end, so that the
            state is that of no step.

    Raises:
        InputError: there are fewer devices than the cluster has, or they are of other kinds.
    """

    def __init__(self, job: Job, placement: Placement, devices: Sequence[Any] | None = None):
        self._job, self._placement = job, placement
        self.is_cut_off = False
        self._running: list[Future[Any]] = []
        self._alone = threading.RLock()
        members = [
            (stage, place, member)
            for stage, each in enumerate(placement.plan.stages)
            for place, member in enumerate(each.members)
        ]
        submeshes = tuple(member.submesh for *_, member in members)
        self._devices = devices_in_order(job.plan.cluster, list(devices or jax.devices()))
        union = HeteroMesh.bind(job.plan.cluster, submeshes, self._devices)
        meshes = {
            (stage, place): union.mesh(i, MESH_AXES, member.mesh_shape)
            for i, (stage, place, member) in enumerate(members)
        }
        processes = [
            [tuple(job.plan.cluster.device_ids(member.submesh)) for member in stage.members]
            for stage in placement.plan.stages
        ]
        self.transport = self._make_transport(processes)
        transports = {peer: self.transport.of(peer, mesh) for peer, mesh in meshes.items()}
        self._threads = ThreadPoolExecutor(len(members), thread_name_prefix="stage")
        self.workers = list(
            self._threads.map(
                lambda peer: StageWorker(
                    placement, peer[0], meshes[peer], transports[peer], member=peer[1]
                ),
                meshes,
            )
        )
        self._device_workers = [*self._by_devices()]
        self._savers = [
            StageSaver(placement, stage, job.parameters, place) for stage, place in meshes
        ]
        self._call = 0
        self._reader = (
            None
            if job.source is None
            else BatchReader(job.source, job.plan.batch_size, job.batch, job.deadline)
        )

    def _by_devices(self) -> Iterator[DeviceWorkers]:
        """The workers of each set of devices: stages that share them together, members apart."""
        for group in self._job.plan.sharing:
            there = [worker for worker in self.workers if worker.stage in group]
            if len(group) > 1:
                yield DeviceWorkers(there)
            else:
                yield from (DeviceWorkers([worker]) for worker in there)

    def _make_transport(self, processes: Processes) -> InProcessTransport:
        return InProcessTransport(self._placement, processes, self._job.deadline)

    def take_over(self, other: LocalExecutor, lost: Set[int] = frozenset()) -> SwitchPlan:
        """Take over the training state of another executor, which then has none.

        Where that fails, the other one has its state again, with every bit, and can train on.

        Args:
            other: an executor of another plan on the same devices.
            lost: devices of the cluster that are gone, and give nothing.

        Returns:
            What was moved.

        Raises:
            InputError: only lost devices hold a part of the state.
            RuntimeError: it has failed, and so has moving back what had moved.
        """
        arrays, network = moved_arrays(other._placement, self._placement), self._network
        plan = plan_switch(arrays, network, lost=lost)
        old, new = other._leaves(), self._leaves()
        for worker, stage in zip(other.workers, old, strict=True):
            stage.fill(worker.state())
        move = StateMove(plan, old, new, self._devices, network=network, lost=lost)
        other.is_cut_off = True
        try:
            # From here on a leaf is free where its stage drops it; sums of gradients are zeros.
            other._forget()
            move.run()
            self._restore(new)
        except BaseException as error:
            try:
                self._forget()
                move.undo()
                other._restore(old)
            except Exception as another:
                raise RuntimeError(
                    "the switch has failed, and so has moving the state back; go on from the last "
                    f"checkpoint: {reason_of(another)}"
                ) from error
            except BaseException as another:
                another.add_note(
                    "the switch was cut off, and so was moving the state back; go on from the last "
                    "checkpoint"
                )
                raise
            other.is_cut_off = False
            raise
        other.is_cut_off = False
        # What reads goes with the state: a source is read in one thread, whatever the plan.
        self._reader, other._reader = other._reader, self._reader
        return plan

    @property
    def _network(self) -> Network:
        return Network.of(self._job.plan.cluster)

    def _leaves(self) -> list[StageLeaves]:
        numbered = dict(enumerate(self._devices))
        return [
            StageLeaves(self._placement, worker.stage, worker.compiled, numbered, worker.member)
            for worker in self.workers
        ]

    def _restore(self, stages: Sequence[StageLeaves]) -> None:
        for worker, stage in zip(self.workers, stages, strict=True):
            worker.restore(stage.state())

    def _forget(self) -> None:
        for worker in self.workers:
            worker.buffers.clear()

    def start(self) -> None:
        """Make the initial state on every stage."""
        with self._replacing_state():
            for worker in self.workers:
                worker.start(self._job.parameters)

    @contextmanager
    def _replacing_state(self) -> Iterator[None]:
        """What gives every stage another state: it is whole when the block has come to its end."""
        # Whoever was interrupted while waiting has not ended what runs.
        wait(self._running)
        self.is_cut_off = True
        yield
        self.is_cut_off = False

    def train_step(
        self, first_example: int, batch: PyTree | None = None, *, timed: bool = False
    ) -> list[StepReport]:
        """Run one training step on all stages.

        It begins when all its rows are read: what the source raises leaves the state whole.

        Args:
            first_example: how many examples come before the step's in the job's source.
            batch: the batch, where it does not come from the job's source.
            timed: whether to record when each operation ran.

        Returns:
            The report of each stage.
        """
        self._call += 1
        call, feed = self._call, self._feed(first_example, batch)
        reports: dict[int, list[StepReport]] = {}
        self.is_cut_off = True
        found = self._all(lambda workers: workers.train_step(call, feed, timed=timed))
        self.is_cut_off = False
        for there, each in zip(self._device_workers, found, strict=True):
            for worker, report in zip(there.workers, each, strict=True):
                reports.setdefault(worker.stage, []).append(report)
        return [stage_report(reports[stage]) for stage in sorted(reports)]

    def use_schedule(self, schedule: Schedule) -> None:
        """Run the following training steps in another order."""
        self._all(lambda workers: workers.use_schedule(schedule))

    def _feed(self, first_example: int, batch: PyTree | None) -> Feed:
        if batch is not None:
            return feed_of(batch, self._job.batch, self._job.plan.batch_size)
        assert self._reader is not None, "a job without a source is given its batches"
        self._reader.read(first_example, self._loads)
        return self._reader.training(first_example)

    @functools.cached_property
    def _loads(self) -> list[tuple[int, int]]:
        """The rows that workers load in any training step, the first microbatches' first."""
        return sorted({span for worker in self.workers for span in worker.loads()})

    def num_held_out(self) -> int:
        """How many held-out batches there are."""
        return 0 if self._reader is None else self._reader.num_held_out

    def evaluate(self, index: int) -> tuple[float, ...]:
        """The sums of a held-out batch, as `StageWorker.evaluate` returns them."""
        assert self._reader is not None
        self._call += 1
        call, feed = self._call, self._reader.held_out(index)
        self._all(lambda workers: workers.compile_evaluation())
        found = self._all(lambda workers: workers.evaluate(call, feed))
        return summed([*itertools.chain.from_iterable(found)])

    def save(self, folder: str) -> None:
        """Start saving the state into a folder; what is trained meanwhile is not in it."""
        for worker, saver in zip(self.workers, self._savers, strict=True):
            saver.save(Path(folder), worker.state())

    def wait_saved(self) -> list[StageRecord | SaveFailure | None]:
        """Finish saving; what each member of each stage wrote, or why it could not."""
        return [
            waited(saver, stage_track(worker.stage, worker.member))
            for worker, saver in zip(self.workers, self._savers, strict=True)
        ]

    def load(self, folder: str) -> None:
        """Take over the state of a checkpoint."""
        with self._replacing_state():
            for worker, saver in zip(self.workers, self._savers, strict=True):
                worker.restore(saver.load(Path(folder), worker.compiled))

    def parameters(self) -> list[tuple[ParameterPart, np.ndarray]]:
        """Every parameter part that the first pipeline holds, as a NumPy array."""
        found = []
        for stage in self._placement.pipelines.first_pipeline:
            held = [each.state().parameters for each in self.workers if each.stage == stage.index]
            leaves = self._placement.leaves(stage.index, Parameter)
            found += zip(stage.parameters, put_together(leaves, held), strict=True)
        return found

    def close(self) -> None:
        """End the threads and forget all arrays."""
        if self._reader is not None:
            self._reader.close()
        for saver in self._savers:
            saver.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.transport.close()
        with self._alone:
            self._forget()

    def _all(self, call: Callable[[DeviceWorkers], Result]) -> list[Result]:
        if len(self._device_workers) == 1:
            # In the caller's thread, which may close the executor from within.
            with self._alone:
                return [call(self._device_workers[0])]

        def run(workers: DeviceWorkers) -> Result:
            try:
                return call(workers)
            except BaseException as error:
                self.transport.fail(error)
                raise

        # What an interrupted call has left running uses the same buffers.
        wait(self._running)
        self.transport.begin_anew()
        futures = [self._threads.submit(run, each) for each in self._device_workers]
        self._running = [*futures]
        wait(futures, return_when=FIRST_EXCEPTION)
        if self.transport.failure is not None:
            raise self.transport.failure
        return [future.result() for future in futures]
