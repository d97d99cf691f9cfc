"""The exact search for the cheapest pipeline: which nodes to rent, and what to do on them.

On some nodes the fastest pipeline is the cheapest, too. So the cheapest of all is the fastest one
on the right numbers of nodes. These are found by branch and bound over boxes, from a least to a
largest number of nodes of each subcluster: nothing in a box is faster than what may use all of its
largest numbers, and nothing rents less than its least ones.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence

from hetjax.planner.harp.fixed_pace import Place
from hetjax.planner.harp.restriction import with_nodes
from hetjax.planner.harp.search import Candidate, search
from hetjax.planner.harp.stage_table import StageTable
from hetjax.planner.plan.prices import price_of_nodes

# Sums of the same prices in another order differ by less, relatively.
_ROUNDING = 1e-12

Nodes = tuple[int, ...]


def search_by_cost(
    table: StageTable, prices: Sequence[float], below: float = float("inf")
) -> tuple[Candidate, ...]:
    """Find the pipeline of the least cost: its latency times the price of the nodes that it uses.

    The search space is that of `hetjax.planner.harp.search.search`.

    Args:
        table: what stages and transfers take.
        prices: what a node of each subcluster costs a second, more than 0.
        below: no pipeline is wanted whose cost is this or more.

    Returns:
        The best candidate first, proven to be that, then others that were met on the way, by cost.
        Empty where nothing fits, or only what is not wanted.
    """
    found: dict[tuple[Place, ...], tuple[float, Candidate]] = {}
    best = below

    @functools.cache
    def least_latency(nodes: Nodes) -> float:
        """The fastest that so many nodes allow; what is met on the way is kept."""
        nonlocal best
        candidates = search(with_nodes(table, nodes))
        for each in candidates:
            cost = price_of_nodes(prices, rented_nodes(table, each)) * each.latency
            if each.places not in found or cost < found[each.places][0]:
                found[each.places] = cost, each
            best = min(best, cost)
        return candidates[0].latency if candidates else float("inf")

    boxes: list[tuple[float, Nodes, Nodes]] = []

    def push(low: Nodes, high: Nodes) -> None:
        latency = least_latency(high) if any(high) else float("inf")
        if latency < float("inf") and price_of_nodes(prices, low) * latency < _nearly(best):
            heapq.heappush(boxes, (price_of_nodes(prices, low) * latency, low, high))

    push(tuple(0 for _ in table.nodes), tuple(nodes for nodes, _ in table.nodes))
    while boxes:
        bound, low, high = heapq.heappop(boxes)
        if bound >= _nearly(best):
            break
        if low == high:
            continue
        spreads = [p * (b - a) for p, a, b in zip(prices, low, high, strict=True)]
        widest = spreads.index(max(spreads))
        middle = (low[widest] + high[widest]) // 2
        push(low, (*high[:widest], middle, *high[widest + 1 :]))
        push((*low[:widest], middle + 1, *low[widest + 1 :]), high)
    met = sorted(found.values(), key=lambda pair: pair[0])
    return tuple(each for _, each in met) if met and met[0][0] < below else ()


def rented_nodes(table: StageTable, candidate: Candidate) -> Nodes:
    """How many nodes of each subcluster a pipeline uses; a node of which a device is used counts.

    Args:
        table: the table of the pipeline.
        candidate: the pipeline.

    Returns:
        A number for each subcluster.
    """
    used: list[set[int]] = [set() for _ in table.nodes]
    for place in candidate.places:
        _, per_node = table.nodes[place.subcluster]
        last = place.start + table.slices[place.subcluster][place.slice].num_devices - 1
        used[place.subcluster].update(range(place.start // per_node, last // per_node + 1))
    return tuple(len(nodes) for nodes in used)


def _nearly(cost: float) -> float:
    return cost * (1 - _ROUNDING)
