"""What it costs that several stages hold the same parameters, and what dividing the state saves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetjax.mesh.links import Link
from hetjax.pipeline.holders import Shared, updated_parts, with_updates
from hetjax.pipeline.program import Program, num_bytes
from hetjax.pipeline.stages import ParameterPart, cut
from hetjax.planner.execution import Execution, state_division
from hetjax.planner.plan import Plan
from hetjax.planner.work import part_shape


@dataclass(frozen=True)
class SharedParameters:
    """Which stages of a plan hold and update the same parameters.

    Args:
        program: the program.
        held: for each stage the parameter parts that it holds.
        shared: who holds and updates those that several hold.
    """

    program: Program
    held: Sequence[Sequence[ParameterPart]]
    shared: Shared

    @classmethod
    def of(cls, plan: Plan, program: Program) -> SharedParameters:
        """Those of a plan for a program."""
        held = [
            stage.parameters
            for pipeline in plan.pipelines
            for stage in cut(program, plan.boundaries(pipeline))
        ]
        shapes = [tuple(program.avals[value].shape) for value in program.parameters]
        return cls(program, held, with_updates(held, shapes, divided=plan.shard_optimizer_state))

    def elements(self, part: ParameterPart) -> int:
        """How many elements a part has."""
        return math.prod(part_shape(self.program, part).shape)

    def num_bytes(self, part: ParameterPart) -> int:
        """How many bytes a part has."""
        return num_bytes(part_shape(self.program, part))

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
            kept = self.elements(updated[part.leaf]) if part.leaf in updated else 0
            elements = self.elements(part) - kept
            saved += elements * optimizer_bytes / state_division(self.program, part, execution)
        return saved


def sharing_seconds(plan: Plan, shared: SharedParameters) -> float:
    """How long stages take to exchange gradients of what several hold, and parameters after that.

    Args:
        plan: the plan.
        shared: what its stages share.

    Returns:
        Seconds: of the stage that exchanges longest, over the slowest of its links. Both directions
        of a link move at once.
    """
    traffic: dict[tuple[int, str, str], float] = {}
    partners: dict[int, set[int]] = {}

    def move(kind: str, source: int, target: int, size: int) -> None:
        for stage, other, way in ((source, target, "out"), (target, source, "in")):
            partners.setdefault(stage, set()).add(other)
            traffic[stage, kind, way] = traffic.get((stage, kind, way), 0.0) + size

    for part, holders in shared.shared.items():
        size, owner = shared.num_bytes(part), holders.updaters[0]
        for stage in holders.stages:
            for updater in holders.updaters:
                if updater != stage:
                    move("gradient", stage, updater, size)
            if stage != owner:
                move("value", owner, stage, size)
    seconds = (_stage_seconds(plan, stage, others, traffic) for stage, others in partners.items())
    return max(seconds, default=0.0)


def _stage_seconds(
    plan: Plan, stage: int, others: set[int], traffic: Mapping[tuple[int, str, str], float]
) -> float:
    mine = plan.stages[stage].submesh
    links: list[Link] = [
        plan.cluster.link_between(mine, plan.stages[other].submesh) for other in others
    ]
    slowest = min(link.bandwidth for link in links)
    moved = sum(
        max(traffic.get((stage, kind, way), 0.0) for way in ("in", "out"))
        for kind in ("gradient", "value")
    )
    return moved / mine.num_devices / slowest
