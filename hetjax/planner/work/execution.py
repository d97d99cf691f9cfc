"""How a stage runs on its devices, and what they hold of its parameters."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

from hetjax.mesh.host_links import host_share, link_to_host
from hetjax.mesh.kinds import DeviceKind
from hetjax.mesh.links import Link
from hetjax.mesh.subcluster import Subcluster
from hetjax.pipeline.program.loss import accumulator_dtype
from hetjax.pipeline.program.traced_program import Program, num_bytes
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.pipeline.update.state_groups import STATE_GROUPS
from hetjax.planner.plan.parameter_names import told_of
from hetjax.planner.plan.stage_plan import Offloaded, Spec
from hetjax.planner.work.arrays import FloatArray
from hetjax.planner.work.layer_runs import Runs
from hetjax.planner.work.part_kinds import PartKind
from hetjax.planner.work.profile import Way
from hetjax.planner.work.rates import data_axis_link
from hetjax.planner.work.repeating_layers import Repetition
from hetjax.planner.work.run_structure import part_shape
from hetjax.sharding.annotation.rules import REDUCTION_GROUPS, division, parameter_spec, state_spec


@dataclass(frozen=True)
class Execution:
    """How a stage runs on its devices.

    Args:
        kind: the kind of the devices.
        link: the link that carries the submesh's own collectives.
        mesh_shape: sizes of the data and the tensor axis.
        sharding: the sharding rule.
        repeats: what forward steps run again in the backward pass.
        parameters: specifications that override the rule, by parameter path.
        subcluster: the name of the subcluster of the devices.
        shape: nodes of it, and devices in each.
        examples: what share of a microbatch the devices compute; all of it, unless they are one
            member of a stage of several.
        updates: of what share of the parameters they keep the optimizer's state and do the update,
            which the other members do of the rest.
        members: how many members the stage has.
        host_link: where the optimizer's state is offloaded, the link to the hosts' memory.
        host_bytes: what of that memory is a device's share, where anything is offloaded.
        activation_link: where activations are offloaded, the same link.
    """

    kind: DeviceKind
    link: Link
    mesh_shape: tuple[int, int]
    sharding: str = "data"
    repeats: Repetition = "nothing"
    parameters: Mapping[str, Spec] = field(default_factory=dict)
    subcluster: str = ""
    shape: tuple[int, int] = (1, 1)
    examples: float = 1.0
    updates: float = 1.0
    members: int = 1
    host_link: Link | None = None
    host_bytes: float = 0.0
    activation_link: Link | None = None

    def offloaded(self, subcluster: Subcluster) -> Execution:
        """The same with the optimizer's state in the memory of a subcluster's hosts."""
        link, share = link_to_host(subcluster), host_share(subcluster)
        return replace(self, host_link=link, host_bytes=share)

    def offloading_activations(self, subcluster: Subcluster) -> Execution:
        """The same with microbatches' activations in the memory of a subcluster's hosts."""
        link, share = link_to_host(subcluster), host_share(subcluster)
        return replace(self, activation_link=link, host_bytes=share)

    @property
    def offloads(self) -> tuple[Offloaded, ...]:
        """What is offloaded, as a plan has it."""
        activations: tuple[Offloaded, ...] = ("activations",) if self.activation_link else ()
        return (*activations, "optimizer_state") if self.host_link else activations

    @property
    def recompute(self) -> bool:
        """Whether all forward steps run again in the backward pass."""
        return self.repeats == "stage"

    @property
    def example_parts(self) -> float:
        """Into how many parts, each like that of one of its devices, a microbatch is divided."""
        return self.mesh_shape[0] / self.examples if self.examples else math.inf

    @property
    def data_link(self) -> Link:
        """What each ring along its data axis has of the link."""
        return data_axis_link(self.link, self.shape, self.mesh_shape)

    @property
    def way(self) -> Way:
        """What measurements of its passes are kept under."""
        # Where only the optimizer's state is divided, passes are as where nothing is.
        sharding = "data" if self.sharding == "state_sharded" else self.sharding
        return Way(self.subcluster, self.shape, self.mesh_shape, sharding)


class ParameterBytes(NamedTuple):
    """Bytes of the parameters of runs on one device; each field an array over the runs.

    Args:
        whole: of whole parameters.
        trained: of those of them that have gradients.
        held: of parameters, gradients and optimizer state as held.
        updated: of the same as far as the device updates them.
    """

    whole: FloatArray
    trained: FloatArray
    held: FloatArray
    updated: FloatArray


def parameter_bytes(
    program: Program, optimizer_bytes: float, runs: Runs, execution: Execution
) -> ParameterBytes:
    """Bytes on one device.

    Args:
        program: the traced loss function.
        optimizer_bytes: bytes of optimizer state for each element of the parameters that are
            updated.
        runs: runs of layers.
        execution: how they run.

    Returns:
        The bytes.
    """
    if execution.parameters:
        return _parameter_bytes(program, optimizer_bytes, runs, execution)
    # Subclusters have submeshes of the same logical meshes, and recomputation holds no more.
    shape, shared = execution.mesh_shape, (execution.updates, execution.members)
    way = ("parameter bytes", shape, execution.sharding, optimizer_bytes, *shared)
    return runs.once(way, lambda: _parameter_bytes(program, optimizer_bytes, runs, execution))


def offloaded_bytes(
    program: Program, optimizer_bytes: float, runs: Runs, execution: Execution
) -> tuple[FloatArray, FloatArray]:
    """Bytes of the optimizer state of one device, where it is in its host's memory.

    Args:
        program: the traced loss function.
        optimizer_bytes: bytes of optimizer state for each element of the parameters.
        runs: runs of layers.
        execution: how they run.

    Returns:
        Of all of it; and of the largest group that comes to the device at once, as
        `hetjax.pipeline.update.state_groups.state_groups` makes them.
    """

    def found() -> tuple[FloatArray, FloatArray]:
        sizes = part_state_bytes(program, optimizer_bytes, runs, execution)
        total = runs.held(sizes)
        return total, np.maximum(runs.largest(sizes), total / STATE_GROUPS)

    if execution.parameters:
        return found()
    way = ("offloaded bytes", execution.mesh_shape, execution.sharding, optimizer_bytes)
    way = (*way, execution.updates)
    return runs.once(way, found)


def part_state_bytes(
    program: Program, optimizer_bytes: float, runs: Runs, execution: Execution
) -> FloatArray:
    """Bytes of the optimizer state of each parameter part on one device.

    Args:
        program: the traced loss function.
        optimizer_bytes: bytes of optimizer state for each element of the parameters that are
            updated.
        runs: runs of layers, with their parts.
        execution: how they run.
    """
    # The blocks of a model have parameters of few shapes.
    kinds, of_parts = runs.kinds
    known: dict[Hashable, float] = {}
    sizes = []
    for part, place in zip(runs.parts, of_parts, strict=True):
        kind, name = kinds[place], program.parameter_names[part.leaf]
        override = told_of(execution.parameters, name)
        key = (place, override)
        if key not in known:
            mine = execution.updates * kind.state_bytes(optimizer_bytes)
            known[key] = mine / _state_division(kind.shape.shape, override, execution)
        sizes.append(known[key])
    return np.array(sizes)


def _parameter_bytes(
    program: Program, optimizer_bytes: float, runs: Runs, execution: Execution
) -> ParameterBytes:
    # The blocks of a model have parameters of few shapes.
    kinds, of_parts = runs.kinds
    sizes = np.array([_part_bytes(kind, None, optimizer_bytes, execution) for kind in kinds])
    sizes = sizes.reshape(-1, 4)[of_parts]
    if execution.parameters:
        known: dict[Hashable, tuple[float, float, float, float]] = {}
        for place, (part, kind) in enumerate(zip(runs.parts, of_parts, strict=True)):
            override = told_of(execution.parameters, program.parameter_names[part.leaf])
            if override is None:
                continue
            key = (kind, override)
            if key not in known:
                known[key] = _part_bytes(kinds[kind], override, optimizer_bytes, execution)
            sizes[place] = known[key]
    return ParameterBytes(*map(runs.held, np.ascontiguousarray(sizes.T)))


def _part_bytes(
    part: PartKind, override: Spec | None, optimizer_bytes: float, execution: Execution
) -> tuple[float, float, float, float]:
    """Of one part, in the order of `ParameterBytes`."""
    mesh_shape = execution.mesh_shape
    spec = _spec_of(part.shape.shape, override, execution)
    whole = num_bytes(part.shape) / division(spec, (1, mesh_shape[1]))
    trained = whole * part.has_gradient
    held, updated = state_bytes(part, spec, execution.sharding, mesh_shape, optimizer_bytes)
    if execution.members == 1:
        return whole, trained, held, updated
    return whole, trained, *_with_other_members(part, spec, optimizer_bytes, execution)


def _with_other_members(
    part: PartKind, spec: PartitionSpec, optimizer_bytes: float, execution: Execution
) -> tuple[float, float]:
    """What is held and updated of a part that members have whole, and update a share of each."""
    mesh_shape, sharding, mine = execution.mesh_shape, execution.sharding, execution.updates
    held, updated = state_bytes(part, spec, sharding, mesh_shape, optimizer_bytes)
    without_state, _ = state_bytes(part, spec, sharding, mesh_shape, 0.0)
    shape = part.shape
    of_state = division(state_spec(sharding, spec, shape.shape, mesh_shape), mesh_shape)
    summed = _sum_bytes(part)
    # Of one group of gradients there are at once what is given to the others and what they give.
    exchanged = summed / of_state / REDUCTION_GROUPS * (1 - mine + execution.members * mine)
    return without_state + mine * (held - without_state) + exchanged, mine * updated


def _sum_bytes(part: PartKind) -> float:
    """Bytes of the sum of a part's gradients."""
    elements = math.prod(part.shape.shape)
    return elements * accumulator_dtype(part.shape.dtype).itemsize * part.has_gradient


def state_bytes(
    part: PartKind,
    spec: PartitionSpec,
    sharding: str,
    mesh_shape: tuple[int, int],
    optimizer_bytes: float,
) -> tuple[float, float]:
    """Bytes of a parameter, its gradient and its optimizer state on one device.

    Args:
        part: the parameter's shape and dtype, and whether it has a gradient, an update and state.
        spec: how it is divided.
        sharding: the stage's sharding rule.
        mesh_shape: sizes of the data and the tensor axis.
        optimizer_bytes: bytes of optimizer state for each element of all parameters that are
            updated.

    Returns:
        What is held, at the moment of the most; and that of it which the device updates.
    """
    shape, size, summed = part.shape, num_bytes(part.shape), _sum_bytes(part)
    state = part.state_bytes(optimizer_bytes)
    of_state = state_spec(sharding, spec, shape.shape, mesh_shape)
    parts, state_parts = division(spec, mesh_shape), division(of_state, mesh_shape)
    # Whole sums of gradients and the divided ones of a group are there at once.
    scattered = summed / state_parts / REDUCTION_GROUPS if state_parts != parts else 0.0
    held = (size + summed) / parts + state / state_parts + scattered
    return held, (size + summed + state) / state_parts * part.is_updated


def state_division(program: Program, part: ParameterPart, execution: Execution) -> int:
    """In how many parts a stage's devices divide the optimizer's state of a parameter part."""
    override = told_of(execution.parameters, program.parameter_names[part.leaf])
    return _state_division(part_shape(program, part).shape, override, execution)


def spec_of_leaf(
    program: Program, leaf: int, shape: tuple[int, ...], execution: Execution
) -> PartitionSpec:
    """How a stage's devices divide what they have of a parameter leaf.

    Args:
        program: the traced loss function.
        leaf: the leaf.
        shape: the shape of what they have of it.
        execution: how they run.
    """
    return _spec_of(shape, told_of(execution.parameters, program.parameter_names[leaf]), execution)


def _state_division(shape: tuple[int, ...], override: Spec | None, execution: Execution) -> int:
    spec = _spec_of(shape, override, execution)
    of_state = state_spec(execution.sharding, spec, shape, execution.mesh_shape)
    return division(of_state, execution.mesh_shape)


def _spec_of(shape: tuple[int, ...], override: Spec | None, execution: Execution) -> PartitionSpec:
    """How a stage divides a parameter part of a shape."""
    if override is not None:
        return PartitionSpec(*override)
    return parameter_spec(execution.sharding, shape, execution.mesh_shape)
