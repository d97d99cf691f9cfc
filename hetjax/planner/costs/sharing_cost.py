"""What it costs that several stages hold the same parameters, and what dividing the state saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.stages.cutting import ParameterPart, cut
from hetjax.pipeline.stages.holders import Shared, updated_parts, with_updates
from hetjax.planner.costs.exchange_cost import ExchangedBytes, exchange_seconds
from hetjax.planner.plan.plan import Plan
from hetjax.planner.work.execution import Execution, state_division
from hetjax.planner.work.part_kinds import part_kind
from hetjax.planner.work.run_structure import part_shape


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

    def state_bytes(self, part: ParameterPart, optimizer_bytes: float) -> int:
        """Bytes of the optimizer's state of a part."""
        kind = part_kind(part_shape(self.program, part), part.leaf, self.program.frozen)
        return kind.state_bytes(optimizer_bytes)

    def exchanged(self, part: ParameterPart) -> ExchangedBytes:
        """What stages tell each other of a part."""
        return ExchangedBytes.of(part_shape(self.program, part))

    def saved_bytes(self, stage: int, optimizer_bytes: float, execution: Execution) -> float:
        """What a device of a stage need not hold, since other stages update some of its parameters.

        Args:
            stage: which stage.
            optimizer_bytes: of the optimizer's state, for each element of all parameters.
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
            kept = [updated[part.leaf]] if part.leaf in updated else []
            whole, *rest = (self.state_bytes(each, optimizer_bytes) for each in (part, *kept))
            saved += (whole - sum(rest)) / state_division(self.program, part, execution)
        return saved

    def undivided_bytes(self, stage: int, optimizer_bytes: float, execution: Execution) -> float:
        """What a member holds of the optimizer's state beyond its share.

        What other stages hold too is not divided among the members of a stage.

        Args:
            stage: which stage.
            optimizer_bytes: of the optimizer's state, for each element of all parameters.
            execution: how the member runs its part of it.

        Returns:
            Bytes.
        """
        leaves = {part.leaf for part in self.shared}
        return sum(
            (1 - execution.updates)
            * self.state_bytes(part, optimizer_bytes)
            / state_division(self.program, part, execution)
            for part in self.held[stage]
            if part.leaf in leaves
        )


def sharing_seconds(plan: Plan, shared: SharedParameters) -> tuple[float, ...]:
    """How long stages take to exchange gradients of what several hold, and parameters after that.

    Args:
        plan: the plan.
        shared: what its stages share.

    Returns:
        Seconds of each stage; 0 where it shares nothing.
    """
    pieces = ((holders, shared.exchanged(part)) for part, holders in shared.shared.items())
    return exchange_seconds(plan.cluster, [stage.submeshes for stage in plan.stages], pieces)
