"""The graph of a stage: a node for each group and each view, with what their strategies cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from hetjax.planner.intra_op.collectives import Layout
from hetjax.planner.intra_op.groups import Costs, Group, Strategy, layouts_of
from hetjax.planner.intra_op.integer_program import Edge, Graph
from hetjax.planner.intra_op.operations import Need
from hetjax.planner.work.arrays import FloatArray


class Viewing(NamedTuple):
    """A strategy of a view.

    Args:
        lies: how the value lies.
        read: how it is read.
        sums: whether the readers' partial cotangents are added before one collective sums them.
    """

    lies: Layout
    read: Layout
    sums: bool


@dataclass(frozen=True)
class View:
    """How several products read one value: it is moved once for all of them.

    Args:
        value: the value.
        home: its group.
        readers: the groups that read it.
        ways: the strategies.
        again: whether the backward pass reads it, too.
    """

    value: int
    home: int
    readers: tuple[int, ...]
    ways: tuple[Viewing, ...]
    again: bool


@dataclass(eq=False)
class StageGraph:
    """Groups with their strategies, as a graph for the integer program.

    The graph's nodes are the groups, in order, and after them the views.

    Args:
        groups: the groups.
        strategies: the strategies of each.
        memory: what each strategy of each group holds, in bytes.
        home: the group of each value.
        costs: what work and communication take.
    """

    groups: Sequence[Group]
    strategies: Sequence[Sequence[Strategy]]
    memory: Sequence[FloatArray]
    home: Mapping[int, int]
    costs: Costs
    views: list[View] = field(default_factory=list)

    def __post_init__(self) -> None:
        readers: dict[int, dict[int, bool]] = {}
        for place, ways in enumerate(self.strategies):
            for need in ways[0].needs:
                by_cluster = readers.setdefault(need.value, {})
                by_cluster[place] = by_cluster.get(place, False) or need.again
        self.views = [
            self._view(value, tuple(by_cluster), any(by_cluster.values()))
            for value, by_cluster in readers.items()
            if sum(by_cluster.values()) > 1
        ]
        self._viewed = {view.value: place for place, view in enumerate(self.views)}

    def with_choice(
        self, costs: Costs, strategies: Sequence[Strategy], viewings: Sequence[int]
    ) -> StageGraph:
        """The graph of one choice, at other rates.

        Args:
            costs: what work and communication take.
            strategies: for each group the strategy that is chosen, at these rates.
            viewings: for each view the place of that which is chosen.
        """
        memory = [np.zeros(1)] * len(strategies)
        ways = [[strategy] for strategy in strategies]
        made = StageGraph(self.groups, ways, memory, self.home, costs)
        made.views = [
            replace(view, ways=(view.ways[place],))
            for view, place in zip(self.views, viewings, strict=True)
        ]
        return made

    def _view(self, value: int, readers: tuple[int, ...], again: bool) -> View:
        layouts = layouts_of(value, self.costs)
        ways = itertools.product(
            layouts, layouts, (False, True) if self.costs.joins_sums else (False,)
        )
        return View(
            value, self.home[value], readers, tuple(itertools.starmap(Viewing, ways)), again
        )

    def graph(self) -> Graph:
        """What the strategies cost alone and in pairs."""
        seconds = [np.array([way.seconds for way in ways]) for ways in self.strategies]
        seconds += [self._view_seconds(view) for view in self.views]
        memory = [*self.memory, *(np.zeros(len(view.ways)) for view in self.views)]
        edges: dict[tuple[int, int], FloatArray] = {}

        def add(source: int, target: int, matrix: FloatArray) -> None:
            key = (source, target)
            edges[key] = edges[key] + matrix if key in edges else matrix

        for place, view in enumerate(self.views, start=len(self.groups)):
            add(view.home, place, self._lies(view))
            for reader in view.readers:
                add(place, reader, self._reads(view, reader))
        for target in range(len(self.groups)):
            for source in self._sources(target):
                add(source, target, self._moves(source, target))
        pairs = tuple(Edge(*key, matrix) for key, matrix in edges.items())
        return Graph(tuple(seconds), tuple(memory), pairs)

    def _sources(self, target: int) -> list[int]:
        """The groups whose values a group reads, but for those that it sees through a view."""
        values = [need.value for need in self.strategies[target][0].needs]
        return list(dict.fromkeys(self.home[v] for v in values if v not in self._viewed))

    def _needs(self, target: int, values: Sequence[int]) -> list[tuple[Need, ...]]:
        """For each strategy of a group, how it needs some values."""
        chosen = set(values)
        return [
            tuple(need for need in way.needs if need.value in chosen)
            for way in self.strategies[target]
        ]

    def _moves(self, source: int, target: int) -> FloatArray:
        """Seconds of the moves from one group to another."""
        every = {need.value for need in self.strategies[target][0].needs}
        values = [v for v in sorted(every) if self.home[v] == source and v not in self._viewed]
        lying = [{v: way.layouts[v] for v in values} for way in self.strategies[source]]
        needs = self._needs(target, values)
        return _matrix(lying, needs, lambda lies, need: self.costs.moving(need, lies))

    def _view_seconds(self, view: View) -> FloatArray:
        """Seconds of moving the value once, and of one sum of cotangents."""
        costs = self.costs
        return np.array(
            [
                (1 + view.again) * costs.moved(view.value, way.lies, way.read)
                + way.sums * costs.backward(Need(view.value, None, True, False), way.lies)
                for way in view.ways
            ]
        )

    def _lies(self, view: View) -> FloatArray:
        """0 where a group leaves a value as the view has it, else infinite."""
        ways = self.strategies[view.home]
        same = [[way.layouts[view.value] == lies for lies, _, _ in view.ways] for way in ways]
        return np.where(same, 0.0, np.inf)

    def _reads(self, view: View, reader: int) -> FloatArray:
        """Seconds from how a view has been moved to how a reader needs it, and of cotangents."""
        costs, value = self.costs, view.value

        def seconds(way: Viewing, needs: tuple[Need, ...]) -> float:
            forward = max(costs.forward(need, way.read) for need in needs)
            own = (need for need in needs if not (need.is_partial and way.sums))
            return forward + sum(costs.backward(need, way.lies) for need in own)

        return _matrix(view.ways, self._needs(reader, [value]), seconds)


def _matrix(
    rows: Sequence[Any], columns: Sequence[Any], seconds: Callable[[Any, Any], float]
) -> FloatArray:
    """A function of all pairs; what is alike is computed once."""
    if len(rows) == len(columns) == 1:
        return np.array([[seconds(rows[0], columns[0])]])
    unlike_rows, of_rows = _unlike(rows, str)
    unlike_columns, of_columns = _unlike(columns, tuple)
    found = [[seconds(row, column) for column in unlike_columns] for row in unlike_rows]
    return np.array(found)[np.ix_(of_rows, of_columns)]


def _unlike(values: Sequence[Any], key: Callable[[Any], Hashable]) -> tuple[list[Any], list[int]]:
    """Values of which none is like another one, and which of them each value is like."""
    places: dict[Hashable, int] = {}
    of_values = [places.setdefault(key(value), len(places)) for value in values]
    return [values[of_values.index(place)] for place in range(len(places))], of_values
