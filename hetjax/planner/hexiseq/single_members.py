"""Stages of a context pipeline whose devices are one member, which holds a part of the parameters.

Members that share the context have the parameters whole. Where a stage's devices have no memory for
that, or only if layers are made again, they may be one member instead: it divides parameters over a
tensor axis, makes layers again, or leaves state and activations with its hosts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace

from hetjax.mesh.cluster import SubMesh
from hetjax.planner.costs.cost_model import estimate
from hetjax.planner.costs.held_memory import memory
from hetjax.planner.harp.table_making import execution_options, submesh_shapes
from hetjax.planner.hexiseq.context_layouts import Part
from hetjax.planner.hexiseq.context_model import ContextModel
from hetjax.planner.hexiseq.context_work import ContextWork
from hetjax.planner.plan.stage_plan import Member, Shares, StagePlan
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.rates import USABLE_MEMORY
from hetjax.planner.work.repeating_layers import LayerRun, repeated_by, runs_by_repetition
from hetjax.sharding.context.context_split import ContextGroup, ContextSplit


@dataclass(frozen=True)
class SingleMember:
    """A stage of one member.

    Args:
        submesh: its devices.
        execution: how they run.
        work: what the whole program computes.
        blocks: how many layers that attend it has.
        round_seconds: what both passes of a microbatch take.
        once_seconds: what it takes once a step.
    """

    submesh: SubMesh
    execution: Execution
    work: ContextWork
    blocks: int
    round_seconds: float
    once_seconds: float

    def stage(self, problem: PlanningProblem, layers: LayerRun) -> StagePlan:
        """The stage of a plan that it is.

        Args:
            problem: the problem.
            layers: the first of its layers, and the one after the last.
        """
        work, execution = self.work, self.execution
        heads = work.query_heads
        alone = ContextGroup((0,), (work.length,), ((0, heads),))
        return StagePlan(
            layers,
            (Member(self.submesh, execution.mesh_shape),),
            sharding=execution.sharding,
            recompute=execution.recompute,
            recompute_layers=repeated_by(execution.repeats, problem.repeatable_layers, layers),
            offload=execution.offloads,
            shares=Shares(context=ContextSplit(work.length, heads, work.key_value_heads, (alone,))),
        )


class SingleMembers:
    """The best ways to run layers on the devices of a stage as one member.

    Args:
        problem: the problem.
        model: its cost model of context splits.
    """

    def __init__(self, problem: PlanningProblem, model: ContextModel):
        self._problem, self._devices, self._work = problem, model.devices, model.work
        self._known: dict[Hashable, SingleMember | None] = {}

    def best(self, part: Part, layers: LayerRun, blocks: int, live: int) -> SingleMember | None:
        """The fastest way that fits.

        Args:
            part: the numbers of the stage's devices.
            layers: the first of its layers, and the one after the last.
            blocks: how many of them attend.
            live: how many microbatches are between their passes at once.

        Returns:
            The way; None where nothing fits, or the devices are no submesh.
        """
        submesh = self._submesh(part)
        if submesh is None:
            return None
        key = submesh.subcluster, submesh.shape, layers, live
        if key not in self._known:
            self._known[key] = self._found(submesh, layers, blocks, live)
        found = self._known[key]
        return found and replace(found, submesh=submesh)

    def _submesh(self, part: Part) -> SubMesh | None:
        """Devices as a slice of a subcluster; None where they are of several, or have gaps."""
        (name, first), (last_name, last) = map(self._devices.place, (part[0], part[-1]))
        if name != last_name or last - first != len(part) - 1:
            return None
        subcluster = self._problem.cluster.subcluster(name)
        each = subcluster.devices_per_node
        for shape in submesh_shapes(subcluster.nodes, each):
            if math.prod(shape) == len(part) and first % each + shape[1] <= each:
                return SubMesh(name, first, shape)
        return None

    def _found(
        self, submesh: SubMesh, layers: LayerRun, blocks: int, live: int
    ) -> SingleMember | None:
        problem = self._problem
        runs = runs_by_repetition(problem.runs, problem.repeatable_layers)
        subcluster = problem.cluster.subcluster(submesh.subcluster)
        found: list[SingleMember] = []
        for option in execution_options(problem, subcluster, submesh.shape):
            # Other rules divide parameters over the data axis, which a shared context does not.
            if option.sharding != "data":
                continue
            run = runs[option.repeats].of(layers)
            usable = USABLE_MEMORY * option.kind.memory_bytes
            held = memory(problem, run, option)
            if held.live_limit(usable, problem.num_microbatches, option.host_bytes) < live:
                continue
            taken = estimate(problem, run, option)
            passes = float(taken.paced_forward_seconds + taken.paced_backward_seconds)
            once = float(taken.update_seconds)
            found.append(SingleMember(submesh, option, self._work, blocks, passes, once))

        def step_seconds(each: SingleMember) -> float:
            return problem.num_microbatches * each.round_seconds + each.once_seconds

        return min(found, key=step_seconds, default=None)
