"""Unlike subclusters joined into one: slices of it are stages whose members share the examples.

To the search a joined subcluster is one like any other: a stage on a slice of it takes what the
cost model says of its members with shares that are planned for them. A slice has the same part of
each subcluster, so they are joined node by node where they have as many, and else as a whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.mesh.groupings import set_partitions
from hetjax.mesh.links import Link
from hetjax.planner.costs.cost_model import estimate
from hetjax.planner.costs.crossing_ends import End, crossing_parts, joined_link
from hetjax.planner.costs.held_memory import memory
from hetjax.planner.costs.union_cost import (
    UnionExecution,
    estimate_union,
    executions_of,
    union_execution,
)
from hetjax.planner.harp.many_subclusters import MOST_GROUPS, few_groupings
from hetjax.planner.harp.member_shares import MemberRate, best_shares
from hetjax.planner.harp.stage_options import StageOption, live_limits
from hetjax.planner.harp.stage_table import PartOfJoined, Slice, StageTable
from hetjax.planner.harp.table_making import (
    ALL_ORDERS_UP_TO,
    listed_runs,
    slice_of_options,
    submesh_shapes,
    transfers_over,
)
from hetjax.planner.plan.stage_plan import Member, Shares, StagePlan
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.layer_runs import Runs
from hetjax.planner.work.rates import USABLE_MEMORY
from hetjax.planner.work.repeating_layers import (
    RepeatingRuns,
    Repetition,
    runs_by_repetition,
)

_MIDDLE = 0.5
"""Between the shares that take the least time and those that are as the memory is."""


@dataclass(frozen=True)
class JoinedSubcluster:
    """Subclusters that are one to the search.

    Args:
        parts: what a device and a node of it are made of; one part: a subcluster alone.
        nodes: how many nodes it has.
        devices_per_node: devices in each.
    """

    parts: tuple[PartOfJoined, ...]
    nodes: int
    devices_per_node: int

    def members(self, shape: tuple[int, int], start: int = 0) -> tuple[Member, ...]:
        """The members of a stage on a slice.

        Args:
            shape: nodes, and devices in each.
            start: the first device.
        """
        submeshes = (part.submesh(shape, start) for part in self.parts)
        return tuple(Member(submesh, (submesh.num_devices, 1)) for submesh in submeshes)


def joined(cluster: Cluster, names: Sequence[str]) -> JoinedSubcluster:
    """Some subclusters as one.

    Args:
        cluster: the cluster.
        names: of the subclusters.

    Example:
        >>> from hetjax.mesh import Subcluster, kind
        >>> link = Link(25e9, 1e-5)
        >>> fast = Subcluster("fast", kind("RTX4090"), 1, 4, link, link)
        >>> slow = Subcluster("slow", kind("RTX3080"), 1, 2, link, link)
        >>> one = joined(Cluster("box", (fast, slow), (("fast", "slow", link),)), ("fast", "slow"))
        >>> [str(member.submesh) for member in one.members((1, 1), start=1)]
        ['fast[2:4] 1x2', 'slow[1:2] 1x1']
    """
    chosen = [cluster.subcluster(name) for name in names]
    nodes = math.gcd(*(each.nodes for each in chosen))
    alike = all(each.nodes == nodes for each in chosen)
    # Nodes that are several of one subcluster are not cut.
    devices = math.gcd(*(each.devices_per_node for each in chosen)) if alike else 1
    parts = (
        PartOfJoined(each.name, each.nodes // nodes, each.devices_per_node // devices)
        for each in chosen
    )
    return JoinedSubcluster(tuple(parts), nodes, devices)


def joinings(cluster: Cluster, dtype: str = "float32") -> Iterator[tuple[JoinedSubcluster, ...]]:
    """The ways to join subclusters, some or all of them.

    Where there are many: all of them, those of a kind, or into groups that compute alike much.

    Args:
        cluster: the cluster.
        dtype: the dtype whose rate tells how much subclusters compute.
    """
    names = [subcluster.name for subcluster in cluster.subclusters]
    if len(names) > ALL_ORDERS_UP_TO:
        yield (joined(cluster, names),)
        for places in few_groupings(cluster, dtype, MOST_GROUPS):
            yield tuple(joined(cluster, [names[place] for place in group]) for group in places)
        return
    for groups in set_partitions(names):
        if len(groups) < len(names):
            yield tuple(joined(cluster, group) for group in groups)


@dataclass(frozen=True, eq=False)
class UnionSlices:
    """The slices of joined subclusters, each found once for all ways to join the others.

    Args:
        problem: what to plan.
        runs: the work of every run of its layers.
    """

    problem: PlanningProblem
    runs: Runs
    _found: dict[JoinedSubcluster, tuple[Slice, ...]] = field(default_factory=dict)
    _rates: dict[tuple[Member, Repetition], MemberRate] = field(default_factory=dict)

    def of(self, joined: JoinedSubcluster) -> tuple[Slice, ...]:
        """The slices on which each device can have an example."""
        if joined not in self._found:
            self._found[joined] = tuple(self._all_of(joined))
        return self._found[joined]

    @functools.cached_property
    def _by_repetition(self) -> RepeatingRuns:
        return listed_runs(self.problem, self.runs)

    @functools.cached_property
    def _whole(self) -> RepeatingRuns:
        """All layers as one run."""
        every = runs_by_repetition(self.runs, self.problem.repeatable_layers)
        return {way: runs.of_length(self.problem.num_layers) for way, runs in every.items()}

    def _all_of(self, of: JoinedSubcluster) -> Iterator[Slice]:
        """The slices on which each device can have an example."""
        again = (False, True) if self.problem.options.allow_recompute else (False,)
        every_layer, cluster = (0, self.problem.num_layers), self.problem.cluster
        for shape in submesh_shapes(of.nodes, of.devices_per_node):
            members = of.members(shape)
            kept: list[StageOption[UnionExecution]] = []
            for recompute in again:
                stage = StagePlan(every_layer, members, recompute=recompute)
                of_stage = self._by_repetition[stage.repeats]
                for batch in _ways_to_share(self.problem, stage, self._rates_of(stage)):
                    union = union_execution(cluster, replace(stage, shares=Shares(batch=batch)))
                    found = _union_option(self.problem, of_stage, union)
                    if not any(each.is_as_good(found) for each in kept):
                        kept.append(found)
            if kept:
                yield slice_of_options(self._by_repetition, shape, kept)

    def _rates_of(self, stage: StagePlan) -> list[MemberRate]:
        """How long the members of a stage of all layers take; several stages have the same."""
        runs, found = self._whole[stage.repeats], []
        for member in stage.members:
            key = member, stage.repeats
            if key not in self._rates:
                alone = replace(stage, members=(member,))
                (self._rates[key],) = member_rates(self.problem, runs, alone)
            found.append(self._rates[key])
        return found


def joined_table(
    slices_of: UnionSlices, plain: StageTable, join: Sequence[JoinedSubcluster]
) -> StageTable | None:
    """The stage table of joined subclusters.

    Args:
        slices_of: their slices.
        plain: the table of the subclusters as they are.
        join: how they are joined.

    Returns:
        The table; None where a microbatch has too few examples for all that are joined.
    """
    problem = slices_of.problem
    places = {each.name: place for place, each in enumerate(problem.cluster.subclusters)}
    slices, ends = [], []
    for each in join:
        if len(each.parts) == 1:
            name = each.parts[0].subcluster
            slices.append(plain.slices[places[name]])
            ends.append(((SubMesh(name, 0, (1, 1)), 1.0),))
            continue
        found = slices_of.of(each)
        if not found:
            return None
        slices.append(found)
        ends.append(_end(each, found[0]))
    pairs = range(len(join))
    between = [
        [_link(problem.cluster, join[a], ends[a], join[b], ends[b]) for b in pairs] for a in pairs
    ]
    return replace(
        plain,
        nodes=tuple((each.nodes, each.devices_per_node) for each in join),
        slices=tuple(slices),
        within=tuple(
            transfers_over(problem, _inside(problem.cluster, end, near=True)) for end in ends
        ),
        between=tuple(tuple(transfers_over(problem, link) for link in row) for row in between),
        order=None,
        joined=tuple(each.parts for each in join),
    )


def _end(of: JoinedSubcluster, cut: Slice) -> End:
    """How the examples are usually shared."""
    option = cut.options[0]
    assert isinstance(option, UnionExecution), "a slice of several subclusters"
    members = of.members(cut.shape)
    return tuple((m.submesh, share) for m, share in zip(members, option.examples, strict=True))


def _inside(cluster: Cluster, end: End, *, near: bool) -> Link:
    """What joins two slices of a subcluster: each member and the one like it, at once."""
    subclusters = [(cluster.subcluster(submesh.subcluster), share) for submesh, share in end]
    links = [
        (s.intra_node if near else cluster.node_link(s.name, s.name), share)
        for s, share in subclusters
    ]
    return Link(
        1 / max(share / link.bandwidth for link, share in links),
        max(link.latency for link, _ in links),
    )


def _link(
    cluster: Cluster, a: JoinedSubcluster, mine: End, b: JoinedSubcluster, theirs: End
) -> Link:
    if a == b:
        return _inside(cluster, mine, near=False)
    return joined_link(crossing_parts(cluster, mine, theirs))


def _ways_to_share(
    problem: PlanningProblem, stage: StagePlan, rates: Sequence[MemberRate]
) -> tuple[tuple[int, ...], ...]:
    """Shares by speed, by memory, and between the two."""
    capacity = [
        problem.cluster.subcluster(m.submesh.subcluster).kind.memory_bytes * m.submesh.num_devices
        for m in stage.members
    ]
    speed = [1 / rate.example for rate in rates]
    found = []
    for lean in (0.0, _MIDDLE, 1.0):
        wanted = [
            (1 - lean) * s / sum(speed) + lean * b / sum(capacity)
            for s, b in zip(speed, capacity, strict=True)
        ]
        leaning = [
            replace(rate, start=0.0, example=1 / each) if lean else rate
            for rate, each in zip(rates, wanted, strict=True)
        ]
        found.append(best_shares(problem.microbatch_size, leaning))
    return tuple(dict.fromkeys(each for each in found if each))


def member_rates(problem: PlanningProblem, runs: Runs, stage: StagePlan) -> list[MemberRate]:
    """How long each member of a stage takes for its examples.

    Args:
        problem: what to plan.
        runs: one run, the stage.
        stage: the stage, with its members; no memory is counted.
    """
    size = problem.microbatch_size
    found = []
    for member in stage.members:
        alone = replace(stage, members=(member,), shares=Shares())
        (execution,) = executions_of(problem.cluster, alone)
        whole, none = (
            estimate(problem, runs, replace(execution, examples=share)) for share in (1.0, 0.0)
        )
        most, least = (
            (each.forward_seconds + each.backward_seconds).item() for each in (whole, none)
        )
        found.append(MemberRate(least, (most - least) / size, member.mesh_shape[0], size))
    return found


def with_memory(
    problem: PlanningProblem, runs: Runs, stage: StagePlan, rates: Sequence[MemberRate]
) -> list[MemberRate]:
    """The same members with what fits into their memory, one microbatch at a time.

    Args:
        problem: what to plan.
        runs: one run, the stage.
        stage: the stage, with its members.
        rates: how long they take.
    """
    executions = executions_of(problem.cluster, stage)
    found = []
    for rate, execution in zip(rates, executions, strict=True):
        least, most = (
            memory(problem, runs, replace(execution, examples=share, updates=share))
            for share in (0.0, 1.0)
        )
        start, end = (float(each.memory_bytes(1)) for each in (least, most))
        room = execution.kind.memory_bytes * USABLE_MEMORY - start
        share = min(1.0, max(0.0, room / (end - start))) if end > start else float(room >= 0)
        # Rounded down, but not by what a sum in another order differs.
        fitting = int(share * problem.microbatch_size + 1e-9)
        found.append(replace(rate, most=fitting if room >= 0 else 0))
    return found


def _union_option(
    problem: PlanningProblem, runs: Runs, union: UnionExecution
) -> StageOption[UnionExecution]:
    """What the runs take on members that share in one way."""
    assert runs.listed is not None, "they are in a list"
    is_first = runs.listed[0] == 0
    limits = np.min([live_limits(problem, runs, each, 1.0) for each in union.members], axis=0)
    found = estimate_union(problem, runs, union)
    seconds = found.forward_seconds + found.backward_seconds
    updating = found.update_seconds / problem.num_microbatches * ~is_first
    seconds = np.round(seconds + updating, 9)
    seconds[limits == 0] = np.inf
    return StageOption(union, limits, seconds, found.update_seconds[is_first])
