"""A stage's programs compiled for a worker's devices, once, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from hetjax.runtime.compilation.host_memory import in_host_memory
from hetjax.runtime.compilation.late_sums import typed_mesh
from hetjax.runtime.compilation.partitioners import MeshPartitioner, UnionPartitioner
from hetjax.runtime.compilation.segment_programs import compile_segments
from hetjax.runtime.compilation.stage_programs import (
    evaluation_program,
    missing_programs,
    task_names,
    training_programs,
)
from hetjax.runtime.instructions.buffers import BatchLeaf, OptimizerState, Parameter
from hetjax.runtime.instructions.instruction_list import EVALUATE, all_tasks
from hetjax.runtime.instructions.member_instructions import MemberPart
from hetjax.runtime.instructions.placement import Placement

Compiled = Any
"""A compiled program; each takes sequences of arrays, one an argument."""


@dataclass(frozen=True, eq=False)
class CompiledStage:
    """What a worker runs.

    Args:
        mesh: the worker's mesh: that of its member.
        programs: compiled programs by name.
        parameters: shardings of the parameter parts, and of their gradients.
        state: shardings of the optimizer's state; of what is offloaded, in the hosts' memory.
        batch: shardings of the batch leaves that the stage reads, by leaf.
        zero_gradients: makes the sums of gradients; None where there are none.
    """

    mesh: Mesh
    programs: Mapping[str, Compiled]
    parameters: Sequence[NamedSharding]
    state: Sequence[NamedSharding]
    batch: Mapping[int, NamedSharding]
    zero_gradients: Callable[[], Sequence[jax.Array]] | None = None


class StageCompiler:
    """Compiles what a worker runs.

    Args:
        placement: annotations of all buffers.
        stage: which stage.
        mesh: the worker's mesh.
        part: its part of the stage's programs; None in a stage of one member, which has all.
        member: which member it is.
    """

    def __init__(
        self,
        placement: Placement,
        stage: int,
        mesh: Mesh,
        part: MemberPart | None = None,
        member: int = 0,
    ):
        self._placement, self._stage = placement, stage
        self._mesh = mesh if part is None else typed_mesh(mesh)
        self._part, self._member = part, member

    def stage(self) -> CompiledStage:
        """All that training needs."""
        zeros: Callable[[], Sequence[jax.Array]] | None
        if self._part is None:
            partitioner = MeshPartitioner(self._mesh)
            programs = training_programs(self._placement, self._stage, partitioner)
            zeros = programs.get("zero_gradients")
        else:
            programs = compile_segments(self._part, self._mesh, self._in_use())
            made = [each for name, each in programs.items() if name.startswith("zero_gradients/")]
            zeros = (lambda: made[0]([], [])) if made else None
        leaves = self._placement.pipelines.stages[self._stage].batch
        batch = dict(zip(leaves, self._shardings(BatchLeaf), strict=True))
        parameters, state = self._shardings(Parameter), self._shardings(OptimizerState)
        for place in self._placement.pipelines.updates[self._stage].away:
            state[place] = in_host_memory(state[place])
        return CompiledStage(self._mesh, programs, parameters, state, batch, zeros)

    def _shardings(self, kind: type[Any]) -> list[NamedSharding]:
        leaves = self._placement.leaves(self._stage, kind)
        if self._part is None:
            return leaves.on(self._mesh)
        found = [shape.sharding for shape in leaves.of_member(self._member, self._mesh)]
        assert all(isinstance(each, NamedSharding) for each in found)
        return found

    def with_schedule(self, compiled: CompiledStage) -> CompiledStage:
        """The compiled stage with the programs of the plan's schedule; those it has are kept."""
        known = compiled.programs
        if self._part is None:
            partitioner = MeshPartitioner(self._mesh)
            missing = missing_programs(self._placement, self._stage, partitioner, known)
        else:
            names = {name.rpartition("/")[0] for name in known}
            missing = compile_segments(self._part, self._mesh, self._in_use() - names)
        return replace(compiled, programs={**known, **missing})

    def _in_use(self) -> set[str]:
        """The programs of the stage that the plan's schedule runs, those of evaluation left out."""
        assert self._part is not None
        recomputes = self._placement.pipelines.programs[self._stage].recompute is not None
        unused = {*all_tasks(recomputes)} - {*task_names(self._placement, self._stage)}
        return self._part.programs.keys() - unused - {EVALUATE}

    def with_evaluation(self, compiled: CompiledStage) -> CompiledStage:
        """The compiled stage with its forward pass alone, as ``"evaluate"``."""
        if self._part is None:
            partitioner = MeshPartitioner(self._mesh)
            program = evaluation_program(self._placement, self._stage, partitioner)
            programs = {EVALUATE: program}
        else:
            programs = compile_segments(self._part, self._mesh, {EVALUATE})
        return replace(compiled, programs={**compiled.programs, **programs})


def divided_programs(placement: Placement, stage: int) -> dict[str, Any]:
    """The programs of a stage of several members as segments and moves.

    Args:
        placement: annotations of all buffers.
        stage: which stage.

    Returns:
        The programs of training and evaluation, by name; none in a stage of one member.
    """
    if len(placement.stage_plan(stage).members) == 1:
        return {}
    partitioner = UnionPartitioner(placement.annotator(stage).whole)
    recomputes = placement.pipelines.programs[stage].recompute is not None
    programs = training_programs(placement, stage, partitioner, all_tasks(recomputes))
    return {**programs, EVALUATE: evaluation_program(placement, stage, partitioner)}
