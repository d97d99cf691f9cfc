"""A stage's training state: making it, and giving its parts names that no plan changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from hetjax.pipeline.build import PipelinePrograms
from hetjax.pipeline.program.loss import host_array, makes_parameters
from hetjax.pipeline.program.stacked_leaves import StackedLeaves
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.runtime.compilation.compiled_stage import CompiledStage
from hetjax.runtime.compilation.compiling import put_from_host, put_whole
from hetjax.runtime.compilation.made_parameters import made_parameters
from hetjax.runtime.instructions.annotation_table import AnnotatedLeaves
from hetjax.runtime.instructions.buffers import OptimizerState, Parameter
from hetjax.runtime.instructions.placement import Placement


@dataclass(frozen=True, eq=False)
class StageState:
    """The training state of one stage.

    Args:
        parameters: its parameter parts.
        optimizer: its parts of the optimizer's state.
    """

    parameters: list[jax.Array]
    optimizer: list[jax.Array]


def initial_state(
    placement: Placement,
    stage: int,
    member: int,
    compiled: CompiledStage,
    parameters: PyTree | Callable[[], PyTree],
) -> StageState:
    """Make a member's initial state on its own devices.

    Args:
        placement: annotations of all buffers, with the programs.
        stage: which stage.
        member: which member of it; of several each makes all of the stage, and keeps its part.
        compiled: its shardings.
        parameters: pytree of arrays, or a function without arguments that makes it; of a
            function's leaves only those of this stage are computed.

    Returns:
        The state.
    """
    pipelines = placement.pipelines
    parts = pipelines.stages[stage].parameters
    several = len(placement.stage_plan(stage).members) > 1
    whole = NamedSharding(compiled.mesh, PartitionSpec())
    held_so: Sequence[NamedSharding] = [whole] * len(parts) if several else compiled.parameters
    known = (*parts, *_scalars_elsewhere(pipelines, parts))
    known_so = [*held_so, *[whole] * (len(known) - len(parts))]
    values = initial_parameters(known, known_so, parameters, pipelines.program.leaves)
    held = values[: len(parts)]
    update = pipelines.updates[stage]
    state: list[Any] = [None] * len(update.state)
    # What is offloaded is made group by group: all of it may be too much for the devices.
    for places in (update.resident, *(group.state for group in update.groups)):
        state_so = [whole if several else compiled.state[place] for place in places]
        made = _made_state(pipelines, stage, places, known, values, state_so)
        for place, array in zip(places, made, strict=True):
            state[place] = array
    if not several:
        return StageState(held, state)
    return StageState(
        _part_of(held, placement.leaves(stage, Parameter), member, compiled.parameters),
        _part_of(state, placement.leaves(stage, OptimizerState), member, compiled.state),
    )


def _scalars_elsewhere(
    pipelines: PipelinePrograms, parts: Sequence[ParameterPart]
) -> tuple[ParameterPart, ...]:
    """The scalars among the parameters that a stage does not have: of these, too, it has the state.

    Args:
        pipelines: the pipelines' programs.
        parts: what the stage has.
    """
    held = {part.leaf for part in parts}
    return tuple(
        ParameterPart(leaf)
        for leaf, shape in enumerate(pipelines.parameter_shapes)
        if not shape.shape and leaf not in held
    )


def _made_state(
    pipelines: PipelinePrograms,
    stage: int,
    places: Sequence[int],
    known: Sequence[ParameterPart],
    values: Sequence[jax.Array],
    shardings: Sequence[NamedSharding],
) -> list[jax.Array]:
    """Some of the leaves of a stage's initial optimizer state."""

    def make(arrays: Sequence[jax.Array]) -> list[Any]:
        parts = state_parts(pipelines, stage, dict(zip(known, arrays, strict=True)))
        return [parts[place] for place in places]

    made = jax.jit(make, out_shardings=list(shardings))(values)
    # The devices have their room again before the next are made.
    return jax.block_until_ready(made) if places else made


def _part_of(
    arrays: Sequence[jax.Array],
    leaves: AnnotatedLeaves,
    member: int,
    shardings: Sequence[NamedSharding],
) -> list[jax.Array]:
    """What a member keeps of arrays that each of its devices has."""
    found = []
    for array, annotation, sharding in zip(arrays, leaves.annotations, shardings, strict=True):
        region = annotation.regions(array.shape)[member]
        rows = tuple(slice(start, stop) for start, stop in region)
        found.append(put_from_host(host_array(array)[rows], array.dtype, sharding))
    return found


def initial_parameters(
    parts: Sequence[ParameterPart],
    shardings: Sequence[NamedSharding],
    parameters: PyTree | Callable[[], PyTree],
    leaves: StackedLeaves,
) -> list[jax.Array]:
    """A stage's parameter parts, from all parameters or from what makes them.

    Whoever gave arrays of NumPy may change them afterwards.
    """
    if makes_parameters(parameters):
        return made_parameters(parameters, parts, shardings, leaves)
    arrays, places = jax.tree.leaves(parameters), [leaves.places[part.leaf] for part in parts]
    held = {leaf: np.asarray(arrays[leaf]) for leaf, _ in places}
    found = []
    for part, (leaf, row), sharding in zip(parts, places, shardings, strict=True):
        array = part.take(held[leaf] if row is None else held[leaf][row])
        on_cpu = next(iter(sharding.device_set)).platform == "cpu"
        # There JAX would take NumPy's memory over as it is. Its own arrays nobody changes.
        if on_cpu and isinstance(arrays[leaf], np.ndarray):
            array = np.array(array)
        found.append(put_whole(array, sharding))
    return found


def state_parts(
    pipelines: PipelinePrograms, stage: int, known: Mapping[ParameterPart, Any]
) -> list[Any]:
    """The initial optimizer state of a stage, as a traceable function of what it is made of.

    The optimizer sees the whole tree; parameters that are not known are zeros, on which no part of
    this stage's state depends.

    Args:
        pipelines: the pipelines' programs.
        stage: which stage.
        known: its parameters, and the scalars of others.
    """
    whole = {part.leaf: array for part, array in known.items()}
    leaves: list[Any] = [
        whole[leaf] if leaf in whole else jnp.zeros(shape.shape, shape.dtype)
        for leaf, shape in enumerate(pipelines.parameter_shapes)
    ]
    state = pipelines.init_state(leaves)
    return [part.take(state[part.leaf]) for part in pipelines.updates[stage].state]


def whole_parameters(
    pipelines: PipelinePrograms, parts: Iterable[tuple[ParameterPart, np.ndarray]]
) -> PyTree[np.ndarray]:
    """All parameters, put together of the parts that stages hold.

    Args:
        pipelines: the pipelines' programs.
        parts: each part, and what is in it.

    Returns:
        Pytree of arrays, as the loss function takes it.
    """
    held = {part.leaf: array for part, array in parts}
    parameters = [held[place] for place in range(len(pipelines.parameter_shapes))]
    joined = pipelines.program.leaves.join(parameters, np.stack)
    return jax.tree.unflatten(pipelines.parameter_tree, joined)


def put_together(leaves: AnnotatedLeaves, held: Sequence[Sequence[Any]]) -> Iterator[np.ndarray]:
    """Leaves of a stage, of what its members have of them.

    Args:
        leaves: how they lie.
        held: what each member has, leaf by leaf.

    Yields:
        Each leaf, whole.
    """
    for place, (shape, annotation) in enumerate(
        zip(leaves.shapes, leaves.annotations, strict=True)
    ):
        regions = annotation.regions(shape.shape)
        if len(regions) == 1:
            yield np.asarray(held[0][place])
            continue
        whole = np.empty(shape.shape, shape.dtype)
        for region, arrays in zip(regions, held, strict=True):
            whole[tuple(slice(*bounds) for bounds in region)] = np.asarray(arrays[place])
        yield whole


def placed_loss_seed(compiled: CompiledStage, value: float, dtype: Any) -> jax.Array:
    """The cotangent of the summed loss."""
    return put_whole(np.full((), value, dtype), NamedSharding(compiled.mesh, PartitionSpec()))
