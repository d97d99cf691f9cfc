"""What a plan costs where devices have prices: whole nodes are paid for, as clouds rent them."""

from __future__ import annotations

from collections.abc import Sequence

from hetjax.errors import InputError
from hetjax.mesh.cluster import Cluster
from hetjax.planner.plan.plan import Plan

_SECONDS_PER_HOUR = 3600.0

OBJECTIVES = ("step_time", "cost")
"""What a planner may make least."""


def node_prices(cluster: Cluster) -> tuple[float, ...]:
    """What a node of each subcluster costs, by the second.

    Args:
        cluster: the cluster.

    Returns:
        Prices, in the currency of the cluster file.

    Raises:
        InputError: a subcluster has no price.
    """
    prices = []
    for subcluster in cluster.subclusters:
        if subcluster.price_per_device_hour is None:
            raise InputError(
                f"the objective is 'cost', and subcluster {subcluster.name!r} of cluster "
                f"{cluster.name!r} has no price_per_device_hour; give every subcluster one, or "
                f"plan for 'step_time'"
            )
        hourly = subcluster.price_per_device_hour * subcluster.devices_per_node
        prices.append(hourly / _SECONDS_PER_HOUR)
    return tuple(prices)


def used_nodes(plan: Plan) -> tuple[int, ...]:
    """How many nodes of each subcluster a plan uses; a node of which a device is used counts.

    Args:
        plan: the plan.

    Returns:
        A number for each subcluster.
    """
    used: dict[str, set[int]] = {each.name: set() for each in plan.cluster.subclusters}
    for stage in plan.stages:
        for submesh in stage.submeshes:
            used[submesh.subcluster].update(plan.cluster.nodes(submesh))
    return tuple(len(nodes) for nodes in used.values())


def price_of_nodes(prices: Sequence[float], nodes: Sequence[int]) -> float:
    """What some nodes of each subcluster cost together, by the second."""
    return sum(price * count for price, count in zip(prices, nodes, strict=True))


def step_cost(plan: Plan, step_time: float) -> float | None:
    """What a step of a plan costs: the price of the nodes that it uses, for as long as it takes.

    Args:
        plan: the plan.
        step_time: seconds of a step.

    Returns:
        In the currency of the cluster file; None where a subcluster has no price.
    """
    if any(each.price_per_device_hour is None for each in plan.cluster.subclusters):
        return None
    return price_of_nodes(node_prices(plan.cluster), used_nodes(plan)) * step_time
