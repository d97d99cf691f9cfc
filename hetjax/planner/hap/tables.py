"""Choices whose costs are tables over few variables, and how their sum is minimised exactly.

A variable gives way to a table over its neighbours, which has for each of their choices the least
(nonserial dynamic programming). In which order, is found once; costs may change as often as wanted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hetjax.planner.intra_op.integer_program import Edge, Graph
from hetjax.planner.work.arrays import FloatArray

Scope = tuple[int, ...]
"""The variables of a table, in the order of its dimensions."""


class _Input(NamedTuple):
    """A table that is added to others.

    Args:
        table: its number.
        scope: its variables.
        axes: the order in which its dimensions are taken.
        shape: its shape among the dimensions of the others.
    """

    table: int
    scope: Scope
    axes: tuple[int, ...]
    shape: tuple[int, ...]


class _Step(NamedTuple):
    """A variable that gives way, and the tables that it is in, the smallest first."""

    variable: int
    inputs: tuple[_Input, ...]


@dataclass(frozen=True, eq=False)
class Minimum:
    """The least costs of a network, for each choice of the variables that are kept.

    Args:
        least: `[choices of the first kept variable, ...]`.
        order: in which order the others gave way.
        tables: all tables, those that were made after those that were given.
    """

    least: FloatArray
    order: EliminationOrder
    tables: Sequence[FloatArray]

    def choices(self, kept: Sequence[int]) -> dict[int, int]:
        """The best choice of every variable.

        Args:
            kept: the choices of the kept variables.
        """
        found = dict.fromkeys(self.order.settled, 0)
        found.update(zip(self.order.kept, map(int, kept), strict=True))
        for step in reversed(self.order.steps):
            total: Any = 0.0
            for each in step.inputs:
                at = tuple(found.get(variable, slice(None)) for variable in each.scope)
                total = total + self.tables[each.table][at]
            found[step.variable] = int(np.argmin(total))
        return found


class EliminationOrder:
    """In which order the variables of a network give way.

    Args:
        sizes: how many choices each variable has.
        scopes: the variables of each table.
        kept: the variables that stay, in the order of the result's dimensions.

    Attributes:
        settled: the variables of one choice, which tables are taken without: arrays have few
            dimensions.
        steps: the others that give way, in order.
        entries: how many entries the tables have that are added up on the way.
        most_entries: how many the largest has.

    Example:
        >>> order = EliminationOrder([2, 2], [(0,), (0, 1)], kept=[1])
        >>> alone, pairs = np.array([1.0, 3.0]), np.array([[0.0, 9.0], [9.0, 0.0]])
        >>> found = order.minimum([alone, pairs])
        >>> found.least.tolist(), found.choices([1])
        ([1.0, 3.0], {1: 1, 0: 1})
    """

    def __init__(self, sizes: Sequence[int], scopes: Sequence[Scope], kept: Sequence[int]):
        self.kept = tuple(kept)
        self._sizes = tuple(sizes)
        self.settled = [variable for variable, size in enumerate(sizes) if size == 1]
        scopes = [tuple(v for v in scope if sizes[v] > 1) for scope in scopes]
        self._shapes = [tuple(sizes[v] for v in scope) for scope in scopes]
        self.steps: list[_Step] = []
        self.entries = self.most_entries = 0
        tables: dict[int, Scope] = dict(enumerate(scopes))
        near: list[set[int]] = [set() for _ in sizes]
        of: list[set[int]] = [set() for _ in sizes]
        for place, scope in tables.items():
            for variable in scope:
                near[variable].update(scope)
                of[variable].add(place)
        for variable, others in enumerate(near):
            others.discard(variable)
        logs = [math.log(size) for size in sizes]
        free = set(range(len(sizes))).difference(kept, self.settled)
        for variable in narrow_order(near, logs, free):
            mine = {place: tables.pop(place) for place in of[variable]}
            others = tuple(sorted({v for scope in mine.values() for v in scope} - {variable}))
            inputs = self._inputs(mine, (*others, variable))
            self.steps.append(_Step(variable, inputs))
            entries = math.prod(self._sizes[each] for each in (*others, variable))
            self.entries += entries
            self.most_entries = max(self.most_entries, entries)
            number = len(scopes) + len(self.steps) - 1
            for place, scope in mine.items():
                for other in scope:
                    of[other].discard(place)
            tables[number] = others
            for other in others:
                of[other].add(number)
        self._last = self._inputs(tables, self.kept)

    def _inputs(self, tables: Mapping[int, Scope], order: Scope) -> tuple[_Input, ...]:
        found = []
        for place, scope in tables.items():
            axes = tuple(sorted(range(len(scope)), key=lambda i: order.index(scope[i])))
            shape = tuple(self._sizes[each] if each in scope else 1 for each in order)
            found.append(_Input(place, scope, axes, shape))
        return tuple(sorted(found, key=lambda each: math.prod(each.shape)))

    def minimum(self, tables: Sequence[FloatArray]) -> Minimum:
        """The least costs.

        Args:
            tables: one for each scope; infinite where choices cannot go together.
        """
        pairs = zip(tables, self._shapes, strict=True)
        known = [table.reshape(shape) for table, shape in pairs]
        for step in self.steps:
            known.append(_added(known, step.inputs).min(axis=-1))
        least = np.zeros([self._sizes[each] for each in self.kept])
        if self._last:
            least = least + _added(known, self._last)
        return Minimum(least, self, known)


def _added(tables: Sequence[FloatArray], inputs: Sequence[_Input]) -> FloatArray:
    first, *others = (tables[i].transpose(axes).reshape(shape) for i, _, axes, shape in inputs)
    if not others:
        return first
    total = first + others[0]
    for each in others[1:]:
        # In place, where nothing grows: what is added last is largest.
        total = np.add(total, each, out=total) if _covers(total, each) else total + each
    return np.asarray(total)


def _covers(wide: FloatArray, narrow: FloatArray) -> bool:
    """Whether a sum has the shape of its first summand, which is an array and no number."""
    pairs = zip(wide.shape, narrow.shape, strict=True)
    return wide.ndim > 0 and all(a >= b for a, b in pairs)


def narrow_order(near: list[set[int]], logs: Sequence[float], free: set[int]) -> list[int]:
    """In which order variables give way, so that few are joined that were not before (min-fill).

    Args:
        near: the neighbours of each variable; it is changed.
        logs: the logarithm of how many choices each has.
        free: the variables that give way.

    Returns:
        The variables, in order.
    """

    def fill(variable: int) -> float:
        around = list(near[variable])
        added = 0.0
        for i, a in enumerate(around):
            beside = near[a]
            added += logs[a] * sum(logs[b] for b in around[:i] if b not in beside)
        return added

    weights = {variable: fill(variable) for variable in free}
    order = []
    while weights:
        variable = min(weights, key=weights.__getitem__)
        del weights[variable]
        order.append(variable)
        around = near[variable]
        for other in around:
            near[other].update(around)
            near[other] -= {other, variable}
        for other in around.union(*(near[each] for each in around)):
            if other in weights:
                weights[other] = fill(other)
    return order


def as_graph(
    sizes: Sequence[int],
    scopes: Sequence[Scope],
    tables: Sequence[FloatArray],
    held: Mapping[int, int],
) -> Graph:
    """The same network for the integer program, which knows nothing of this file.

    Args:
        sizes: how many choices each variable has.
        scopes: the variables of each table, one or two.
        tables: the tables.
        held: the choices of variables that have one.
    """
    alone = [np.zeros(size) for size in sizes]
    for variable, choice in held.items():
        others = np.arange(sizes[variable]) != choice
        alone[variable] = np.where(others, np.inf, 0.0)
    pairs: dict[Scope, FloatArray] = {}
    for scope, costs in zip(scopes, tables, strict=True):
        if len(scope) == 1:
            alone[scope[0]] = alone[scope[0]] + costs
            continue
        ends, matrix = (scope, costs) if scope[0] < scope[1] else (scope[::-1], costs.T)
        pairs[ends] = pairs[ends] + matrix if ends in pairs else matrix
    edges = tuple(Edge(a, b, matrix) for (a, b), matrix in pairs.items())
    return Graph(tuple(alone), tuple(np.zeros(size) for size in sizes), edges)
