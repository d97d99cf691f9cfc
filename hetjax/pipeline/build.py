"""From a traced loss, an optimizer and stage boundaries to everything that a pipeline computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from hetjax.pipeline.backward import StagePrograms, accumulator_dtype, differentiate
from hetjax.pipeline.program import Program, abstract
from hetjax.pipeline.stages import ParameterPart, Stage, cut
from hetjax.pipeline.update import StageUpdate, divide_update

Shapes = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True, eq=False)
class PipelineProgram:
    """All that a pipeline computes, before any device is known.

    Args:
        program: the traced loss function.
        stages: what each stage holds and passes on.
        programs: each stage's forward and backward functions.
        updates: each stage's share of the optimizer's update.
        parameter_tree: structure of the parameters.
        parameter_shapes: shape of every parameter leaf, whole.
        state_tree: structure of the optimizer's state.
        state_shapes: shape of every leaf of the optimizer's state, whole.
        messages: for each phase of the update, for each stage, the shapes of what it tells others.
        init_state: the optimizer's ``init``.
    """

    program: Program
    stages: tuple[Stage, ...]
    programs: tuple[StagePrograms, ...]
    updates: tuple[StageUpdate, ...]
    parameter_tree: Any
    parameter_shapes: Shapes
    state_tree: Any
    state_shapes: Shapes
    messages: tuple[tuple[Shapes, ...], ...]
    init_state: Callable[[PyTree], Any]

    @property
    def num_stages(self) -> int:
        """How many stages the pipeline has."""
        return len(self.stages)

    def part_shape(self, part: ParameterPart) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a part of a parameter leaf."""
        whole = self.parameter_shapes[part.leaf]
        return jax.ShapeDtypeStruct(part.shape(whole.shape), whole.dtype)

    def state_shape(self, part: ParameterPart) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a part of a leaf of the optimizer's state."""
        whole = self.state_shapes[part.leaf]
        return jax.ShapeDtypeStruct(part.shape(whole.shape), whole.dtype)

    def holders(self, leaf: int) -> tuple[int, ...]:
        """The stages that hold a parameter leaf whole."""
        return tuple(
            stage.index
            for stage in self.stages
            if any(part.leaf == leaf and part.stop is None for part in stage.parameters)
        )

    @property
    def tied(self) -> tuple[int, ...]:
        """The parameter leaves that several stages hold whole, whose gradients are summed."""
        leaves = range(len(self.parameter_shapes))
        return tuple(leaf for leaf in leaves if len(self.holders(leaf)) > 1)


def build_pipeline(
    program: Program,
    parameters: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    boundaries: Sequence[int],
    recompute: Sequence[bool],
    accumulate: bool = True,
) -> PipelineProgram:
    """Cut, differentiate and divide: all programs of a pipeline.

    Args:
        program: the loss function, traced at the microbatch's size.
        parameters: pytree of arrays or shapes.
        optimizer: an Optax transformation.
        boundaries: positions where stages begin, and the program's end.
        recompute: for each stage, whether it recomputes its forward pass.
        accumulate: whether a step has several microbatches.

    Returns:
        The pipeline's programs.

    Raises:
        InputError: the optimizer cannot be divided so.
    """
    stages = cut(program, boundaries)
    leaves, tree = jax.tree.flatten(abstract(parameters))
    shapes = [program.avals[value] for value in program.parameters]
    programs = _differentiate(program, stages, shapes, recompute, accumulate)
    parts = [stage.parameters for stage in stages]

    def unflatten(values: Sequence[Any]) -> PyTree:
        return jax.tree.unflatten(tree, values)

    updates = divide_update(optimizer, leaves, parts, program.parameter_names, unflatten)
    state = jax.eval_shape(optimizer.init, unflatten(leaves))
    pipeline = PipelineProgram(
        program=program,
        stages=stages,
        programs=programs,
        updates=updates,
        parameter_tree=tree,
        parameter_shapes=tuple(leaves),
        state_tree=jax.tree.structure(state),
        state_shapes=tuple(jax.tree.leaves(state)),
        messages=(),
        init_state=optimizer.init,
    )
    return _with_messages(pipeline)


def _differentiate(
    program: Program,
    stages: Sequence[Stage],
    shapes: Sequence[jax.ShapeDtypeStruct],
    recompute: Sequence[bool],
    accumulate: bool,
) -> tuple[StagePrograms, ...]:
    parts = [
        [jax.ShapeDtypeStruct(p.shape(shapes[p.leaf].shape), shapes[p.leaf].dtype) for p in held]
        for held in (stage.parameters for stage in stages)
    ]
    batch = [[program.avals[program.batch[leaf]] for leaf in stage.batch] for stage in stages]
    received: list[list[jax.ShapeDtypeStruct]] = [[]]
    for stage, held, leaves in zip(stages[:-1], parts, batch, strict=False):
        received.append(jax.eval_shape(stage.function, held, leaves, received[-1]))
    programs: list[StagePrograms] = []
    cotangents: tuple[int, ...] = ()
    for stage in reversed(stages):
        i = stage.index
        programs.append(
            differentiate(
                stage,
                parts[i],
                batch[i],
                received[i],
                is_last=i == len(stages) - 1,
                cotangents_in=cotangents,
                recompute=recompute[i],
                accumulate=accumulate,
            )
        )
        cotangents = programs[-1].cotangents_out
    return tuple(reversed(programs))


def _with_messages(pipeline: PipelineProgram) -> PipelineProgram:
    shapes: list[tuple[Shapes, ...]] = []
    for phase in range(len(pipeline.updates[0].phases)):
        results = [
            jax.eval_shape(
                pipeline.updates[stage].phases[phase],
                *update_inputs(pipeline, stage, phase, shapes),
            )
            for stage in range(pipeline.num_stages)
        ]
        if phase < len(pipeline.updates[0].phases) - 1:
            shapes.append(tuple(tuple(result) for result in results))
    return replace(pipeline, messages=tuple(shapes))


def update_inputs(
    pipeline: PipelineProgram, stage: int, phase: int, messages: Sequence[Sequence[Shapes]]
) -> tuple[Any, ...]:
    """Shapes of what a phase of the update takes.

    Args:
        pipeline: the pipeline.
        stage: which stage.
        phase: which phase.
        messages: the shapes of the messages of the phases before, by phase and stage.

    Returns:
        Shapes of (parameters, gradients, state, loss, messages).
    """
    update = pipeline.updates[stage]
    parameters = [pipeline.part_shape(part) for part in pipeline.stages[stage].parameters]
    gradients = [jax.ShapeDtypeStruct(p.shape, accumulator_dtype(p.dtype)) for p in parameters]
    state = [pipeline.state_shape(part) for part in update.state]
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    loss = (scalar, scalar) if stage == pipeline.num_stages - 1 else ()
    received = [
        list(messages[earlier][sender])
        for earlier in range(phase)
        for sender in update.receives[earlier]
    ]
    return parameters, gradients, state, loss, received
