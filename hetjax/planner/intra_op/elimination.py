"""The best choice of strategies found exactly, one node after another, without an integer program.

What a node costs at best depends on the strategies of its neighbours alone, so that it gives way to
a table over these. Stages are long and narrow: the tables stay small.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.intra_op.integer_program import Graph
from hetjax.planner.work.arrays import FloatArray

_MOST_ENTRIES = 1_000_000
"""Up to so many entries a table may have."""

_NEAR = 1e-11
"""Of all that is at stake, how much less counts as nothing: an integer program's solver stops at a
tenth of it."""


class _Table(NamedTuple):
    """What some nodes cost, by the strategies of others.

    Args:
        nodes: the others, in order, one a dimension.
        least: what they cost at best.
        lead: by how much the best is better than the second best; None for infinitely.
    """

    nodes: tuple[int, ...]
    least: FloatArray
    lead: FloatArray | None


class _EliminatedNode(NamedTuple):
    """A node that has given way: its best strategy by those of others."""

    node: int
    others: tuple[int, ...]
    best: NDArray[np.intp]


def sole_choice(graph: Graph) -> tuple[int, ...] | None:
    """The cheapest choice of strategies, where no other one comes near it.

    Args:
        graph: the nodes, their strategies and what these cost.

    Returns:
        For each node its strategy. None where there are several about as cheap or none at all, and
        where the tables would become too large.

    Source: nonserial dynamic programming (Bertele and Brioschi, 1972).

    Example:
        >>> from hetjax.planner.intra_op.integer_program import Edge
        >>> node, alike = np.array([1.0, 3.0]), Edge(0, 1, np.array([[0.0, 9.0], [9.0, 0.0]]))
        >>> sole_choice(Graph((node, 0 * node), (node, node), (alike,)))
        (0, 0)
        >>> sole_choice(Graph((0 * node, 0 * node), (node, node), (alike,)))
    """
    elimination = _Elimination(graph)
    while elimination.left:
        if not elimination.give_way():
            return None
    scale = abs(elimination.least) + sum(map(_spread, graph.seconds))
    scale += sum(_spread(edge.seconds) for edge in graph.edges)
    if not elimination.least < math.inf or elimination.lead <= _NEAR * scale:
        return None
    return elimination.choice()


class _Elimination:
    """The tables that are left of a graph while its nodes give way."""

    def __init__(self, graph: Graph):
        self.sizes = [len(node) for node in graph.seconds]
        self.left = set(range(len(self.sizes)))
        self.tables: dict[int, list[_Table]] = {node: [] for node in self.left}
        for node, seconds in enumerate(graph.seconds):
            self._add(_Table((node,), seconds, None))
        for edge in graph.edges:
            ends, matrix = (edge.source, edge.target), edge.seconds
            if edge.source > edge.target:
                ends, matrix = ends[::-1], matrix.T
            self._add(_Table(ends, matrix, None))
        self.entries = {node: self._entries(node) for node in self.left}
        self.steps: list[_EliminatedNode] = []
        self.least, self.lead = 0.0, math.inf

    def give_way(self) -> bool:
        """Let the node give way that takes the smallest table; False where all are too large."""
        node = min(self.left, key=self.entries.__getitem__)
        if self.entries[node] > _MOST_ENTRIES:
            return False
        self.left.remove(node)
        mine = self.tables.pop(node)
        nodes = self._nodes(mine)
        made, best = _without(node, mine, nodes, [self.sizes[each] for each in nodes])
        self.steps.append(_EliminatedNode(node, made.nodes, best))
        for other in made.nodes:
            self.tables[other] = [each for each in self.tables[other] if node not in each.nodes]
        if made.nodes:
            self._add(made)
        else:
            self.least += float(made.least)
            self.lead = min(self.lead, math.inf if made.lead is None else float(made.lead))
        for other in made.nodes:
            self.entries[other] = self._entries(other)
        return True

    def choice(self) -> tuple[int, ...]:
        """The best strategies, once all nodes have given way."""
        chosen = [0] * len(self.sizes)
        for step in reversed(self.steps):
            chosen[step.node] = int(step.best[tuple(chosen[other] for other in step.others)])
        return tuple(chosen)

    def _add(self, table: _Table) -> None:
        for node in table.nodes:
            self.tables[node].append(table)

    def _nodes(self, tables: Collection[_Table]) -> tuple[int, ...]:
        return tuple(sorted(set().union(*(table.nodes for table in tables))))

    def _entries(self, node: int) -> int:
        return math.prod(self.sizes[each] for each in self._nodes(self.tables[node]))


def _without(
    node: int, tables: Sequence[_Table], nodes: tuple[int, ...], sizes: Sequence[int]
) -> tuple[_Table, NDArray[np.intp]]:
    """The sum of tables where a node takes its best strategy, and which that is."""

    def spread(values: FloatArray, of: _Table) -> FloatArray:
        own = [size if each in of.nodes else 1 for each, size in zip(nodes, sizes, strict=True)]
        return values.reshape(own)

    # The largest last, so that sums grow late.
    total = np.zeros(())
    for table in sorted(tables, key=lambda table: table.least.size):
        total = total + spread(table.least, table)
    leads = [spread(table.lead, table) for table in tables if table.lead is not None]
    axis = nodes.index(node)
    best = total.argmin(axis=axis)
    at_best = np.expand_dims(best, axis)
    least = np.take_along_axis(total, at_best, axis)
    lead = None
    if total.shape[axis] > 1:
        np.put_along_axis(total, at_best, np.inf, axis)
        with np.errstate(invalid="ignore"):
            lead = total.min(axis=axis) - least.squeeze(axis)
    for each in leads:
        wide = np.broadcast_to(each, total.shape)
        own = np.take_along_axis(wide, at_best, axis).squeeze(axis)
        lead = own if lead is None else np.fmin(lead, own)
    others = nodes[:axis] + nodes[axis + 1 :]
    return _Table(others, least.squeeze(axis), lead), best


def _spread(values: FloatArray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.ptp(finite)) if len(finite) else 0.0
