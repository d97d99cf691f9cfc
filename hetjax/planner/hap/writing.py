"""From a synthesised program to the shares of a stage: what a plan says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hetjax.planner.hap.synthesis import Synthesis
from hetjax.planner.module_programs.dimensions import Dimensions
from hetjax.planner.module_programs.module_chain import Module, ModuleChain
from hetjax.planner.module_programs.program import ModuleProgram
from hetjax.planner.module_programs.ways import WHOLE
from hetjax.planner.plan.module_shares import ModuleShares, OperandShare, Share
from hetjax.planner.plan.stage_plan import Shares

FloatArray = NDArray[np.float64]


def shares_of(chain: ModuleChain, dimensions: Dimensions, found: Synthesis) -> Shares:
    """The shares of a stage whose members compute a synthesised program.

    Args:
        chain: the stage's modules.
        dimensions: the classes of their dimensions.
        found: the program and its ratios.

    Returns:
        The shares.
    """
    return _Writer(chain, dimensions, found).shares()


class _Writer:
    def __init__(self, chain: ModuleChain, dimensions: Dimensions, found: Synthesis):
        self._chain, self._dimensions, self._found = chain, dimensions, found
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

    def _share(self, kind: int, value: int, layout: int) -> Share:
        """What each member has of a value, in whole elements."""
        number = self._dimensions.class_of(kind, value, layout)
        size = self._chain.kinds[kind].traced.flat.avals[value].shape[layout]
        parts = self._found.shares[kind][number]
        return Share(layout, tuple(round(float(part) * size) for part in parts))

    def _batch(self) -> tuple[int, ...]:
        """The members' examples, where all that is read of the batch is divided alike."""
        found: set[tuple[int, ...]] = set()
        for module, program in self._pairs:
            traced = program.trace.traced
            leaves = set(traced.batch)
            for equation, step in enumerate(traced.flat.steps):
                for place, operand in enumerate(step.inputs):
                    if operand not in leaves:
                        continue
                    layout = program.ways[equation].operands[place]
                    if layout != 0:
                        return ()
                    assert isinstance(operand, int)
                    found.add(self._share(module.kind, operand, 0).sizes)
        return found.pop() if len(found) == 1 else ()

    def _parameters(self) -> dict[str, Share]:
        found = {}
        for module, program in self._pairs:
            for name, value, stored in self._named(module, program):
                if stored.layout != WHOLE:
                    found[name] = self._share(module.kind, value, stored.layout)
        return found

    def _updates(self) -> dict[str, Share | None]:
        found: dict[str, Share | None] = {}
        for module, program in self._pairs:
            for name, value, stored in self._named(module, program):
                shape = program.trace.traced.flat.avals[value].shape
                if stored.layout == WHOLE and shape:
                    alone = stored.update == WHOLE
                    found[name] = None if alone else self._share(module.kind, value, stored.update)
        return found

    def _named(self, module: Module, program: ModuleProgram):
        names = self._chain.program.parameter_names
        triples = zip(
            module.parameters, program.trace.traced.parameters, program.stored, strict=True
        )
        for part, value, stored in triples:
            yield names[part.leaf], value, stored

    def _modules(self, batch: Sequence[int]) -> tuple[ModuleShares, ...]:
        """The moves of each module, those of modules that do the same once."""
        runs: dict[tuple[OperandShare, ...], list[tuple[int, int]]] = {}
        known: dict[tuple[int, int], tuple[OperandShare, ...]] = {}
        before = None
        for module, program in self._pairs:
            regroups = before is not None and before != module.kind
            key = id(program), before if regroups and before is not None else -1
            if key not in known:
                known[key] = tuple(self._operands(module, program, batch))
            runs.setdefault(known[key], []).append((module.start, module.stop))
            before = module.kind
        kinds = {
            run: module.kind for module, _ in self._pairs for run in [(module.start, module.stop)]
        }
        found: dict[tuple[int, tuple[OperandShare, ...]], list[tuple[int, int]]] = {}
        for operands, places in runs.items():
            for run in places:
                found.setdefault((kinds[run], operands), []).append(run)
        return tuple(
            ModuleShares(tuple(places), operands) for (_, operands), places in found.items()
        )

    def _operands(self, module: Module, program: ModuleProgram, batch: Sequence[int]):
        """The operands that lie otherwise than they come."""
        traced, kind = program.trace.traced, module.kind
        given = self._given(module, program, batch)
        for equation, step in enumerate(traced.flat.steps):
            for place, operand in enumerate(step.inputs):
                if not isinstance(operand, int):
                    continue
                layout = program.operand_layouts.get((equation, place))
                taken = program.ways[equation].operands[place]
                if layout == WHOLE:
                    yield OperandShare(equation, place)
                elif layout is not None:
                    share = self._share(kind, operand, layout)
                    if given.get(operand) != share:
                        yield OperandShare(equation, place, share)
                elif taken >= 0 and operand in given:
                    share = self._share(kind, operand, taken)
                    if given[operand] != share:
                        yield OperandShare(equation, place, share)

    def _given(
        self, module: Module, program: ModuleProgram, batch: Sequence[int]
    ) -> Mapping[int, Share]:
        """How values come into a module that are divided outside of it."""
        found: dict[int, Share] = {}
        traced, modules = program.trace.traced, self._chain.modules
        if batch:
            found.update((value, Share(0, tuple(batch))) for value in traced.batch)
        place = modules.index(module)
        if place:
            self._come(found, traced.received, program, modules[place - 1].kind)
        if place + 1 < len(modules):
            self._come(found, traced.cotangents, program, modules[place + 1].kind)
        return found

    def _come(
        self, found: dict[int, Share], values: Sequence[int], program: ModuleProgram, kind: int
    ) -> None:
        """Values that another kind of module divides, in its own ratios."""
        for value in values:
            layout = program.made(value)
            if layout >= 0:
                number = self._dimensions.class_of(program.kind, value, layout)
                size = program.trace.traced.flat.avals[value].shape[layout]
                parts = self._found.shares[kind][number]
                found[value] = Share(layout, tuple(round(float(part) * size) for part in parts))
