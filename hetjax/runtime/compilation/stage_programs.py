"""All programs of a stage, divided among its devices before the first step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.pipeline.build import update_inputs
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.pipeline.update.divided_update import UpdateGroup
from hetjax.runtime.compilation.compiling import Argument
from hetjax.runtime.compilation.partitioners import Layout, Partitioned, Partitioner
from hetjax.runtime.compilation.sharing_programs import SharingPrograms
from hetjax.runtime.compilation.task_programs import TaskPrograms
from hetjax.runtime.instructions.buffers import (
    BatchLeaf,
    Buffer,
    Gradient,
    OptimizerState,
    Parameter,
    ReceivedValue,
    ReducedGradient,
    SentValue,
    UpdatedGradient,
    UpdatedParameter,
)
from hetjax.runtime.instructions.instruction_list import stage_programs
from hetjax.runtime.instructions.placement import Placement, reduction_groups
from hetjax.runtime.instructions.shared_rows import StageSharing


def training_programs(
    placement: Placement,
    stage: int,
    partitioner: Partitioner,
    tasks: Sequence[str] | None = None,
) -> dict[str, Partitioned]:
    """The programs that a stage's training instructions name.

    Args:
        placement: annotations of all buffers.
        stage: which stage.
        partitioner: what divides them.
        tasks: the names of the tasks' programs; None for those of the plan's schedule.

    Returns:
        The programs, by name.
    """
    found = _StagePrograms(placement, stage, partitioner)
    programs = dict(found.tasks_of(tasks or task_names(placement, stage)))
    programs |= SharingPrograms(placement, stage, partitioner).programs()
    if stage in placement.pipelines.loss_stages[1:]:
        programs["sum_losses"] = found.sum_losses()
    if found.accumulates and found.shapes.trained:
        programs["zero_gradients"] = found.zero_gradients()
    if found.late:
        groups = reduction_groups(placement, stage)
        programs |= {
            f"reduce_gradients_{group}": found.reduce_gradients(places)
            for group, places in enumerate(groups)
        }
    update = placement.pipelines.updates[stage]
    for phase in range(len(update.phases)):
        final = phase == len(update.phases) - 1
        if (final and not update.groups) or (not final and update.sends[phase]):
            programs[f"update_{phase}"] = found.update(phase, final)
    programs |= found.update_groups()
    return programs


def missing_programs(
    placement: Placement, stage: int, partitioner: Partitioner, known: Mapping[str, Partitioned]
) -> dict[str, Partitioned]:
    """The programs of a schedule's tasks, but for those that are known."""
    found = _StagePrograms(placement, stage, partitioner)
    return dict(found.tasks_of(task_names(placement, stage), known))


def task_names(placement: Placement, stage: int) -> tuple[str, ...]:
    """The names of the programs that a stage's tasks run in the plan's schedule."""
    recomputes = placement.pipelines.programs[stage].recompute is not None
    schedule = placement.pipeline_plan(stage).schedule
    return stage_programs(schedule, placement.place(stage), recomputes)


def evaluation_program(placement: Placement, stage: int, partitioner: Partitioner) -> Partitioned:
    """A stage's forward pass alone, which keeps nothing for a backward pass."""
    return _StagePrograms(placement, stage, partitioner).evaluation()


class _StagePrograms:
    def __init__(self, placement: Placement, stage: int, partitioner: Partitioner):
        self.placement, self.stage, self.partitioner = placement, stage, partitioner
        self.pipelines = placement.pipelines
        self.shapes = self.pipelines.programs[stage]
        self.whole = partitioner.whole
        self.parameters = self._layouts(Parameter)
        self.state = self._layouts(OptimizerState)
        self.batch = self._layouts(BatchLeaf)
        self.received = self._layouts(ReceivedValue)
        is_last = self.pipelines.is_last(stage)
        self.sent = [self.whole] * len(self.shapes.sent) if is_last else self._layouts(SentValue)
        self.num_microbatches = placement.pipeline_plan(stage).num_microbatches
        self.accumulates = self.num_microbatches > 1
        self.sums = self._layouts(Gradient)
        self.late = bool(reduction_groups(placement, stage))
        self.tasks = TaskPrograms(
            self.shapes,
            partitioner,
            self.parameters,
            self.batch,
            self.received,
            self.sent,
            self.sums,
            self.accumulates,
            self.late,
        )

    def tasks_of(
        self, names: Sequence[str], known: Mapping[str, Partitioned] | None = None
    ) -> Iterator[tuple[str, Partitioned]]:
        """Programs of tasks, but for those that are known."""
        return self.tasks.programs(names, known)

    def _layouts(self, kind: type[Buffer]) -> list[Layout]:
        return list(
            map(self.partitioner.layout, self.placement.leaves(self.stage, kind).annotations)
        )

    def evaluation(self) -> Partitioned:
        shapes = self.shapes
        sent, *_ = shapes.forward.outputs
        return self.partitioner.task(
            shapes.forward.returning(sent),
            [
                Argument(shapes.parameters, self.parameters),
                Argument(shapes.batch, self.batch),
                Argument(shapes.received, self.received),
            ],
            (self.sent,),
        )

    def zero_gradients(self) -> Partitioned:
        trained = self.shapes.trained
        shapes = [self.tasks.gradient_shapes[place] for place in trained]

        def zeros() -> list[jax.Array]:
            return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]

        sums = [self.sums[place] for place in trained]
        return self.partitioner.program(zeros, (), sums, keeps_sums=self.late)

    def reduce_gradients(self, places: Sequence[int]) -> Partitioned:
        """Those of these gradients that were summed late, reduced; the others as they are."""
        everything = self._layouts(ReducedGradient)
        reduced = [everything[place] for place in places]
        # What comes out divided has no use for the memory of what was whole.
        donated = reduced == [self.parameters[place] for place in places]
        sums = Argument(self.tasks.gradient_shapes, self.sums, donated).chosen(places)

        def reduce(sums: Sequence[jax.Array]) -> list[jax.Array]:
            return [self._agreed(place, array) for place, array in zip(places, sums, strict=True)]

        return self.partitioner.program(reduce, [sums], reduced, keeps_sums=True)

    def _agreed(self, place: int, gradient: jax.Array) -> jax.Array:
        """A gradient; where other stages get it, too, the same bits from whomever they get it."""
        part = self.pipelines.stages[self.stage].parameters[place]
        if part.leaf not in self.pipelines.shared_of_leaf:
            return gradient
        (agreed,) = self.partitioner.agreed([gradient], [self.sums[place]])
        return agreed

    def _loss_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of what the update is told of the loss."""
        first, *others = self.pipelines.loss_stages
        if self.stage != first:
            return []
        return [*self._own_loss_shapes(), *[self._summed_loss_shape] * (2 * len(others))]

    def _own_loss_shapes(self) -> list[jax.ShapeDtypeStruct]:
        total = jax.ShapeDtypeStruct((), self.shapes.sent[0].dtype)
        counts = [self._summed_loss_shape] * self.num_microbatches
        return [*[total] * self.num_microbatches, *counts]

    @property
    def _summed_loss_shape(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), self.pipelines.program.loss_dtype)

    def sum_losses(self) -> Partitioned:
        shapes = self._own_loss_shapes()
        return self.partitioner.program(
            lambda losses: _summed_loss(losses, self.num_microbatches),
            [Argument(shapes, [self.whole] * len(shapes))],
            (self.whole, self.whole),
        )

    def _agreed_parts(
        self,
        arrays: Sequence[Any],
        layouts: Sequence[Layout],
        parts: Sequence[ParameterPart | None],
    ) -> list[Any]:
        """Arrays as the first member has them, but those that each member is told to update."""
        lies = self.placement.annotator(self.stage)
        held = list(arrays)
        told = [
            place
            for place, part in enumerate(parts)
            if part is None or not lies.updates_alone(part)
        ]
        agreed = self.partitioner.agreed([held[i] for i in told], [layouts[i] for i in told])
        for place, array in zip(told, agreed, strict=True):
            held[place] = array
        return held

    @property
    def _sets_back(self) -> bool:
        """Whether the update's last phase makes gradients' sums zeros again.

        Sums that are reduced late, or of other rows, are set back by a program of their own.
        """
        divides = StageSharing(self.pipelines, self.stage).divides
        return self.accumulates and not self.late and not divides

    def update_groups(self) -> dict[str, Partitioned]:
        """The programs of the update's groups; those that compute alike are one."""
        groups = self.pipelines.updates[self.stage].groups
        made: dict[Hashable, Partitioned] = {}
        programs: dict[str, Partitioned] = {}
        for place, group in enumerate(groups):
            run, arguments, outputs = self._update_group(group, place == len(groups) - 1)
            closed = jax.make_jaxpr(run)(*(list(each.shapes) for each in arguments))
            lies = tuple(tuple(each.shardings) for each in arguments)
            # A program that holds arrays is told by more than its text.
            key = (str(closed), lies) if not closed.consts else place
            if key not in made:
                made[key] = self.partitioner.program(run, arguments, outputs)
            programs[f"update_group_{place}"] = made[key]
        return programs

    def _update_group(
        self, group: UpdateGroup, is_last: bool
    ) -> tuple[Callable[..., Any], list[Argument], Any]:
        """The last phase of the update for some of the parameters, in a stage of one member."""
        update = self.pipelines.updates[self.stage]
        last = len(update.phases) - 1
        parameters, gradients, state, _, received = update_inputs(
            self.pipelines, self.stage, last, self.pipelines.messages
        )
        sizes = [len(message) for message in received]
        flat = [shape for message in received for shape in message]
        of_parameters = Argument(parameters, self._layouts(UpdatedParameter), donated=True)
        lies = self._layouts(UpdatedGradient)
        of_gradients = Argument(gradients, [lies[p] for p in update.summed], self._sets_back)
        of_state = Argument(state, self.state, donated=True)
        arguments = [
            of_parameters.chosen(group.parts),
            of_gradients.chosen(group.summed),
            replace(of_state.chosen(update.resident), donated=False),
            of_state.chosen(group.state),
            Argument(flat, [self.whole] * len(flat)),
        ]
        sets_back = {"set_back": True} if self._sets_back else {}

        def run(parameters: Any, gradients: Any, common: Any, state: Any, flat: Any) -> Any:
            vectors = iter(flat)
            told = [[next(vectors) for _ in range(size)] for size in sizes]
            held = [*common, *state]
            new, new_state, metrics, *rest = group.update(
                parameters, gradients, held, (), told, **sets_back
            )
            return new, new_state, *((metrics,) if is_last else ()), *rest

        outputs = (arguments[0].shardings, of_state.chosen(group.returned).shardings)
        outputs += ((self.whole,) * 3,) if is_last else ()
        outputs += (arguments[1].shardings,) if self._sets_back else ()
        return run, arguments, outputs

    def update(self, phase: int, final: bool) -> Partitioned:
        update = self.pipelines.updates[self.stage]
        shapes = update_inputs(self.pipelines, self.stage, phase, self.pipelines.messages)
        parameters, gradients, state, _, received = shapes
        losses, sets_back = self._loss_shapes(), self._sets_back
        updated = self._layouts(UpdatedParameter)
        # Each is updated where its gradient lies, or would lie.
        summed = self._layouts(UpdatedGradient)
        of_gradients = [summed[place] for place in update.summed]
        sizes = [len(message) for message in received]
        pairs = zip(update.state, update.like, strict=True)
        of_state = [None if leaf is None else replace(part, leaf=leaf) for part, leaf in pairs]
        states = [self.state[place] for place in update.state_of(phase)]

        def run(parameters: Any, gradients: Any, state: Any, losses: Any, flat: Any) -> Any:
            loss = _summed_loss(losses, self.num_microbatches) if losses else ()
            messages, rest = [], list(flat)
            for size in sizes:
                messages.append(rest[:size])
                del rest[:size]
            # Each updates its share of what all have, in both branches of the guard.
            own = self.partitioner.brought(parameters, summed)
            arguments = (own, gradients, state, loss, messages)
            if not final:
                return update.phases[phase](*arguments)
            keywords = {"set_back": True} if sets_back else {}
            new, new_state, *rest = update.phases[phase](*arguments, **keywords)
            new = self._agreed_parts(new, summed, update.parts)
            return new, self._agreed_parts(new_state, self.state, of_state), *rest

        flat = [shape for message in received for shape in message]
        outputs: Any = self.whole
        if final:
            outputs = (updated, self.state, (self.whole, self.whole, self.whole))
            outputs = (*outputs, of_gradients) if sets_back else outputs
        # Pipelines that update the same parameters do it by the same program, to the bit.
        several = self.pipelines.num_pipelines > 1
        make = self.partitioner.program if several else self.partitioner.update
        return make(
            run,
            [
                Argument(parameters, updated, donated=final),
                Argument(gradients, of_gradients, donated=final and sets_back),
                Argument(state, states, donated=final),
                Argument(losses, [self.whole] * len(losses)),
                Argument(flat, [self.whole] * len(flat)),
            ],
            outputs,
        )


def _summed_loss(losses: Sequence[jax.Array], num_microbatches: int) -> tuple[Any, Any]:
    """The summed loss and the count, of those of microbatches and then of other pipelines."""
    own, others = losses[: 2 * num_microbatches], losses[2 * num_microbatches :]
    counts = [*own[num_microbatches:], *others[len(others) // 2 :]]
    totals = [total.astype(counts[0].dtype) for total in own[:num_microbatches]]
    totals += others[: len(others) // 2]
    return sum(totals[1:], totals[0]), sum(counts[1:], counts[0])
