"""The integer program: one strategy for each node of a graph, at the least cost that fits.

Every strategy is a binary variable, every pair of strategies at the ends of an edge a continuous
one: the pairs of a strategy add up to it, so that they are whole where the strategies are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from hetjax.planner.work.arrays import FloatArray


@dataclass(frozen=True, eq=False)
class Edge:
    """What two nodes cost together.

    Args:
        source: a node.
        target: another node.
        seconds: ``[strategies of source, strategies of target]``; infinite where the two cannot
            go together.
    """

    source: int
    target: int
    seconds: FloatArray


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes of which each takes one of its strategies.

    Args:
        seconds: for each node, what each strategy costs alone; infinite for one that cannot be.
        memory: for each node, what memory each strategy takes, in bytes.
        edges: what pairs of nodes cost beside that; no two join the same nodes.
    """

    seconds: tuple[FloatArray, ...]
    memory: tuple[FloatArray, ...]
    edges: tuple[Edge, ...]

    def cost(self, choice: Sequence[int]) -> float:
        """Seconds of one strategy for each node."""
        alone = sum(float(node[k]) for node, k in zip(self.seconds, choice, strict=True))
        pairs = sum(float(e.seconds[choice[e.source], choice[e.target]]) for e in self.edges)
        return alone + pairs

    def held(self, choice: Sequence[int]) -> float:
        """Bytes of one strategy for each node."""
        return sum(float(node[k]) for node, k in zip(self.memory, choice, strict=True))


@dataclass(frozen=True)
class Solution:
    """The best choice.

    Args:
        choice: for each node its strategy.
        seconds: what they cost.
        memory_bytes: what memory they take.
        is_optimal: whether it is proved that none is better; not so where time ran out.
    """

    choice: tuple[int, ...]
    seconds: float
    memory_bytes: float
    is_optimal: bool


def solve(
    graph: Graph, memory_limit: float = np.inf, *, time_limit: float = 60.0
) -> Solution | None:
    """The cheapest choice of strategies that fits.

    Args:
        graph: the nodes, their strategies and what these cost.
        memory_limit: bytes that they may take together.
        time_limit: seconds after which the best choice so far will do.

    Returns:
        The choice; None where none fits, or none was found in time.

    Source: Alpa (Zheng et al., 2022), section 4.2, eq. 1, with a limit on memory.

    Example:
        >>> fast, small = np.array([1.0, 3.0]), np.array([8.0, 2.0])
        >>> graph = Graph((fast, fast), (small, small), ())
        >>> solve(graph).choice, solve(graph, memory_limit=4.0).choice
        ((0, 0), (1, 1))
    """
    program = _IntegerProgram(graph)
    least = sum(float(node.min()) for node in graph.memory)
    if least > memory_limit:
        return None
    result = milp(
        program.costs(),
        integrality=program.integrality(),
        bounds=program.bounds(),
        constraints=[*program.consistency(), *program.memory(memory_limit)],
        options={"mip_rel_gap": 0.0, "time_limit": time_limit},
    )
    if result.x is None:
        return None
    chosen = tuple(
        int(np.argmax(result.x[first : first + len(node)]))
        for first, node in zip(program.first, graph.seconds, strict=True)
    )
    return Solution(chosen, graph.cost(chosen), graph.held(chosen), result.status == 0)


class _IntegerProgram:
    """The variables: first those of the nodes' strategies, then those of the edges' pairs.

    Bounds are of type Any where they are arrays, which the stubs of scipy do not know.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        counts = [len(node) for node in graph.seconds]
        self.first = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(int)
        self.num_strategies = sum(counts)
        self.edges, self.alone = _separated(graph)
        # Pairs that cannot go together have no variable.
        self.pairs = [np.argwhere(np.isfinite(edge.seconds)) for edge in self.edges]
        self.size = self.num_strategies + sum(map(len, self.pairs))

    def costs(self) -> FloatArray:
        """In units of what a choice costs, so that the solver's tolerances mean little."""
        costs = [np.where(np.isfinite(node), node, node.min()) for node in self.alone]
        for edge, pairs in zip(self.edges, self.pairs, strict=True):
            costs.append(edge.seconds[pairs[:, 0], pairs[:, 1]])
        flat = np.concatenate(costs)
        spread = sum(float(np.ptp(each)) for each in costs if len(each))
        return flat * (_COST_UNITS / spread) if spread else flat

    def bounds(self) -> Bounds:
        """Strategies that cost infinitely much are not taken."""
        most: Any = np.ones(self.size)
        most[: self.num_strategies] = np.isfinite(np.concatenate(self.alone))
        return Bounds(0.0, most)

    def integrality(self) -> NDArray[np.int64]:
        return (np.arange(self.size) < self.num_strategies).astype(np.int64)

    def consistency(self) -> list[LinearConstraint]:
        """One strategy a node; the pairs of a strategy, at either end of an edge, add up to it."""
        rows, columns, values, right = [], [], [], []

        def add(entries: NDArray[np.int64], factors: FloatArray, total: float) -> None:
            rows.append(np.full(len(entries), len(right)))
            columns.append(entries)
            values.append(factors)
            right.append(total)

        for first, node in zip(self.first, self.graph.seconds, strict=True):
            add(np.arange(first, first + len(node)), np.ones(len(node)), 1.0)
        offset = self.num_strategies
        for edge, pairs in zip(self.edges, self.pairs, strict=True):
            for end, node in enumerate((edge.source, edge.target)):
                for strategy in range(len(self.graph.seconds[node])):
                    mine = offset + np.flatnonzero(pairs[:, end] == strategy)
                    entries = np.append(mine, self.first[node] + strategy)
                    add(entries, np.append(np.ones(len(mine)), -1.0), 0.0)
            offset += len(pairs)
        matrix = coo_array(
            (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))),
            shape=(len(right), self.size),
        )
        bounds: Any = np.array(right)
        return [LinearConstraint(matrix.tocsr(), bounds, bounds)]

    def memory(self, limit: float) -> list[LinearConstraint]:
        if not np.isfinite(limit):
            return []
        sizes = np.zeros(self.size)
        sizes[: self.num_strategies] = np.concatenate(self.graph.memory)
        unit = max(limit, 1.0)
        return [LinearConstraint(sizes[None, :] / unit, -np.inf, limit / unit)]


_COST_UNITS = 1e6
"""What the spread of all costs is scaled to; the solver stops within 1e-6 of the optimum."""


def _separated(graph: Graph) -> tuple[list[Edge], list[FloatArray]]:
    """The edges that are more than a sum of what each end costs; the others go to the nodes."""
    alone = [node.astype(np.float64) for node in graph.seconds]
    kept = []
    for edge in graph.edges:
        if np.isfinite(edge.seconds).all():
            rows = edge.seconds[:, :1]
            columns = edge.seconds[:1] - edge.seconds[0, 0]
            scale = max(1e-300, float(edge.seconds.max()))
            if np.abs(edge.seconds - rows - columns).max() <= 1e-12 * scale:
                alone[edge.source] = alone[edge.source] + rows[:, 0]
                alone[edge.target] = alone[edge.target] + columns[0]
                continue
        kept.append(edge)
    return kept, alone
