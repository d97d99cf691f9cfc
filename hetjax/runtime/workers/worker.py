"""The worker: what one member of a stage holds, and the loop that runs its instruction list."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.pipeline.timeline.timeline import Event, host_track, stage_track
from hetjax.runtime.compilation.compiled_stage import CompiledStage, StageCompiler
from hetjax.runtime.compilation.host_memory import check_host_memory
from hetjax.runtime.compilation.state import StageState, initial_state, placed_loss_seed
from hetjax.runtime.instructions.buffers import (
    ACTIVATIONS,
    STEP_METRICS,
    Activation,
    AuxSum,
    Buffer,
    Gradient,
    LossCount,
    LossSeed,
    LossSum,
    Offloaded,
    OptimizerState,
    Parameter,
)
from hetjax.runtime.instructions.instruction import (
    Fetch,
    Free,
    Instruction,
    Load,
    Receive,
    Run,
    Send,
    Store,
    Tag,
)
from hetjax.runtime.instructions.instruction_list import (
    evaluation_instructions,
    training_instructions,
)
from hetjax.runtime.instructions.placement import Placement, reduction_groups
from hetjax.runtime.moves.transport import Transport
from hetjax.runtime.workers.early_runs import EarlyRuns
from hetjax.runtime.workers.instruction_run import InstructionRun
from hetjax.runtime.workers.placed_rows import global_array, local_rows
from hetjax.runtime.workers.playing import Pace
from hetjax.runtime.workers.step_report import StepReport

Feed = Callable[[int, int], Sequence[np.ndarray]]
"""From the first row and the row after the last one to the batch's leaves, with those rows."""

_EVENT_KINDS = {
    "forward": "F",
    "recompute": "R",
    "backward": "B",
    "input_gradient": "B",
    "weight_gradient": "W",
}


class StageWorker:
    """Holds the state of one stage, or of one of its members, and runs its instructions.

    Args:
        placement: shardings of all buffers, with the programs and the plan.
        stage: which stage.
        mesh: the member's devices.
        transport: what moves arrays to and from the other workers.
        member: which member of the stage.

    Attributes:
        pace: what programs run under; None to run them as fast as they go.
    """

    pace: Pace | None = None

    def __init__(
        self,
        placement: Placement,
        stage: int,
        mesh: Mesh,
        transport: Transport,
        member: int = 0,
    ):
        self.placement, self.stage, self.member = placement, stage, member
        self.mesh, self.transport = mesh, transport
        self.part = placement.part(stage, member)
        # Processors run all programs at once that they are given, so that the one that others wait
        # for is done as late as the rest.
        self.one_by_one = self.part is not None and mesh.devices.flat[0].platform == "cpu"
        self.pipelines = placement.pipelines
        self.programs = placement.pipelines.programs[stage]
        self.is_last = placement.pipelines.is_last(stage)
        spans_hosts = len({device.process_index for device in mesh.devices.flat}) > 1
        self.waits_for_others = spans_hosts or self.part is not None
        offload = placement.stage_plan(stage).offload
        if offload:
            check_host_memory(mesh.local_devices, f"stage {stage}: offload {list(offload)}")
        self.compiled: CompiledStage = self._compiler.stage()
        schedule = placement.pipeline_plan(stage).schedule
        self.training = self._training(schedule)
        self.evaluation: tuple[Instruction, ...] = ()
        self.buffers: dict[Buffer, Any] = {}
        self._sizes: dict[Activation, int] = {}
        self._held: Held | None = None

    def _training(self, schedule: Schedule) -> tuple[Instruction, ...]:
        reductions = reduction_groups(self.placement, self.stage)
        return training_instructions(
            self.pipelines,
            schedule,
            self.stage,
            reductions=reductions,
            part=self.part,
            offloads="activations" in self.placement.stage_plan(self.stage).offload,
        )

    @property
    def _compiler(self) -> StageCompiler:
        return StageCompiler(self.placement, self.stage, self.mesh, self.part, self.member)

    def start(self, parameters: Any) -> None:
        """Make the initial state.

        Args:
            parameters: pytree of arrays, or a function without arguments that makes it.
        """
        placed = self.placement, self.stage, self.member
        self.restore(initial_state(*placed, self.compiled, parameters))

    def restore(self, state: StageState) -> None:
        """Take over a state.

        Args:
            state: parameter and optimizer-state parts of this stage, sharded as it wants them.
        """
        self.buffers = {}
        self._bind(Parameter, state.parameters)
        self._bind(OptimizerState, state.optimizer)
        for name in map(OptimizerState, self.pipelines.updates[self.stage].away):
            self.buffers[Offloaded(name)] = self.buffers.pop(name)
        if self.compiled.zero_gradients is not None:
            sums = zip(self.programs.trained, self.compiled.zero_gradients(), strict=True)
            self.buffers.update({Gradient(place): array for place, array in sums})
        if self.is_last:
            dtype = self.programs.sent[0].dtype
            self.buffers[LossSeed()] = placed_loss_seed(
                self.compiled, self.pipelines.loss_seed, dtype
            )

    def use_schedule(self, schedule: Schedule) -> None:
        """Run the following training steps in another order.

        Args:
            schedule: of as many stages and microbatches; programs that it needs and that are not
                there yet are compiled.
        """
        self.placement = self.placement.with_schedule(schedule)
        self.compiled = self._compiler.with_schedule(self.compiled)
        self.training = self._training(schedule)
        self._held = None

    def state(self) -> StageState:
        """The parameter and optimizer-state parts that the stage holds now."""
        return StageState(self._all(Parameter), self._all(OptimizerState))

    def _bind(self, kind: type[_Placed], arrays: Sequence[Any]) -> None:
        self.buffers.update({kind(i): array for i, array in enumerate(arrays)})

    def _all(self, kind: type[_Placed]) -> list[jax.Array]:
        found = {
            name.buffer if isinstance(name, Offloaded) else name: array
            for name, array in self.buffers.items()
        }
        return [found[name] for name in sorted(name for name in found if isinstance(name, kind))]

    def num_bytes(self, name: Activation, array: Any) -> int:
        """The size of an array that a microbatch keeps, which is the same in every step.

        It is remembered: an array takes microseconds to say it, and a stage keeps a hundred.
        """
        if name not in self._sizes:
            self._sizes[name] = array.nbytes
        return self._sizes[name]

    def train_step(self, step: int, feed: Feed, *, timed: bool = False) -> StepReport:
        """Run one training step.

        Args:
            step: the step's number, the same on all workers.
            feed: gives rows of the step's batch.
            timed: wait for each operation and record when it ran.

        Returns:
            What was seen.
        """
        run = self.begin_step(step, feed, timed=timed)
        run.execute(self.training)
        return self.end_step(run)

    def loads(self) -> list[tuple[int, int]]:
        """What a training step asks its feed for: the first row each time, and the end."""
        microbatches = [each.microbatch for each in self.training if isinstance(each, Load)]
        places = map(self.rows_of, microbatches)
        return [(base + first, base + end) for base, first, end in places]

    def rows_of(self, microbatch: int) -> tuple[int, int, int]:
        """Where the member's rows of a microbatch begin in the batch; which of them it loads."""
        placement, stage = self.placement, self.stage
        start, stop = placement.examples_of(stage, self.member)
        first, end = local_rows(list(self.compiled.batch.values()), stop - start)
        size = placement.pipeline_plan(stage).microbatch_size
        return placement.first_example(stage) + microbatch * size + start, first, end

    def begin_step(self, step: int, feed: Feed, *, timed: bool) -> _StepRun:
        """A training step that has not begun: whoever runs it goes through its instructions."""
        return _StepRun(self, step, feed, timed=timed, counts=self._held is None)

    def end_step(self, run: _StepRun) -> StepReport:
        """What was seen in a training step, of which all instructions have run."""
        run.end()
        held = self._held or run.held
        if self.waits_for_others:  # It runs all in the same order in every step.
            self._held = held
        run.report.live_microbatches, run.report.live_bytes = held
        return run.report

    def compile_evaluation(self) -> None:
        """Compile what `evaluate` runs, where it is not compiled yet.

        All workers do it before any of them evaluates: those that wait for one which still compiles
        would take it for lost.
        """
        if not self.evaluation:
            self.compiled = self._compiler.with_evaluation(self.compiled)
            schedule = self.placement.pipeline_plan(self.stage).schedule
            self.evaluation = evaluation_instructions(
                self.pipelines, schedule, self.stage, part=self.part
            )

    def evaluate(self, step: int, feed: Feed) -> tuple[float, ...] | None:
        """Compute the loss of a batch, without a backward pass, when that is compiled.

        Args:
            step: a number that tells this call's transfers from all others.
            feed: gives rows of the batch.

        Returns:
            The summed loss and the count, then the figures beside the loss as `StepReport.aux` has
            them; None except in the last stage.
        """
        run = self.begin_evaluation(step, feed)
        run.execute(self.evaluation)
        return self.end_evaluation(run)

    def begin_evaluation(self, step: int, feed: Feed) -> _StepRun:
        """An evaluation that has not begun; see `begin_step`."""
        return _StepRun(self, step, feed, timed=False, counts=False)

    def end_evaluation(self, run: _StepRun) -> tuple[float, ...] | None:
        """What `evaluate` returns, of an evaluation of which all instructions have run."""
        run.end()
        found = (*self._pop_sum(LossSum), *self._pop_sum(LossCount), *run.report.aux)
        return found if found and self.member == 0 else None

    def _pop_sum(self, kind: type[LossSum | LossCount]) -> tuple[float, ...]:
        """Take the scalars of all microbatches out of the buffers; their sum, where there are."""
        found = sorted(name for name in self.buffers if isinstance(name, kind))
        return tuple(self._popped((0, name) for name in found))

    def pop_aux(self) -> tuple[float, ...]:
        """Take what the loss gives beside itself out of the buffers.

        Returns:
            The sum of all microbatches for each figure; none where there are no figures.
        """
        found = sorted(name for name in self.buffers if isinstance(name, AuxSum))
        figures = tuple(self._popped((name.place, name) for name in found))
        return figures if self.member == 0 else ()

    def _popped(self, names: Iterable[tuple[int, Buffer]]) -> Iterator[float]:
        """Take scalars out of the buffers, and add up those of one figure in the order given."""
        sums: dict[int, float] = {}
        for figure, name in names:
            sums[figure] = sums.get(figure, 0.0) + float(self.buffers.pop(name))
        for figure in sorted(sums):
            yield sums[figure]


_Placed = Parameter | OptimizerState
"""Buffers of a stage that are counted from 0."""


class Held(NamedTuple):
    """What activations a worker holds at once in a step, at most.

    Args:
        microbatches: of how many microbatches.
        num_bytes: their size.
    """

    microbatches: int = 0
    num_bytes: int = 0


class _StepRun(InstructionRun):
    """A step of a stage's worker, and what is seen of it.

    Args:
        counts: whether to count what it holds.
    """

    def __init__(self, worker: StageWorker, step: int, feed: Feed, *, timed: bool, counts: bool):
        super().__init__(worker.compiled.programs, worker.transport, worker.buffers, step)
        self.worker, self.feed, self.timed = worker, feed, timed
        self.report = StepReport()
        self.counts, self.held = counts, Held()
        self.live: Counter[int] = Counter()
        self.live_bytes = 0
        self.watchers: list[threading.Thread] = []
        self.began = time.perf_counter()

    def execute(self, instructions: Sequence[Instruction]) -> None:
        early = EarlyRuns(instructions)
        for place, instruction in enumerate(instructions):
            if isinstance(instruction, Receive):
                self._fill_wait(early, place, instruction.tag)
            if not early.has_run(place):
                self.do(instruction)

    def end(self) -> None:
        for watcher in self.watchers:
            watcher.join()
        self._metrics()
        self.report.seconds = time.perf_counter() - self.began

    def do(self, instruction: Instruction) -> None:
        if isinstance(instruction, Load):
            self.load(instruction)
        else:
            super().do(instruction)

    def _fill_wait(self, early: EarlyRuns, place: int, tag: Tag) -> None:
        """Run weight gradients that come later, as long as a transfer is not there.

        While the devices still compute, nothing is lost by waiting for them. Hosts and members that
        compute together must all run the same in the same order, whatever each of them waits for.
        """
        if self.worker.waits_for_others:
            return
        transport = self.worker.transport
        while (run := early.next_after(place, self.buffers)) is not None:
            if transport.ready(self.step, tag):
                return
            jax.block_until_ready(self.latest)
            if transport.ready(self.step, tag):
                return
            self.do(run)
            early.mark()

    def _metrics(self) -> None:
        if STEP_METRICS[0] in self.buffers:
            values = [self.buffers.pop(name) for name in STEP_METRICS]
            # A step ends when its new parameters are there, on every stage.
            jax.block_until_ready([*values, *self.worker.state().parameters])
            first = self.worker.pipelines.loss_stages[0], 0
            if (self.worker.stage, self.worker.member) == first:
                self._tell(*values)
        self.report.aux = self.worker.pop_aux()

    def _tell(self, loss: jax.Array, norm: jax.Array, squares: jax.Array) -> None:
        self.report.loss, self.report.gradient_norm = float(loss), float(norm)
        if not (np.isfinite(self.report.loss) and np.isfinite(self.report.gradient_norm)):
            leaves = np.flatnonzero(~np.isfinite(np.asarray(squares)))
            self.report.nonfinite_leaves = tuple(leaves.tolist())

    def run(self, instruction: Run) -> None:
        if self.worker.one_by_one:
            jax.block_until_ready(self.latest)
        start = time.time()
        pace = self.worker.pace
        with pace.running(self.worker.stage, instruction.program) if pace else nullcontext():
            self.compute(instruction)
            if self.timed or pace:
                jax.block_until_ready(self.latest)
        self.hold(instruction.outputs, self.latest)
        if self.timed:
            kind = _EVENT_KINDS.get(instruction.program.partition("/")[0], "update")
            mark = instruction.microbatch if instruction.microbatch >= 0 else None
            name = kind if mark is None else f"{kind}{mark}"
            track = stage_track(self.worker.stage, self.worker.member)
            self.report.events.append(Event(track, name, kind, mark, start, time.time()))

    def fetch(self, instruction: Fetch) -> None:
        start = time.time()
        super().fetch(instruction)
        self._watch("fetch", start, instruction.buffers, instruction.microbatch)

    def store(self, instruction: Store) -> None:
        start = time.time()
        super().store(instruction)
        self._watch("store", start, instruction.targets, instruction.microbatch)

    def _watch(self, kind: str, start: float, names: Sequence[Buffer], microbatch: int) -> None:
        """In a timed step, note when a copy to or from the hosts' memory is done.

        Nobody waits for it before what is copied is used: computation goes on beside it.
        """
        if not self.timed or not names:
            return
        arrays = [self.buffers[name] for name in names]
        track = host_track(self.worker.stage, self.worker.member, inward=kind == "fetch")
        size = sum(array.nbytes for array in arrays)
        place = len(self.report.events)
        mark = microbatch if microbatch >= 0 else None
        of_group = sum(e.kind == kind and e.microbatch is None for e in self.report.events)
        name = f"{kind} {of_group}" if mark is None else f"{kind} F{mark}"
        event = Event(track, name, kind, mark, start, start, size)
        self.report.events.append(event)

        def wait() -> None:
            # An array that is donated meanwhile was there before.
            with suppress(RuntimeError):
                jax.block_until_ready(arrays)
            self.report.events[place] = replace(event, end=time.time())

        watcher = threading.Thread(target=wait, daemon=True)
        watcher.start()
        self.watchers.append(watcher)

    def load(self, instruction: Load) -> None:
        worker, shardings = self.worker, self.worker.compiled.batch
        start, stop = worker.placement.examples_of(worker.stage, worker.member)
        base, first, end = worker.rows_of(instruction.microbatch)
        leaves = self.feed(base + first, base + end)
        arrays = [
            global_array(leaves[b.leaf], stop - start, shape, shardings[b.leaf], first)
            for b, shape in zip(instruction.buffers, self.worker.programs.batch, strict=True)
        ]
        self.hold(instruction.buffers, arrays)

    def receive(self, instruction: Receive) -> None:
        tag, transport = instruction.tag, self.worker.transport
        start = time.perf_counter()
        arrays = transport.receive(self.step, tag)
        if self.timed:
            jax.block_until_ready(arrays)
        self.report.arrivals[tag] = transport.arrival(self.step, tag)
        self.report.waits[tag] = time.perf_counter() - start
        self.hold(instruction.buffers, arrays)

    def send(self, instruction: Send) -> None:
        self.report.sends[instruction.tag] = time.time()
        super().send(instruction)

    def hold(self, names: Sequence[Buffer], arrays: Sequence[Any]) -> None:
        super().hold(names, arrays)
        if self.counts:
            self._count(names, 1)
            held = sum(count > 0 for count in self.live.values())
            most = self.held
            self.held = Held(max(most.microbatches, held), max(most.num_bytes, self.live_bytes))

    def free(self, instruction: Free) -> None:
        if self.counts:
            self._count(instruction.buffers, -1)
        super().free(instruction)

    def _count(self, names: Sequence[Buffer], sign: int) -> None:
        for name in names:
            if isinstance(name, ACTIVATIONS):
                self.live[name.microbatch] += sign
                self.live_bytes += sign * self.worker.num_bytes(name, self.buffers[name])
