"""A context split that was chosen for a problem, and the stage that it makes of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetjax.mesh.cluster import Subcluster, SubMesh
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.pipeline.update.state_groups import STATE_GROUPS
from hetjax.planner.hexiseq.context_devices import ContextDevices
from hetjax.planner.hexiseq.context_model import ContextModel, work_flops
from hetjax.planner.hexiseq.context_pace import context_paces
from hetjax.planner.hexiseq.context_work import ContextWork
from hetjax.planner.hexiseq.group_layout import GroupLayout
from hetjax.planner.hexiseq.program_work import attending_layers, context_work
from hetjax.planner.hexiseq.scheduler import ContextSchedule
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import Member, PipelinePlan, Shares, StagePlan
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.repeating_layers import LayerRun
from hetjax.sharding.context.context_split import ContextSplit


@dataclass(frozen=True)
class ContextChoice:
    """A context split for a problem, with what its layers do in the backward pass.

    Args:
        schedule: the split, and what it is predicted to take.
        model: the cost model that it was found by, whose work says whether layers are made again,
            and how many sequences there are at once.
    """

    schedule: ContextSchedule
    model: ContextModel

    @property
    def blocks(self) -> int:
        """How many layers that attend it is of."""
        return self.model.work.layers

    @property
    def once_seconds(self) -> float:
        """What its devices take once a step, however many microbatches it has."""
        groups = [group.devices for group in self.schedule.split.groups]
        return self.model.once_seconds(GroupLayout(self.model.devices, groups))

    @property
    def round_seconds(self) -> float:
        """What a microbatch takes."""
        return (self.schedule.seconds - self.once_seconds) / self.model.work.rounds

    def stage(self, problem: PlanningProblem, layers: LayerRun) -> StagePlan:
        """The stage that it makes of some layers.

        Args:
            problem: the problem.
            layers: the first of the problem's layers, and the one after the last.

        Returns:
            The stage, whose members are the split's devices in the order of its groups.
        """
        split, (start, stop), devices = self.schedule.split, layers, self.model.devices
        shapes = [(1, int(devices.sizes[each])) for each in split.devices]
        places = map(devices.place, split.devices)
        again = attending_layers(problem) if self.model.work.is_recomputed else ()
        return StagePlan(
            layers,
            tuple(
                Member(SubMesh(*place, shape), shape)
                for place, shape in zip(places, shapes, strict=True)
            ),
            offload=("optimizer_state",) if self.model.work.offloaded_bytes else (),
            shares=Shares(context=_by_places(split)),
            recompute_layers=tuple(run for run in again if start <= run[0] and run[1] <= stop),
        )


def context_models(problem: PlanningProblem) -> list[ContextModel]:
    """The cost models of a problem: of layers that are kept, and that are made again.

    Args:
        problem: the problem; its program was traced with `divides_sequences`.

    Returns:
        Both, with members of one device first, then with members that have a tensor axis; of layers
        that are kept alone where none may be made again.

    Raises:
        InputError: the model has no attention, or something that goes along the sequence.
    """
    kept = context_work(problem)
    may_repeat = problem.options.allow_recompute and attending_layers(problem)
    works = [kept, replace(kept, is_recomputed=True)] if may_repeat else [kept]
    return [
        model
        for tensor in ({}, *_tensor_axes(problem, kept))
        for model in _models(problem, works, tensor)
    ]


def offloading(problem: PlanningProblem, models: Sequence[ContextModel]) -> list[ContextModel]:
    """Cost models with the optimizer's state in the hosts' memory, for what fits in no other way.

    Args:
        problem: the problem.
        models: its cost models.

    Returns:
        The same, without devices whose hosts give no memory; none where there is no state, or no
        host gives any.
    """
    if not problem.optimizer_bytes:
        return []
    cluster = problem.cluster
    without = frozenset(
        device
        for part in cluster.subclusters
        if part.host_memory_bytes is None
        for device in cluster.device_ids(SubMesh(part.name, 0, (part.nodes, part.devices_per_node)))
    )
    program = problem.program
    sizes = [program.avals[value].size for value in program.parameters]
    # While one group of the state is updated, the next one is on its way.
    there = min(1.0, 2 * max(max(sizes) / sum(sizes), 1 / STATE_GROUPS))
    found = []
    for model in models:
        devices = replace(model.devices, lost=model.devices.lost | without)
        if len(devices.usable):
            found.append(ContextModel(devices, _offloading(model.work, there), model.paces))
    return found


def _offloading(work: ContextWork, there: float) -> ContextWork:
    """The work with state offloaded, of which some share is on devices at once."""
    away = work.updated_bytes
    return replace(work, updated_bytes=there * away, offloaded_bytes=away)


def _tensor_axes(problem: PlanningProblem, work: ContextWork) -> list[Mapping[str, int]]:
    """Tensor axes of members, by subcluster, each as long as nodes allow up to some length.

    Each device must have as many whole heads of keys and values.
    """
    parts = problem.cluster.subclusters
    found: dict[tuple[int, ...], None] = {}
    for most in _powers(max(part.devices_per_node for part in parts)):
        found[tuple(_longest(part, most) for part in parts)] = None
    together = {sizes: math.lcm(*sizes) for sizes in found if max(sizes) > 1}
    return [
        dict(zip((part.name for part in parts), sizes, strict=True))
        for sizes, least in together.items()
        if work.key_value_heads % least == 0
    ]


def _longest(part: Subcluster, most: int) -> int:
    """The longest tensor axis in a node of a subcluster, up to some length."""
    each = part.devices_per_node
    fitting = (size for size in _powers(min(most, each)) if each % size == 0)
    return max((size for size in fitting if part.allows_tensor_axis(size)), default=1)


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _models(
    problem: PlanningProblem, works: Sequence[ContextWork], tensor: Mapping[str, int]
) -> list[ContextModel]:
    together = works[0].heads_per_key_value * math.lcm(*tensor.values()) if tensor else 1
    paces = context_paces(problem, works[0], tensor)
    found = []
    for work in works:
        step = work_flops(work)
        rates = {name: step / pace.step_seconds(work) for name, pace in paces.items()}
        devices = ContextDevices(
            problem.cluster, problem.dtype, lost=problem.lost, tensor=tensor, rates=rates
        )
        if not len(devices.usable):
            # Each member of several devices has a lost one.
            continue
        found.append(ContextModel(devices, replace(work, heads_together=together), paces))
    return found


def context_pipeline(
    problem: PlanningProblem, stages: tuple[StagePlan, ...], microbatches: int
) -> PipelinePlan:
    """A pipeline whose stages share the context.

    Args:
        problem: the problem.
        stages: the stages, of all layers.
        microbatches: how many it has of a step.
    """
    schedule = one_f_one_b(len(stages), microbatches)
    return PipelinePlan(stages, microbatches, problem.microbatch_size, schedule)


def context_plan(problem: PlanningProblem, *pipelines: PipelinePlan) -> Plan:
    """The plan of pipelines whose stages share the context.

    Args:
        problem: the problem.
        pipelines: the pipelines, which together have all microbatches.

    Returns:
        The plan, without a prediction.
    """
    return Plan(
        problem.program.fingerprint,
        problem.layers,
        problem.cluster,
        pipelines,
        planner="HexiSeq",
        lost_devices=tuple(sorted(problem.lost)),
    )


def _by_places(split: ContextSplit) -> ContextSplit:
    """A split whose devices are their places among all of its devices."""
    groups, first = [], 0
    for group in split.groups:
        stop = first + len(group.devices)
        groups.append(replace(group, devices=tuple(range(first, stop))))
        first = stop
    return replace(split, groups=tuple(groups))
