"""The Ray executor: one actor a host of a submesh, and a driver that only starts and listens."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from jaxtyping import PyTree

from hetjax.errors import InputError, together
from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.planner.plan.plan import Plan
from hetjax.runtime.checkpoints.checkpoint_files import SaveFailure
from hetjax.runtime.compilation.state import put_together
from hetjax.runtime.instructions.buffers import Parameter
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.moves.carrier_curves import LinkEnd
from hetjax.runtime.moves.carriers import CONNECT_SECONDS, CarrierName
from hetjax.runtime.moves.listening import LOOPBACK, SECRET_BYTES
from hetjax.runtime.moves.peers import Peer, names_of, processes_of
from hetjax.runtime.moves.state_switch import moved_arrays
from hetjax.runtime.ray.ray_carriers import Joined, choose_carriers, joined_both_ways
from hetjax.runtime.ray.ray_cluster import (
    RAY_USERS,
    RayOptions,
    check_resources,
    connect_to_ray,
    worker_options,
    worker_resources,
)
from hetjax.runtime.ray.ray_sending import put_job
from hetjax.runtime.ray.ray_switching import Fetches, Parcels, owners_of, parcels_of
from hetjax.runtime.ray.ray_worker import computation_settings
from hetjax.runtime.ray.ray_workers import SAVE, START_SECONDS, RayWorkers
from hetjax.runtime.workers.clocks import ClockReading, by_our_clock, measure_offset
from hetjax.runtime.workers.feed import feed_of
from hetjax.runtime.workers.given_rows import GivenRows, given_rows
from hetjax.runtime.workers.job import Job
from hetjax.runtime.workers.same_traces import check_parameters, job_record
from hetjax.runtime.workers.step_report import (
    StepReport,
    member_report,
    stage_report,
    summed,
)
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.switch_groups import groups_of, messages_of_groups
from hetjax.sharding.resolution.switch_transfers import SwitchPlan, plan_switch

__all__ = ["RayExecutor", "RayOptions", "connect_to_ray"]


class RayExecutor:
    """Runs every stage of a plan in processes of their own, on a Ray cluster.

    A call that fails ends all workers; from then on every call raises the same error. Calls may
    come from several threads.

    Args:
        job: the job.
        placement: its programs and shardings.
        options: how to use Ray.
        fetched: objects in Ray's memory that workers will want, brought to their hosts while they
            compile.

    Attributes:
        switch_seconds: after a switch, how long giving, starting and taking took.
        carrier_curves: what is known of the carriers on links, of those of this run at least where
            there is a choice.

    Raises:
        InputError: the cluster cannot be reached, or lacks the devices.
        WorkerLostError: a worker died while it was set up.
    """

    def __init__(
        self,
        job: Job,
        placement: Placement,
        options: RayOptions,
        fetched: Mapping[Peer, Sequence[Any]] | None = None,
    ):
        _check_cores(job.plan, options)
        self.switch_seconds: dict[str, float] = {}
        self.carrier_curves = options.curves
        self._job, self._placement, self._options = job, placement, options
        self._processes = processes_of(job.plan)
        self._workers = RayWorkers(names_of(job.plan))
        self._call = 0
        self._is_between_steps = True
        self._fetches: Fetches | None = None
        self._joined = RAY_USERS.join(options)
        try:
            self._set_up(options, fetched or {})
        except BaseException:
            self.close()
            raise

    def _set_up(self, options: RayOptions, fetched: Mapping[Peer, Sequence[Any]]) -> None:
        import ray

        reference = put_job(self._job)
        record = ray.put(job_record(self._job, self._placement))
        self._start_workers()
        self._prepare(options.cores)
        hosts = addresses = self._workers.call(lambda actor: actor.host.remote())
        if len(set(hosts.values())) == 1:
            hosts = dict.fromkeys(hosts, LOOPBACK)
        self._join_worlds(hosts)
        if fetched:
            nodes = self._workers.call(lambda actor: actor.node.remote(), list(fetched))
            self._fetches = Fetches.begin([(nodes[peer], each) for peer, each in fetched.items()])
        secret, carriers = secrets.token_bytes(SECRET_BYTES), options.carriers
        self._workers.call(lambda actor: actor.build.remote(reference, record, secret, carriers))
        joined = self._connect(hosts)
        if CarrierName.HOST in carriers:
            actors = {peer: self._workers.actor(peer) for peer in hosts}
            self._workers.call(lambda actor: actor.meet.remote(actors))
        if len(carriers) > 1:
            ends = {peer: self._link_end(peer, host) for peer, host in addresses.items()}
            self.carrier_curves = choose_carriers(self._workers, joined, ends, options.curves)

    def _connect(self, hosts: Mapping[Peer, str]) -> Joined:
        """Connect the workers, which listen from when all can to when all are; what joins them."""
        addresses = self._workers.wait(
            {peer: self._workers.actor(peer).listen.remote(host) for peer, host in hosts.items()}
        )
        reached = self._workers.wait(
            {peer: self._workers.actor(peer).connect.remote(addresses) for peer in hosts},
            f"workers to connect to {self._places(hosts)}",
            3 * CONNECT_SECONDS,
        )
        self._workers.call(lambda actor: actor.stop_listening.remote())
        return joined_both_ways(reached)

    def _link_end(self, peer: Peer, address: str) -> LinkEnd:
        return LinkEnd(self._processes[peer].member.submesh.subcluster, address)

    def _start_workers(self) -> None:
        _check_resources(self._job.plan)
        cluster = self._job.plan.cluster
        self._workers.start(
            {
                peer: worker_options(
                    cluster.subcluster(process.member.submesh.subcluster), len(process.devices)
                )
                for peer, process in self._processes.items()
            }
        )

    def _prepare(self, cores: Sequence[int]) -> None:
        settings = computation_settings()
        workers = self._workers
        own: dict[tuple[int, int], int | None] = {}
        for (stage, _), process in self._processes.items():
            if (stage, process.place) not in own:
                own[stage, process.place] = cores[len(own)] if cores else None
        workers.wait(
            {
                peer: workers.actor(peer).prepare.remote(settings, own[peer[0], process.place])
                for peer, process in self._processes.items()
            }
        )

    def _join_worlds(self, addresses: Mapping[Peer, str]) -> None:
        """Make one `jax.distributed` world of each submesh that spans hosts."""
        wide = {peer: each for peer, each in self._processes.items() if each.num_hosts > 1}
        firsts = [peer for peer, each in wide.items() if each.host == 0]
        ports = self._workers.wait(
            {peer: self._workers.actor(peer).free_port.remote(addresses[peer]) for peer in firsts}
        )
        meetings = {peer: f"{addresses[peer]}:{ports[peer]}" for peer in firsts}
        calls = {
            peer: self._workers.actor(peer).join_world.remote(
                meetings[peer[0], peer[1] - each.host], each.num_hosts, each.host, START_SECONDS
            )
            for peer, each in wide.items()
        }
        what = f"the hosts of a stage to meet at {self._places(meetings)}"
        self._workers.wait(calls, what, START_SECONDS)

    def _places(self, addresses: Mapping[Peer, str]) -> str:
        """Where workers are, for a message."""
        names = {peer: process.name for peer, process in self._processes.items()}
        return together([f"{names[peer]} at {each}" for peer, each in addresses.items()])

    def switch_to(
        self, job: Job, placement: Placement, lost: Set[int] = frozenset()
    ) -> tuple[RayExecutor, SwitchPlan]:
        """Hand the training state over to workers of another plan, and end those of this one.

        Args:
            job: the same job with the other plan.
            placement: its programs and shardings.
            lost: devices that give nothing. Their workers must still answer: one that has died ends
                all others.

        Returns:
            The executor of the other plan, and what was moved.

        Raises:
            InputError: the plan cannot be followed here, or only lost devices hold a part of the
                state, and this executor is as it was; or the new workers have found so, and the
                state is lost.
            WorkerLostError: a worker died meanwhile; the state is lost with it.
        """
        self._workers.check_running()
        _check_cores(job.plan, self._options)
        _check_resources(job.plan)
        network = Network.of(job.plan.cluster)
        plan = plan_switch(moved_arrays(self._placement, placement), network, lost=lost)
        groups = groups_of(plan.arrays)
        messages = messages_of_groups(plan, groups)
        owners = owners_of(self._job.plan), owners_of(job.plan)
        began = time.perf_counter()
        first = [parcels_of(phases[0] if phases else (), *owners) for phases in messages]
        # Workers lack what they have given.
        self._is_between_steps = False
        given = [self._give(parcels, group) for parcels, group in zip(first, groups, strict=True)]
        given_at = time.perf_counter()
        # Whoever asks for these workers again has interrupted what follows.
        self._workers.end(
            RuntimeError(
                "the switch was interrupted, and the state is lost; close the trainer, and go on "
                "from a checkpoint by resume() of another one"
            )
        )
        executor = None
        wanted: dict[Peer, list[Any]] = {}
        for references in given:
            for (_, taker), reference in references.items():
                wanted.setdefault(taker, []).append(reference)
        try:
            options = replace(self._options, curves=self.carrier_curves)
            executor = RayExecutor(job, placement, options, wanted)
            wanted.clear()
            started_at = time.perf_counter()
            for group, phases, parcels, objects in zip(groups, messages, first, given, strict=True):
                executor._take(parcels, objects, group if len(phases) < 2 else None)
                for place, later in enumerate(phases[1:], start=2):
                    passed = parcels_of(later, owners[1], owners[1])
                    objects_passed = executor._give(passed, None)
                    executor._take(passed, objects_passed, group if place == len(phases) else None)
                    objects_passed.clear()
                # What has been made of them is on the devices: Ray's memory is free again.
                objects.clear()
            executor._workers.call(lambda actor: actor.take_over.remote())
        except BaseException as error:
            if executor is not None:
                executor.close()
            if isinstance(error, Exception):
                self._workers.ended = error
            raise
        finally:
            # The error keeps its frames, and references in them would keep the state in memory.
            for references in (*given, wanted):
                references.clear()
        taken = time.perf_counter() - started_at
        # The executor of the new workers has joined by itself.
        self._leave()
        executor.switch_seconds = {
            "give": given_at - began,
            "start": started_at - given_at,
            "take": taken,
        }
        return executor, plan

    @property
    def is_cut_off(self) -> bool:
        """Whether a step, a load, a start or a switch has not ended, and the workers still run.

        Those that have ended say why at every call.
        """
        return not self._is_between_steps and self._workers.ended is None

    @property
    def processes(self) -> dict[Peer, int]:
        """The process of each worker."""
        return self._workers.processes

    def moving_seconds(self) -> float:
        """How long the state took, after a switch, to come to the new workers' hosts.

        It moves while they compile. By the hosts' clocks, against the driver's; 0 for what has not
        come.
        """
        return 0.0 if self._fetches is None else self._fetches.seconds()

    @property
    def _everyone(self) -> list[Peer]:
        return list(self._processes)

    def _give(self, parcels: Parcels, group: Sequence[int] | None) -> dict[tuple[Peer, Peer], Any]:
        """References to what workers give, which is made when this returns.

        It is of a group of leaves, which they then lack, or else of what they have taken.
        """
        done, found = {}, {}
        # All are rid of a group, also those whose copies nobody asks for.
        for giver in {pair[0] for pair in parcels} if group is None else self._everyone:
            pairs = [pair for pair in parcels if pair[0] == giver]
            method = self._workers.actor(giver).give.options(num_returns=len(pairs) + 1)
            given = method.remote([parcels[pair] for pair in pairs], group)
            done[giver], *references = given if pairs else [given]
            found.update(zip(pairs, references, strict=True))
        self._workers.wait(done)
        return found

    def _take(
        self,
        parcels: Parcels,
        references: Mapping[tuple[Peer, Peer], Any],
        group: Sequence[int] | None,
    ) -> None:
        """Let workers take what was given; where a group of leaves is whole then, all make it."""
        calls = {}
        for taker in {pair[1] for pair in parcels} if group is None else self._everyone:
            pairs = [pair for pair in parcels if pair[1] == taker]
            wanted = [parcels[pair] for pair in pairs]
            calls[taker] = self._workers.actor(taker).take.remote(
                wanted, group, *(references[pair] for pair in pairs)
            )
        self._workers.wait(calls)

    def start(self) -> None:
        """Make the initial state on every stage.

        Raises:
            InputError: workers make unlike states.
        """
        self._is_between_steps = False
        # Workers do one thing after the other: a step that nobody waits for any more ends before.
        records = self._workers.call(lambda actor: actor.start.remote())
        check_parameters(self._job, self._placement, records)
        self._is_between_steps = True

    def train_step(
        self, first_example: int, batch: PyTree | None = None, *, timed: bool = False
    ) -> list:
        """Run one step on all stages: one call to each worker.

        Args:
            first_example: how many examples come before the step's in the job's source.
            batch: the batch, where it does not come from the job's source.
            timed: whether to record when each operation ran, by the driver's clock.

        Returns:
            The report of each stage.

        Raises:
            InputError: the batch does not have the planned shape.
            WorkerLostError: a worker died or stopped answering.
        """
        given = dict.fromkeys(self._processes, None) if batch is None else self._given(batch)
        self._call += 1
        call = self._call
        self._is_between_steps = False
        reports = self._workers.call_each(
            lambda peer, actor: actor.train_step.remote(call, first_example, given[peer], timed)
        )
        self._is_between_steps = True
        if timed:
            reports = {peer: self._by_our_clock(peer, reports[peer]) for peer in reports}
        stages: dict[int, dict[int, list[StepReport]]] = {}
        for peer, process in self._processes.items():
            for stage, report in zip(process.stages, reports[peer], strict=True):
                stages.setdefault(stage, {}).setdefault(process.place, []).append(report)
        return [
            stage_report([member_report(hosts) for hosts in stages[stage].values()])
            for stage in sorted(stages)
        ]

    def _by_our_clock(self, peer: Peer, reports: Sequence[StepReport]) -> list[StepReport]:
        """A worker's reports by the driver's clock; asked each time, since clocks drift."""

        def ask() -> ClockReading:
            return self._workers.call(lambda actor: actor.clock.remote(), [peer])[peer]

        offset = measure_offset(ask)
        return [by_our_clock(report, offset) for report in reports]

    def use_schedule(self, schedule: Schedule) -> None:
        """Run the following training steps in another order."""
        self._workers.call(lambda actor: actor.use_schedule.remote(schedule))

    def num_held_out(self) -> int:
        """How many held-out batches there are."""
        found = self._workers.call(lambda actor: actor.num_held_out.remote(), [(0, 0)])[0, 0]
        if isinstance(found, Exception):
            raise found
        return found

    def evaluate(self, index: int) -> tuple[float, ...]:
        """The sums of a held-out batch, as `StageWorker.evaluate` returns them."""
        read = self._workers.call(lambda actor: actor.read_held_out.remote(index))
        for error in read.values():
            if error is not None:
                raise error
        self._call += 1
        call = self._call
        results = self._workers.call(lambda actor: actor.evaluate.remote(call))
        firsts = [each for (_, host), each in results.items() if host == 0]
        return summed([*itertools.chain.from_iterable(firsts)])

    def save(self, folder: str) -> None:
        """Start saving the state into a folder."""
        self._workers.call(lambda actor: actor.save.remote(folder))

    def wait_saved(self) -> list[Any]:
        """Finish saving; what the first host of each member wrote, or why a host could not."""
        records = self._workers.call(
            lambda actor: actor.wait_saved.options(concurrency_group=SAVE).remote()
        )
        saved = [*itertools.chain.from_iterable(records.values())]
        failures = [each for each in saved if isinstance(each, SaveFailure)]
        return failures or saved

    def load(self, folder: str) -> None:
        """Take over the state of a checkpoint."""
        self._is_between_steps = False
        self._workers.call(lambda actor: actor.load.remote(folder))
        self._is_between_steps = True

    def parameters(self) -> list[tuple[ParameterPart, Any]]:
        """Every parameter part that the first pipeline holds, as a NumPy array."""
        stages = self._placement.pipelines.first_pipeline
        peers = [peer for peer in self._workers.peers if peer[0] < len(stages)]
        answers = self._workers.call(lambda actor: actor.parameters.remote(), peers)
        held: dict[int, list[Any]] = {}
        for peer, of_stages in answers.items():
            for stage, arrays in zip(self._processes[peer].stages, of_stages, strict=True):
                held.setdefault(stage, []).extend([arrays] if arrays is not None else [])
        return [
            (part, array)
            for stage in stages
            for part, array in zip(
                stage.parameters,
                put_together(self._placement.leaves(stage.index, Parameter), held[stage.index]),
                strict=True,
            )
        ]

    def _given(self, batch: PyTree) -> dict[Peer, GivenRows | None]:
        """What each worker is given of a batch, of which it has the planned shape."""
        size = self._job.plan.batch_size
        leaves = feed_of(batch, self._job.batch, size)(0, size)
        return {
            peer: given_rows(self._placement, process.stages, process.place, leaves)
            for peer, process in self._processes.items()
        }

    def close(self) -> None:
        """End all workers, and leave the Ray cluster if nobody else here is in it."""
        self._workers.end(RuntimeError("the workers have been ended"))
        self._leave()

    def _leave(self) -> None:
        joined, self._joined = self._joined, None
        if joined is not None:
            RAY_USERS.leave(joined)


def _check_cores(plan: Plan, options: RayOptions) -> None:
    """Check that there is a core for each member of each stage, where cores are given."""
    count = sum(len(plan.stages[stages[0]].members) for stages in plan.sharing)
    if options.cores and len(options.cores) != count:
        whose = "members of stages" if plan.has_unions else "stages"
        if count < len(plan.stages):
            whose = "sets of devices"
        raise InputError(
            f"cores is {options.cores}; it has a core for each of the {count} {whose}, or is empty"
        )


def _check_resources(plan: Plan) -> None:
    """Check that the connected Ray cluster has what the workers of a plan ask of it."""
    wanted = []
    for process in processes_of(plan).values():
        subcluster = plan.cluster.subcluster(process.member.submesh.subcluster)
        wanted.append((subcluster.name, worker_resources(subcluster, len(process.devices))))
    check_resources(wanted)
