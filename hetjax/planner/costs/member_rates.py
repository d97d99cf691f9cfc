"""What the members of a stage compute and move, by the cost model's rules, for any program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetjax.mesh.cluster import Cluster
from hetjax.mesh.kinds import DeviceKind
from hetjax.planner.costs.exchange_cost import exchange_bandwidth
from hetjax.planner.module_programs.rates import ClassRates, DirectNetwork, MemberSpeed, Rates
from hetjax.planner.plan.stage_plan import Member
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.rates import (
    TASK_SECONDS,
    TRAFFIC_SHARE,
    USABLE_MEMORY,
    collective_link,
    data_axis_link,
)


def member_rates(problem: PlanningProblem, members: Sequence[Member]) -> Rates:
    """What computing and moving takes on the members of a stage.

    Args:
        problem: the planning problem, with its profile.
        members: the members; there are several.

    Returns:
        The rates: of members what classes of work were measured to take, else the roofline that
        `hetjax.planner.costs.cost_model.estimate` has; of moves the slowest of each member's links,
        with all that works side by side.
    """
    classes = class_rates(problem)
    speeds = tuple(
        _speed(problem, member, classes.get(member.submesh.subcluster)) for member in members
    )
    return Rates(speeds, member_network(problem.cluster, members))


def member_network(cluster: Cluster, members: Sequence[Member]) -> DirectNetwork:
    """The links among the members of a stage.

    Args:
        cluster: the devices.
        members: the members; there are several.
    """
    submeshes = [member.submesh for member in members]
    subclusters = [cluster.subcluster(submesh.subcluster) for submesh in submeshes]
    bandwidths, latency = [], 0.0
    for place, mine in enumerate(submeshes):
        others = [other for each, other in enumerate(submeshes) if each != place]
        bandwidths.append(min(exchange_bandwidth(cluster, mine, other) for other in others))
        links = (cluster.link_between(mine, other) for other in others)
        latency = max(latency, *(link.latency for link in links))
    # Each gives something to all others, and takes something of them.
    messages = 2 * (len(members) - 1) * max(each.message_load for each in subclusters)
    return DirectNetwork(
        tuple(bandwidths),
        TASK_SECONDS + latency + messages,
        tuple(each.transfer_load for each in subclusters),
    )


def _speed(problem: PlanningProblem, member: Member, classes: ClassRates | None) -> MemberSpeed:
    submesh = member.submesh
    kind = problem.cluster.subcluster(submesh.subcluster).kind
    # Devices along another axis than that of the examples compute the same.
    devices = member.mesh_shape[0]
    slower = problem.profile.slowness(submesh.subcluster, submesh.shape)
    # A third of a step's work is forward.
    factor = devices / ((slower[0] + 2 * slower[1]) / 3)
    link = data_axis_link(
        collective_link(problem.cluster, submesh), submesh.shape, member.mesh_shape
    )
    assumed = kind.memory_bandwidth / 2
    return MemberSpeed(
        flops=factor * kind.product_flops(problem.dtype),
        traffic=factor * kind.memory_bandwidth / TRAFFIC_SHARE,
        updated=problem.profile.updates.get(submesh.subcluster, assumed),
        devices=devices,
        inner_bandwidth=link.bandwidth,
        memory=USABLE_MEMORY * kind.memory_bytes,
        classes=classes,
        on_cpu=kind.is_processor,
    )


@dataclass(frozen=True)
class PassSpeed:
    """What a device computes of a pass.

    Args:
        kind: the device.
        dtype: the dtype of products.
        slowness: by what passes take longer than the kind's figures say, forward and backward.
        classes: what classes of work take; None where none was measured.
    """

    kind: DeviceKind
    dtype: str
    slowness: tuple[float, float]
    classes: ClassRates | None

    def seconds(
        self, flops: float, traffic: float, work: tuple[tuple[str, float], ...], way: int
    ) -> float:
        """What something takes.

        Args:
            flops: FLOPs of its matrix products.
            traffic: bytes that it reads and writes, were nothing fused.
            work: the same by class, which counts where classes were measured.
            way: 0 forward, 1 backward.
        """
        if self.classes is not None:
            return self.classes.seconds(work)
        moving = traffic * TRAFFIC_SHARE / self.kind.memory_bandwidth
        computing = flops / self.kind.product_flops(self.dtype)
        return self.slowness[way] * (computing + moving)


def pass_speeds(problem: PlanningProblem) -> Callable[[str, tuple[int, int]], PassSpeed]:
    """The speeds of devices, by the name of their subcluster and the shape of their submesh.

    Args:
        problem: the planning problem, with its profile.
    """
    classes = class_rates(problem)

    def speed(subcluster: str, shape: tuple[int, int]) -> PassSpeed:
        kind = problem.cluster.subcluster(subcluster).kind
        slowness = problem.profile.slowness(subcluster, shape)
        return PassSpeed(kind, problem.dtype, slowness, classes.get(subcluster))

    return speed


def class_rates(problem: PlanningProblem) -> dict[str, ClassRates]:
    """What classes of work take on the devices of subclusters where something was measured.

    Args:
        problem: the planning problem, with its profile.

    Returns:
        By the subcluster's name.
    """
    found, known = {}, problem.profile.classes
    # The cluster may be a part of the one that was measured.
    for part in problem.cluster.subclusters:
        if part.name in known:
            figures = part.kind.product_flops(problem.dtype), part.kind.memory_bandwidth
            found[part.name] = ClassRates(known[part.name], *figures)
    return found
