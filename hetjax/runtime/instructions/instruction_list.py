"""Instructions: what a worker does in one step, as a list that is written once.

A schedule says in which order a stage runs its forward and backward tasks. Here that order becomes
a flat list of loads, receives, runs, sends and frees on named buffers, with every buffer freed at
its last use. The list is data: it knows nothing of devices, and every executor runs the same one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from hetjax.pipeline.build import PipelinePrograms
from hetjax.pipeline.schedules.schedule import Schedule, Task
from hetjax.pipeline.stages.backward import Reads
from hetjax.runtime.instructions import shared_rows as sharing
from hetjax.runtime.instructions.activation_instructions import ActivationCopies
from hetjax.runtime.instructions.buffer_lifetimes import with_expectations, with_frees
from hetjax.runtime.instructions.buffers import (
    STEP_METRICS,
    AuxSum,
    BatchLeaf,
    Buffer,
    Buffers,
    Deferred,
    Gradient,
    LossCount,
    LossSeed,
    LossSum,
    Offloaded,
    OptimizerState,
    Parameter,
    PipelineLoss,
    ReceivedCotangent,
    ReceivedValue,
    ReducedGradient,
    Residual,
    SentCotangent,
    SentValue,
    StepMetric,
    UpdateMessage,
)
from hetjax.runtime.instructions.instruction import (
    Await,
    Fetch,
    Instruction,
    Load,
    Receive,
    Route,
    RouteKind,
    Run,
    Send,
    Store,
    Tag,
    Turn,
)
from hetjax.runtime.instructions.member_instructions import MemberPart, for_member

MOVE_WINDOW = 4
"""How many moves among the members of a stage may be asked for ahead of their use."""

WEIGHT_GRADIENT = "weight_gradient"
EVALUATE = "evaluate"
"""The program that may run in the place of a wait."""


def training_instructions(
    pipelines: PipelinePrograms,
    schedule: Schedule,
    stage: int,
    *,
    reductions: Sequence[Sequence[int]] = (),
    part: MemberPart | None = None,
    offloads: bool = False,
) -> tuple[Instruction, ...]:
    """The instructions of one stage, or of one of its members, for one training step.

    Args:
        pipelines: the pipelines' programs.
        schedule: the order of tasks of the stage's pipeline.
        stage: which stage, counted over all pipelines.
        reductions: groups of places of parameters whose gradients are reduced together, after the
            last microbatch; none where every program reduces what it adds.
        part: what the member does of the stage's programs; None where it has no other members.
        offloads: whether microbatches' activations wait in the hosts' memory.

    Returns:
        Its instructions, every buffer freed after its last use; where stages of its pipeline share
        devices, with a `Turn` before each task and after the last.
    """
    writer = _InstructionWriter(
        pipelines, schedule, stage, reductions=reductions, offloads=offloads
    )
    body = _of_part([*writer.tasks(), *writer.update()], stage, part)
    away = {each for name in body if isinstance(name, Fetch) for each in name.buffers}

    def is_kept(buffer: Buffer) -> bool:
        if isinstance(buffer, Offloaded):
            return isinstance(buffer.buffer, OptimizerState)
        kinds = (Parameter, OptimizerState, LossSeed, StepMetric, AuxSum)
        return isinstance(buffer, kinds) and buffer not in away

    return tuple(with_frees(with_expectations(body, writer.windows()), is_kept))


def evaluation_instructions(
    pipelines: PipelinePrograms,
    schedule: Schedule,
    stage: int,
    *,
    part: MemberPart | None = None,
) -> tuple[Instruction, ...]:
    """The instructions of one stage for the loss alone, over the microbatches of one batch.

    Args:
        pipelines: the pipelines' programs.
        schedule: the schedule of the stage's pipeline, for its microbatches and who takes turns.
        stage: which stage, counted over all pipelines.
        part: what a member does of the stage's programs; None where it has no other members.

    Returns:
        Its instructions.
    """
    writer = _InstructionWriter(pipelines, None, stage)
    body: list[Instruction] = []
    turn = [Turn()] if schedule.turns else []
    for microbatch in range(schedule.num_microbatches):
        body += [*turn, *writer.inputs(microbatch)]
        arguments = (writer.parameters, writer.batch(microbatch), writer.received(microbatch))
        body.append(Run(EVALUATE, arguments, writer.made(microbatch), microbatch))
        body += writer.outputs(microbatch)
    body += turn
    windows = {
        Route(RouteKind.VALUE, stage - 1, stage): 2,
        Route(RouteKind.MOVE, stage, stage): MOVE_WINDOW,
    }
    kept = (Parameter, LossSum, LossCount, AuxSum)
    body = _of_part(body, stage, part)
    asked = with_expectations(body, windows)
    return tuple(with_frees(asked, lambda buffer: isinstance(buffer, kept)))


def _of_part(body: Sequence[Instruction], stage: int, part: MemberPart | None) -> list[Instruction]:
    return list(body if part is None else for_member(body, stage, part))


def all_tasks(recomputes: bool) -> tuple[str, ...]:
    """The names of the programs that tasks of any schedule run, in the order of first use.

    Args:
        recomputes: whether the stage makes its residuals again before a backward pass.
    """
    again = ("recompute",) if recomputes else ()
    return ("forward", *again, "backward", "input_gradient", WEIGHT_GRADIENT)


def stage_programs(schedule: Schedule, place: int, recomputes: bool) -> tuple[str, ...]:
    """The names of the programs that a stage's tasks run.

    Args:
        schedule: the order of tasks.
        place: which stage of the pipeline.
        recomputes: whether it makes its residuals again before a backward pass.

    Returns:
        Names in the order of first use.
    """
    tasks = schedule.order[place]
    split = {task.microbatch for task in tasks if task.kind == "W"}
    names = ["forward"]
    if recomputes:
        names.append("recompute")
    if len(split) < schedule.num_microbatches:
        names.append("backward")
    if split:
        names += ["input_gradient", WEIGHT_GRADIENT]
    return tuple(names)


class _InstructionWriter:
    def __init__(
        self,
        pipelines: PipelinePrograms,
        schedule: Schedule | None,
        stage: int,
        *,
        reductions: Sequence[Sequence[int]] = (),
        offloads: bool = False,
    ):
        self.pipelines, self.schedule, self.stage = pipelines, schedule, stage
        self.reductions, self.offloads = reductions, offloads
        self.is_first, self.is_last = pipelines.is_first(stage), pipelines.is_last(stage)
        self.place = stage - pipelines.first_stages[pipelines.pipeline_of(stage)]
        self.programs = pipelines.programs[stage]
        self.recomputes = self.programs.recompute is not None
        self.spec = pipelines.stages[stage]
        places = range(len(self.spec.parameters))
        self.parameters = tuple(map(Parameter, places))
        self.gradients = tuple(map(Gradient, self.programs.trained))
        self.state = tuple(map(OptimizerState, range(len(pipelines.updates[stage].state))))

    def batch(self, microbatch: int) -> tuple[BatchLeaf, ...]:
        return tuple(BatchLeaf(microbatch, leaf) for leaf in self.spec.batch)

    def received(self, microbatch: int) -> Buffers:
        return tuple(ReceivedValue(microbatch, value) for value in self.spec.receives)

    def sent(self, microbatch: int) -> Buffers:
        return tuple(SentValue(microbatch, value) for value in self.spec.sends)

    def made(self, microbatch: int) -> Buffers:
        """What the forward pass is for: the values sent, or the loss in the last stage."""
        if self.is_last:
            aux = (AuxSum(microbatch, i) for i in range(len(self.pipelines.program.aux)))
            return (LossSum(microbatch), LossCount(microbatch), *aux)
        return self.sent(microbatch)

    def residuals(self, microbatch: int) -> Buffers:
        return tuple(Residual(microbatch, i) for i in range(len(self.programs.residuals)))

    def deferred(self, microbatch: int) -> Buffers:
        return tuple(Deferred(microbatch, i) for i in range(len(self.programs.split.deferred)))

    def cotangents_in(self, microbatch: int) -> Buffers:
        if self.is_last:
            return (LossSeed(),)
        return tuple(ReceivedCotangent(microbatch, i) for i in self.programs.cotangents_in)

    def cotangents_out(self, microbatch: int) -> Buffers:
        return tuple(SentCotangent(microbatch, i) for i in self.programs.cotangents_out)

    def stage_inputs(self, reads: Reads, microbatch: int) -> tuple[Buffers, ...]:
        """The first arguments of a program: parameters, batch, received."""
        batch, received = self.batch(microbatch), self.received(microbatch)
        return self.parameters, _chosen(batch, reads.batch), _chosen(received, reads.received)

    def backward_inputs(self, reads: Reads, microbatch: int) -> tuple[Buffers, ...]:
        """The same of a backward pass, and residuals and cotangents."""
        residuals, cotangents = self.residuals(microbatch), self.cotangents_in(microbatch)
        return (
            *self.stage_inputs(reads, microbatch),
            _chosen(residuals, reads.residuals),
            _chosen(cotangents, reads.cotangents),
        )

    def windows(self) -> dict[Route, int]:
        """How many transfers of a route may be under way: what the other end may run ahead."""
        assert self.schedule is not None
        windows = {Route(RouteKind.MOVE, self.stage, self.stage): MOVE_WINDOW}
        if not self.is_first:
            ahead = self.schedule.live_bound(self.place - 1)
            if not self.pipelines.programs[self.stage - 1].has_backward:
                # It does not wait for us: what we do not need yet shall wait there.
                ahead = min(ahead, self.schedule.live_bound(self.place) + 1)
            windows[Route(RouteKind.VALUE, self.stage - 1, self.stage)] = max(1, ahead)
        if not self.is_last:
            windows[Route(RouteKind.COTANGENT, self.stage + 1, self.stage)] = max(
                1, self.schedule.live_bound(self.place)
            )
        return windows

    def inputs(self, microbatch: int) -> Iterator[Instruction]:
        if self.spec.batch:
            yield Load(microbatch, self.batch(microbatch))
        if not self.is_first and self.spec.receives:
            tag = Tag(Route(RouteKind.VALUE, self.stage - 1, self.stage), microbatch)
            yield Receive(tag, self.received(microbatch))

    def outputs(self, microbatch: int) -> Iterator[Instruction]:
        if self.spec.sends:
            tag = Tag(Route(RouteKind.VALUE, self.stage, self.stage + 1), microbatch)
            yield Send(tag, self.sent(microbatch))

    def tasks(self) -> Iterator[Instruction]:
        assert self.schedule is not None
        tasks = self.schedule.order[self.place]
        order = frozenset(tasks)
        turn = [Turn()] if self.schedule.turns else []
        copies = ActivationCopies(self.programs, self.spec, tasks) if self.offloads else None
        for place, task in enumerate(tasks):
            yield from turn
            if copies is not None:
                yield from copies.before(place)
            yield from self._task(task, order)
            if copies is not None:
                yield from copies.after(place)
        yield from turn

    def _task(self, task: Task, order: Collection[Task]) -> Iterator[Instruction]:
        microbatch = task.microbatch
        match task.kind:
            case "F":
                yield from self._forward(microbatch)
            case "R" if self.recomputes:
                yield self._recompute(microbatch)
            case "B" if self.programs.has_backward:
                if self.recomputes and Task("R", microbatch) not in order:
                    yield self._recompute(microbatch)
                yield from self._backward(microbatch, split=Task("W", microbatch) in order)
            case "W" if self.programs.has_backward:
                yield from self._weight_gradient(microbatch)
            case _:
                # Nothing is trained up to here: the schedule's place for it stays empty.
                pass

    def _forward(self, microbatch: int) -> Iterator[Instruction]:
        yield from self.inputs(microbatch)
        arguments = (self.parameters, self.batch(microbatch), self.received(microbatch))
        kept = () if self.recomputes else self.residuals(microbatch)
        yield Run("forward", arguments, (*self.made(microbatch), *kept), microbatch)
        yield from self.outputs(microbatch)

    def _recompute(self, microbatch: int) -> Instruction:
        arguments = self.stage_inputs(self.programs.recompute_reads, microbatch)
        return Run("recompute", arguments, self.residuals(microbatch), microbatch)

    def _backward(self, microbatch: int, *, split: bool) -> Iterator[Instruction]:
        cotangents = self.cotangents_in(microbatch)
        if not self.is_last and cotangents:
            tag = Tag(Route(RouteKind.COTANGENT, self.stage + 1, self.stage), microbatch)
            yield Receive(tag, cotangents)
        yield self._input_gradient(microbatch) if split else self._whole_backward(microbatch)
        returned = self.cotangents_out(microbatch)
        if returned:
            tag = Tag(Route(RouteKind.COTANGENT, self.stage, self.stage - 1), microbatch)
            yield Send(tag, returned)

    def _whole_backward(self, microbatch: int) -> Instruction:
        arguments = self.backward_inputs(self.programs.backward_reads, microbatch)
        outputs = (*self.cotangents_out(microbatch), *self.gradients)
        return Run("backward", (*arguments, self._accumulators()), outputs, microbatch)

    def _input_gradient(self, microbatch: int) -> Instruction:
        split = self.programs.split
        arguments = self.backward_inputs(split.input_gradient_reads, microbatch)
        light = tuple(map(Gradient, split.light))
        accumulators = light if self._accumulators() else ()
        outputs = (*self.cotangents_out(microbatch), *self.deferred(microbatch), *light)
        return Run("input_gradient", (*arguments, accumulators), outputs, microbatch)

    def _weight_gradient(self, microbatch: int) -> Iterator[Instruction]:
        split = self.programs.split
        heavy = tuple(map(Gradient, split.heavy))
        if not heavy:
            return
        arguments = self.backward_inputs(split.weight_gradient_reads, microbatch)
        accumulators = heavy if self._accumulators() else ()
        arguments = (*arguments, self.deferred(microbatch), accumulators)
        yield Run(WEIGHT_GRADIENT, arguments, heavy, microbatch)

    def _accumulators(self) -> Buffers:
        assert self.schedule is not None
        return self.gradients if self.schedule.num_microbatches > 1 else ()

    def _sets_back_apart(self, shared: sharing.StageSharing) -> bool:
        """Whether gradients' sums are made zeros again by a program of their own."""
        return bool(self._accumulators()) and (bool(self.reductions) or shared.divides)

    def update(self) -> Iterator[Instruction]:
        for group, places in enumerate(self.reductions):
            gradients = tuple(map(Gradient, places))
            reduced = tuple(map(ReducedGradient, places))
            yield Run(f"reduce_gradients_{group}", (gradients,), reduced)
        held_gradients = sharing.REDUCED_GRADIENTS if self.reductions else sharing.GRADIENTS
        shared = sharing.StageSharing(self.pipelines, self.stage)
        yield from sharing.sum_gradients(shared, held_gradients)
        yield from self._tell_loss()
        yield from sharing.take_parameters(shared)
        parameters = shared.updated_buffers(sharing.PARAMETERS)
        gradients = shared.summed_buffers(held_gradients)
        update = self.pipelines.updates[self.stage]
        others = [s for s in range(self.pipelines.num_stages) if s != self.stage]
        known: list[Buffer] = []
        own: list[Buffer] = []
        for phase in range(len(update.phases)):
            state = tuple(self.state[place] for place in update.state_of(phase))
            told = (*known, *own)
            arguments = (parameters, gradients, state, self._losses(), told)
            if phase == len(update.phases) - 1:
                if update.groups:
                    yield from self._in_groups(parameters, gradients, told, shared)
                    break
                outputs = (*parameters, *self.state, *STEP_METRICS)
                sums = self._accumulators()
                is_apart = self._sets_back_apart(shared)
                outputs = outputs if is_apart else (*outputs, *sums)
                yield Run(f"update_{phase}", arguments, outputs)
                if is_apart:
                    yield Run("zero_gradients", (), sums)
                break
            mine = self._message(phase, self.stage)
            if update.sends[phase]:
                yield Run(f"update_{phase}", arguments, mine)
                own += mine
                for other in others:
                    route = Route(RouteKind.MESSAGE, self.stage, other)
                    yield Send(Tag(route, phase=phase), mine)
            for sender in update.receives[phase]:
                buffers = self._message(phase, sender)
                route = Route(RouteKind.MESSAGE, sender, self.stage)
                yield Receive(Tag(route, phase=phase), buffers)
                known += buffers
        yield from sharing.share_parameters(shared)

    def _in_groups(
        self,
        parameters: Buffers,
        gradients: Buffers,
        known: Buffers,
        shared: sharing.StageSharing,
    ) -> Iterator[Instruction]:
        """The last phase of an update whose state comes from the hosts' memory and goes back.

        While a group is updated, the next one is on its way; the one before has then left.
        """
        update = self.pipelines.updates[self.stage]
        resident = tuple(self.state[place] for place in update.resident)
        sums = self._accumulators()
        is_apart = self._sets_back_apart(shared)
        states = [tuple(self.state[place] for place in group.state) for group in update.groups]
        yield Fetch(states[0])
        for place, (group, state) in enumerate(zip(update.groups, states, strict=True)):
            if place + 1 < len(states):
                if place:
                    yield Await(tuple(map(Offloaded, states[place - 1])))
                yield Fetch(states[place + 1])
            mine = tuple(parameters[part] for part in group.parts)
            summed = tuple(gradients[each] for each in group.summed)
            is_last = place == len(states) - 1
            outputs = (
                *mine,
                *(self.state[each] for each in group.returned),
                *(STEP_METRICS if is_last else ()),
                *(summed if sums and not is_apart else ()),
            )
            arguments = (mine, summed, resident, state, known)
            yield Run(f"update_group_{place}", arguments, outputs)
            yield Store(state)
        if is_apart:
            yield Run("zero_gradients", (), sums)
        yield Await(tuple(map(Offloaded, (each for state in states[-2:] for each in state))))

    def _message(self, phase: int, sender: int) -> Buffers:
        count = len(self.pipelines.messages[phase][sender])
        return tuple(UpdateMessage(phase, sender, i) for i in range(count))

    def _tell_loss(self) -> Iterator[Instruction]:
        """Give the loss of a later pipeline to the one that adds up the loss of all."""
        first, *others = self.pipelines.loss_stages
        if self.stage in others:
            mine = (PipelineLoss("sum", self.stage), PipelineLoss("count", self.stage))
            yield Run("sum_losses", (self._own_losses(),), mine)
            yield Send(Tag(Route(RouteKind.LOSS, self.stage, first)), mine)
        if self.stage == first:
            for other in others:
                theirs = (PipelineLoss("sum", other), PipelineLoss("count", other))
                yield Receive(Tag(Route(RouteKind.LOSS, other, first)), theirs)

    def _own_losses(self) -> Buffers:
        assert self.schedule is not None
        microbatches = range(self.schedule.num_microbatches)
        return (*map(LossSum, microbatches), *map(LossCount, microbatches))

    def _losses(self) -> Buffers:
        """What the update is told of the loss: in the one stage that adds it up, all of it."""
        first, *others = self.pipelines.loss_stages
        if self.stage != first:
            return ()
        sums = (PipelineLoss("sum", other) for other in others)
        counts = (PipelineLoss("count", other) for other in others)
        return (*self._own_losses(), *sums, *counts)


def _chosen(buffers: Buffers, places: Sequence[int]) -> Buffers:
    return tuple(buffers[place] for place in places)
