"""From a plan's shares back to the programs of its modules."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hetjax.errors import InputError
from hetjax.pipeline.program.traced_program import Operand
from hetjax.pipeline.stages.traced_modules import check_operands
from hetjax.planner.module_programs.dimensions import Dimensions, find_dimensions
from hetjax.planner.module_programs.module_chain import Module, ModuleChain
from hetjax.planner.module_programs.program import ModuleProgram, Stored, layouts_text
from hetjax.planner.module_programs.ways import FREE, SUMMANDS, WHOLE, ComputingWay, ways_of
from hetjax.planner.plan.module_shares import OperandShare, Share
from hetjax.planner.plan.parameter_names import told_of
from hetjax.planner.plan.share_checks import check_fits
from hetjax.planner.plan.stage_plan import Shares
from hetjax.planner.work.arrays import FloatArray


@dataclass(frozen=True, eq=False)
class ReadPrograms:
    """The programs of a chain's modules, as a plan has them.

    Args:
        chain: the modules.
        dimensions: the classes of dimensions.
        programs: of each module its program.
        ratios: for each kind of module what part of every class of dimensions each member has.
    """

    chain: ModuleChain
    dimensions: Dimensions
    programs: tuple[ModuleProgram, ...]
    ratios: tuple[FloatArray, ...]


def read_programs(chain: ModuleChain, shares: Shares, count: int, where: str) -> ReadPrograms:
    """Read what a stage's members do of its modules.

    Args:
        chain: the modules, which are those of the shares.
        shares: the stage's shares.
        count: how many members it has.
        where: what errors name as the shares.

    Returns:
        The programs.

    Raises:
        InputError: an operand of an equation lies in a way in which it cannot be taken.
    """
    return _Reader(chain, shares, count, where).read()


@dataclass(eq=False)
class _Reader:
    chain: ModuleChain
    shares: Shares
    count: int
    where: str
    _programs: dict[Hashable, ModuleProgram] = field(default_factory=dict)
    _said: set[tuple[int, int]] = field(default_factory=set)

    def read(self) -> ReadPrograms:
        """Forward through all modules, then backward."""
        self._dimensions = find_dimensions(self.chain)
        kinds = range(len(self.chain.kinds))
        even = np.full((len(self._dimensions.units), self.count), 1 / self.count)
        self._ratios = [even.copy() for _ in kinds]
        self._ways = [ways_of(self.chain.kinds[k], k, self._dimensions) for k in kinds]
        modules = self.chain.modules
        passes = [
            _Pass(self, module, operands)
            for module, (_, operands) in zip(modules, self.shares.module_runs, strict=True)
        ]
        first = passes[0]
        received = first.trace.traced.received
        coming = [_Coming(layout) for layout in first.outside(received)]
        for each in passes:
            each.forward(coming)
            coming = [each.given(operand) for operand in each.trace.traced.sent]
        coming = []
        for each in reversed(passes):
            each.backward(coming)
            coming = [each.given(operand) for operand in each.trace.returned.values()]
        programs = tuple(map(self._program, passes))
        return ReadPrograms(self.chain, self._dimensions, programs, tuple(self._ratios))

    def _program(self, each: _Pass) -> ModuleProgram:
        """One program for all modules that do the same."""
        by_even = frozenset(each.by_even_parts)
        gives_back = self._gives_back(each)
        key = (
            each.module.kind,
            tuple(each.ways),
            tuple(each.stored),
            tuple(each.inputs.items()),
            by_even,
            gives_back,
        )
        if key not in self._programs:
            shared = self.chain.shared_parts
            places = (i for i, part in enumerate(each.module.parameters) if part in shared)
            self._programs[key] = ModuleProgram(
                each.trace,
                each.module.kind,
                self._dimensions,
                tuple(each.ways),
                tuple(each.stored),
                each.inputs,
                frozenset(each.wholes),
                frozenset(places),
                by_even,
                gives_back,
                self.chain.held_inputs[each.module.kind],
            )
        return self._programs[key]

    def _gives_back(self, each: _Pass) -> int | None:
        """How the stage's first module gives cotangents back, where it makes some otherwise."""
        returned = each.trace.returned.values()
        if each.module is not self.chain.modules[0]:
            return None
        layout = 0 if self.shares.batch else WHOLE
        made = [each.made(value) for value in returned if isinstance(value, int)]
        return layout if any(lies not in (layout, WHOLE) for lies in made) else None

    def say(self, kind: int, value: int, share: Share) -> None:
        """Note what part of a class of dimensions each member has."""
        number = self._dimensions.class_of(kind, value, share.dimension)
        total = max(1, sum(share.sizes))
        self._ratios[kind][number] = np.array(share.sizes) / total
        self._said.add((kind, number))

    def take(self, kind: int, value: int, coming: _Coming) -> None:
        """Note the parts in which a value comes, where the plan says nothing of its class."""
        if coming.parts is not None:
            number = self._dimensions.class_of(kind, value, coming.layout)
            if (kind, number) not in self._said:
                self._ratios[kind][number] = coming.parts

    def parts(self, kind: int, value: int, dimension: int) -> FloatArray:
        """What part each member has of a dimension of a value."""
        return self._ratios[kind][self._dimensions.class_of(kind, value, dimension)]


class _Coming(NamedTuple):
    """How a value comes into a module from its neighbour, and in which parts."""

    layout: int
    parts: FloatArray | None = None


class _Pass:
    """One module while it is read."""

    def __init__(self, reader: _Reader, module: Module, operands: Sequence[OperandShare]):
        self.reader, self.module = reader, module
        self.trace = reader.chain.kinds[module.kind]
        self._told = {(each.equation, each.operand): each for each in operands}
        where = f"{reader.where}.modules, for the module from position {module.start} on,"
        check_operands(self.trace.traced.flat, self._told, where)
        self._layouts: dict[int, int] = {}
        self.inputs: dict[int, int] = {}
        self.ways: list[ComputingWay] = []
        self.stored: list[Stored] = []
        self.wholes: set[int] = set()
        self.by_even_parts: set[tuple[int, int]] = set()
        self._throughs: dict[tuple[int, int], Share | None] = {}
        self._inputs()

    def made(self, operand: Operand) -> int:
        """How a value lies."""
        return self._layouts[operand] if isinstance(operand, int) else FREE

    def given(self, operand: Operand) -> _Coming:
        """How a value comes into the module's neighbour."""
        layout, kind = self.made(operand), self.module.kind
        if not isinstance(operand, int) or layout < 0:
            return _Coming(layout)
        return _Coming(layout, self.reader.parts(kind, operand, layout))

    def _inputs(self) -> None:
        shares, traced = self.reader.shares, self.trace.traced
        program = self.reader.chain.program
        for part, value in zip(self.module.parameters, traced.parameters, strict=True):
            name = program.parameter_names[part.leaf]
            share = told_of(shares.parameters, name)
            update = told_of(shares.updates, name)
            if share is not None:
                self.reader.say(self.module.kind, value, share)
                self.stored.append(Stored(share.dimension, share.dimension))
            elif update is not None:
                self.reader.say(self.module.kind, value, update)
                self.stored.append(Stored(WHOLE, update.dimension))
            else:
                self.stored.append(Stored(WHOLE, WHOLE))
            self._come(value, WHOLE if share is None else share.dimension)
        for value, layout in zip(traced.batch, self.outside(traced.batch), strict=True):
            self._come(value, layout)

    def outside(self, values: Sequence[int]) -> list[int]:
        """How values lie that come from outside the stage: as its examples do."""
        batch = self.reader.shares.batch
        for value in values if batch else ():
            self.reader.say(self.module.kind, value, Share(0, batch))
        return [0 if batch else WHOLE] * len(values)

    def _come(self, value: int, layout: int) -> None:
        self.inputs[value] = self._layouts[value] = layout

    def forward(self, received: Sequence[_Coming]) -> None:
        """Read the forward pass, given how received values lie."""
        for value, coming in zip(self.trace.traced.received, received, strict=True):
            self._come(value, WHOLE if coming.layout == FREE else coming.layout)
            self.reader.take(self.module.kind, value, coming)
        self.ways = [self.reader._ways[self.module.kind][i][0] for i in range(self._count)]
        for equation in sorted(self.trace.forward):
            self._read(equation)

    def backward(self, cotangents: Sequence[_Coming]) -> None:
        """Read the backward pass, given how cotangents lie."""
        traced = self.trace.traced
        given = cotangents or [_Coming(WHOLE)] * len(traced.cotangents)
        for value, coming in zip(traced.cotangents, given, strict=True):
            self._come(value, WHOLE if coming.layout == FREE else coming.layout)
            self.reader.take(self.module.kind, value, coming)
        for equation in range(self._count):
            if equation not in self.trace.forward:
                self._read(equation)

    @property
    def _count(self) -> int:
        return len(self.trace.traced.flat.steps)

    def _read(self, equation: int) -> None:
        step, kind = self.trace.traced.flat.steps[equation], self.module.kind
        layouts = []
        for place, operand in enumerate(step.inputs):
            layout = self.made(operand)
            if (equation, place) in self._told and isinstance(operand, int):
                told = self._told[equation, place]
                self._check(told, operand)
                if told.share is None:
                    self.wholes.add(operand)
                    layout = WHOLE
                else:
                    self.reader.say(kind, operand, told.share)
                    layout = told.share.dimension
                if told.through is not None:
                    self.by_even_parts.add((operand, layout))
                if self._throughs.setdefault((operand, layout), told.through) != told.through:
                    raise InputError(
                        f"{self.reader.where}.modules: equation {equation}, operand "
                        f"{place}.through is unlike that of another operand, which is the same "
                        f"value; a value is moved once: give both the same"
                    )
            layouts.append(layout)
        way = self._way(equation, layouts)
        self.ways[equation] = way
        self._layouts.update(zip(step.outputs, way.results, strict=True))

    def _check(self, told: OperandShare, operand: int) -> None:
        """Check that an operand can lie as it is told, and go by even parts where it is told to."""
        shape = self.trace.traced.flat.avals[operand].shape
        where = f"{self.reader.where}.modules: equation {told.equation}, operand {told.operand}"
        for name, share in (("share", told.share), ("through", told.through)):
            if share is not None:
                check_fits(share, shape, "the operand", f"{where}.{name}")
        if told.through is None:
            return
        made, comes = self.made(operand), told.through.dimension if told.share is None else SUMMANDS
        if made != comes:
            raise InputError(
                f"{where}.through is given, and the operand comes as {layouts_text([made])}; "
                f"allowed where it comes as {layouts_text([comes])}, for a gather or a scatter"
            )

    def _way(self, equation: int, layouts: Sequence[int]) -> ComputingWay:
        """The way that an equation is computed as its operands lie."""
        for way in self.reader._ways[self.module.kind][equation]:
            pairs = list(zip(way.operands, layouts, strict=True))
            if all(a == b or FREE in (a, b) for a, b in pairs):
                return way
        # Where one operand is divided or a sum, members take their part of those that all have.
        for way in self.reader._ways[self.module.kind][equation]:
            pairs = list(zip(way.operands, layouts, strict=True))
            if all(a == b or FREE in (a, b) or (b == WHOLE and a != WHOLE) for a, b in pairs):
                return way
        step = self.trace.traced.flat.steps[equation]
        raise InputError(
            f"{self.reader.where}.modules: equation {equation} of the module from position "
            f"{self.module.start} on, {step.name}, has operands that lie "
            f"{layouts_text(layouts)}; it cannot take them so, and the plan has no move for it"
        )
