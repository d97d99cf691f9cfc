"""A stage's programs compiled for its mesh, once, before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.pipeline.build import update_inputs
from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.runtime.compilation.compiling import Argument, compile_program
from hetjax.runtime.compilation.late_sums import compile_deduced, sharding_on
from hetjax.runtime.compilation.sharing_programs import SharingPrograms
from hetjax.runtime.compilation.task_programs import Compiled, TaskCompiler
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


@dataclass(frozen=True, eq=False)
class CompiledStage:
    """What a worker runs.

    Args:
        mesh: the stage's mesh.
        programs: compiled programs by name; each takes sequences of arrays, one an argument.
        parameters: shardings of the parameter parts and of their gradients.
        state: shardings of the optimizer's state.
        batch: shardings of the batch leaves that the stage reads, by leaf.
    """

    mesh: Mesh
    programs: Mapping[str, Compiled]
    parameters: Sequence[NamedSharding]
    state: Sequence[NamedSharding]
    batch: Mapping[int, NamedSharding]


def compile_stage(placement: Placement, stage: int, mesh: Mesh) -> CompiledStage:
    """Compile the programs that a stage's training instructions name.

    Args:
        placement: shardings of all buffers.
        stage: which stage.
        mesh: its mesh.

    Returns:
        The compiled stage.
    """
    compiler = _Compiler(placement, stage, mesh)
    programs = dict(compiler.programs(placement.pipeline_plan(stage).schedule))
    programs |= SharingPrograms(placement, stage, mesh).programs()
    if stage in placement.pipelines.loss_stages[1:]:
        programs["sum_losses"] = compiler.sum_losses()
    if compiler.accumulates:
        programs["zero_gradients"] = compiler.zero_gradients()
    if compiler.late:
        groups = reduction_groups(placement, stage)
        programs |= {
            f"reduce_gradients_{group}": compiler.reduce_gradients(places)
            for group, places in enumerate(groups)
        }
    update = placement.pipelines.updates[stage]
    for phase in range(len(update.phases)):
        final = phase == len(update.phases) - 1
        if final or update.sends[phase]:
            programs[f"update_{phase}"] = compiler.update(phase, final)
    leaves = placement.pipelines.stages[stage].batch
    batch = dict(zip(leaves, compiler.batch, strict=True))
    return CompiledStage(mesh, programs, compiler.parameters, compiler.state, batch)


def with_schedule(compiled: CompiledStage, placement: Placement, stage: int) -> CompiledStage:
    """The compiled stage with the programs of another schedule; those that it has are kept.

    Args:
        compiled: the stage.
        placement: with the new schedule in its plan.
        stage: which stage.

    Returns:
        The stage, with what was missing compiled.
    """
    compiler = _Compiler(placement, stage, compiled.mesh)
    schedule = placement.pipeline_plan(stage).schedule
    missing = compiler.programs(schedule, known=compiled.programs)
    return replace(compiled, programs={**compiled.programs, **dict(missing)})


def compile_evaluation(placement: Placement, stage: int, mesh: Mesh) -> Compiled:
    """Compile a stage's forward pass alone, which keeps nothing for a backward pass."""
    return _Compiler(placement, stage, mesh).evaluation()


class _Compiler:
    def __init__(self, placement: Placement, stage: int, mesh: Mesh):
        self.placement, self.stage, self.mesh = placement, stage, mesh
        self.pipelines = placement.pipelines
        self.shapes = self.pipelines.programs[stage]
        self.whole = NamedSharding(mesh, PartitionSpec())
        self.parameters = self._shardings(Parameter)
        self.state = self._shardings(OptimizerState)
        self.batch = self._shardings(BatchLeaf)
        self.received = self._shardings(ReceivedValue)
        is_last = self.pipelines.is_last(stage)
        self.sent = [self.whole] * len(self.shapes.sent) if is_last else self._shardings(SentValue)
        self.num_microbatches = placement.pipeline_plan(stage).num_microbatches
        self.accumulates = self.num_microbatches > 1
        sums = placement.leaves(stage, Gradient).annotations
        self.late = any(annotation.is_partial for annotation in sums)
        self.sums = [sharding_on(mesh, annotation) for annotation in sums]
        self.tasks = TaskCompiler(
            self.shapes,
            mesh,
            self.parameters,
            self.batch,
            self.received,
            self.sent,
            self.sums,
            self.accumulates,
            self.late,
        )

    def programs(
        self, schedule: Schedule, known: Mapping[str, Compiled] | None = None
    ) -> Iterator[tuple[str, Compiled]]:
        """The programs of a schedule's tasks, but for those that are known."""
        recomputes = self.shapes.recompute is not None
        names = stage_programs(schedule, self.placement.place(self.stage), recomputes)
        return self.tasks.programs(names, known)

    def _shardings(self, kind: type[Buffer]) -> list[NamedSharding]:
        return self.placement.leaves(self.stage, kind).on(self.mesh)

    def evaluation(self) -> Compiled:
        shapes = self.shapes
        return compile_program(
            self.pipelines.stages[self.stage].function,
            [
                Argument(shapes.parameters, self.parameters),
                Argument(shapes.batch, self.batch),
                Argument(shapes.received, self.received),
            ],
            self.sent,
        )

    def zero_gradients(self) -> Compiled:
        def zeros() -> list[jax.Array]:
            return [jnp.zeros(shape.shape, shape.dtype) for shape in self.tasks.gradient_shapes]

        if not self.late:
            return compile_program(zeros, (), self.sums)
        return compile_deduced(zeros, (), self.sums, self.mesh)

    def reduce_gradients(self, places: Sequence[int]) -> Compiled:
        """Those of these gradients that were summed late, reduced; the others as they are."""
        everything = self._shardings(ReducedGradient)
        reduced = [everything[place] for place in places]
        # What comes out divided has no use for the memory of what was whole.
        donated = reduced == [self.parameters[place] for place in places]
        sums = Argument(self.tasks.gradient_shapes, self.sums, donated).chosen(places)
        return compile_deduced(list, [sums], reduced, self.mesh)

    def _loss_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of what the update is told of the loss."""
        first, *others = self.pipelines.loss_stages
        if self.stage != first:
            return []
        return [*self._own_loss_shapes(), *[_SCALAR] * (2 * len(others))]

    def _own_loss_shapes(self) -> list[jax.ShapeDtypeStruct]:
        total = jax.ShapeDtypeStruct((), self.shapes.sent[0].dtype)
        return [*[total] * self.num_microbatches, *[_SCALAR] * self.num_microbatches]

    def sum_losses(self) -> Compiled:
        shapes = self._own_loss_shapes()
        return compile_program(
            lambda losses: _summed_loss(losses, self.num_microbatches),
            [Argument(shapes, [self.whole] * len(shapes))],
            (self.whole, self.whole),
        )

    def update(self, phase: int, final: bool) -> Compiled:
        update = self.pipelines.updates[self.stage]
        shapes = update_inputs(self.pipelines, self.stage, phase, self.pipelines.messages)
        parameters, gradients, state, _, received = shapes
        losses = self._loss_shapes()
        # Sums that are reduced late, or of other rows, are set back by a program of their own.
        divides = StageSharing(self.pipelines, self.stage).divides
        sets_back = self.accumulates and not self.late and not divides
        updated = self._shardings(UpdatedParameter)
        summed = self._shardings(UpdatedGradient)
        sizes = [len(message) for message in received]

        def run(parameters: Any, gradients: Any, state: Any, losses: Any, flat: Any) -> Any:
            loss = _summed_loss(losses, self.num_microbatches) if losses else ()
            messages, rest = [], list(flat)
            for size in sizes:
                messages.append(rest[:size])
                del rest[:size]
            arguments = (parameters, gradients, state, loss, messages)
            if final and sets_back:
                return update.phases[phase](*arguments, set_back=True)
            return update.phases[phase](*arguments)

        flat = [shape for message in received for shape in message]
        outputs: Any = self.whole
        if final:
            outputs = (updated, self.state, (self.whole, self.whole, self.whole))
            outputs = (*outputs, summed) if sets_back else outputs
        return compile_program(
            run,
            [
                Argument(parameters, updated, donated=final),
                Argument(gradients, summed, donated=final and sets_back),
                Argument(state, self.state, donated=final),
                Argument(losses, [self.whole] * len(losses)),
                Argument(flat, [self.whole] * len(flat)),
            ],
            outputs,
        )


_SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def _summed_loss(losses: Sequence[jax.Array], num_microbatches: int) -> tuple[Any, Any]:
    """The summed loss and the count, of those of microbatches and then of other pipelines."""
    own, others = losses[: 2 * num_microbatches], losses[2 * num_microbatches :]
    totals = [total.astype(jnp.float32) for total in own[:num_microbatches]]
    totals += others[: len(others) // 2]
    counts = [*own[num_microbatches:], *others[len(others) // 2 :]]
    return sum(totals[1:], totals[0]), sum(counts[1:], counts[0])
