"""Networks of choices whose costs are tables over few variables, and how they are minimised exactly.

A variable gives way to a table over its neighbours, which has for each of their choices the least
(nonserial dynamic programming). Choices that none needs are left out before tables grow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.intra_op.integer_program import Edge, Graph

FloatArray = NDArray[np.float64]

BIG = 1e4
"""Seconds in place of infinity: differences of infinite costs must be numbers."""

_TIE = 1e-15
"""Seconds that count as none: sums of tables round."""

_ROUNDS = (400, 6400)
"""Up to how many entries variables give way before choices are looked through that none needs."""


class Table(NamedTuple):
    """What some variables cost together.

    Args:
        variables: the variables, in order.
        costs: for each of their choices.
    """

    variables: tuple[int, ...]
    costs: FloatArray


@dataclass(frozen=True)
class _Gone:
    """A variable that has given way.

    Args:
        variable: the variable.
        choices: for each variable of the tables, what its numbers there stand for.
        tables: the tables that it was in.
    """

    variable: int
    choices: Mapping[int, NDArray[np.intp]]
    tables: tuple[Table, ...]

    def best(self, found: Mapping[int, int]) -> int:
        """Its best choice, given those of the others."""
        total: Any = 0.0
        for variables, costs in self.tables:
            at = tuple(
                slice(None)
                if each == self.variable
                else int(np.searchsorted(self.choices[each], found[each]))
                for each in variables
            )
            total = total + costs[at]
        return int(self.choices[self.variable][int(np.argmin(total))])


class Network:
    """Variables and tables of what their choices cost.

    Args:
        sizes: how many choices each variable has.
        tables: the tables; infinite where choices cannot go together.

    Attributes:
        left: the variables that have not given way.
        entries: how many entries all tables had that were made.
    """

    def __init__(self, sizes: Sequence[int], tables: Sequence[Table]):
        self._choices = [np.arange(size) for size in sizes]
        self.left = set(range(len(sizes)))
        self.entries = 0
        self._tables: dict[int, Table] = {}
        self._of: list[set[int]] = [set() for _ in sizes]
        self._next = 0
        self._gone: list[_Gone] = []
        for table in tables:
            self._add(table.variables, np.minimum(table.costs, BIG))

    def reduce(self, kept: Sequence[int]) -> None:
        """Let variables with few neighbours give way, and leave out choices that none needs.

        Args:
            kept: variables that stay, with all their choices.
        """
        for most in _ROUNDS:
            self._give_way(kept, most)
            self._leave_out(kept)

    def least(self, kept: Sequence[int]) -> FloatArray:
        """What the rest costs at best, for all choices of some variables; the rest gives way.

        Args:
            kept: the variables; the result has a dimension for each.
        """
        self._give_way_all(kept)
        total: Any = np.zeros([len(self._choices[each]) for each in kept])
        for table in self._tables.values():
            total = total + _spread(table, kept, self._sizes(kept))
        return total

    def choices(self, kept: Mapping[int, int]) -> dict[int, int]:
        """The best choices of all variables, once the others have given way.

        Args:
            kept: those of the variables that are left.
        """
        found = dict(kept)
        for gone in reversed(self._gone):
            found[gone.variable] = gone.best(found)
        return found

    def _sizes(self, variables: Sequence[int]) -> list[int]:
        return [len(self._choices[each]) for each in variables]

    def _add(self, variables: tuple[int, ...], costs: FloatArray) -> None:
        order = sorted(range(len(variables)), key=variables.__getitem__)
        inside = tuple(variables[i] for i in order)
        self._tables[self._next] = Table(inside, costs.transpose(order))
        for variable in inside:
            self._of[variable].add(self._next)
        self._next += 1

    def _neighbours(self, variable: int) -> list[int]:
        found = {v for place in self._of[variable] for v in self._tables[place].variables}
        return sorted(found - {variable})

    def _weight(self, variable: int) -> int:
        around = self._neighbours(variable)
        return math.prod(self._sizes([variable, *around]))

    def _give_way(self, kept: Sequence[int], most: float) -> None:
        """Let variables give way, those with the smallest tables first, up to some entries."""
        free = self.left - set(kept)
        weights = {variable: self._weight(variable) for variable in free}
        while weights:
            variable = min(weights, key=weights.__getitem__)
            if weights.pop(variable) > most:
                return
            for other in self._eliminate(variable):
                if other in weights:
                    weights[other] = self._weight(other)

    def _give_way_all(self, kept: Sequence[int]) -> None:
        """Let all variables give way, in an order that makes few large tables."""
        near = {each: set(self._neighbours(each)) for each in {*self.left, *kept}}
        logs = dict(enumerate(np.log(self._sizes(range(len(self._choices)))).tolist()))
        for variable in narrow_order(near, logs, self.left - set(kept)):
            self._eliminate(variable)

    def _eliminate(self, variable: int) -> tuple[int, ...]:
        """Let a variable give way to a table over its neighbours."""
        places = sorted(self._of[variable])
        mine = [self._tables.pop(place) for place in places]
        for place, table in zip(places, mine, strict=True):
            for other in table.variables:
                self._of[other].discard(place)
        others = tuple(sorted({v for table in mine for v in table.variables} - {variable}))
        order = (*others, variable)
        total: Any = np.zeros(len(self._choices[variable]))
        for table in sorted(mine, key=lambda table: table.costs.size):
            total = total + _spread(table, order, self._sizes(order))
        self.entries += total.size
        choices = {each: self._choices[each] for each in order}
        self._gone.append(_Gone(variable, choices, tuple(mine)))
        self.left.discard(variable)
        least = total.min(axis=-1)
        self._add(others, least.reshape(self._sizes(others)))
        return others

    def _leave_out(self, kept: Sequence[int]) -> None:
        """Leave out choices that are never cheaper than another one of the same variable."""
        for variable in sorted(self.left - set(kept), key=lambda v: -len(self._choices[v])):
            count = len(self._choices[variable])
            if count == 1:
                continue
            dearer = np.zeros((count, count))
            for place in self._of[variable]:
                variables, costs = self._tables[place]
                rows = np.moveaxis(costs, variables.index(variable), 0).reshape(count, -1)
                dearer += (rows[:, None, :] - rows[None, :, :]).max(axis=-1)
            kept_places: list[int] = []
            never = dearer <= _TIE
            for choice in range(count):
                others = (
                    other
                    for other in range(count)
                    if other in kept_places or other > choice
                )
                if not any(never[other, choice] for other in others):
                    kept_places.append(choice)
            if len(kept_places) < count:
                self._restrict(variable, np.array(kept_places))

    def _restrict(self, variable: int, places: NDArray[np.intp]) -> None:
        for number in self._of[variable]:
            variables, costs = self._tables[number]
            axis = variables.index(variable)
            self._tables[number] = Table(variables, np.take(costs, places, axis=axis))
        self._choices[variable] = self._choices[variable][places]


def narrow_order(
    near: Mapping[int, set[int]], logs: Mapping[int, float], free: set[int]
) -> list[int]:
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
            added += logs[a] * sum(logs[b] for b in around[:i] if b not in near[a])
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


def _spread(table: Table, order: Sequence[int], sizes: Sequence[int]) -> FloatArray:
    """A table's costs among the dimensions of some variables."""
    mine = table.variables
    axes = sorted(range(len(mine)), key=lambda i: order.index(mine[i]))
    shape = [
        size if variable in mine else 1 for variable, size in zip(order, sizes, strict=True)
    ]
    return table.costs.transpose(axes).reshape(shape)


def as_graph(sizes: Sequence[int], tables: Sequence[Table], held: Mapping[int, int]) -> Graph:
    """The same network for the integer program, which knows nothing of this file.

    Args:
        sizes: how many choices each variable has.
        tables: the tables, of one or two variables.
        held: the choices of variables that have one.
    """
    alone = [np.zeros(size) for size in sizes]
    for variable, choice in held.items():
        others = np.arange(sizes[variable]) != choice
        alone[variable] = np.where(others, np.inf, 0.0)
    pairs: dict[tuple[int, ...], FloatArray] = {}
    for variables, costs in tables:
        if len(variables) == 1:
            alone[variables[0]] = alone[variables[0]] + costs
            continue
        ends, matrix = variables, costs
        if ends[0] > ends[1]:
            ends, matrix = ends[::-1], costs.T
        pairs[ends] = pairs[ends] + matrix if ends in pairs else matrix
    edges = tuple(Edge(a, b, matrix) for (a, b), matrix in pairs.items())
    return Graph(tuple(alone), tuple(np.zeros(size) for size in sizes), edges)
