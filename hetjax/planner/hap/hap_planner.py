"""The planner of HAP: one stage over the union of all devices, with a synthesised program."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.errors import DoesNotFitError, InputError
from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.mesh.subcluster import Subcluster
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner.costs.member_rates import member_rates
from hetjax.planner.costs.modules_cost import starting_seconds
from hetjax.planner.hap.chain_search import ChainSearch
from hetjax.planner.hap.forced import Forced
from hetjax.planner.hap.synthesis import Synthesis, synthesise, synthesise_at
from hetjax.planner.hap.writing import shares_of
from hetjax.planner.module_programs.module_chain import ModuleChain, chain_of, narrow_edges
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import Member, PipelinePlan, StagePlan
from hetjax.planner.problem.problem import PlanningProblem


@dataclass(frozen=True, eq=False)
class Synthesised:
    """What HAP's planner has found.

    Args:
        plan: the plan, without a prediction.
        found: the program and its ratios.
        chain: the modules.
    """

    plan: Plan
    found: Synthesis
    chain: ModuleChain

    @property
    def seconds(self) -> float:
        """What a step takes, with starting its passes."""
        return starting_seconds(self.plan.pipelines[0].num_microbatches) + self.found.seconds


@dataclass(frozen=True)
class HapPlanner:
    """Plans one stage over all devices, whose members share tensors as is fastest.

    A member is a node that is whole; where fewer than two are, a device. Subclusters without which
    the stage is faster are left out.

    Args:
        forced: what programs are looked at; None for all.
        ratios: what part of everything that is divided each member has; empty for the best ones.

    Source: HAP, sections 3 to 5.
    """

    forced: Forced | None = None
    ratios: tuple[float, ...] = ()

    def plan(self, problem: PlanningProblem) -> Plan:
        """A plan for the problem.

        Args:
            problem: what to plan.

        Returns:
            A valid plan.

        Raises:
            InputError: the cluster has one device, or the model fits with no ratios.
        """
        return self.synthesise(problem).plan

    def synthesise(self, problem: PlanningProblem) -> Synthesised:
        """The plan, with the program that it has.

        Args:
            problem: what to plan.

        Raises:
            InputError: as for `plan`.
        """
        members = cluster_members(problem.cluster, problem.microbatch_size, problem.lost)
        if len(members) < 2:
            raise InputError(
                f"planner.name is 'hap', and the cluster {problem.cluster.name!r} has one member "
                f"that can be used, a node or a device of the only node; a program is divided "
                f"among several: choose 'harp'"
            )
        chain = chain_of_problem(problem)
        search = self._search(problem, chain)
        stage, found = self._without_those_that_hinder(problem, members, search)
        count = problem.num_microbatches
        schedule = one_f_one_b(1, count)
        pipeline = PipelinePlan((stage,), count, problem.microbatch_size, schedule)
        plan = Plan(
            problem.program.fingerprint,
            problem.layers,
            problem.cluster,
            (pipeline,),
            planner="HAP",
            lost_devices=tuple(sorted(problem.lost)),
        )
        return Synthesised(plan, found, chain)

    def _without_those_that_hinder(
        self, problem: PlanningProblem, members: tuple[Member, ...], search: ChainSearch
    ) -> tuple[StagePlan, Synthesis]:
        """The best stage, without subclusters that slow it down, as one behind a slow link may.

        What every member has whole goes to all of them, also where their part is nothing.
        """
        best = self._stage(problem, members, 0, search)
        while not self.ratios:
            left = best[0].members
            names = dict.fromkeys(member.submesh.subcluster for member in left)
            found = [best]
            for name in names:
                others = tuple(each for each in left if each.submesh.subcluster != name)
                if len(others) > 1:
                    with contextlib.suppress(DoesNotFitError):
                        found.append(self._stage(problem, others, 0, search))
            fastest = min(found, key=lambda pair: pair[1].seconds)
            if fastest is best:
                break
            best = fastest
        return best

    def last_stages(
        self, problem: PlanningProblem
    ) -> Callable[[tuple[Member, ...], int], StagePlan]:
        """What makes last stages of pipelines, whose members compute the loss together.

        Args:
            problem: what to plan.

        Returns:
            From the stage's members (see `members_of`) and its first layer to the stage. It raises
            `DoesNotFitError` where it fits with no ratios that were tried, and `InputError` where
            there are too many ways.
        """
        searches: dict[int, ChainSearch] = {}

        def last_stage(members: tuple[Member, ...], first: int) -> StagePlan:
            if first not in searches:
                chain = chain_of_problem(problem, problem.layers[first])
                searches[first] = self._search(problem, chain)
            return self._stage(problem, members, first, searches[first])[0]

        return last_stage

    def _search(self, problem: PlanningProblem, chain: ModuleChain) -> ChainSearch:
        """What finds programs of a chain, for any members."""
        return ChainSearch(chain, problem.optimizer_bytes, problem.num_microbatches, self.forced)

    def _stage(
        self,
        problem: PlanningProblem,
        members: tuple[Member, ...],
        first: int,
        search: ChainSearch,
    ) -> tuple[StagePlan, Synthesis]:
        """The stage of the layers from the first one on, and its program."""
        rates = member_rates(problem, members)
        if self.ratios:
            found = synthesise_at(search, rates, np.array(self.ratios))
        else:
            found = synthesise(search, rates)
        shares = shares_of(search.chain, search.dimensions, found, members, rates)
        return StagePlan((first, problem.num_layers), members, shares=shares), found


def chain_of_problem(problem: PlanningProblem, start: int = 0) -> ModuleChain:
    """The modules of a problem's program, each distinct one traced.

    Args:
        problem: the problem.
        start: the position in the program that the chain begins with.
    """
    program = problem.program
    starts = [each.section.start for each in problem.sections if each.section.start > start]
    return chain_of(program, narrow_edges(program, [start, *starts, program.num_positions]))


def cluster_members(
    cluster: Cluster, microbatch_size: int, lost: frozenset[int] = frozenset()
) -> tuple[Member, ...]:
    """The members of a stage over all devices of a cluster.

    Args:
        cluster: the cluster.
        microbatch_size: examples in a microbatch: devices of a node share those of the node.
        lost: devices that cannot be used. A node that has lost one is left out where two others or
            more are whole.

    Returns:
        The nodes that are whole; where there are fewer than two of these, devices: all that are
        left, also those of a whole node.

    Example:
        >>> from hetjax.mesh import Link, Subcluster, kind
        >>> link = Link(25e9, 1e-5)
        >>> box = Cluster("box", (Subcluster("fast", kind("RTX4090"), 1, 2, link, link),))
        >>> [str(member.submesh) for member in cluster_members(box, 8)]
        ['fast[0:1] 1x1', 'fast[1:2] 1x1']
        >>> pair = Cluster("pair", (Subcluster("fast", kind("RTX4090"), 2, 2, link, link),))
        >>> [str(member.submesh) for member in cluster_members(pair, 8)]
        ['fast[0:2] 1x2', 'fast[2:4] 1x2']
        >>> [str(member.submesh) for member in cluster_members(pair, 8, frozenset({3}))]
        ['fast[0:1] 1x1', 'fast[1:2] 1x1', 'fast[2:3] 1x1']
    """
    whole = [
        SubMesh(each.name, start, (1, each.devices_per_node))
        for each in cluster.subclusters
        for start in range(0, each.num_devices, each.devices_per_node)
    ]
    alone = sum(lost.isdisjoint(cluster.device_ids(node)) for node in whole) < 2
    found = []
    for each in cluster.subclusters:
        width = 1 if alone else each.devices_per_node
        for start in range(0, each.num_devices, width):
            submesh = SubMesh(each.name, start, (1, width))
            if lost.isdisjoint(cluster.device_ids(submesh)):
                found.append(submesh)
    return members_of(cluster, found, microbatch_size)


def members_of(
    cluster: Cluster, submeshes: Sequence[SubMesh], microbatch_size: int
) -> tuple[Member, ...]:
    """The members of a stage, whose devices divide examples alone.

    Args:
        cluster: the cluster.
        submeshes: the devices of each; those of several nodes become several members, and so do
            those whose tensor axis would be wider than is allowed.
        microbatch_size: examples in a microbatch.

    Example:
        >>> from hetjax.mesh import Link, Subcluster, kind
        >>> link = Link(25e9, 1e-5)
        >>> rack = Cluster("rack", (Subcluster("fast", kind("A800"), 2, 4, link, link),))
        >>> [str(each.submesh) for each in members_of(rack, [SubMesh("fast", 0, (2, 4))], 8)]
        ['fast[0:4] 1x4', 'fast[4:8] 1x4']
    """
    found = []
    for each in submeshes:
        part = cluster.subcluster(each.subcluster)
        width = _widest_member(part, each.shape[1], microbatch_size)
        data = math.gcd(width, microbatch_size)
        for start in range(each.start, each.start + each.num_devices, width):
            submesh = SubMesh(each.subcluster, start, (1, width))
            found.append(Member(submesh, (data, width // data)))
    return tuple(found)


def _widest_member(part: Subcluster, devices: int, microbatch_size: int) -> int:
    """The most devices that divide a node's and need no wider tensor axis than is allowed."""
    return next(
        width
        for width in range(devices, 0, -1)
        if devices % width == 0
        and part.allows_tensor_axis(width // math.gcd(width, microbatch_size))
    )
