"""A module's program as data: how each equation is computed, and what is moved for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hetjax.pipeline.program.loss import accumulator_dtype
from hetjax.pipeline.program.traced_program import Operand, Step, num_bytes
from hetjax.planner.module_programs.charges import (
    EXCHANGE,
    GATHER,
    SCATTER,
    SUM,
    Loads,
    MoveOf,
    Moves,
)
from hetjax.planner.module_programs.dimensions import Dimensions
from hetjax.planner.module_programs.module_chain import ModuleTrace
from hetjax.planner.module_programs.ways import FREE, SUMMANDS, WHOLE, ComputingWay, WayLoad


class Stored(NamedTuple):
    """How a parameter is stored and updated.

    Args:
        layout: how it lies: `WHOLE` or a dimension.
        update: how its gradient lies when it is updated.
    """

    layout: int
    update: int


@dataclass(frozen=True)
class ProgramMove:
    """A value that is brought to lie in another way.

    Args:
        value: the value, by its number in the module's trace.
        before: how it was made.
        after: how it lies then.
        move: what is charged for it.
        equation: the first equation that needs it so; the number of equations for the update, and
            for what is given back to another stage.
    """

    value: int
    before: int
    after: int
    move: MoveOf
    equation: int


@dataclass(frozen=True, eq=False)
class ModuleProgram:
    """What members do of a module.

    Args:
        trace: the module's trace.
        kind: its number.
        dimensions: the classes of dimensions.
        ways: how each equation is computed.
        stored: how each parameter is stored and updated.
        inputs: how values lie as they come: parameters, batch leaves, received values, cotangents.
        wholes: the values that are brought to each member whole, where it is enough for all that
            takes them.
        shared: the places of parameters that other modules have, too.
        by_even_parts: the values that are brought to even parts on their way, with how they lie at
            its end; None: all for which that is faster.
        gives_back: how cotangents shall lie that go to another stage; None: as they are made.
        held_inputs: the values received that are kept for the backward pass, and not by the module
            before anyway; of most such modules.
    """

    trace: ModuleTrace
    kind: int
    dimensions: Dimensions
    ways: tuple[ComputingWay, ...]
    stored: tuple[Stored, ...]
    inputs: dict[int, int]
    wholes: frozenset[int] = frozenset()
    shared: frozenset[int] = frozenset()
    by_even_parts: frozenset[tuple[int, int]] | None = None
    gives_back: int | None = None
    held_inputs: frozenset[int] = frozenset()

    @cached_property
    def layouts(self) -> dict[int, int]:
        """How each value is made."""
        found = dict(self.inputs)
        for step, way in zip(self.trace.traced.flat.steps, self.ways, strict=True):
            found.update(zip(step.outputs, way.results, strict=True))
        return found

    @cached_property
    def _makers(self) -> dict[tuple[int, ...], int]:
        steps = self.trace.traced.flat.steps
        return {tuple(step.outputs): equation for equation, step in enumerate(steps)}

    def equation_of(self, step: Step) -> int:
        """The number of an equation."""
        return self._makers[tuple(step.outputs)]

    def made(self, operand: Operand) -> int:
        """How a value is made; `FREE` of one that is known everywhere."""
        return self.layouts[operand] if isinstance(operand, int) else FREE

    @property
    def first_edge(self) -> list[tuple[int, int]]:
        """The values received, and the cotangents given back, with how they lie."""
        traced = self.trace.traced
        values = (*traced.received, *self.trace.returned.values())
        return [(value, self.made(value)) for value in values if isinstance(value, int)]

    @cached_property
    def operand_layouts(self) -> dict[tuple[int, int], int]:
        """How operands lie that lie otherwise than they were made, by equation and place."""
        found = {}
        for equation, step in enumerate(self.trace.traced.flat.steps):
            way = self.ways[equation]
            for place, operand in enumerate(step.inputs):
                layout = way.operands[place]
                if not isinstance(operand, int) or layout in (FREE, SUMMANDS):
                    continue
                if layout != self.made(operand):
                    found[equation, place] = layout
        return found

    @cached_property
    def loads(self) -> Loads:
        """What each equation makes each member compute."""
        return Loads(way.load for way in self.ways)

    def input_loads(self, values: frozenset[int]) -> Loads:
        """What members hold of values received.

        Args:
            values: those that are kept.
        """
        where = self.trace, self.kind, self.dimensions
        return Loads(input_load(*where, each, self.made(each)) for each in sorted(values))

    @cached_property
    def charged_moves(self) -> Moves:
        """What is charged for the moves."""
        return Moves(each.move for each in self.moves)

    @cached_property
    def moves(self) -> tuple[ProgramMove, ...]:
        """The moves inside the module, and those of its update, in order."""
        return tuple(self._moves())

    def _moves(self) -> Iterator[ProgramMove]:
        done: set[tuple[int, int]] = set()
        steps = self.trace.traced.flat.steps
        for (equation, place), layout in self.operand_layouts.items():
            value = steps[equation].inputs[place]
            assert isinstance(value, int)
            yield from self._moved(value, layout, equation, done)
        traced = self.trace.traced
        if self.trace.is_last:
            for operand in traced.sent:
                if isinstance(operand, int):
                    yield from self._moved(operand, WHOLE, len(steps), done)
        if self.gives_back is not None:
            for value, move in given_back(self, self.gives_back):
                yield ProgramMove(value, self.made(value), self.gives_back, move, len(steps))
        for place, gradient in enumerate(traced.gradients):
            stored = self.stored[place]
            if isinstance(gradient, int):
                yield from self._moved(gradient, stored.update, len(steps), done, once=True)
            is_parted = stored.layout != stored.update and place in traced.trained
            if is_parted and place not in self.shared:
                value = traced.parameters[place]
                gather = move_of(self, value, stored.update, WHOLE, once=True)
                assert gather is not None, "an update in parts is gathered"
                yield ProgramMove(value, stored.update, WHOLE, gather, len(steps))

    def _moved(
        self,
        value: int,
        layout: int,
        equation: int,
        done: set[tuple[int, int]],
        *,
        once: bool = False,
    ) -> Iterator[ProgramMove]:
        """A value brought to a layout, unless it has been already; a whole one has every part."""
        made = self.made(value)
        wanted = WHOLE if value in self.wholes else layout
        if made in (wanted, WHOLE, FREE) or (value, wanted) in done:
            return
        done.add((value, wanted))
        move = move_of(self, value, made, wanted, once=once)
        assert move is not None, "it lies otherwise than it was made"
        if move.by_even_parts is None and self.by_even_parts is not None:
            move = move._replace(by_even_parts=(value, wanted) in self.by_even_parts)
        yield ProgramMove(value, made, wanted, move, equation)

    def update_loads(self, state_bytes: float) -> Iterator[WayLoad]:
        """What the update computes, but that of parameters which other modules have, too.

        Args:
            state_bytes: bytes of optimizer state for each element of a parameter.
        """
        for place, stored in enumerate(self.stored):
            if place not in self.shared:
                yield update_load(
                    self.trace, self.kind, self.dimensions, place, stored, state_bytes
                )
                yield from self.sum_loads(place)

    def sum_loads(self, place: int) -> Iterator[WayLoad]:
        """What the devices of each member sum of a gradient, which lies as it is made.

        Args:
            place: the parameter's place.
        """
        gradient = self.trace.traced.gradients[place]
        if isinstance(gradient, int) and place in self.trace.traced.trained:
            yield sum_load(self.trace, self.kind, self.dimensions, gradient, self.made(gradient))


def move_of(
    program: ModuleProgram, value: int, before: int, after: int, *, once: bool = False
) -> MoveOf | None:
    """The move that brings a value from one layout to another; None where nothing moves.

    Args:
        program: the program that has the value.
        value: the value.
        before: how it lies.
        after: how it shall lie, which is not `SUMMANDS`.
        once: whether it is moved once a step, and not for each microbatch.
    """
    return move_between(
        program.trace, program.kind, program.dimensions, value, before, after, once=once
    )


def given_back(program: ModuleProgram, layout: int) -> Iterator[tuple[int, MoveOf]]:
    """What brings cotangents to lie as another stage is given them.

    Args:
        program: the program that makes them.
        layout: how they shall lie.

    Yields:
        The cotangents that are made otherwise, with their moves.
    """
    for value in program.trace.returned.values():
        if not isinstance(value, int):
            continue
        move = move_of(program, value, program.made(value), layout)
        if move is not None:
            # No plan tells of it: the runtime moves what it has to give.
            yield value, move._replace(by_even_parts=False)


def move_between(
    trace: ModuleTrace,
    kind: int,
    dimensions: Dimensions,
    value: int,
    before: int,
    after: int,
    *,
    once: bool = False,
) -> MoveOf | None:
    """As `move_of`, of a value in a trace of a kind of module."""
    if before in (after, WHOLE, FREE) or after == FREE:
        return None
    size = float(trace.num_bytes[value])
    source, target = (
        dimensions.class_of(kind, value, layout) if layout >= 0 else -1
        for layout in (before, after)
    )
    if before == SUMMANDS:
        form = SUM if after == WHOLE else SCATTER
    else:
        form = GATHER if after == WHOLE else EXCHANGE
    # The runtime moves what an update needs at once.
    either = form in (GATHER, SCATTER) and not once
    return MoveOf(form, size, source, target, once, None if either else False)


def update_load(
    trace: ModuleTrace,
    kind: int,
    dimensions: Dimensions,
    place: int,
    stored: Stored,
    state_bytes: float,
) -> WayLoad:
    """What the update of a parameter makes each member compute.

    Args:
        trace: the trace of a module that has it.
        kind: the number of that.
        dimensions: the classes of dimensions.
        place: the parameter's place.
        stored: how it is stored and updated.
        state_bytes: bytes of optimizer state for each element of it.
    """
    value = trace.traced.parameters[place]
    aval = trace.traced.flat.avals[value]
    elements = math.prod(aval.shape)
    size, summed = num_bytes(aval), elements * accumulator_dtype(aval.dtype).itemsize
    updated = size + summed + elements * state_bytes
    is_updated = place in trace.traced.trained
    if not is_updated:
        # It is held, and that is all.
        summed, updated = 0, size
    alone = stored.update == WHOLE
    # Summands of a gradient are as large as the parameter is stored.
    own = size + summed if stored.layout == WHOLE else 0
    rest = updated - (size + summed) if stored.layout == WHOLE else updated
    return WayLoad(
        divided=-1 if alone else dimensions.class_of(kind, value, stored.update),
        updated=updated * is_updated if alone else 0.0,
        shared_updated=0.0 if alone else updated * is_updated,
        held=own + (rest if alone else 0.0),
        shared_held=0.0 if alone else rest,
    )


def sum_load(
    trace: ModuleTrace, kind: int, dimensions: Dimensions, gradient: int, made: int
) -> WayLoad:
    """What a member's devices, which share examples, sum of a gradient in a step.

    Args:
        trace: the trace of a module that makes it.
        kind: the number of that.
        dimensions: the classes of dimensions.
        gradient: the value.
        made: how it is made.
    """
    aval = trace.traced.flat.avals[gradient]
    summed = float(math.prod(aval.shape) * accumulator_dtype(aval.dtype).itemsize)
    is_divided = made >= 0
    return WayLoad(
        divided=dimensions.class_of(kind, gradient, made) if is_divided else -1,
        summed=0.0 if is_divided else summed,
        shared_summed=summed if is_divided else 0.0,
    )


def input_load(
    trace: ModuleTrace, kind: int, dimensions: Dimensions, value: int, layout: int
) -> WayLoad:
    """What members hold of a value received that is kept for the backward pass.

    Args:
        trace: the trace of a module that receives it.
        kind: the number of that.
        dimensions: the classes of dimensions.
        value: the value.
        layout: how it lies.
    """
    size, is_divided = float(trace.num_bytes[value]), layout >= 0
    return WayLoad(
        divided=dimensions.class_of(kind, value, layout) if is_divided else -1,
        by_examples=dimensions.examples in dimensions.classes[kind][value],
        held=0.0 if is_divided else size,
        shared_held=size if is_divided else 0.0,
    )


def shared_update(
    program: ModuleProgram, place: int, state_bytes: float
) -> tuple[list[WayLoad], list[MoveOf]]:
    """Loads and moves of the update of a parameter that several modules have.

    Args:
        program: the program of one of them.
        place: the parameter's place in it.
        state_bytes: bytes of optimizer state for each element of it.
    """
    stored = program.stored[place]
    value = program.trace.traced.parameters[place]
    load = update_load(program.trace, program.kind, program.dimensions, place, stored, state_bytes)
    gather = move_of(program, value, stored.update, stored.layout, once=True)
    if place not in program.trace.traced.trained:
        gather = None
    return [load, *program.sum_loads(place)], [gather] if gather else []


def layouts_text(layouts: Sequence[int]) -> str:
    """Layouts for people.

    Example:
        >>> layouts_text([WHOLE, 1, SUMMANDS])
        'whole, dim 1, summands'
    """
    names = {WHOLE: "whole", SUMMANDS: "summands", FREE: "known"}
    return ", ".join(names.get(layout, f"dim {layout}") for layout in layouts)
