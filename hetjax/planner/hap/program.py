"""A synthesised program: what each module computes and moves, and what that truly takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetjax.pipeline.program.traced_program import Operand
from hetjax.planner.hap.module_network import Copies, ModuleNetwork, Stored
from hetjax.planner.hap.rates import MoveOf
from hetjax.planner.hap.ways import FREE, SUMMANDS, WHOLE, Load, Way

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class ProgramMove:
    """A value that is brought to lie in another way.

    Args:
        value: the value, by its number in the module's trace.
        before: how it was made.
        after: how it lies then.
        move: what is charged for it; None where nothing moves.
        equation: the first equation that needs it so; the number of equations for the update.
    """

    value: int
    before: int
    after: int
    move: MoveOf | None
    equation: int


@dataclass(frozen=True, eq=False)
class ModuleProgram:
    """What members do of a module.

    Args:
        network: the choices that there were.
        choices: which were made, by variable.
    """

    network: ModuleNetwork
    choices: Mapping[int, int]

    def way(self, equation: int) -> Way:
        """How an equation is computed."""
        network = self.network
        return network.ways[equation][self.choices[network.of_equation[equation]]]

    def stored(self, place: int) -> Stored:
        """How a parameter is stored and updated."""
        variable = self.network.stored[place]
        found = self.network.choices[variable][self.choices[variable]]
        assert isinstance(found, Stored)
        return found

    def made(self, operand: Operand) -> int:
        """How a value is made."""
        if not isinstance(operand, int):
            return FREE
        maker = self.network.makers[operand]
        return maker.layouts[0 if maker.variable < 0 else self.choices[maker.variable]]

    def copies(self, value: int) -> tuple[int, ...]:
        """The layouts into which a value is brought that several take."""
        variable = self.network.copies.get(value)
        if variable is None:
            return ()
        found = self.network.choices[variable][self.choices[variable]]
        assert isinstance(found, Copies)
        return found.others

    @cached_property
    def operand_layouts(self) -> dict[tuple[int, int], int]:
        """How operands lie that lie otherwise than they were made, by equation and place."""
        found = {}
        for equation, step in enumerate(self.network.trace.traced.flat.steps):
            way = self.way(equation)
            for place, operand in enumerate(step.inputs):
                layout = way.operands[place]
                if not isinstance(operand, int) or layout in (FREE, SUMMANDS):
                    continue
                if layout != self.made(operand):
                    found[equation, place] = layout
        return found

    @cached_property
    def moves(self) -> tuple[ProgramMove, ...]:
        """The moves inside the module, and those of its update, in order."""
        return tuple(self._moves())

    def _moves(self) -> Iterator[ProgramMove]:
        done: set[tuple[int, int]] = set()
        steps = self.network.trace.traced.flat.steps
        for (equation, place), layout in self.operand_layouts.items():
            value = steps[equation].inputs[place]
            assert isinstance(value, int)
            made, copies = self.made(value), self.copies(value)
            # Of a copy that each member has whole a part is free.
            wanted = WHOLE if WHOLE in copies else layout
            if (value, wanted) in done:
                continue
            done.add((value, wanted))
            move = self.network.move(value, made, wanted)
            yield ProgramMove(value, made, wanted, move, equation)
        yield from self._update_moves(done)

    def _update_moves(self, done: set[tuple[int, int]]) -> Iterator[ProgramMove]:
        traced = self.network.trace.traced
        end = len(traced.flat.steps)
        if self.network.trace.is_last:
            for operand in traced.sent:
                if isinstance(operand, int) and (operand, WHOLE) not in done:
                    move = self.network.move(operand, self.made(operand), WHOLE)
                    yield ProgramMove(operand, self.made(operand), WHOLE, move, end)
        for place, gradient in enumerate(traced.gradients):
            stored = self.stored(place)
            if isinstance(gradient, int):
                made, copies = self.made(gradient), self.copies(gradient)
                wanted = WHOLE if WHOLE in copies else stored.update
                if (gradient, wanted) not in done:
                    done.add((gradient, wanted))
                    move = self.network.move(gradient, made, wanted)
                    yield ProgramMove(gradient, made, wanted, move, end)
            if stored.layout != stored.update and place not in self.network.shared:
                value = traced.parameters[place]
                gather = self.network.move(value, stored.update, WHOLE)
                yield ProgramMove(value, stored.update, WHOLE, gather, end)

    def update_loads(self) -> Iterator[Load]:
        """What the update computes."""
        for place in range(len(self.network.stored)):
            load = self.network.update_load(place, self.stored(place))
            if load is not None:
                yield load


@dataclass(frozen=True, eq=False)
class Pass:
    """What members take for a run of equations between moves.

    Args:
        before: what each computes until the first move; all of it where there is none.
        inside: seconds from there to the last move, with it: of the slowest between any two.
        after: what each computes after the last move; None where there is none.
        waited: of what is computed inside, for how long the others wait for each member.
    """

    before: FloatArray
    inside: float
    after: FloatArray | None
    waited: FloatArray


class Clock:
    """Adds up what members take, who wait for each other at moves.

    Args:
        count: how many members.

    Attributes:
        waited: for how long the others have waited for each member.

    Source: HAP, section 3.2 (figure 6).
    """

    def __init__(self, count: int):
        self._open, self._seconds = np.zeros(count), 0.0
        self._before: FloatArray | None = None
        self.waited = np.zeros(count)

    def compute(self, seconds: FloatArray) -> None:
        """Every member computes."""
        self._open = self._open + seconds

    def move(self, seconds: float) -> None:
        """All wait for each other, and move something."""
        if self._before is None:
            self._before = self._open
        self._close()
        self._seconds += seconds

    def run(self, each: Pass) -> None:
        """All members run a pass."""
        self.compute(each.before)
        if each.after is not None:
            self.move(each.inside)
            self.waited += each.waited
            self._open = each.after

    def done(self) -> float:
        """When the slowest is done."""
        self._close()
        return self._seconds

    def as_pass(self) -> Pass:
        """What was added up, to be run again."""
        if self._before is None:
            return Pass(self._open, 0.0, None, self.waited)
        place = int(np.argmax(self._before))
        waited = self.waited.copy()
        waited[place] -= self._before[place]
        return Pass(self._before, self._seconds - self._before[place], self._open, waited)

    def _close(self) -> None:
        place = int(np.argmax(self._open))
        self._seconds += float(self._open[place])
        self.waited[place] += float(self._open[place])
        self._open = np.zeros_like(self._open)
