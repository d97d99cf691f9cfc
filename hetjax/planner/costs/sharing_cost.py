"""What it costs that several stages hold the same parameters, and what dividing the state saves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax

from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.pipeline.program.loss import accumulator_dtype
from hetjax.pipeline.program.traced_program import Program, num_bytes
from hetjax.pipeline.stages.cutting import ParameterPart, cut
from hetjax.pipeline.stages.holders import Holders, Shared, updated_parts, with_updates
from hetjax.planner.costs.network_cards import is_in_one_node
from hetjax.planner.plan.plan import Plan
from hetjax.planner.work.execution import Execution, state_division
from hetjax.planner.work.stage_work import part_shape


class ExchangedBytes(NamedTuple):
    """What stages tell each other of a parameter.

    Args:
        gradient: bytes of its gradient, summed over microbatches.
        value: bytes of itself.
    """

    gradient: int
    value: int

    @classmethod
    def of(cls, shape: jax.ShapeDtypeStruct) -> ExchangedBytes:
        """Those of a parameter of some shape."""
        summed = math.prod(shape.shape) * accumulator_dtype(shape.dtype).itemsize
        return cls(summed, num_bytes(shape))


@dataclass(frozen=True)
class SharedParameters:
    """Which stages of a plan hold and update the same parameters.

    Args:
        program: the program.
        held: for each stage the parameter parts that it holds, but those without an update.
        shared: who holds and updates those that several hold.
    """

    program: Program
    held: Sequence[Sequence[ParameterPart]]
    shared: Shared

    @classmethod
    def of(cls, plan: Plan, program: Program) -> SharedParameters:
        """Those of a plan for a program."""
        frozen = program.frozen.without_update
        held = [
            [part for part in stage.parameters if part.leaf not in frozen]
            for pipeline in plan.pipelines
            for stage in cut(program, plan.boundaries(pipeline))
        ]
        shapes = [tuple(program.avals[value].shape) for value in program.parameters]
        return cls(program, held, with_updates(held, shapes, divided=plan.shard_optimizer_state))

    def elements(self, part: ParameterPart) -> int:
        """How many elements a part has."""
        return math.prod(part_shape(self.program, part).shape)

    def exchanged(self, part: ParameterPart) -> ExchangedBytes:
        """What stages tell each other of a part."""
        return ExchangedBytes.of(part_shape(self.program, part))

    def saved_bytes(self, stage: int, optimizer_bytes: float, execution: Execution) -> float:
        """What a device of a stage need not hold, since other stages update some of its parameters.

        Args:
            stage: which stage.
            optimizer_bytes: of the optimizer's state, for each element of a parameter.
            execution: how the stage runs.

        Returns:
            Bytes.
        """
        parts = self.held[stage]
        updated = {part.leaf: part for part in updated_parts(parts, self.shared, stage)}
        saved = 0.0
        for part in parts:
            if updated.get(part.leaf) == part:
                continue
            kept = self.elements(updated[part.leaf]) if part.leaf in updated else 0
            elements = self.elements(part) - kept
            saved += elements * optimizer_bytes / state_division(self.program, part, execution)
        return saved

    def undivided_bytes(self, stage: int, optimizer_bytes: float, execution: Execution) -> float:
        """What a member holds of the optimizer's state beyond its share.

        What other stages hold too is not divided among the members of a stage.

        Args:
            stage: which stage.
            optimizer_bytes: of the optimizer's state, for each element of a parameter.
            execution: how the member runs its part of it.

        Returns:
            Bytes.
        """
        leaves = {part.leaf for part in self.shared}
        rest = (1 - execution.updates) * optimizer_bytes
        return sum(
            rest * self.elements(part) / state_division(self.program, part, execution)
            for part in self.held[stage]
            if part.leaf in leaves
        )


def sharing_seconds(plan: Plan, shared: SharedParameters) -> tuple[float, ...]:
    """How long stages take to exchange gradients of what several hold, and parameters after that.

    Args:
        plan: the plan.
        shared: what its stages share.

    Returns:
        Seconds of each stage, over the slowest of its links; 0 where it shares nothing.
    """
    pieces = ((holders, shared.exchanged(part)) for part, holders in shared.shared.items())
    return exchange_seconds(plan.cluster, [stage.submeshes for stage in plan.stages], pieces)


def exchange_seconds(
    cluster: Cluster,
    submeshes: Sequence[Sequence[SubMesh]],
    pieces: Iterable[tuple[Holders, ExchangedBytes]],
) -> tuple[float, ...]:
    """How long stages take to exchange what several of them hold.

    Between nodes, as many network cards work side by side as a submesh has nodes; within a node, as
    many devices as it has. Both directions of a link move at once.

    Args:
        cluster: the cluster.
        submeshes: where the stages are; several submeshes share a stage.
        pieces: who holds and updates what is shared, and its bytes.

    Returns:
        Seconds of each stage, over the slowest of its links; 0 where it shares nothing.
    """
    traffic: Counter[tuple[int, str, str]] = Counter()
    partners: dict[int, set[int]] = {}

    def move(kind: str, source: int, target: int, size: int) -> None:
        for stage, other, way in ((source, target, "out"), (target, source, "in")):
            partners.setdefault(stage, set()).add(other)
            traffic[stage, kind, way] += size

    for holders, size in pieces:
        owner = holders.updaters[0]
        for stage in holders.stages:
            for updater in holders.updaters:
                if updater != stage:
                    move("gradient", stage, updater, size.gradient)
            if stage != owner:
                move("value", owner, stage, size.value)
    seconds = [0.0] * len(submeshes)
    for stage, others in partners.items():
        moved = sum(
            max(traffic[stage, kind, way] for way in ("in", "out"))
            for kind in ("gradient", "value")
        )
        seconds[stage] = moved / min(
            exchange_bandwidth(cluster, mine, theirs)
            for other in others
            for mine in submeshes[stage]
            for theirs in submeshes[other]
        )
    return tuple(seconds)


def exchange_bandwidth(cluster: Cluster, mine: SubMesh, other: SubMesh) -> float:
    """How fast a stage exchanges what it holds with another one.

    Args:
        cluster: the cluster.
        mine: where the stage is.
        other: where the other one is.

    Returns:
        Bytes/s, over all network cards or devices that work side by side.
    """
    link = cluster.link_between(mine, other)
    near = is_in_one_node(cluster, mine, other)
    return link.bandwidth * (mine.num_devices if near else mine.shape[0])
