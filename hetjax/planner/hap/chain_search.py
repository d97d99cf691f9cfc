"""The cheapest program of a chain: each kind of module solved for all edges, joined by min-plus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hetjax.errors import InputError
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.planner.hap.forced import Forced
from hetjax.planner.hap.held_parameters import Held, all_held, descended, most_wanted, used_alike
from hetjax.planner.hap.module_network import ModuleNetwork
from hetjax.planner.hap.tables import FloatArray, Minimum
from hetjax.planner.module_programs.charges import Loads, Moves
from hetjax.planner.module_programs.dimensions import Dimensions, find_dimensions
from hetjax.planner.module_programs.module_chain import Module, ModuleChain
from hetjax.planner.module_programs.program import (
    ModuleProgram,
    Stored,
    given_back,
    move_between,
)
from hetjax.planner.module_programs.rates import Rates
from hetjax.planner.module_programs.step_time import (
    Ratios,
    StepTime,
    regrouped,
    shared_updates,
    step_time,
)
from hetjax.planner.module_programs.ways import WHOLE


@dataclass(frozen=True, eq=False)
class ChainProgram:
    """A program of a whole chain.

    Args:
        modules: of each module its program; modules that do the same share one.
        bound: at least what any program takes, with the same ratios.
        seconds: what a step of this one takes.
        time: the parts of that.
    """

    modules: tuple[ModuleProgram, ...]
    bound: float
    seconds: float
    time: StepTime

    @property
    def gap(self) -> float:
        """How much faster another program may be, at the most."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0


MOST_ENTRIES = 50_000_000
"""Of the largest table of a module; where there are more, fewer dimensions are divided."""

_FEWER_CLASSES = (16, 8, 4, 2, 1, 0)
"""How many classes of dimensions may then be divided, those of most bytes first."""


def _classes_by_bytes(chain: ModuleChain, dimensions: Dimensions) -> list[int]:
    """The classes of dimensions, that of the examples first, then those of most bytes."""
    total = np.zeros(len(dimensions.units))
    for kind, trace in enumerate(chain.kinds):
        for value, size in enumerate(trace.num_bytes):
            for each in set(dimensions.classes[kind][value]):
                total[each] += size
    if dimensions.examples >= 0:
        total[dimensions.examples] = np.inf
    return [int(each) for each in np.argsort(-total) if dimensions.units[each] > 1]


Allowed = Mapping[int, NDArray[np.bool_]]
"""For some variables of a module the choices that may be made."""


@dataclass(eq=False)
class ChainSearch:
    """Finds programs of a chain.

    Args:
        chain: the modules.
        state_bytes: bytes of optimizer state for each element of a parameter.
        num_microbatches: microbatches in a step.
        forced: what programs are looked at; None for all.

    Raises:
        InputError: a module has too many choices, however few dimensions are divided.

    Attributes:
        dimensions: the classes of the chain's dimensions.
        networks: the choices of each kind of module.
        expansions: how many partial programs were looked at so far: entries of tables.
    """

    chain: ModuleChain
    state_bytes: float
    num_microbatches: int = 1
    forced: Forced | None = None
    expansions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.dimensions: Dimensions = find_dimensions(self.chain)
        self.networks = self._made()
        order = _classes_by_bytes(self.chain, self.dimensions)
        for count in _FEWER_CLASSES:
            if max(each.order.most_entries for each in self.networks) <= MOST_ENTRIES:
                break
            self.dimensions = self.dimensions.among(order[:count])
            self.networks = self._made()
        self._check_entries()
        forced = self.forced
        self._allowed = [forced.allowed(each) if forced else None for each in self.networks]

    def _check_entries(self) -> None:
        """Check that the choices of all modules can be told in tables.

        Raises:
            InputError: those of a module cannot, however few dimensions are divided.
        """
        for module in self.chain.modules:
            entries = self.networks[module.kind].order.most_entries
            if entries > MOST_ENTRIES:
                raise InputError(
                    f"planner.name is 'hap', and the equations at positions {module.start} to "
                    f"{module.stop - 1} of the program, which nothing divides into modules, belong "
                    f"together in {entries:.0e} ways; allowed: {MOST_ENTRIES:.0e}; choose 'harp'"
                )

    def _made(self) -> list[ModuleNetwork]:
        """The networks of all kinds, for the dimensions that may be divided."""
        shared = self.chain.shared_parts
        networks = []
        for kind, trace in enumerate(self.chain.kinds):
            module = next(each for each in self.chain.modules if each.kind == kind)
            places = frozenset(i for i, part in enumerate(module.parameters) if part in shared)
            held = self.chain.held_inputs[kind]
            where = (trace, kind, self.dimensions, self.state_bytes, places, held)
            networks.append(ModuleNetwork(*where))
        return networks

    def among(self, forced: Forced | None) -> ChainSearch:
        """The same search among other programs.

        Args:
            forced: what programs are looked at; None for all.
        """
        other = copy(self)
        other.forced, other.expansions = forced, 0
        other._allowed = [forced.allowed(each) if forced else None for each in self.networks]
        return other

    def best(self, rates: Rates, ratios: Ratios, weights: FloatArray) -> ChainProgram:
        """The cheapest program by weighted times of the members.

        Args:
            rates: what computing and moving takes.
            ratios: the ratios of each kind of module.
            weights: of the members, which add up to 1.

        Returns:
            The program, and the bound that its weighted time is under all programs.
        """
        least, modules = self._joined(rates, ratios, weights)
        time = step_time(self.chain, modules, rates, ratios, self.state_bytes)
        return ChainProgram(modules, least, time.step(self.num_microbatches), time)

    def _joined(
        self, rates: Rates, ratios: Ratios, weights: FloatArray
    ) -> tuple[float, tuple[ModuleProgram, ...]]:
        """The cheapest program, and what it takes."""
        solved = []
        for kind, network in enumerate(self.networks):
            self.expansions += network.order.entries
            costs = self.costs(kind, rates, ratios[kind], weights)
            solved.append(network.minimum(*costs, self._allowed[kind]))
        joined = _Joined(self, solved, rates, ratios, weights)
        options = {part: self._stored_options(part) for part in sorted(self.chain.shared_parts)}
        every = all_held(options)
        if every is not None:
            return min(map(joined.best, every), key=lambda found: found[0])
        alike = used_alike(self.chain)
        bound, wanted = joined.wanted()
        _, modules = descended(alike, options, most_wanted(alike, wanted), joined.best)
        return bound, modules

    def costs(
        self, kind: int, rates: Rates, shares: FloatArray, weights: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """What loads and moves of a kind of module take in a step, by weighted times.

        Args:
            kind: which kind.
            rates: what computing and moving takes.
            shares: what part of every class of dimensions each member has.
            weights: of the members.
        """
        network, count = self.networks[kind], self.num_microbatches
        loads = rates.load_seconds(network.charged_loads, shares) @ weights
        moves = rates.move_seconds(network.charged_moves, shares)
        once, moved_once = network.once
        return np.where(once, loads, count * loads), np.where(moved_once, moves, count * moves)

    def _stored_options(self, part: ParameterPart) -> list[Stored]:
        module = next(each for each in self.chain.modules if part in each.parameters)
        network = self.networks[module.kind]
        choices = network.choices[network.stored[module.parameters.index(part)]]
        return [each for each in choices if isinstance(each, Stored)]


def _giving_back(program: ModuleProgram) -> ModuleProgram:
    """The first program of a stage, whose cotangents lie as what it receives.

    The same one where they are made so: modules that are alike share theirs.
    """
    received = program.trace.traced.received
    layout = program.made(received[0]) if received else WHOLE
    is_needed = next(given_back(program, layout), None) is not None
    return replace(program, gives_back=layout) if is_needed else program


class _Joined:
    """Modules that are solved, joined to a chain."""

    def __init__(
        self,
        search: ChainSearch,
        solved: Sequence[Minimum],
        rates: Rates,
        ratios: Ratios,
        weights: FloatArray,
    ):
        self._search, self._solved = search, solved
        self._rates, self._ratios, self._weights = rates, ratios, weights
        self._regroupings: dict[tuple[int, int], FloatArray] = {}

    def best(self, held: Held) -> tuple[float, tuple[ModuleProgram, ...]]:
        """The cheapest program where shared parameters are stored in some way."""
        modules = self._search.chain.modules
        seconds, edges = self._path([self._matrix(module, held) for module in modules])
        programs: dict[object, ModuleProgram] = {}
        found = []
        for module, (before, after) in zip(modules, edges, strict=True):
            kept = (*self._at_edges(module, before, after), *self._stored(module, held))
            key = module.kind, kept
            if key not in programs:
                choices = self._solved[module.kind].choices(kept)
                programs[key] = self._search.networks[module.kind].program(choices)
            found.append(programs[key])
        found[0] = _giving_back(found[0])
        return seconds + self._shared_seconds(found), tuple(found)

    def wanted(self) -> tuple[float, list[Held]]:
        """What the cheapest program takes if each module stores shared parameters for itself.

        Returns:
            At least what any program takes, and how each module stores those that it has.
        """
        modules = self._search.chain.modules
        seconds, edges = self._path([self._matrix(module, None) for module in modules])
        found: list[Held] = []
        for module, (before, after) in zip(modules, edges, strict=True):
            network = self._search.networks[module.kind]
            table = self._solved[module.kind].least[self._at_edges(module, before, after)]
            best = np.unravel_index(int(table.argmin()), table.shape)
            held: dict[ParameterPart, Stored] = {}
            for place, choice in zip(sorted(network.shared), best, strict=True):
                stored = network.choices[network.stored[place]][int(choice)]
                assert isinstance(stored, Stored)
                held[module.parameters[place]] = stored
            found.append(held)
        return seconds, found

    def _path(self, costs: Sequence[FloatArray]) -> tuple[float, list[tuple[int, int]]]:
        """The cheapest way through all modules, and how values lie at the edges of each.

        Args:
            costs: of each module by how values lie at its first edge, and at its last.
        """
        modules = self._search.chain.modules
        reached = self._first_edge()
        from_where = []
        for place, (module, each) in enumerate(zip(modules, costs, strict=True)):
            if place:
                reached = reached + self._regrouping(modules[place - 1].kind, module.kind)
            total = reached[:, None] + each
            from_where.append(total.argmin(axis=0))
            reached = total.min(axis=0)
        assert reached.shape == (1,), "a chain ends with the loss"
        after = 0
        edges = []
        for best in reversed(from_where):
            edges.append((int(best[after]), after))
            after = int(best[after])
        return float(reached[0]), edges[::-1]

    def _first_edge(self) -> FloatArray:
        """What it takes that values come from another stage in some way, and cotangents go to it.

        They come and go as a plan says of a stage's examples: all whole, or all divided by
        examples. Cotangents that are made otherwise are brought to lie so.
        """
        kind = self._search.chain.modules[0].kind
        network = self._search.networks[kind]
        sizes = [network.sizes[each] for each in (*network.received, *network.returned)]
        found = np.full(sizes, np.inf)
        for layout in (WHOLE, 0):
            choices = [network.choices[each] for each in network.received]
            if all(layout in each for each in choices) and self._are_examples(layout):
                places = tuple(list(each).index(layout) for each in choices)
                found[places] = np.minimum(found[places], self._giving(layout))
        return found.ravel()

    def _are_examples(self, layout: int) -> bool:
        """Whether what the first module receives and gives back can lie as a stage's examples."""
        search, kind = self._search, self._search.chain.modules[0].kind
        trace = search.networks[kind].trace
        values = (*trace.traced.received, *trace.returned.values())
        return layout == WHOLE or all(
            search.dimensions.class_of(kind, value, layout) == search.dimensions.examples
            for value in values
            if isinstance(value, int)
        )

    def _giving(self, layout: int) -> FloatArray:
        """What it takes to bring cotangents to a layout, by how they are made."""
        search, kind = self._search, self._search.chain.modules[0].kind
        network = search.networks[kind]
        total = np.zeros([network.sizes[each] for each in network.returned])
        values = network.trace.returned.values()
        for axis, (variable, value) in enumerate(zip(network.returned, values, strict=True)):
            if not isinstance(value, int):
                continue
            where = network.trace, kind, search.dimensions, value
            made = [each for each in network.choices[variable] if isinstance(each, int)]
            moves = [move_between(*where, each, layout) for each in made]
            charged = Moves(move._replace(by_even_parts=False) for move in moves if move)
            taken = iter(self._rates.move_seconds(charged, self._ratios[kind]).tolist())
            seconds = [next(taken) if move else 0.0 for move in moves]
            shape = [1] * total.ndim
            shape[axis] = len(seconds)
            total = total + search.num_microbatches * np.reshape(seconds, shape)
        return total

    def _matrix(self, module: Module, held: Held | None) -> FloatArray:
        """A module's costs by how values lie at its first edge, and at its last.

        Args:
            module: the module.
            held: how shared parameters are stored; None for each as is cheapest.
        """
        network = self._search.networks[module.kind]
        table = self._solved[module.kind].least
        if held is None:
            table = table.min(axis=tuple(range(table.ndim - len(network.shared), table.ndim)))
        else:
            table = table[(..., *self._stored(module, held))]
        rows = len(network.received) + len(network.returned)
        return table.reshape(int(np.prod(table.shape[:rows])), -1)

    def _stored(self, module: Module, held: Held) -> tuple[int, ...]:
        network = self._search.networks[module.kind]
        return tuple(
            list(network.choices[network.stored[i]]).index(held[module.parameters[i]])
            for i in sorted(network.shared)
        )

    def _at_edges(self, module: Module, before: int, after: int) -> tuple[int, ...]:
        """The choices of the variables of a module's edges."""
        network = self._search.networks[module.kind]
        first = [*network.received, *network.returned]
        last = [*network.sent, *network.cotangents]
        found: list[int] = []
        for variables, number in ((first, before), (last, after)):
            sizes = [network.sizes[each] for each in variables]
            found += map(int, np.unravel_index(number, sizes) if sizes else ())
        return tuple(found)

    def _regrouping(self, before: int, after: int) -> FloatArray:
        """What it takes that modules divide values in other ratios than those before them."""
        if (before, after) not in self._regroupings:
            found = self._found_regrouping(self._ratios[before], after)
            self._regroupings[before, after] = self._search.num_microbatches * found
        return self._regroupings[before, after]

    def _found_regrouping(self, theirs: FloatArray, kind: int) -> FloatArray:
        network, ours = self._search.networks[kind], self._ratios[kind]
        trace = network.trace
        variables = [*network.received, *network.returned]
        sizes = [network.sizes[each] for each in variables]
        total = np.zeros(sizes)
        if ours is theirs:
            return total.ravel()
        values = [*trace.traced.received, *trace.returned.values()]
        for axis, (variable, value) in enumerate(zip(variables, values, strict=True)):
            seconds = np.zeros(sizes[axis])
            for choice, layout in enumerate(network.choices[variable]):
                if isinstance(layout, int) and layout >= 0 and isinstance(value, int):
                    number = self._search.dimensions.class_of(kind, value, layout)
                    size = trace.num_bytes[value]
                    seconds[choice] = regrouped(self._rates, size, ours, theirs, number)
            shape = [1] * len(sizes)
            shape[axis] = sizes[axis]
            total = total + seconds.reshape(shape)
        return total.ravel()

    def _shared_seconds(self, programs: Sequence[ModuleProgram]) -> float:
        """What the update of parameters takes that several modules have."""
        total, search = 0.0, self._search
        for kind, loads, moves in shared_updates(search.chain, programs, search.state_bytes):
            shares = self._ratios[kind]
            total += float((self._rates.load_seconds(Loads(loads), shares) @ self._weights).sum())
            total += float(self._rates.move_seconds(Moves(moves), shares).sum())
        return total
