"""From a synthesised program to the shares of a stage: what a plan says of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from hetjax.planner.hap.synthesis import Synthesis
from hetjax.planner.module_programs.dimensions import Dimensions
from hetjax.planner.module_programs.module_chain import Module, ModuleChain
from hetjax.planner.module_programs.program import ModuleProgram, Stored
from hetjax.planner.module_programs.rates import Rates
from hetjax.planner.module_programs.ways import WHOLE
from hetjax.planner.plan.module_shares import ModuleShares, OperandShare, Share
from hetjax.planner.plan.stage_plan import Member, Shares
from hetjax.sharding.annotation.bounds import even_sizes


def shares_of(
    chain: ModuleChain,
    dimensions: Dimensions,
    found: Synthesis,
    members: Sequence[Member],
    rates: Rates,
) -> Shares:
    """The shares of a stage whose members compute a synthesised program.

    Args:
        chain: the stage's modules.
        dimensions: the classes of their dimensions.
        found: the program and its ratios.
        members: the members.
        rates: what moving takes among them.

    Returns:
        The shares.
    """
    return _Writer(chain, dimensions, found, members, rates).shares()


_OTHERWISE = Share(0, ())
"""What stands for a value that lies in some other way than whole."""


class _Writer:
    def __init__(
        self,
        chain: ModuleChain,
        dimensions: Dimensions,
        found: Synthesis,
        members: Sequence[Member],
        rates: Rates,
    ):
        self._rates = rates
        self._chain, self._dimensions, self._found = chain, dimensions, found
        self._data_axes = [member.mesh_shape[0] for member in members]
        self._pairs = list(zip(chain.modules, found.program.modules, strict=True))

    def shares(self) -> Shares:
        """All that the plan says."""
        batch = self._batch()
        return Shares(
            batch=batch,
            parameters=self._parameters(),
            updates=self._updates(),
            modules=self._modules(batch),
        )

    def _share(self, kind: int, ratios: int, value: int, layout: int) -> Share:
        """What each member has of a value of a kind of module, in the ratios of another one."""
        number = self._dimensions.class_of(kind, value, layout)
        size = self._chain.kinds[kind].traced.flat.avals[value].shape[layout]
        parts = self._found.shares[ratios][number]
        return Share(layout, tuple(round(float(part) * size) for part in parts))

    def _batch(self) -> tuple[int, ...]:
        """The members' examples, where what comes from outside is divided alike by them.

        What a stage before gives decides; in a first stage all that is read of the batch.
        """
        sizes = self._received_sizes() or self._read_sizes()
        if len(sizes) != 1 or () in sizes:
            return ()
        (found,) = sizes
        divides = all(n % axis == 0 for n, axis in zip(found, self._data_axes, strict=True))
        return found if divides else ()

    def _received_sizes(self) -> set[tuple[int, ...]]:
        """The parts of what the stage before gives; an empty one for what comes whole."""
        _, first = self._pairs[0]
        values, kind = first.trace.traced.received, first.kind
        return {
            self._share(kind, kind, value, 0).sizes if first.made(value) == 0 else ()
            for value in values
        }

    def _read_sizes(self) -> set[tuple[int, ...]]:
        """The parts of what is read of the batch; an empty one for what is not divided so."""
        found: set[tuple[int, ...]] = set()
        for _, program in self._pairs:
            traced, kind = program.trace.traced, program.kind
            leaves = set(traced.batch)
            for equation, step in enumerate(traced.flat.steps):
                for place, operand in enumerate(step.inputs):
                    if isinstance(operand, int) and operand in leaves:
                        divided = program.ways[equation].operands[place] == 0
                        found.add(self._share(kind, kind, operand, 0).sizes if divided else ())
        return found

    def _parameters(self) -> dict[str, Share]:
        found = {}
        for module, program in self._pairs:
            for name, value, stored in self._named(module, program):
                if stored.layout != WHOLE:
                    found[name] = self._share(program.kind, program.kind, value, stored.layout)
        return found

    def _updates(self) -> dict[str, Share | None]:
        found: dict[str, Share | None] = {}
        for module, program in self._pairs:
            for name, value, stored in self._named(module, program):
                shape = program.trace.traced.flat.avals[value].shape
                if stored.layout == WHOLE and shape:
                    where = program.kind, program.kind, value, stored.update
                    found[name] = None if stored.update == WHOLE else self._share(*where)
        return found

    def _named(self, module: Module, program: ModuleProgram) -> Iterator[tuple[str, int, Stored]]:
        """The parameters of a module: path, value, and how each is stored."""
        names = self._chain.program.parameter_names
        triples = zip(
            module.parameters, program.trace.traced.parameters, program.stored, strict=True
        )
        for part, value, stored in triples:
            yield names[part.leaf], value, stored

    def _modules(self, batch: Sequence[int]) -> tuple[ModuleShares, ...]:
        """The moves of each module, those of modules that do the same once."""
        known: dict[tuple[int, int, int], tuple[OperandShare, ...]] = {}
        found: dict[tuple[int, tuple[OperandShare, ...]], list[tuple[int, int]]] = {}
        kinds = [-1, *(module.kind for module, _ in self._pairs), -1]
        for place, (module, program) in enumerate(self._pairs):
            # What comes from its neighbours may be divided in other ratios.
            key = id(program), kinds[place], kinds[place + 2]
            if key not in known:
                known[key] = tuple(self._operands(place, program, batch))
            runs = found.setdefault((module.kind, known[key]), [])
            runs.append((module.start, module.stop))
        return tuple(ModuleShares(tuple(runs), operands) for (_, operands), runs in found.items())

    def _operands(
        self, place: int, program: ModuleProgram, batch: Sequence[int]
    ) -> Iterator[OperandShare]:
        """The operands of a module that lie otherwise than they come."""
        traced, kind = program.trace.traced, program.kind
        given, by_even = self._given(place, program, batch), self._by_even_parts(program)
        for equation, step in enumerate(traced.flat.steps):
            for i, operand in enumerate(step.inputs):
                if not isinstance(operand, int):
                    continue
                layout = program.operand_layouts.get((equation, i))
                if layout is None and operand in given:
                    layout = program.ways[equation].operands[i]
                if layout is None:
                    continue
                through = by_even.get((operand, layout))
                if layout == WHOLE:
                    if given.get(operand, _OTHERWISE) is not None:
                        yield OperandShare(equation, i, None, through)
                elif layout >= 0:
                    share = self._share(kind, kind, operand, layout)
                    if given.get(operand) != share:
                        yield OperandShare(equation, i, share, through)

    def _by_even_parts(self, program: ModuleProgram) -> Mapping[tuple[int, int], Share]:
        """The even parts that values are brought to on their way, with how they lie at its end."""
        found, shares = {}, self._found.shares[program.kind]
        go = self._rates.go_by_even_parts(program.charged_moves, shares)
        for each in itertools.compress(program.moves, go):
            divided = max(each.before, each.after)
            size = program.trace.traced.flat.avals[each.value].shape[divided]
            sizes = even_sizes(size, self._rates.count)
            pairs = zip(sizes, self._data_axes, strict=True)
            # Else every device of a member would have all of its part.
            if divided or not any(part % axis for part, axis in pairs):
                found[each.value, each.after] = Share(divided, sizes)
        return found

    def _given(
        self, place: int, program: ModuleProgram, batch: Sequence[int]
    ) -> Mapping[int, Share | None]:
        """How values come into a module from outside of it: in which parts, or whole."""
        found: dict[int, Share | None] = {}
        traced, modules = program.trace.traced, self._chain.modules
        lies = Share(0, tuple(batch)) if batch else None
        outside = traced.batch if place else (*traced.batch, *traced.received)
        found.update(dict.fromkeys(outside, lies))
        coming = [(traced.received, place - 1)] if place else []
        if place + 1 < len(modules):
            coming.append((traced.cotangents, place + 1))
        for values, other in coming:
            for value in values:
                layout = program.made(value)
                if layout >= 0:
                    share = self._share(program.kind, modules[other].kind, value, layout)
                    found[value] = share
        return found
