"""What runs inside a Ray actor: one host of one set of devices, with its own JAX client."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from hetjax.collecting import seldom_collected
from hetjax.errors import CheckpointError, InputError, WorkerLostError
from hetjax.pipeline.program.trace_record import TraceRecord
from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.planner.plan.plan import Plan
from hetjax.runtime.checkpoints.checkpoint import StageSaver, waited
from hetjax.runtime.checkpoints.checkpoint_files import SaveFailure, StageRecord
from hetjax.runtime.moves.carriers import (
    BETWEEN_PROCESSES,
    CONNECT_SECONDS,
    CarrierLinks,
    CarrierName,
    Delivery,
    PieceCarrier,
)
from hetjax.runtime.moves.host_carrier import Bytes, HostCarrier
from hetjax.runtime.moves.peers import (
    Peer,
    WorkerProcess,
    devices_of,
    leads_of,
    names_of,
    processes_of,
)
from hetjax.runtime.moves.process_transport import ProcessTransport
from hetjax.runtime.moves.stage_leaves import StageLeaves
from hetjax.runtime.moves.stream_carrier import StreamCarrier
from hetjax.runtime.moves.wire_carrier import WireCarrier
from hetjax.runtime.ray.ray_devices import given_devices
from hetjax.runtime.ray.ray_errors import telling
from hetjax.runtime.ray.ray_switching import StateExchange, devices_of_process
from hetjax.runtime.workers.clocks import ClockReading, read_clock
from hetjax.runtime.workers.device_workers import DeviceWorkers
from hetjax.runtime.workers.feed import BatchReader
from hetjax.runtime.workers.given_rows import GivenRows
from hetjax.runtime.workers.job import Job, build, traced_losses, transfers
from hetjax.runtime.workers.same_traces import (
    JobRecord,
    check_losses,
    check_optimizer,
    check_trees,
    parameters_record,
)
from hetjax.runtime.workers.step_report import StepReport
from hetjax.runtime.workers.worker import Feed, StageWorker
from hetjax.sharding.annotation.rules import MESH_AXES
from hetjax.sharding.resolution.switch_transfers import Messages

_COMPUTATION_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
)

Listening = Mapping[CarrierName, Mapping[Peer, str]]
"""By which carriers a worker listens, and where each of the others reaches it."""

PIECES = "pieces"
"""A worker takes what others give it beside what it does: calls of this group wait for no other."""


def pin_to_core(core: int) -> None:
    """Keep every thread of this process on one core, and so those it starts later."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def computation_settings() -> dict[str, Any]:
    """The settings of this process's JAX that change what a program computes."""
    return {name: getattr(jax.config, name) for name in _COMPUTATION_SETTINGS}


class SignOfLife(NamedTuple):
    """What a worker answers who is asked whether it runs.

    Args:
        process: the number of its process.
        said: what it wants people to know since it was last asked.
    """

    process: int
    said: tuple[str, ...]


class HostWorker:
    """One process of a submesh, of one stage or of stages that share it.

    It is created before JAX has a client, which `build` makes; `connect` joins the other workers.

    Args:
        peer: its stage, and its place among the stage's hosts.
        name: what it is called in messages.
    """

    def __init__(self, peer: Peer, name: str):
        self.peer, self.name = peer, name
        self.listening: dict[CarrierName, WireCarrier | StreamCarrier] = {}
        self._said: list[str] = []

    def ping(self) -> SignOfLife:
        """Answer, as long as the process runs."""
        said, self._said[:] = self._said[:], []
        return SignOfLife(os.getpid(), tuple(said))

    def clock(self) -> ClockReading:
        """This host's clock."""
        return read_clock()

    def prepare(self, settings: Mapping[str, Any], core: int | None) -> None:
        """Take over the driver's JAX settings, and stay on one core.

        Args:
            settings: what `computation_settings` returned in the driver.
            core: the core; None for any.

        Raises:
            InputError: this host has no such core.
        """
        for name, value in settings.items():
            jax.config.update(name, value)
        if core is None:
            return
        allowed = sorted(os.sched_getaffinity(0))
        if core not in allowed:
            raise InputError(f"cores: {self.name} has no core {core}, only {allowed}")
        pin_to_core(core)

    def host(self) -> str:
        """This host's address in the cluster."""
        import ray

        return ray.util.get_node_ip_address()

    def free_port(self, host: str) -> int:
        """A port of an address of this host that nothing uses."""
        with socket.socket() as probe:
            probe.bind((host, 0))
            return probe.getsockname()[1]

    def node(self) -> str:
        """The Ray node that this host is."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def join_world(
        self, coordinator: str, num_processes: int, process: int, timeout: float
    ) -> None:
        """Join the other hosts of the submesh in one `jax.distributed` world."""
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process,
            initialization_timeout=int(timeout),
            coordinator_bind_address=coordinator if process == 0 else None,
        )

    @telling
    @seldom_collected()
    def build(
        self, job: Job, record: JobRecord, secret: bytes, carriers: Sequence[CarrierName]
    ) -> tuple[Peer, ...]:
        """Trace and compile.

        Args:
            job: the training job.
            record: what the driver has traced of it.
            secret: what only the workers of this run have.
            carriers: what may take pieces from worker to worker.

        Returns:
            The workers that this one gives something, or takes something from.

        Raises:
            InputError: the hosts of this stage do not have the devices that the plan wants, or
                this worker traces something else than the driver.
        """
        processes = processes_of(job.plan)
        self.process = processes[self.peer]
        stages, member = self.process.stages, self.process.place
        meshes = {stage: member_mesh(job.plan, self.process, stage) for stage in stages}
        check_trees(record, job, self.name)
        traced = traced_losses(job)
        check_losses(record, traced, self.name)
        placement = build(job, traced)
        check_optimizer(record, placement, self.name)
        names, device = names_of(job.plan), meshes[self.peer[0]].local_devices[0]
        made: dict[CarrierName, PieceCarrier] = {}
        if CarrierName.WIRE in carriers:
            wire = WireCarrier(self.peer, device, names, secret, job.deadline)
            made[CarrierName.WIRE] = self.listening[CarrierName.WIRE] = wire
        if CarrierName.STREAM in carriers:
            stream = StreamCarrier(self.peer, names, secret, job.deadline)
            made[CarrierName.STREAM] = self.listening[CarrierName.STREAM] = stream
        if CarrierName.HOST in carriers:
            self.host_carrier = HostCarrier(self._post)
            made[CarrierName.HOST] = self.host_carrier
        self.carriers = tuple(made)
        self.transport = ProcessTransport(
            placement,
            self.peer,
            meshes,
            devices_of(processes),
            transfers(placement),
            made,
            job.deadline,
            leads_of(processes),
        )
        self.workers = DeviceWorkers(
            [
                StageWorker(placement, stage, mesh, self.transport, member=member)
                for stage, mesh in meshes.items()
            ]
        )
        self.savers = [StageSaver(placement, stage, job.parameters, member) for stage in stages]
        self.job = job
        self._held_out: Feed | None = None
        self.reader = (
            None
            if job.source is None
            else BatchReader(
                job.source, job.plan.batch_size, job.batch, job.deadline, self._said.append
            )
        )
        return self.transport.partners

    def listen(self, host: str) -> Listening:
        """Let other workers connect to an address of this host; where each of them reaches it.

        A carrier that the devices here do not have is left out, unless there is no other.

        Raises:
            InputError: there is no carrier that they have.
        """
        found: dict[CarrierName, dict[Peer, str]] = {}
        for name, carrier in list(self.listening.items()):
            try:
                found[name] = carrier.listen(host, self.transport.partners)
            except InputError:
                if len(self.carriers) == 1:
                    raise
                del self.listening[name]
        return found

    def connect(self, addresses: Mapping[Peer, Listening]) -> dict[Peer, tuple[CarrierName, ...]]:
        """Connect to the workers that this one exchanges something with.

        Args:
            addresses: where each worker listens, by which carriers.

        Returns:
            For each of those workers, the carriers by which it was reached.

        Raises:
            WorkerLostError: one of them was reached by no carrier that connects.
        """
        reached: dict[Peer, list[CarrierName]] = {p: [] for p in self.transport.partners}
        failed: dict[Peer, WorkerLostError] = {}
        # Streams first: who waits for the greeting of a server would keep others waiting.
        for name in (CarrierName.STREAM, CarrierName.WIRE):
            listening = {peer for peer in reached if name in addresses[peer]}
            if name not in self.listening or not listening:
                continue
            where = {peer: addresses[peer][name][self.peer] for peer in listening}
            errors = self.listening[name].connect(where)
            failed |= errors
            for peer in where.keys() - errors.keys():
                reached[peer].append(name)
        for peer, names in reached.items():
            if not names and peer in failed:
                raise failed[peer]
            if CarrierName.HOST in self.carriers:
                names.append(CarrierName.HOST)
        return {
            peer: tuple(name for name in BETWEEN_PROCESSES if name in names)
            for peer, names in reached.items()
        }

    def stop_listening(self) -> None:
        """Refuse further connections."""
        for carrier in self.listening.values():
            carrier.stop_listening()

    def meet(self, actors: Mapping[Peer, Any]) -> None:
        """Come to know the other workers, to call them."""
        self._takers = {
            peer: actor.take_pieces.options(concurrency_group=PIECES)
            for peer, actor in actors.items()
        }

    def _post(self, delivery: Delivery, pieces: Bytes | str) -> None:
        self._takers[delivery.receiver].remote(delivery, pieces)

    def take_pieces(self, delivery: Delivery, pieces: Bytes | str) -> None:
        """Take what another worker gives."""
        self.host_carrier.take(delivery, pieces)

    def exchange(
        self, partner: Peer, carrier: CarrierName, size: int, rounds: Sequence[int]
    ) -> list[float]:
        """Send messages to and fro with another worker, which is called alike; their seconds."""
        seconds = min(CONNECT_SECONDS, self.job.deadline)
        return self.transport.exchange(partner, carrier, size, rounds, seconds)

    def choose_by(
        self, links: Mapping[Peer, CarrierLinks], joined: Mapping[Peer, Sequence[CarrierName]]
    ) -> None:
        """Choose carriers by what they take on the links to other workers."""
        self.transport.choose_by(links, joined)

    @telling
    def start(self) -> TraceRecord | None:
        """Make the initial state; what makes it is put on record, where that is a function."""
        for worker in self.workers.workers:
            worker.start(self.job.parameters)
        return parameters_record(self.job)

    @telling
    def train_step(
        self, call: int, first_example: int, given: GivenRows | None, timed: bool
    ) -> list[StepReport]:
        """Run one training step.

        Args:
            call: a number that grows with every step of any kind.
            first_example: how many examples come before the step's in the job's source.
            given: rows of the batch, where they do not come from the job's source.
            timed: whether to record when each operation ran.

        Returns:
            The report of each of its stages.
        """
        return self.workers.train_step(call, self._feed(first_example, given), timed=timed)

    def _feed(self, first_example: int, given: GivenRows | None) -> Feed:
        if given is not None:
            return given
        assert self.reader is not None, "a job without a source is given its batches"
        return self.reader.training(first_example)

    def use_schedule(self, schedule: Schedule) -> None:
        """Run the following training steps in another order."""
        self.workers.use_schedule(schedule)

    @telling
    def num_held_out(self) -> int | Exception:
        """How many held-out batches there are, or why they could not be read.

        What is raised would end the workers, and with them the state.
        """
        try:
            return 0 if self.reader is None else self.reader.num_held_out
        except Exception as error:
            return _reason("held-out batches", error)

    @telling
    def read_held_out(self, index: int) -> Exception | None:
        """Read a held-out batch before any worker computes with it; why it could not be read.

        What computes with it is compiled before, too. What is raised would end the workers, and
        with them the state.
        """
        assert self.reader is not None
        self.workers.compile_evaluation()
        try:
            self._held_out = self.reader.held_out(index)
        except Exception as error:
            return _reason(f"held-out batch {index}", error)
        return None

    @telling
    def evaluate(self, call: int) -> list[tuple[float, ...] | None]:
        """The sums of what was read, as `StageWorker.evaluate` returns them for each stage."""
        assert self._held_out is not None
        feed, self._held_out = self._held_out, None
        return self.workers.evaluate(call, feed)

    def save(self, folder: str) -> None:
        """Start saving the state; what is trained meanwhile is not in it."""
        for saver, worker in zip(self.savers, self.workers.workers, strict=True):
            saver.save(Path(folder), worker.state())

    def wait_saved(self) -> list[StageRecord | SaveFailure | None]:
        """Finish saving, and say what was written for each stage, or why it could not be."""
        return [waited(saver, self.name) for saver in self.savers]

    def load(self, folder: str) -> None:
        """Take over the state of a checkpoint.

        Raises:
            CheckpointError: this worker cannot read it, as where its host does not see the folder.
        """
        for saver, worker in zip(self.savers, self.workers.workers, strict=True):
            try:
                state = saver.load(Path(folder), worker.compiled)
            except CheckpointError as error:
                raise CheckpointError(f"{self.name}: {error}") from error
            worker.restore(state)

    def give(self, parcels: Sequence[Messages], group: Sequence[int] | None) -> list[Any]:
        """Give other workers what they want: one result to know that it is done, one for each.

        Args:
            parcels: what each of them wants.
            group: the leaves of the state that it is of, which this worker then lacks; None: it is
                of what has been taken.
        """
        exchange = self._exchange
        if group is None:
            return [None, *exchange.pass_on(parcels)]
        worker = self._only_worker
        if worker.buffers:
            self._leaves.fill(worker.state())
            worker.buffers.clear()
        return [None, *exchange.give_up(parcels, group)]

    def take(
        self,
        parcels: Sequence[Messages],
        group: Sequence[int] | None,
        *arrays: Sequence[np.ndarray],
    ) -> None:
        """Take what other workers have given.

        Args:
            parcels: what each of them gives.
            group: the leaves of which now everything is there; None: some of it comes later.
            arrays: what each of them has given.
        """
        self._exchange.take(parcels, arrays)
        if group is not None:
            self._exchange.finish(group)

    def take_over(self) -> None:
        """Train on with what has been taken."""
        self._only_worker.restore(self._exchange.state())
        del self._exchange, self._leaves

    @functools.cached_property
    def _leaves(self) -> StageLeaves:
        worker = self._only_worker
        devices = devices_of_process(self.job.plan, self.process.member, worker.mesh)
        return StageLeaves(worker.placement, worker.stage, worker.compiled, devices, worker.member)

    @functools.cached_property
    def _exchange(self) -> StateExchange:
        return StateExchange(self._leaves)

    @property
    def _only_worker(self) -> StageWorker:
        """The worker of a process of one stage: no others switch in memory."""
        (worker,) = self.workers.workers
        return worker

    def parameters(self) -> list[list[np.ndarray] | None]:
        """What the member has of its stages' parameter parts, of its first host; all call it."""
        return [self._parameters_of(worker) for worker in self.workers.workers]

    def _parameters_of(self, worker: StageWorker) -> list[np.ndarray] | None:
        whole = jax.sharding.NamedSharding(worker.mesh, jax.sharding.PartitionSpec())
        gather = jax.jit(lambda arrays: arrays, out_shardings=whole)
        gathered = gather(worker.state().parameters)
        return None if self.process.host else [np.asarray(array) for array in gathered]


def _reason(what: str, error: Exception) -> Exception:
    """Why something of a source cannot be read, as an error that can be sent to the driver."""
    if isinstance(error, InputError | OSError):
        return error
    return InputError(f"source: {what} cannot be read: {error!r}")


def member_mesh(plan: Plan, process: WorkerProcess, stage: int | None = None) -> jax.sharding.Mesh:
    """The mesh of a worker's member, of the devices that the member's processes see.

    Args:
        plan: the plan.
        process: the worker's process.
        stage: which of its stages; None for the first.
    """
    stage = process.peer[0] if stage is None else stage
    wanted = process.member.submesh
    devices = given_devices(
        plan.cluster.subcluster(wanted.subcluster),
        wanted.num_devices,
        f"stage {stage}",
        lambda host: replace(process, host=host).name,
    )
    shape = plan.stages[stage].members[process.place].mesh_shape
    return jax.sharding.Mesh(np.array(devices).reshape(shape), MESH_AXES)
