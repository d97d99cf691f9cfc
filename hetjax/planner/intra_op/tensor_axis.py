"""What it takes to divide a program along a tensor axis, position by position.

The integer program divides the program's modules as well as a stage could; what its answer costs
is booked where it arises, so that any run of layers costs the sum of its positions. Modules that
follow each other and are alike are decided once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetjax.mesh.links import Link
from hetjax.pipeline.layers.modules import Section
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.stages.cutting import Stage, cut
from hetjax.planner.intra_op.alike_nodes import solve_alike
from hetjax.planner.intra_op.collectives import Layout, Ring
from hetjax.planner.intra_op.graph import StageGraph
from hetjax.planner.intra_op.groups import Costs, Group, Strategy, strategies_of, strategy_of
from hetjax.planner.intra_op.stage_sharding import StageParts
from hetjax.planner.plan.stage_plan import Spec
from hetjax.planner.work.arrays import FloatArray
from hetjax.sharding.annotation.rules import TENSOR

_REPEATS = 3
"""How many modules that follow each other are decided together, for all of them."""

_DATA = 2
"""Devices of the data axis, so that the other axis leaves the examples alone."""

_FLOPS, _BANDWIDTH, _LINK = 1e12, 1e16, Link(bandwidth=1e11, latency=0.0)
"""What decides: products are slow and all else fast, so that every product is divided, for whose
weights stages have a tensor axis, and as few bytes move as that allows."""

_WRONG_BYTE = 1e-3
"""Seconds of a byte of a matrix that is whole, or of a value whose tokens are divided, where they
shall not be."""

_NOTHING = 1e-300
"""What a unit of that is not counted takes."""


@dataclass(frozen=True, eq=False)
class TensorCosts:
    """What a tensor axis costs at each position, for one microbatch, forward and backward.

    Args:
        bytes: what passes once round the ring, whole.
        passes: how often something does.
        flops: of matrix products, what a device computes beyond its share.
        traffic: of what is no product, what a device reads and writes beyond its share.
    """

    bytes: FloatArray
    passes: FloatArray
    flops: FloatArray
    traffic: FloatArray

    def of_layers(self, layers: Sequence[int]) -> TensorCosts:
        """The same by layer.

        Args:
            layers: the positions where layers begin, and the end.
        """
        begins = np.asarray(layers[:-1])
        return TensorCosts(*(np.add.reduceat(each, begins) for each in vars(self).values()))


@dataclass(frozen=True)
class Window:
    """Positions that are decided together.

    Args:
        first: the first one.
        end: the one after the last.
        told: from which of them on the answer counts.
        until: before which it ends to count.
        copied: the occurrence of a module whose answer counts for others: first position, and the
            one after the last.
        copies: where those begin.
    """

    first: int
    end: int
    told: int
    until: int
    copied: tuple[int, int] = (0, 0)
    copies: tuple[int, ...] = ()


def windows(sections: Sequence[Section], num_positions: int) -> tuple[Window, ...]:
    """The windows that tell of all positions.

    Args:
        sections: modules and what stands between them.
        num_positions: how many positions there are.

    Returns:
        The windows. Each sees a module more than it tells of, wherever another one follows.

    Example:
        >>> blocks = [Section(3 * i, 3 * i + 3, 0) for i in range(8)]
        >>> head, tail = windows([*blocks, Section(24, 26)], 26)
        >>> (head.first, head.end, head.until), head.copied, head.copies
        ((0, 9, 6), (3, 6), (6, 9, 12, 15, 18))
        >>> tail.first, tail.told, tail.end
        (18, 21, 26)
    """
    found, first, told = [], 0, 0
    for module, group in itertools.groupby(sections, key=lambda section: section.module):
        same = list(group)
        if module is None or len(same) <= _REPEATS:
            continue
        second, last = same[1], same[-1]
        copies = tuple(section.start for section in same[2:-1])
        copied = second.start, second.stop
        found.append(Window(first, same[_REPEATS - 1].stop, told, second.stop, copied, copies))
        first, told = same[-2].start, last.start
    found.append(Window(first, num_positions, told, num_positions))
    return tuple(found)


@dataclass(frozen=True, eq=False)
class TensorAxis:
    """The costs of tensor axes of any size, computed when they are asked for.

    Args:
        program: the traced loss function.
        microbatch_size: examples in a microbatch.
        sections: its modules and what stands between them.

    Source: Alpa (Zheng et al., 2022), section 4, once for each module.
    """

    program: Program
    microbatch_size: int
    sections: Sequence[Section]
    _known: dict[int, TensorCosts | None] = field(default_factory=dict, repr=False)

    def costs(self, devices: int) -> TensorCosts | None:
        """What an axis of so many devices costs.

        Args:
            devices: how many, 2 or more.

        Returns:
            The costs; None where they cannot be told, as of a loop that is one step.
        """
        if devices not in self._known:
            self._known[devices] = self._find(devices)
        return self._known[devices]

    @functools.cached_property
    def _windows(self) -> list[tuple[Window, StageParts]]:
        """The windows and what of them is the same for axes of all sizes."""
        program = self.program
        found = windows(self.sections, program.num_positions)
        return [
            (window, StageParts.of(program, stage, self.microbatch_size))
            for window, stage in zip(found, _stages(program, found), strict=True)
        ]

    def _find(self, devices: int) -> TensorCosts | None:
        if any(step.iterations > 1 for step in self.program.steps):
            return None
        total = np.zeros((len(_UNITS), self.program.num_positions))
        for window, parts in self._windows:
            found = _WindowDivision(self.program, window, parts, devices).booked()
            if found is None:
                return None
            told = slice(window.told, window.until)
            total[:, told] = found[:, told]
            for start in window.copies:
                length = window.copied[1] - window.copied[0]
                total[:, start : start + length] = found[:, slice(*window.copied)]
        return TensorCosts(*total)


@dataclass(frozen=True)
class DividedParameters:
    """How a stage lies along a tensor axis that is there for its parameters' sake.

    Args:
        parameters: the specification of each parameter, by its path.
        values: specifications of what products make, and of what goes to them, by number.
    """

    parameters: Mapping[str, Spec] = field(default_factory=dict)
    values: Mapping[int, Spec] = field(default_factory=dict)


def divided_parameters(
    program: Program,
    stage: Stage,
    microbatch_size: int,
    devices: int,
    tokens: Mapping[int, int],
) -> DividedParameters:
    """Divide a stage's matrices wherever they can be; beside that as few bytes move as may be.

    Args:
        program: the traced loss function.
        stage: a stage of it.
        microbatch_size: examples in a microbatch.
        devices: of the tensor axis.
        tokens: by value its dimension of tokens, which the axis leaves alone.

    Returns:
        How it lies; nothing where that cannot be told.
    """
    if any(step.iterations > 1 for step in program.steps):
        return DividedParameters()
    parts = StageParts.of(program, stage, microbatch_size)
    window = Window(0, program.num_positions, 0, program.num_positions)
    division = _WindowDivision(program, window, parts, devices)
    return division.with_divided_parameters(stage, tokens)


class _WindowDivision:
    """The best division of a window.

    Args:
        program: the traced loss function.
        window: the window.
        parts: its groups.
        devices: of the tensor axis.
    """

    def __init__(self, program: Program, window: Window, parts: StageParts, devices: int):
        self.program, self.window, self.parts, self.devices = program, window, parts, devices
        self.position = {
            value: position for position, step in enumerate(program.steps) for value in step.outputs
        }

    def booked(self) -> FloatArray | None:
        """The figures of `TensorCosts`, one a row, booked at positions."""
        made = self._graph(self._costs(_LINK, _FLOPS, _BANDWIDTH))
        solution = solve_alike(made.graph())
        if solution is None:
            return None
        rows = np.zeros((len(_UNITS), self.program.num_positions))
        for row, unit in zip(rows, _UNITS, strict=True):
            self._book(row, self._chosen(made, self._costs(*unit), solution.choice))
        ring = self.devices - 1
        rows[0] *= self.devices / ring
        rows[1] /= ring
        for row, (_, flops, bandwidth) in zip(rows[2:], _UNITS[2:], strict=True):
            costs = self._costs(_UNITS[2][0], flops, bandwidth)
            for group in self.parts.groups:
                whole = sum(costs.computing(operation, None) for operation in group.operations)
                row[self._place(group)] -= whole / self.devices
        # What the examples' axis was taken to divide; a pass is one, however long it is.
        return rows * np.array([_DATA, 1, _DATA, _DATA])[:, None]

    def with_divided_parameters(self, stage: Stage, tokens: Mapping[int, int]) -> DividedParameters:
        """How all lies where each matrix of the stage is divided, and no token."""
        names = {
            self.program.parameters[part.leaf]: self.program.parameter_names[part.leaf]
            for part in stage.parameters
        }
        costs, groups = self._costs(_LINK, _FLOPS, _BANDWIDTH), self.parts.groups
        strategies = [
            [self._told(each, group, names, tokens, costs) for each in strategies_of(group, costs)]
            for group in groups
        ]
        memory = [np.zeros(len(each)) for each in strategies]
        solution = solve_alike(
            StageGraph(groups, strategies, memory, self.parts.home, costs).graph()
        )
        if solution is None:
            return DividedParameters()
        pairs = zip(strategies, solution.choice, strict=False)
        layouts = {v: d for found, place in pairs for v, d in found[place].layouts.items()}
        values = self.parts.told(self.program, stage, strategies)
        return DividedParameters(
            {name: self._spec(value, layouts) for value, name in names.items() if value in layouts},
            {value: self._spec(value, layouts) for value in sorted(values) if value in layouts},
        )

    def _told(
        self,
        strategy: Strategy,
        group: Group,
        names: Mapping[int, str],
        tokens: Mapping[int, int],
        costs: Costs,
    ) -> Strategy:
        """A strategy that takes long where it leaves a matrix whole, or divides tokens."""
        value = group.value
        is_matrix = value in names and len(self.program.avals[value].shape) > 1
        wrong = [value] if is_matrix and strategy.layouts[value] is None else []
        wrong += [v for v, at in strategy.layouts.items() if v in tokens and at == tokens[v]]
        extra = _WRONG_BYTE * sum(costs.size(each) for each in wrong)
        return replace(strategy, seconds=strategy.seconds + extra)

    def _spec(self, value: int, layouts: Mapping[int, Layout]) -> Spec:
        dimensions = range(len(self.program.avals[value].shape))
        return tuple(TENSOR if each == layouts[value] else None for each in dimensions)

    def _costs(self, link: Link, flops: float, bandwidth: float) -> Costs:
        ring = Ring(link, self.devices)
        return Costs(self.parts.operations, ring, _DATA, flops, bandwidth, joins_sums=True)

    def _graph(self, costs: Costs) -> StageGraph:
        groups = self.parts.groups
        strategies = [strategies_of(group, costs) for group in groups]
        memory = [np.zeros(len(each)) for each in strategies]
        return StageGraph(groups, strategies, memory, self.parts.home, costs)

    def _chosen(self, made: StageGraph, costs: Costs, choice: Sequence[int]) -> StageGraph:
        """The graph of what is chosen alone: nothing else is booked."""
        groups = self.parts.groups
        chosen = [
            strategy_of(group, costs, place) for group, place in zip(groups, choice, strict=False)
        ]
        return made.with_choice(costs, chosen, choice[len(groups) :])

    def _book(self, row: FloatArray, of: StageGraph) -> None:
        """Add what a choice costs, that of an edge where it leads to."""
        graph = of.graph()
        places = [self._place(group) for group in self.parts.groups]
        places += [min(places[reader] for reader in view.readers) for view in of.views]
        for place, seconds in zip(places, graph.seconds, strict=True):
            row[place] += seconds[0]
        for edge in graph.edges:
            row[places[edge.target]] += edge.seconds[0, 0]

    def _place(self, group: Group) -> int:
        """Where a group's costs are booked: at the first of what it does."""
        first = next(group.operations, None)
        place = 0 if first is None else self.position[first.results[0]]
        # Cheap steps belong to every stage that uses them, wherever they stand.
        return min(max(place, self.window.first), self.window.end - 1)


_UNITS = (
    (Link(1.0, 0.0), 1 / _NOTHING, 1 / _NOTHING),
    (Link(1 / _NOTHING, 1.0), 1 / _NOTHING, 1 / _NOTHING),
    (Link(1 / _NOTHING, 0.0), 1.0, 1 / _NOTHING),
    (Link(1 / _NOTHING, 0.0), 1 / _NOTHING, 1.0),
)
"""Links, FLOP/s and bytes/s at which the seconds are bytes, passes, FLOPs and traffic."""


def _stages(program: Program, found: Sequence[Window]) -> list[Stage]:
    """The windows as stages; those that follow each other are cut at once."""
    if any(before.end > after.first for before, after in itertools.pairwise(found)):
        return [stage for window in found for stage in _stages(program, [window])]
    edges = {edge for window in found for edge in (window.first, window.end)}
    boundaries = sorted({0, *edges, program.num_positions})
    stages = cut(program, boundaries)
    return [stages[boundaries.index(window.first)] for window in found]
