"""A module's choices as a network: ways of equations, copies of values, how parameters are stored.

Costs are numbers of loads and moves. What these take, for given ratios, is filled in later, so that
a network is built once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from hetjax.pipeline.program.traced_program import Operand
from hetjax.planner.hap.tables import EliminationOrder, FloatArray, Minimum, Scope
from hetjax.planner.module_programs.charges import Loads, MoveOf, Moves
from hetjax.planner.module_programs.dimensions import Dimensions
from hetjax.planner.module_programs.module_chain import ModuleTrace
from hetjax.planner.module_programs.program import (
    ModuleProgram,
    Stored,
    input_load,
    move_between,
    sum_load,
    update_load,
)
from hetjax.planner.module_programs.ways import (
    FREE,
    SUMMANDS,
    WHOLE,
    ComputingWay,
    WayLoad,
    layouts_of,
    ways_of,
)


class Copies(NamedTuple):
    """In which layouts a value is held.

    Args:
        made: the one that it was made in.
        others: those that it is brought to.
    """

    made: int
    others: tuple[int, ...]


class Maker(NamedTuple):
    """What a value's layout follows from.

    Args:
        variable: the variable.
        layouts: for each of its choices.
    """

    variable: int
    layouts: tuple[int, ...]


class Taker(NamedTuple):
    """What takes a value.

    Args:
        variable: the variable; -1 for what always takes it alike.
        layouts: for each of its choices how it takes the value; `FREE` for in any way.
    """

    variable: int
    layouts: tuple[int, ...]


@dataclass(eq=False)
class ModuleNetwork:
    """The choices of a module.

    Args:
        trace: the module's trace.
        kind: its number.
        dimensions: the classes of dimensions.
        state_bytes: bytes of optimizer state for each element of a parameter.
        shared: the places of parameters that other modules have, too.
        held_inputs: as for `ModuleProgram`.

    Attributes:
        choices: for each variable what it chooses from.
        received: the variables of how received values lie.
        returned: the same of the cotangents that are given back.
        sent: the same of what is given on.
        cotangents: the same of the cotangents that come in.
        stored: for each parameter the variable of how it is stored.
        copies: for each value that several take the variable of the layouts that it is held in.
        of_equation: for each equation the variable of its way.
        scopes: the variables of each table.
        sizes: how many choices each variable has.
        order: in which order variables give way.
        loads: what is charged for computing.
        moves: what is charged for moving.
        charged_loads: the loads in a table.
        charged_moves: the moves in a table.
        once: which of the loads, and of the moves, are of the update.
    """

    trace: ModuleTrace
    kind: int
    dimensions: Dimensions
    state_bytes: float
    shared: frozenset[int] = frozenset()
    held_inputs: frozenset[int] = frozenset()
    choices: list[Sequence[object]] = field(default_factory=list)
    loads: list[WayLoad] = field(default_factory=list)
    moves: list[MoveOf] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._load_numbers: dict[WayLoad, int] = {}
        self._move_numbers: dict[MoveOf, int] = {}
        self._tables: dict[tuple[int, ...], FloatArray] = {}
        self._entries: list[tuple[tuple[int, ...], int, str, int]] = []
        traced = self.trace.traced
        # Where nothing but the update takes a gradient, it is moved once a step.
        read = {value for step in traced.flat.steps for value in step.values()}
        self._gradients = {each for each in traced.gradients if each not in read}
        self.ways: list[list[ComputingWay]] = ways_of(self.trace, self.kind, self.dimensions)
        self.makers: dict[int, Maker] = {}
        self.takers: dict[int, list[Taker]] = {}
        self.copies: dict[int, int] = {}
        self.of_equation: dict[int, int] = {}
        self.received = [self._input(value) for value in traced.received]
        last = self.trace.is_last
        self.cotangents = [] if last else [self._input(value) for value in traced.cotangents]
        self.stored = [self._parameter(place) for place in range(len(traced.parameters))]
        for value in (*traced.batch, *(traced.cotangents if last else ())):
            self.makers[value] = Maker(-1, (WHOLE,))
        for equation in range(len(traced.flat.steps)):
            self._equation(equation)
        self.sent = [self._output(operand) for operand in traced.sent if not self.trace.is_last]
        if self.trace.is_last:
            for operand in traced.sent:
                self._take(operand, Taker(-1, (WHOLE,)))
        self.returned = [self._output(operand) for operand in self.trace.returned.values()]
        for value in list(self.takers):
            self._join(value)
        self._charge_sums()
        self._finish()

    @property
    def _where(self) -> tuple[ModuleTrace, int, Dimensions]:
        return self.trace, self.kind, self.dimensions

    @property
    def kept(self) -> list[int]:
        """The variables of the module's edges, and of parameters that other modules have, too."""
        edges = [*self.received, *self.returned, *self.sent, *self.cotangents]
        return [*edges, *(self.stored[place] for place in sorted(self.shared))]

    def _variable(self, choices: Sequence[object]) -> int:
        self.choices.append(choices)
        self._tables[(len(self.choices) - 1,)] = np.zeros(len(choices))
        return len(self.choices) - 1

    def _input(self, value: int) -> int:
        layouts = layouts_of(value, self.kind, self.trace, self.dimensions)
        variable = self._variable(layouts)
        self.makers[value] = Maker(variable, layouts)
        for number, layout in enumerate(layouts if value in self.held_inputs else ()):
            self._charge((variable,), number, input_load(*self._where, value, layout))
        return variable

    def _parameter(self, place: int) -> int:
        traced = self.trace.traced
        value, gradient = traced.parameters[place], traced.gradients[place]
        layouts = [e for e in layouts_of(value, self.kind, self.trace, self.dimensions) if e >= -1]
        divided = [layout for layout in layouts if layout != WHOLE]
        choices = [Stored(WHOLE, update) for update in layouts]
        choices += [Stored(layout, layout) for layout in divided]
        variable = self._variable(choices)
        self.makers[value] = Maker(variable, tuple(each.layout for each in choices))
        if isinstance(gradient, int):
            self._take(gradient, Taker(variable, tuple(each.update for each in choices)))
        for number, stored in enumerate(choices):
            if place in self.shared:
                break
            load = update_load(*self._where, place, stored, self.state_bytes)
            self._charge((variable,), number, load)
            gather = move_between(*self._where, value, stored.update, stored.layout, once=True)
            if gather is not None and place in traced.trained:
                self._charge((variable,), number, gather)
        return variable

    def _charge_sums(self) -> None:
        """What members' devices sum of gradients, by how these are made."""
        traced = self.trace.traced
        for place in sorted(set(traced.trained) - self.shared):
            gradient = traced.gradients[place]
            maker = self.makers.get(gradient) if isinstance(gradient, int) else None
            if maker is None or maker.variable < 0:
                continue
            assert isinstance(gradient, int), "it is made"
            for number, made in enumerate(maker.layouts):
                load = sum_load(*self._where, gradient, made)
                self._charge((maker.variable,), number, load)

    def _equation(self, equation: int) -> None:
        step = self.trace.traced.flat.steps[equation]
        ways = self.ways[equation]
        variable = self._variable(ways)
        self.of_equation[equation] = variable
        for number, way in enumerate(ways):
            self._charge((variable,), number, way.load)
        for place, operand in enumerate(step.inputs):
            layouts = tuple(way.operands[place] for way in ways)
            self._take(operand, Taker(variable, layouts))
        for place, value in enumerate(step.outputs):
            self.makers[value] = Maker(variable, tuple(way.results[place] for way in ways))

    def _output(self, operand: Operand) -> int:
        """The variable of how an output lies, which is as it was made."""
        layouts = layouts_of(operand, self.kind, self.trace, self.dimensions)
        variable = self._variable(layouts)
        if isinstance(operand, int):
            maker = self.makers[operand]
            unlike = np.array(maker.layouts)[:, None] != np.array(layouts)[None, :]
            if maker.variable < 0:
                self._add((variable,), np.where(unlike[0], np.inf, 0.0))
            else:
                self._add((maker.variable, variable), np.where(unlike, np.inf, 0.0))
        return variable

    def _take(self, operand: Operand, taker: Taker) -> None:
        if isinstance(operand, int) and any(layout != FREE for layout in taker.layouts):
            self.takers.setdefault(operand, []).append(taker)

    def _move(self, value: int, before: int, after: int) -> MoveOf | None:
        once = value in self._gradients
        return move_between(*self._where, value, before, after, once=once)

    def _is_movable(self, value: int) -> bool:
        """Whether a value can go over a wire; random keys cannot, and cost nothing to make."""
        dtype = self.trace.traced.flat.avals[value].dtype
        return not jnp.issubdtype(dtype, jax.dtypes.extended)

    def _join(self, value: int) -> None:
        """Tables between what makes a value and what takes it."""
        maker, takers = self.makers[value], self.takers[value]
        if maker.variable < 0:
            return
        if len(takers) == 1:
            self._between(value, maker, takers[0])
            return
        wanted = sorted({e for taker in takers for e in taker.layouts if e >= 0})
        choices: list[Copies] = []
        for made in dict.fromkeys(maker.layouts):
            choices.append(Copies(made, ()))
            if made != WHOLE and self._is_movable(value):
                choices.append(Copies(made, (WHOLE,)))
                choices += [Copies(made, (layout,)) for layout in wanted if layout != made]
        variable = self._variable(choices)
        self.copies[value] = variable
        unlike = np.array(maker.layouts)[:, None] != np.array([e.made for e in choices])[None, :]
        self._add((maker.variable, variable), np.where(unlike, np.inf, 0.0))
        for number, choice in enumerate(choices):
            for other in choice.others:
                move = self._move(value, choice.made, other)
                assert move is not None, "a copy lies otherwise than what it is of"
                self._charge((variable,), number, move)
        for taker in takers:
            layouts = dict.fromkeys(taker.layouts)
            taken = {layout: [_has(choice, layout) for choice in choices] for layout in layouts}
            columns = np.array([taken[layout] for layout in taker.layouts])
            table = np.where(columns.T, 0.0, np.inf)
            if taker.variable < 0:
                self._add((variable,), table[:, 0])
            else:
                self._add((variable, taker.variable), table)

    def _between(self, value: int, maker: Maker, taker: Taker) -> None:
        alone = taker.variable < 0 or taker.variable == maker.variable
        scope = (maker.variable,) if alone else (maker.variable, taker.variable)
        width = 1 if alone else len(taker.layouts)
        table = np.zeros(len(maker.layouts) * width)
        pairs = itertools.product(dict.fromkeys(maker.layouts), dict.fromkeys(taker.layouts))
        moves = {pair: self._move(value, *pair) for pair in pairs if pair[1] != SUMMANDS}
        for i, before in enumerate(maker.layouts):
            for j in range(width):
                after = taker.layouts[i if taker.variable == maker.variable else j]
                if after == SUMMANDS and before not in (SUMMANDS, WHOLE):
                    table[i * width + j] = np.inf
                    continue
                if after == SUMMANDS:
                    continue
                move = moves[before, after]
                if move is not None and not self._is_movable(value):
                    table[i * width + j] = np.inf
                elif move is not None:
                    self._charge(scope, i * width + j, move)
        shape = (len(maker.layouts),) if alone else (len(maker.layouts), width)
        self._add(scope, table.reshape(shape))

    def _add(self, scope: tuple[int, ...], table: FloatArray) -> None:
        self._tables[scope] = self._tables[scope] + table if scope in self._tables else table

    def _charge(self, scope: tuple[int, ...], entry: int, what: WayLoad | MoveOf) -> None:
        if isinstance(what, WayLoad):
            number = self._load_numbers.setdefault(what, len(self.loads))
            if number == len(self.loads):
                self.loads.append(what)
            self._entries.append((scope, entry, "load", number))
            return
        number = self._move_numbers.setdefault(what, len(self.moves))
        if number == len(self.moves):
            self.moves.append(what)
        self._entries.append((scope, entry, "move", number))

    def _finish(self) -> None:
        """The tables as one array, and a matrix from what loads and moves take to it."""
        self.scopes: list[Scope] = list(self._tables)
        self._shapes = [table.shape for table in self._tables.values()]
        starts = np.cumsum([0, *(table.size for table in self._tables.values())])
        first = dict(zip(self._tables, starts.tolist(), strict=False))
        rows = [first[scope] + entry for scope, entry, _, _ in self._entries]
        columns = [
            number if what == "load" else len(self.loads) + number
            for _, _, what, number in self._entries
        ]
        shape = int(starts[-1]), len(self.loads) + len(self.moves)
        self._matrix = csr_array((np.ones(len(rows)), (rows, columns)), shape=shape)
        # A module may have nothing to choose: what only hands values on.
        tables = (table.ravel() for table in self._tables.values())
        self._constant = np.concatenate([np.zeros(0), *tables])
        self._slices = [slice(a, b) for a, b in itertools.pairwise(starts.tolist())]
        self.charged_loads, self.charged_moves = Loads(self.loads), Moves(self.moves)
        self.once = (
            np.array([each.is_of_update for each in self.loads], bool),
            np.array([each.once for each in self.moves], bool),
        )
        self.sizes = [len(each) for each in self.choices]
        self.order = EliminationOrder(self.sizes, self.scopes, self.kept)

    def tables(self, loads: FloatArray, moves: FloatArray) -> list[FloatArray]:
        """The tables of costs.

        Args:
            loads: what each load takes.
            moves: what each move takes.
        """
        flat = self._constant + self._matrix @ np.concatenate([loads, moves])
        return [
            flat[where].reshape(shape)
            for where, shape in zip(self._slices, self._shapes, strict=True)
        ]

    def minimum(
        self,
        loads: FloatArray,
        moves: FloatArray,
        allowed: Mapping[int, NDArray[np.bool_]] | None = None,
    ) -> Minimum:
        """The least costs, for each choice of the variables that are kept.

        Args:
            loads: what each load takes.
            moves: what each move takes.
            allowed: for some variables the choices that may be made.
        """
        tables = self.tables(loads, moves)
        for variable, may in (allowed or {}).items():
            place = self.scopes.index((variable,))
            tables[place] = np.where(may, tables[place], np.inf)
        return self.order.minimum(tables)

    def program(self, choices: Mapping[int, int]) -> ModuleProgram:
        """The program that choices make.

        Args:
            choices: by variable.
        """
        traced = self.trace.traced
        given = (*traced.parameters, *traced.batch, *traced.received, *traced.cotangents)
        inputs = {}
        for value in given:
            maker = self.makers[value]
            inputs[value] = maker.layouts[0 if maker.variable < 0 else choices[maker.variable]]
        stored, wholes = [], set()
        for variable in self.stored:
            found = self.choices[variable][choices[variable]]
            assert isinstance(found, Stored)
            stored.append(found)
        for value, variable in self.copies.items():
            copies = self.choices[variable][choices[variable]]
            assert isinstance(copies, Copies)
            if WHOLE in copies.others:
                wholes.add(value)
        chosen = [self.ways[e][choices[variable]] for e, variable in self.of_equation.items()]
        return ModuleProgram(
            *self._where,
            tuple(self._without_needless_summands(inputs, chosen)),
            tuple(stored),
            inputs,
            frozenset(wholes),
            self.shared,
            held_inputs=self.held_inputs,
        )

    def _without_needless_summands(
        self, inputs: Mapping[int, int], chosen: Sequence[ComputingWay]
    ) -> Iterator[ComputingWay]:
        """Ways that make summands of summands alone: else all is whole, which is as good."""
        made = dict(inputs)
        steps = self.trace.traced.flat.steps
        for equation, (step, way) in enumerate(zip(steps, chosen, strict=True)):
            taken = [made[operand] for operand in step.inputs if isinstance(operand, int)]
            if SUMMANDS in way.operands and SUMMANDS not in taken:
                way = self.ways[equation][0]
            made.update(zip(step.outputs, way.results, strict=True))
            yield way


def _has(copies: Copies, layout: int) -> bool:
    """Whether a value can be taken in some layout."""
    held = (copies.made, *copies.others)
    if layout == FREE or layout in held:
        return True
    # A plan does not tell of summands: they are what is made so, or what is made whole.
    return WHOLE in (held if layout != SUMMANDS else (copies.made,))
