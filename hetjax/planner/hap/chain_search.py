"""The cheapest program of a chain of modules: each kind solved for all edges, joined by min-plus."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetjax.pipeline.program.traced_program import num_bytes
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.planner.hap.dimensions import Dimensions, find_dimensions
from hetjax.planner.hap.module_chain import Module, ModuleChain
from hetjax.planner.hap.module_network import ModuleNetwork, Stored
from hetjax.planner.hap.program import Clock, ModuleProgram, Pass
from hetjax.planner.hap.rates import REGROUP, MoveOf, Rates
from hetjax.planner.hap.tables import FloatArray, Minimum
from hetjax.planner.hap.ways import Load


@dataclass(frozen=True, eq=False)
class ChainProgram:
    """A program of a whole chain.

    Args:
        modules: of each module its program; modules that do the same share one.
        bound: at least what any program takes, with the same ratios.
        seconds: what this one truly takes.
        waited: for each member the part of the computing in which the others wait for it.
    """

    modules: tuple[ModuleProgram, ...]
    bound: float
    seconds: float
    waited: FloatArray

    @property
    def gap(self) -> float:
        """How much faster another program may be, at the most."""
        return 1 - self.bound / self.seconds if self.seconds else 0.0


Ratios = Sequence[FloatArray]
"""For each kind of module, what part of every class of dimensions each member has."""


@dataclass(eq=False)
class ChainSearch:
    """Finds programs of a chain.

    Args:
        chain: the modules.
        state_bytes: bytes of optimizer state for each element of a parameter.

    Attributes:
        dimensions: the classes of the chain's dimensions.
        networks: the choices of each kind of module.
        expansions: how many partial programs were looked at so far: entries of tables.
    """

    chain: ModuleChain
    state_bytes: float
    expansions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.dimensions: Dimensions = find_dimensions(self.chain)
        shared = self.chain.shared_parts
        self.networks: list[ModuleNetwork] = []
        for kind, trace in enumerate(self.chain.kinds):
            module = next(each for each in self.chain.modules if each.kind == kind)
            places = frozenset(i for i, part in enumerate(module.parameters) if part in shared)
            network = ModuleNetwork(trace, kind, self.dimensions, self.state_bytes, places)
            self.networks.append(network)

    def best(self, rates: Rates, ratios: Ratios, weights: FloatArray) -> ChainProgram:
        """The cheapest program by weighted times.

        Args:
            rates: what computing and moving takes.
            ratios: the ratios of each kind of module.
            weights: of the members, which add up to 1.
        """
        solved = [
            self._solved(kind, rates, ratios[kind], weights) for kind in range(len(self.networks))
        ]
        least, modules = min(
            (self._chained(solved, rates, ratios, weights, held) for held in self._held()),
            key=lambda found: found[0],
        )
        seconds, waited = self.seconds(modules, rates, ratios)
        return ChainProgram(modules, least, seconds, waited)

    def _solved(
        self, kind: int, rates: Rates, shares: FloatArray, weights: FloatArray
    ) -> Minimum:
        network = self.networks[kind]
        loads = rates.load_seconds(network.loads, shares) @ weights
        self.expansions += network.order.entries
        return network.minimum(loads, rates.move_seconds(network.moves, shares))

    def _held(self) -> list[Mapping[ParameterPart, Stored]]:
        """The ways to store parameters that several modules have."""
        parts = sorted(self.chain.shared_parts)
        options = [self._stored_options(part) for part in parts]
        return [
            dict(zip(parts, each, strict=True)) for each in itertools.product(*options)
        ]

    def _stored_options(self, part: ParameterPart) -> list[Stored]:
        kind, place = self._first_holder(part)
        network = self.networks[kind]
        return [
            each for each in network.choices[network.stored[place]] if isinstance(each, Stored)
        ]

    def _first_holder(self, part: ParameterPart) -> tuple[int, int]:
        for module in self.chain.modules:
            if part in module.parameters:
                return module.kind, module.parameters.index(part)
        raise AssertionError("some module has the part")

    def _chained(
        self,
        solved: Sequence[Minimum],
        rates: Rates,
        ratios: Ratios,
        weights: FloatArray,
        held: Mapping[ParameterPart, Stored],
    ) -> tuple[float, tuple[ModuleProgram, ...]]:
        """The cheapest program of the chain where shared parameters are stored in some way."""
        modules = self.chain.modules
        reached = np.zeros(1)
        from_where = []
        for place, module in enumerate(modules):
            table = self._matrix(module, solved[module.kind].least, held)
            if place:
                reached = reached + self._regrouping(place, rates, ratios)
            total = reached[:, None] + table
            from_where.append(total.argmin(axis=0))
            reached = total.min(axis=0)
        assert reached.shape == (1,), "a chain begins and ends with nothing"
        out = 0
        edges = []
        for best in reversed(from_where):
            edges.append((int(best[out]), out))
            out = int(best[out])
        programs: dict[object, ModuleProgram] = {}
        found = []
        for module, (before, after) in zip(modules, reversed(edges), strict=True):
            network = self.networks[module.kind]
            stored = tuple(held[module.parameters[i]] for i in sorted(network.shared))
            key = module.kind, before, after, stored
            if key not in programs:
                kept = self._kept_choices(network, before, after, stored)
                choices = solved[module.kind].choices(kept)
                programs[key] = ModuleProgram(network, choices)
            found.append(programs[key])
        return float(reached[0]) + self._shared_seconds(held, rates, ratios, weights), tuple(found)

    def _matrix(
        self, module: Module, least: FloatArray, held: Mapping[ParameterPart, Stored]
    ) -> FloatArray:
        """A module's costs by how values lie at its first edge, and at its last."""
        network = self.networks[module.kind]
        at = [self._stored_choice(network, i, held, module) for i in sorted(network.shared)]
        table = least[(..., *at)]
        rows = len(network.received) + len(network.returned)
        return table.reshape(int(np.prod(table.shape[:rows])), -1)

    def _stored_choice(
        self,
        network: ModuleNetwork,
        place: int,
        held: Mapping[ParameterPart, Stored],
        module: Module,
    ) -> int:
        part = module.parameters[place]
        return list(network.choices[network.stored[place]]).index(held[part])

    def _kept_choices(
        self, network: ModuleNetwork, before: int, after: int, stored: Sequence[Stored]
    ) -> list[int]:
        first = [*network.received, *network.returned]
        last = [*network.sent, *network.cotangents]
        found: list[int] = []
        for variables, number in ((first, before), (last, after)):
            sizes = [len(network.choices[each]) for each in variables]
            found += map(int, np.unravel_index(number, sizes) if sizes else ())
        places = sorted(network.shared)
        variables = [network.stored[place] for place in places]
        pairs = zip(variables, stored, strict=True)
        return [*found, *(list(network.choices[v]).index(each) for v, each in pairs)]

    def _regrouping(self, place: int, rates: Rates, ratios: Ratios) -> FloatArray:
        """What it takes that a module divides values in other ratios than the one before."""
        module, before = self.chain.modules[place], self.chain.modules[place - 1]
        network = self.networks[module.kind]
        sizes = [len(network.choices[v]) for v in (*network.received, *network.returned)]
        total = np.zeros(sizes)
        if ratios[module.kind] is ratios[before.kind]:
            return total.ravel()
        for axis, each in enumerate(self._regroup_moves(place, rates, ratios)):
            shape = [1] * len(sizes)
            shape[axis] = sizes[axis]
            total = total + np.array(each).reshape(shape)
        return total.ravel()

    def _regroup_moves(self, place: int, rates: Rates, ratios: Ratios) -> list[list[float]]:
        """For each value at a module's first edge, for each layout, what regrouping it takes."""
        module, before = self.chain.modules[place], self.chain.modules[place - 1]
        network, trace = self.networks[module.kind], self.chain.kinds[module.kind].traced
        ours, theirs = ratios[module.kind], ratios[before.kind]
        received = [(value, theirs, ours) for value in trace.received]
        returned = [(value, ours, theirs) for value in network.trace.returned.values()]
        found = []
        variables = [*network.received, *network.returned]
        for variable, (value, source, target) in zip(variables, [*received, *returned], strict=True):
            seconds = []
            for layout in network.choices[variable]:
                assert isinstance(layout, int)
                assert isinstance(value, int)
                seconds.append(0.0)
                if layout < 0:
                    continue
                number = self.dimensions.class_of(module.kind, value, layout)
                ends = source[number], target[number]
                if not np.array_equal(*ends):
                    size = float(num_bytes(trace.flat.avals[value]))
                    move = MoveOf(REGROUP, size, number, number)
                    seconds[-1] = rates.network.seconds(move, *ends)
            found.append(seconds)
        return found

    def _shared_seconds(
        self,
        held: Mapping[ParameterPart, Stored],
        rates: Rates,
        ratios: Ratios,
        weights: FloatArray,
    ) -> float:
        """What the update of parameters takes that several modules have."""
        total = 0.0
        for part, stored in held.items():
            loads, moves = self.shared_update(part, stored)
            kind, _ = self._first_holder(part)
            total += float((rates.load_seconds(loads, ratios[kind]) @ weights).sum())
            total += float(rates.move_seconds(moves, ratios[kind]).sum())
        return total

    def shared_update(self, part: ParameterPart, stored: Stored) -> tuple[list[Load], list[MoveOf]]:
        """Loads and moves of the update of a parameter that several modules have.

        Args:
            part: the parameter.
            stored: how it is stored and updated.
        """
        kind, place = self._first_holder(part)
        return self.networks[kind].whole_update(place, stored)

    def seconds(
        self, modules: Sequence[ModuleProgram], rates: Rates, ratios: Ratios
    ) -> tuple[float, FloatArray]:
        """What a program truly takes: members wait for each other at moves.

        Args:
            modules: the programs of the chain's modules.
            rates: what computing and moving takes.
            ratios: the ratios of each kind of module.

        Returns:
            Seconds of a step, and for each member the part of the computing in which the others
            wait for it.

        Source: HAP, section 3.2.
        """
        known: dict[int, tuple[Pass, Pass, Pass]] = {}
        for module, program in zip(self.chain.modules, modules, strict=True):
            if id(program) not in known:
                known[id(program)] = passes_of(program, rates, ratios[module.kind])
        clock = Clock(rates.count)
        for place, program in enumerate(modules):
            self._regroup(place, 0, modules, clock, rates, ratios)
            clock.run(known[id(program)][0])
        for place in reversed(range(len(modules))):
            clock.run(known[id(modules[place])][1])
            self._regroup(place, 1, modules, clock, rates, ratios)
        for program in modules:
            clock.run(known[id(program)][2])
        held = {
            part: modules[i].stored(module.parameters.index(part))
            for i, module in enumerate(self.chain.modules)
            for part in module.parameters
            if part in self.chain.shared_parts
        }
        ends = np.full(rates.count, 1 / rates.count)
        shared = self._shared_seconds(held, rates, ratios, ends)
        return clock.done() + shared, clock.waited / max(1e-30, float(clock.waited.sum()))

    def _regroup(
        self,
        place: int,
        which: int,
        modules: Sequence[ModuleProgram],
        clock: Clock,
        rates: Rates,
        ratios: Ratios,
    ) -> None:
        """Regroup what comes to a module, or goes from it."""
        kinds = self.chain.modules
        if not place or ratios[kinds[place].kind] is ratios[kinds[place - 1].kind]:
            return
        network, program = self.networks[kinds[place].kind], modules[place]
        every = self._regroup_moves(place, rates, ratios)
        count = len(network.received)
        variables = [*network.received, *network.returned]
        mine = range(count) if which == 0 else range(count, len(variables))
        seconds = sum(every[i][program.choices[variables[i]]] for i in mine)
        if seconds:
            clock.move(seconds)


def passes_of(program: ModuleProgram, rates: Rates, shares: FloatArray) -> tuple[Pass, Pass, Pass]:
    """What a module's forward pass, backward pass and update take on each member.

    Args:
        program: what members do of it.
        rates: what computing and moving takes.
        shares: what part of every class of dimensions each member has.
    """
    network = program.network
    steps = network.trace.traced.flat.steps
    loads = rates.load_seconds([program.way(i).load for i in range(len(steps))], shares)
    waiting: dict[int, list[MoveOf]] = {}
    for each in program.moves:
        if each.move is not None:
            waiting.setdefault(each.equation, []).append(each.move)
    timers = [Clock(rates.count) for _ in range(3)]
    for equation in range(len(steps)):
        timer = timers[0 if equation in network.trace.forward else 1]
        if equation in waiting:
            timer.move(float(rates.move_seconds(waiting[equation], shares).sum()))
        timer.compute(loads[equation])
    if len(steps) in waiting:
        timers[2].move(float(rates.move_seconds(waiting[len(steps)], shares).sum()))
    timers[2].compute(rates.load_seconds(list(program.update_loads()), shares).sum(axis=0))
    return timers[0].as_pass(), timers[1].as_pass(), timers[2].as_pass()

