"""What HeteroAuto weighs of a traced program: how each kind of devices runs a module of it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetjax.errors import InputError
from hetjax.mesh.cluster import SubMesh
from hetjax.mesh.links import Link
from hetjax.mesh.subcluster import Subcluster
from hetjax.planner.costs.cost_model import Estimate, estimate
from hetjax.planner.h2.heteroauto import ChipKind
from hetjax.planner.h2.layer_division import GroupWay
from hetjax.planner.plan.stage_plan import Offloaded
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.rates import (
    TASK_SECONDS,
    USABLE_MEMORY,
    collective_link,
    transfer_seconds,
)
from hetjax.planner.work.repeating_layers import LayerRun, Repetition, runs_by_repetition

_GROUPS = 8
"""Into how many groups of nodes a kind is divided at most."""

_OFFLOADS: Sequence[tuple[Offloaded, ...]] = (
    (),
    ("optimizer_state",),
    ("activations",),
    ("activations", "optimizer_state"),
)
"""What a stage may have in its hosts' memory."""


@dataclass(frozen=True)
class Modules:
    """The layers of a program as HeteroAuto sees them: alike modules, and what is around them.

    Args:
        runs: of each module its layers, with what stands between it and the next one.
        before: the layers before the first module, which its stage computes, too.
        after: those after the last one.
    """

    runs: tuple[LayerRun, ...]
    before: LayerRun
    after: LayerRun

    @classmethod
    def of(cls, problem: PlanningProblem) -> Modules:
        """The modules of a problem's program.

        Args:
            problem: the problem.

        Raises:
            InputError: the program repeats no module.
        """
        pieces = problem.repeatable_layers
        if not problem.sections or len(pieces) < 2:
            raise InputError(
                "planner.name is 'heteroauto', which divides modules that repeat, such as a "
                "model's blocks, and the program has none; set planner.name = 'harp'"
            )
        starts = [first for first, _ in pieces]
        ends = [*starts[1:], pieces[-1][1]]
        runs = tuple(zip(starts, ends, strict=True))
        return cls(runs, (0, starts[0]), (ends[-1], problem.num_layers))

    def layers_of(self, counts: Sequence[int]) -> list[LayerRun]:
        """The layers of stages that have so many modules each, and all of the program."""
        edges = [0, *(run[0] for run in self.runs[1:]), self.after[0]]
        ends = [edges[end] for end in itertools.accumulate(counts)]
        return list(zip([0, *ends[:-1]], [*ends[:-1], self.after[1]], strict=True))


class ModuleWays:
    """Tells how kinds of devices run modules.

    Args:
        problem: the planning problem.
        modules: its modules.
    """

    def __init__(self, problem: PlanningProblem, modules: Modules):
        self._problem, self._modules = problem, modules
        everything = problem.runs
        self._runs = runs_by_repetition(everything, problem.repeatable_layers)

    def kinds(self) -> list[ChipKind]:
        """The kinds of the cluster's devices, those of the most memory first."""
        return [self._kind(part) for part in self._ordered]

    @functools.cached_property
    def _ordered(self) -> list[Subcluster]:
        return sorted(self._problem.cluster.subclusters, key=lambda p: -p.kind.memory_bytes)

    def _kind(self, part: Subcluster) -> ChipKind:
        return ChipKind(
            part.name,
            part.num_devices,
            part.kind.memory_bytes * USABLE_MEMORY,
            part.devices_per_node * math.ceil(part.nodes / _GROUPS),
            lambda width, chips: list(self._ways(part, width, chips)),
        )

    def _ways(self, part: Subcluster, width: int, chips: int) -> Iterator[GroupWay]:
        again: tuple[Repetition, ...] = ("nothing", "layers")
        allowed = again if self._problem.options.allow_recompute else again[:1]
        widths = (1 << k for k in range(part.devices_per_node.bit_length()))
        for tensor in filter(part.allows_tensor_axis, widths):
            shape = stage_shape(part, width * tensor)
            if shape is None or chips % (width * tensor):
                continue
            away = _OFFLOADS if part.host_memory_bytes is not None else _OFFLOADS[:1]
            for repeats, offload in itertools.product(allowed, away):
                # What is made again is not worth its way.
                if repeats == "nothing" or "activations" not in offload:
                    yield self._way(part, shape, (width, tensor), repeats, offload, chips)

    def _way(
        self,
        part: Subcluster,
        shape: tuple[int, int],
        mesh_shape: tuple[int, int],
        repeats: Repetition,
        offload: Sequence[Offloaded],
        chips: int,
    ) -> GroupWay:
        execution = Execution(
            part.kind,
            collective_link(self._problem.cluster, SubMesh(part.name, 0, shape)),
            mesh_shape,
            "state_sharded" if mesh_shape[0] > 1 else "data",
            repeats,
            subcluster=part.name,
            shape=shape,
        )
        if "optimizer_state" in offload:
            execution = execution.offloaded(part)
        if "activations" in offload:
            execution = execution.offloading_activations(part)
        # Two modules side by side tell what one more takes.
        middle = max(0, len(self._modules.runs) // 2 - 1)
        first, second = self._modules.runs[middle : middle + 2]
        one, two = (
            self._estimate(execution, first),
            self._estimate(execution, (first[0], second[1])),
        )
        layer = _difference(two, one)
        head = self._edge(execution, self._modules.after)
        there, back = self._handover(part, shape, first)
        return GroupWay(
            tensor=mesh_shape[1],
            stages=chips // math.prod(mesh_shape),
            repeats=repeats == "layers",
            offloads=bool(offload),
            layer_seconds=layer.seconds,
            update_seconds=layer.update_seconds,
            handover_seconds=there + back,
            pace_seconds=max(there, back, self._card(part, shape, first), self._crossing),
            state_bytes=layer.state_bytes,
            kept_bytes=layer.kept_bytes,
            fixed_bytes=float(one.state_bytes + max(one.update_bytes, one.working_bytes))
            - layer.state_bytes,
            offloads_activations="activations" in offload,
            host_bytes=layer.host_bytes,
            host_memory_bytes=execution.host_bytes if offload else math.inf,
            exposed_seconds=max(0.0, _seconds(one) - layer.seconds),
            first_bytes=self._edge(execution, self._modules.before).state_bytes,
            last_bytes=head.state_bytes + head.kept_bytes,
            last_layers=math.ceil(head.seconds / layer.seconds) if layer.seconds else 0,
        )

    def _edge(self, execution: Execution, run: LayerRun) -> _Layer:
        """What layers at an end of the program take on a stage that has others, too."""
        if run[0] == run[1]:
            return _Layer(0.0, 0.0, 0.0, 0.0, 0.0)
        alone = self._estimate(execution, run)
        # What an update copies on CPUs is no more for it.
        streamed = alone.update_bytes if execution.host_link is not None else 0
        state = float(alone.state_bytes + streamed)
        kept, seconds = float(alone.activation_bytes), _seconds(alone) - 2 * TASK_SECONDS
        return _Layer(max(0.0, seconds), 0.0, state, kept, float(alone.host_bytes))

    def _estimate(self, execution: Execution, run: LayerRun) -> Estimate:
        return estimate(self._problem, self._runs[execution.repeats].of(run), execution)

    def _handover(
        self, part: Subcluster, shape: tuple[int, int], run: LayerRun
    ) -> tuple[float, float]:
        """What a microbatch and its gradient take to the next stage of the same kind."""
        is_near = shape < (1, part.devices_per_node) or part.nodes == 1
        between = self._problem.cluster.node_link(part.name, part.name)
        return self._transfers(part.intra_node if is_near else between, run)

    def _card(self, part: Subcluster, shape: tuple[int, int], run: LayerRun) -> float:
        """What the network cards of a node are busy with for each microbatch.

        A node's first stage gets a microbatch over its card, and its last one the gradient over its
        own; what they send is as much. Where the two have one card, both come over it.
        """
        devices, cluster = math.prod(shape), self._problem.cluster
        if part.num_devices < max(devices, part.devices_per_node) + devices:
            return 0.0
        first = SubMesh(part.name, 0, shape)
        last = SubMesh(part.name, max(0, part.devices_per_node - devices), shape)
        after = SubMesh(part.name, max(devices, part.devices_per_node), shape)
        link = cluster.link_between(last, after)
        there, back = (seconds - link.latency for seconds in self._transfers(link, run))
        meet = cluster.cards(first) & cluster.cards(last)
        return there + back if meet else max(there, back)

    def _transfers(self, link: Link, run: LayerRun) -> tuple[float, float]:
        work = self._problem.works[run[0]]
        return (
            transfer_seconds(link, work.received_bytes),
            transfer_seconds(link, work.returned_bytes),
        )

    @functools.cached_property
    def _crossing(self) -> float:
        """What a microbatch takes at least from one kind to the next, on the slowest link."""
        names = [kind.name for kind in self._ordered]
        cluster, run = self._problem.cluster, self._modules.runs[-1]
        links = (cluster.node_link(a, b) for a, b in itertools.pairwise(names))
        return max((max(self._transfers(link, run)) for link in links), default=0.0)


@dataclass(frozen=True)
class _Layer:
    """What some layers more take."""

    seconds: float
    update_seconds: float
    state_bytes: float
    kept_bytes: float
    host_bytes: float


def _difference(two: Estimate, one: Estimate) -> _Layer:
    return _Layer(
        max(_seconds(two) - _seconds(one), 0.0),
        max(float(two.update_seconds) - float(one.update_seconds), 0.0),
        max(float(two.state_bytes) - float(one.state_bytes), 1.0),
        max(float(two.activation_bytes) - float(one.activation_bytes), 0.0),
        max(float(two.host_bytes) - float(one.host_bytes), 0.0),
    )


def _seconds(each: Estimate) -> float:
    return float(each.paced_forward_seconds) + float(each.paced_backward_seconds)


def stage_shape(part: Subcluster, devices: int) -> tuple[int, int] | None:
    """The nodes and devices in each of a stage of so many devices; None where they do not divide.

    Args:
        part: what it is on.
        devices: how many it has.

    Example:
        >>> from hetjax.mesh import Link, kind
        >>> link = Link(1e9, 1e-5)
        >>> part = Subcluster("old", kind("V100"), 4, 8, link, link)
        >>> stage_shape(part, 4), stage_shape(part, 16), stage_shape(part, 6)
        ((1, 4), (2, 8), None)
    """
    each = part.devices_per_node
    if devices <= each:
        return (1, devices) if each % devices == 0 else None
    whole = devices % each == 0 and devices // each <= part.nodes
    return (devices // each, each) if whole else None
