"""What the members of a stage compute and move, by the cost model's rules, for any program."""

from __future__ import annotations

from collections.abc import Sequence

from hetjax.mesh.cluster import Cluster
from hetjax.planner.costs.sharing_cost import exchange_bandwidth
from hetjax.planner.module_programs.rates import ClassRates, DirectNetwork, MemberSpeed, Rates
from hetjax.planner.plan.stage_plan import Member
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.rates import TASK_SECONDS, TRAFFIC_SHARE, USABLE_MEMORY, collective_link


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
    link = collective_link(problem.cluster, submesh)
    assumed = kind.memory_bandwidth / 2
    return MemberSpeed(
        flops=factor * kind.product_flops(problem.dtype),
        traffic=factor * kind.memory_bandwidth / TRAFFIC_SHARE,
        updated=problem.profile.updates.get(submesh.subcluster, assumed),
        devices=devices,
        inner_bandwidth=link.bandwidth,
        memory=USABLE_MEMORY * kind.memory_bytes,
        classes=classes,
    )


def class_rates(problem: PlanningProblem) -> dict[str, ClassRates]:
    """What classes of work take on the devices of subclusters where something was measured.

    Args:
        problem: the planning problem, with its profile.

    Returns:
        By the subcluster's name.
    """
    found = {}
    for name, rates in problem.profile.classes.items():
        kind = problem.cluster.subcluster(name).kind
        figures = kind.product_flops(problem.dtype), kind.memory_bandwidth
        found[name] = ClassRates(rates, *figures)
    return found
