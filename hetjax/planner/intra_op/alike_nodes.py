"""Nodes of a graph that are alike, and do alike: the blocks of a model are decided once.

Two nodes are alike where their costs are, and those of their edges, and so on for a few edges
around. The first and the last blocks, which have other neighbours, decide for themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hetjax.planner.intra_op.elimination import sole_choice
from hetjax.planner.intra_op.integer_program import Edge, Graph, Solution, solve
from hetjax.planner.work.arrays import FloatArray

RADIUS = 3
"""How many edges around a node are compared."""

_MOST_NODES = 60
"""Up to this many nodes, about those of two blocks, each decides for itself."""


def solve_alike(
    graph: Graph, memory_limit: float = np.inf, *, time_limit: float = 60.0
) -> Solution | None:
    """The cheapest choice of strategies, where in large graphs nodes that are alike do alike.

    Args:
        graph: the nodes, their strategies and what these cost.
        memory_limit: bytes that they may take together.
        time_limit: seconds after which the best choice so far will do.

    Returns:
        The choice, one for each node of the graph; None where none fits, or none was found in time.
    """
    classes = list(range(len(graph.seconds)))
    if len(classes) > _MOST_NODES:
        classes = classes_of(graph)
    small = tied(graph, classes)
    solution = _without_program(small, memory_limit)
    solution = solution or solve(small, memory_limit, time_limit=time_limit)
    return solution and replace(solution, choice=tuple(solution.choice[each] for each in classes))


def _without_program(graph: Graph, memory_limit: float) -> Solution | None:
    """The cheapest choice of all, where it is the only one and fits."""
    choice = sole_choice(graph)
    if choice is None or graph.held(choice) > memory_limit:
        return None
    return Solution(choice, graph.cost(choice), graph.held(choice), is_optimal=True)


def classes_of(graph: Graph, radius: int = RADIUS) -> list[int]:
    """The class of each node; nodes that are alike share one.

    Args:
        graph: the graph.
        radius: how many edges around a node are compared.

    Returns:
        Numbers from 0, in the order of the classes' first nodes.

    Source: Weisfeiler and Leman, 1968: refinement of colours.

    Example:
        >>> one, two = np.array([1.0, 2.0]), np.array([2.0, 1.0])
        >>> classes_of(Graph((one, two, one), (one, one, one), ()))
        [0, 1, 0]
    """
    pairs = zip(graph.seconds, graph.memory, strict=True)
    classes = _numbered([(s.tobytes(), m.tobytes()) for s, m in pairs])
    matrices = _numbered([edge.seconds.tobytes() for edge in graph.edges])
    for _ in range(radius):
        around: list[list[tuple[int, int, int]]] = [[] for _ in classes]
        for edge, matrix in zip(graph.edges, matrices, strict=True):
            around[edge.source].append((0, matrix, classes[edge.target]))
            around[edge.target].append((1, matrix, classes[edge.source]))
        classes = _numbered([(k, *sorted(found)) for k, found in zip(classes, around, strict=True)])
    return classes


def tied(graph: Graph, classes: Sequence[int]) -> Graph:
    """A graph of classes, in which all nodes of one take the same strategy.

    Args:
        graph: the graph.
        classes: the class of each node; those of one have as many strategies.

    Returns:
        The graph, whose costs are those of all nodes together.
    """
    count = max(classes) + 1
    seconds = _added(graph.seconds, classes, count)
    memory = _added(graph.memory, classes, count)
    edges: dict[tuple[int, int], FloatArray] = {}
    for edge in graph.edges:
        source, target, matrix = classes[edge.source], classes[edge.target], edge.seconds
        if source == target:
            seconds[source] = seconds[source] + np.diagonal(matrix)
            continue
        if source > target:
            source, target, matrix = target, source, matrix.T
        known = edges.get((source, target))
        edges[source, target] = matrix if known is None else known + matrix
    pairs = tuple(Edge(*key, matrix) for key, matrix in edges.items())
    return Graph(tuple(seconds), tuple(memory), pairs)


def _added(arrays: Sequence[FloatArray], classes: Sequence[int], count: int) -> list[FloatArray]:
    found: list[FloatArray | None] = [None] * count
    for array, place in zip(arrays, classes, strict=True):
        known = found[place]
        found[place] = array if known is None else known + array
    return [array for array in found if array is not None]


def _numbered(keys: Sequence[object]) -> list[int]:
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
