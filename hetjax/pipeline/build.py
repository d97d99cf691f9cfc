"""From a traced loss, an optimizer and stage boundaries to everything that pipelines compute."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.pipeline.program.loss import abstract, accumulator_dtype, path_names
from hetjax.pipeline.program.loss_seed import loss_seed
from hetjax.pipeline.program.stacked_leaves import StackedLeaves
from hetjax.pipeline.program.traced_program import FlatJaxpr, Program
from hetjax.pipeline.stages.backward import Shapes, StagePrograms, differentiate
from hetjax.pipeline.stages.cutting import ParameterPart, Stage, cut
from hetjax.pipeline.stages.holders import Shared, updated_parts, with_updates
from hetjax.pipeline.stages.recomputing import Run
from hetjax.pipeline.stages.traced_stage import Tracer, trace_stage
from hetjax.pipeline.update.divided_update import StageUpdate, divide_update
from hetjax.pipeline.update.initial_state import InitialState
from hetjax.pipeline.update.settled_state import widening_init
from hetjax.pipeline.update.traced_update import divided_trace


@dataclass(frozen=True)
class PipelineCut:
    """How one pipeline cuts the program.

    Args:
        boundaries: positions where stages begin, and the program's end.
        recompute: for each stage, whether it recomputes its forward pass.
        num_microbatches: how many microbatches a step has.
        recompute_runs: for each stage, runs of positions that keep only their inputs and are made
            again in the backward pass; where empty, none on any.
    """

    boundaries: tuple[int, ...]
    recompute: tuple[bool, ...]
    num_microbatches: int
    recompute_runs: tuple[tuple[Run, ...], ...] = ()
    stream_state: tuple[bool, ...] = ()


@dataclass(frozen=True, eq=False)
class PipelinePrograms:
    """All that the pipelines of a plan compute, before any device is known.

    The stages of all pipelines are counted through: those of the second follow those of the first.

    Args:
        traced: the traced loss function, at the microbatch's size of each pipeline.
        first_stages: for each pipeline its first stage, and the number of all stages.
        stages: what each stage holds and passes on.
        programs: each stage's forward and backward functions.
        shared: who holds and who updates the parameters that several stages hold; without those
            that no stage updates.
        updates: each stage's share of the optimizer's update.
        parameter_tree: structure of the parameters, of whose leaves `Program.leaves` says which
            count as rows.
        parameter_shapes: shape of every parameter, whole.
        state_tree: structure of the optimizer's state.
        state_leaves: which of its leaves count as rows.
        state_shapes: shape of everything that they count as, whole.
        messages: for each phase of the update, for each stage, the shapes of what it tells others.
        init_state: from all parameters to all of the optimizer's initial state, a list of each.
        initial: its trace, from the leaves of the parameters' pytree to those of the state's.
        update: the trace of the whole update, as one device computes it.
        loss_seed: the cotangent of the summed loss; gradients are summed times this.
    """

    traced: tuple[Program, ...]
    first_stages: tuple[int, ...]
    stages: tuple[Stage, ...]
    programs: tuple[StagePrograms, ...]
    shared: Shared
    updates: tuple[StageUpdate, ...]
    parameter_tree: Any
    parameter_shapes: Shapes
    state_tree: Any
    state_leaves: StackedLeaves
    state_shapes: Shapes
    messages: tuple[tuple[Shapes, ...], ...]
    init_state: Callable[[Sequence[Any]], list[Any]]
    initial: _compat.ClosedJaxpr
    update: FlatJaxpr
    loss_seed: float

    @property
    def program(self) -> Program:
        """The traced loss function, at the microbatch's size of the first pipeline."""
        return self.traced[0]

    @property
    def num_stages(self) -> int:
        """How many stages all pipelines have."""
        return len(self.stages)

    @property
    def num_pipelines(self) -> int:
        """How many pipelines there are."""
        return len(self.first_stages) - 1

    def pipeline_of(self, stage: int) -> int:
        """The pipeline that a stage is in."""
        return bisect.bisect_right(self.first_stages, stage) - 1

    def trains(self, part: ParameterPart) -> bool:
        """Whether a part of a parameter leaf has a gradient."""
        return part.leaf not in self.program.frozen.without_gradient

    @property
    def first_pipeline(self) -> tuple[Stage, ...]:
        """The stages of the first pipeline, which hold all of the model."""
        return self.stages[: self.first_stages[1]]

    def is_first(self, stage: int) -> bool:
        """Whether a stage is the first of its pipeline."""
        return stage in self.first_stages

    def is_last(self, stage: int) -> bool:
        """Whether a stage is the last of its pipeline, which computes the loss."""
        return stage + 1 in self.first_stages

    @property
    def loss_stages(self) -> tuple[int, ...]:
        """The last stage of each pipeline; the first of them adds up the loss of all."""
        return tuple(end - 1 for end in self.first_stages[1:])

    def part_shape(self, part: ParameterPart) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a part of a parameter leaf."""
        whole = self.parameter_shapes[part.leaf]
        return jax.ShapeDtypeStruct(part.shape(whole.shape), whole.dtype)

    def state_shape(self, part: ParameterPart) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a part of a leaf of the optimizer's state."""
        whole = self.state_shapes[part.leaf]
        return jax.ShapeDtypeStruct(part.shape(whole.shape), whole.dtype)

    @functools.cached_property
    def state_names(self) -> tuple[str, ...]:
        """The paths of the optimizer's state."""
        places = jax.tree.unflatten(self.state_tree, range(self.state_tree.num_leaves))
        return self.state_leaves.split_names(path_names(places))

    @functools.cached_property
    def shared_of_leaf(self) -> Mapping[int, tuple[ParameterPart, ...]]:
        """The parts of `shared` by their leaf."""
        by_leaf = itertools.groupby(self.shared, key=lambda part: part.leaf)
        return {leaf: tuple(parts) for leaf, parts in by_leaf}


def build_pipelines(
    programs: Sequence[Program],
    parameters: PyTree,
    optimizer: optax.GradientTransformation,
    cuts: Sequence[PipelineCut],
    *,
    divide_state: bool = False,
    tracer_of: Callable[[PipelinePrograms, int], Tracer] | None = None,
    adapted: Callable[[PipelinePrograms, int], Stage] | None = None,
) -> PipelinePrograms:
    """Cut, differentiate and divide: all programs of some pipelines.

    Args:
        programs: the loss function, traced at the size of each pipeline's microbatches.
        parameters: pytree of arrays or shapes.
        optimizer: an Optax transformation.
        cuts: how each pipeline cuts it.
        divide_state: whether stages that hold the same parameters divide the optimizer's state
            among them.
        tracer_of: from the pipelines as they are cut, and a stage, to what traces the stage; None:
            `hetjax.pipeline.stages.traced_stage.trace_stage` traces all.
        adapted: the same, to the stage as its members compute it; None: as it was cut.

    Returns:
        The pipelines' programs.

    Raises:
        InputError: the optimizer cannot be divided so.
    """
    pipelines = cut_pipelines(programs, parameters, optimizer, cuts, divide_state=divide_state)
    if adapted is not None:
        stages = tuple(adapted(pipelines, stage) for stage in range(pipelines.num_stages))
        pipelines = replace(pipelines, stages=stages)
    differentiated: list[StagePrograms] = []
    firsts = itertools.pairwise(pipelines.first_stages)
    for program, each, (first, end) in zip(programs, cuts, firsts, strict=True):
        shapes = [program.avals[value] for value in program.parameters]
        tracers = [
            trace_stage if tracer_of is None else tracer_of(pipelines, stage)
            for stage in range(first, end)
        ]
        stages = pipelines.stages[first:end]
        differentiated += _differentiate(program, stages, shapes, each, tracers)
    return _with_messages(replace(pipelines, programs=tuple(differentiated)))


def cut_pipelines(
    programs: Sequence[Program],
    parameters: PyTree,
    optimizer: optax.GradientTransformation,
    cuts: Sequence[PipelineCut],
    *,
    divide_state: bool = False,
) -> PipelinePrograms:
    """Cut and divide alone: what every stage holds, without its programs.

    Args:
        programs: the loss function, traced at the size of each pipeline's microbatches.
        parameters: pytree of arrays or shapes.
        optimizer: an Optax transformation.
        cuts: how each pipeline cuts it.
        divide_state: whether stages that hold the same parameters divide the optimizer's state
            among them.

    Returns:
        The pipelines, with neither programs nor messages.

    Raises:
        InputError: the optimizer cannot be divided so, or a value that crosses has a dtype of less
            than a byte.
    """
    leaves, tree = jax.tree.flatten(abstract(parameters))
    stages: list[Stage] = []
    first_stages = [0]
    for traced, each in zip(programs, cuts, strict=True):
        found = cut(traced, each.boundaries)
        _check_crossing(traced, found)
        stages += [replace(stage, index=first_stages[-1] + stage.index) for stage in found]
        first_stages.append(len(stages))

    def unflatten(values: Sequence[Any]) -> PyTree:
        return jax.tree.unflatten(tree, values)

    program = programs[0]
    frozen, shapes = program.frozen, program.leaves.split_shapes(leaves)
    held = [
        [part for part in stage.parameters if part.leaf not in frozen.without_update]
        for stage in stages
    ]
    shared = with_updates(held, [tuple(each.shape) for each in shapes], divided=divide_state)
    seed = loss_seed(programs, [each.num_microbatches for each in cuts])
    updates = divide_update(
        optimizer,
        leaves,
        [updated_parts(parts, shared, stage) for stage, parts in enumerate(held)],
        program.parameter_names,
        unflatten,
        program.loss_dtype,
        first_pipeline=first_stages[1],
        frozen=frozen,
        streamed=[
            first + stage
            for first, each in zip(first_stages, cuts, strict=False)
            for stage, is_streamed in enumerate(each.stream_state)
            if is_streamed
        ],
        leaves=program.leaves,
        loss_seed=seed,
    )
    by_rows = divided_trace(
        optimizer, leaves, unflatten, program.loss_dtype, frozen, program.leaves, seed
    )
    state_leaves = by_rows.state
    of_state = by_rows.flat.inputs[-2 - len(state_leaves.places) : -2]
    dtypes = state_leaves.join(
        [by_rows.flat.avals[value].dtype for value in of_state], stack=lambda rows: rows[0]
    )
    make_state = widening_init(optimizer, unflatten(leaves), dtypes)
    initial = InitialState.of(make_state, unflatten(leaves))

    names = path_names(parameters)
    places, state_places = program.leaves.places, state_leaves.places
    # Of scalars all stages have the state.
    scalars = {leaf for (leaf, _), each in zip(places, shapes, strict=True) if not each.shape}
    for stage, update in zip(stages, updates, strict=True):
        known = scalars | {places[part.leaf][0] for part in stage.parameters}
        for part in update.state:
            initial.check(state_places[part.leaf][0], known, names)

    def init_state(values: Sequence[Any]) -> list[Any]:
        made = make_state(unflatten(program.leaves.join(values, jnp.stack)))
        return state_leaves.split(jax.tree.leaves(made))

    return PipelinePrograms(
        traced=tuple(programs),
        first_stages=tuple(first_stages),
        stages=tuple(stages),
        programs=(),
        shared=shared,
        updates=updates,
        parameter_tree=tree,
        parameter_shapes=tuple(shapes),
        state_tree=jax.tree.structure(initial.shapes),
        state_leaves=state_leaves,
        state_shapes=tuple(state_leaves.split_shapes(jax.tree.leaves(initial.shapes))),
        messages=(),
        init_state=init_state,
        initial=initial.traced,
        update=by_rows.flat,
        loss_seed=seed,
    )


def _check_crossing(program: Program, stages: Sequence[Stage]) -> None:
    """Check that JAX can move what stages send: it loses how parts of bytes are packed."""
    for stage in stages:
        for value in stage.sends:
            aval = program.avals[value]
            if not _is_less_than_a_byte(aval.dtype):
                continue
            made = next(step for step in program.steps if value in step.outputs)
            where = "" if made.equation is None else f" at {_compat.source_line(made.equation)}"
            raise InputError(
                f"plan: the value {aval.dtype}{list(aval.shape)} that {made.name!r} makes{where} "
                f"crosses from stage {stage.index} to the next; allowed: dtypes of whole bytes. "
                f"Cast it to int8 where it is made, or cut elsewhere"
            )


def _is_less_than_a_byte(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits < 8
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8


def _differentiate(
    program: Program,
    stages: Sequence[Stage],
    shapes: Sequence[jax.ShapeDtypeStruct],
    each: PipelineCut,
    tracers: Sequence[Tracer],
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
    for i, stage in reversed(list(enumerate(stages))):
        programs.append(
            differentiate(
                stage,
                parts[i],
                batch[i],
                received[i],
                is_last=i == len(stages) - 1,
                cotangents_in=cotangents,
                recompute=each.recompute[i],
                recompute_runs=each.recompute_runs[i] if each.recompute_runs else (),
                accumulate=each.num_microbatches > 1,
                tracer=tracers[i],
            )
        )
        cotangents = programs[-1].cotangents_out
    return tuple(reversed(programs))


def _with_messages(pipelines: PipelinePrograms) -> PipelinePrograms:
    shapes: list[tuple[Shapes, ...]] = []
    # The last phase has none.
    for phase in range(len(pipelines.updates[0].phases) - 1):
        results = [
            jax.eval_shape(
                pipelines.updates[stage].phases[phase],
                *update_inputs(pipelines, stage, phase, shapes),
            )
            for stage in range(pipelines.num_stages)
        ]
        shapes.append(tuple(tuple(result) for result in results))
    return replace(pipelines, messages=tuple(shapes))


def update_inputs(
    pipelines: PipelinePrograms, stage: int, phase: int, messages: Sequence[Sequence[Shapes]]
) -> tuple[Any, ...]:
    """Shapes of what a phase of the update takes.

    Args:
        pipelines: the pipelines' programs.
        stage: which stage.
        phase: which phase.
        messages: the shapes of the messages of the phases before, by phase and stage.

    Returns:
        Shapes of (parameters, gradients, state, loss, messages).
    """
    update = pipelines.updates[stage]
    parameters = [pipelines.part_shape(part) for part in update.parts]
    gradients = [
        jax.ShapeDtypeStruct(parameters[p].shape, accumulator_dtype(parameters[p].dtype))
        for p in update.summed
    ]
    state = [pipelines.state_shape(update.state[place]) for place in update.state_of(phase)]
    scalar = jax.ShapeDtypeStruct((), pipelines.program.loss_dtype)
    loss = (scalar, scalar) if stage == pipelines.loss_stages[0] else ()
    received = [
        list(messages[earlier][sender])
        for earlier in range(phase)
        for sender in update.receives[earlier]
    ]
    received += [list(of_phase[stage]) for of_phase in messages[:phase] if of_phase[stage]]
    return parameters, gradients, state, loss, received
