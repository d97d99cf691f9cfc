"""Cutting a program into stages: which steps, parameters and values each of them has."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jax

from hetjax.pipeline.program.costs import REPEATABLE, is_heavy
from hetjax.pipeline.program.traced_program import (
    Operand,
    Program,
    Step,
    evaluate_steps,
    operand_value,
)
from hetjax.pipeline.stages.lean_scans import keeping_little
from hetjax.sharding.deduction.reshard import RESHARD


@dataclass(frozen=True, order=True)
class ParameterPart:
    """What a stage holds of a parameter leaf.

    Args:
        leaf: the leaf's place in the parameters' pytree.
        start: first row held; 0 where the leaf is whole.
        stop: the row after the last one held; None where the leaf is whole. Stages that hold the
            same leaf may divide its update by rows.
    """

    leaf: int
    start: int = 0
    stop: int | None = None

    def contains(self, other: ParameterPart) -> bool:
        """Whether all of another part is in this one."""
        if self.leaf != other.leaf:
            return False
        if self.stop is None or other.stop is None:
            return self.stop is None
        return self.start <= other.start and other.stop <= self.stop

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The part's shape, given the leaf's."""
        return tuple(whole) if self.stop is None else (self.stop - self.start, *whole[1:])

    def take(self, array: Any) -> Any:
        """The part of an array of the leaf's shape."""
        return array if self.stop is None else array[self.start : self.stop]


@dataclass(frozen=True, eq=False, repr=False)  # JAX writes down what it traces.
class Body:
    """What a stage computes, as a function of its parameters, batch leaves and received values.

    Args:
        inputs: the numbers by which its steps know these, in this order.
        steps: its steps.
        positions: where in the program each stands; of a cheap step that every stage computes for
            itself -1.
        outputs: what it returns.
    """

    inputs: tuple[int, ...]
    steps: tuple[Step, ...]
    positions: tuple[int, ...]
    outputs: tuple[Operand, ...]

    def __call__(
        self, parameters: Sequence[Any], batch: Sequence[Any], received: Sequence[Any]
    ) -> list[Any]:
        """Its outputs."""
        arrays = itertools.chain(parameters, batch, received)
        return evaluate_steps(self.steps, dict(zip(self.inputs, arrays, strict=True)), self.outputs)


@dataclass(frozen=True, eq=False)
class Stage:
    """A contiguous run of steps, and what goes in and out of it for one microbatch.

    Args:
        index: its place in the pipeline.
        parameters: the parameter parts that it holds.
        batch: the batch leaves that it reads, by their place in the batch's pytree.
        receives: the numbers of the values that it gets from the stage before.
        sends: the numbers of the values that it gives to the stage after.
        function: from its parameters, batch leaves and received values (three sequences) to the
            values that it sends; the last stage returns the program's outputs instead: the summed
            loss, the count, and what the loss has beside it. As a program is cut, a `Body`.
        steps: the steps that it computes.
        avals: shape and dtype of each value by its number.
        trained: the places of the parameter parts whose gradients are wanted.
        moving: the places of the values received that a trained parameter reaches: no other has a
            cotangent to give back.
    """

    index: int
    parameters: tuple[ParameterPart, ...]
    batch: tuple[int, ...]
    receives: tuple[int, ...]
    sends: tuple[int, ...]
    function: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], list[Any]]
    steps: tuple[Step, ...]
    avals: Sequence[jax.ShapeDtypeStruct]
    trained: tuple[int, ...]
    moving: tuple[int, ...]


def cut(program: Program, boundaries: Sequence[int]) -> tuple[Stage, ...]:
    """Cut a program into stages.

    Cheap steps that no parameter reaches (masks, positions, one-hot targets, random keys), or that
    only give a parameter another form (a cast), belong to every stage that uses them, so that only
    activations cross a link. A value used beyond the next stage is handed on by the stages between.

    Args:
        program: the traced loss function.
        boundaries: the positions where stages begin, and the end: ``(0, ..., num_positions)``.

    Returns:
        The stages, in order.
    """
    assert boundaries[0] == 0, boundaries
    assert boundaries[-1] == program.num_positions, boundaries
    assert list(boundaries) == sorted(set(boundaries)), boundaries
    known, key = _cuts.setdefault(program, {}), tuple(boundaries)
    # What was asked for last stands last.
    stages = known[key] = known.pop(key, None) or _cut(program, key)
    if len(known) > _KEPT_CUTS:
        known.pop(next(iter(known)), None)
    return stages


_KEPT_CUTS = 8
"""How many cuts of a program are kept: to count its layers takes three, to predict a plan one."""

_cuts: WeakKeyDictionary[Program, dict[tuple[int, ...], tuple[Stage, ...]]] = WeakKeyDictionary()
"""The last cuts of programs: each question about a plan's stages asks for them anew."""


def _cut(program: Program, boundaries: tuple[int, ...]) -> tuple[Stage, ...]:
    cutter = _Cutter(program, boundaries)
    return tuple(cutter.stage(index) for index in range(len(boundaries) - 1))


def made_between(program: Program, first: int, end: int) -> frozenset[int]:
    """The values that a stage makes which has some positions, and no other stage.

    Args:
        program: the traced loss function.
        first: its first position.
        end: the position after its last.

    Returns:
        Numbers of values; not those of cheap steps that every stage computes for itself.
    """
    found = {output for step in program.steps[first:end] for output in step.outputs}
    return frozenset(found - shared_steps(program))


def crossing_values(program: Program, boundary: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The values that cross a cut at one position.

    Args:
        program: the traced loss function.
        boundary: a position strictly inside the program.

    Returns:
        Shape and dtype of each value that the second part needs of the first.
    """
    cutter = _Cutter(program, (0, boundary, program.num_positions))
    return tuple(cutter.avals[value] for value in cutter.crossing(0))


_shared: WeakKeyDictionary[Program, frozenset[int]] = WeakKeyDictionary()
"""What was found of programs before: every cut of one asks for it."""


def shared_steps(program: Program) -> frozenset[int]:
    """The outputs of cheap steps that every stage computes for itself, where it needs them.

    They are of two sorts: what no parameter reaches (masks, positions, one-hot targets, keys), and
    parameters in another form (cast, transposed), which cost less to make again than to send.
    """
    if program not in _shared:
        _shared[program] = _shared_steps(program)
    return _shared[program]


def _shared_steps(program: Program) -> frozenset[int]:
    weights, examples = set(program.parameters), set(program.batch)
    learned: set[int] = set()
    shared: set[int] = set()
    for step in program.steps:
        values, outputs = set(step.values()), set(step.outputs)
        # A reshard stands where the program says so: it is of one stage.
        heavy = step.iterations > 1 or is_heavy(step) or step.name == RESHARD.name
        of_weights, of_examples = bool(values & weights), bool(values & examples)
        costly = step.name not in REPEATABLE or of_examples
        if heavy or values & learned or (of_weights and costly):
            learned |= outputs
            continue
        shared |= outputs
        if of_weights:
            weights |= outputs
        elif of_examples:
            examples |= outputs
    return frozenset(shared)


@dataclass(frozen=True, eq=False)
class _Shares:
    """A program's steps, by whether every stage computes them for itself; the same for all cuts.

    Args:
        step: the step that makes each value that is shared.
        place: its place among the program's steps.
        others: the other steps, each with its position.
    """

    step: dict[int, Step]
    place: dict[int, int]
    others: Sequence[tuple[int, Step]]


_known_shares: WeakKeyDictionary[Program, _Shares] = WeakKeyDictionary()
"""What was found of programs before."""


def _shares_of(program: Program) -> _Shares:
    if program not in _known_shares:
        shared = shared_steps(program)
        found, places, others = {}, {}, []
        for place, step in enumerate(program.steps):
            if shared.issuperset(step.outputs):
                found.update(dict.fromkeys(step.outputs, step))
                places.update(dict.fromkeys(step.outputs, place))
            else:
                others.append((place, keeping_little(step)))
        _known_shares[program] = _Shares(found, places, others)
    return _known_shares[program]


class _Cutter:
    def __init__(self, program: Program, boundaries: Sequence[int]):
        self.program = program
        self.avals = program.avals
        self.shares = _shares_of(program)
        self.shared_step, self.shared_place = self.shares.step, self.shares.place
        self.num_stages = len(boundaries) - 1
        self.steps: list[list[Step]] = [[] for _ in range(self.num_stages)]
        self.positions: list[list[int]] = [[] for _ in range(self.num_stages)]
        self.producer: dict[int, int] = {}
        self._assign(boundaries)
        self.needs = [self._needs(index) for index in range(self.num_stages)]
        self.leaf_of = {value: leaf for leaf, value in enumerate(program.parameters)}
        self.crossings = self._crossings()

    def _assign(self, boundaries: Sequence[int]) -> None:
        stage = 0
        for position, step in self.shares.others:
            while position >= boundaries[stage + 1]:
                stage += 1
            self.steps[stage].append(step)
            self.positions[stage].append(position)
            self.producer.update(dict.fromkeys(step.outputs, stage))

    def _closure(self, operands: Iterable[Operand]) -> list[int]:
        """Values with those of the shared steps behind them in place of their outputs."""
        found: list[int] = []
        pending = list(operands)
        seen: set[int] = set()
        while pending:
            value = operand_value(pending.pop())
            if value is None:
                continue
            if value not in self.shared_step:
                found.append(value)
            elif value not in seen:
                seen.add(value)
                pending.extend(self.shared_step[value].inputs)
        return found

    def _demands(self, index: int) -> list[Operand]:
        operands = [operand for step in self.steps[index] for operand in step.inputs]
        if index == self.num_stages - 1:
            operands += self.program.outputs
        return operands

    def _needs(self, index: int) -> list[int]:
        """What a stage reads that it does not make: parameters, batch leaves, earlier values."""
        own = {output for step in self.steps[index] for output in step.outputs}
        return [value for value in self._closure(self._demands(index)) if value not in own]

    def crossing(self, index: int) -> tuple[int, ...]:
        """The values made in stages up to ``index`` and needed after it."""
        return self.crossings[index]

    def _crossings(self) -> list[tuple[int, ...]]:
        """The values that cross the end of each stage."""
        last_need = {
            value: index
            for index, needs in enumerate(self.needs)
            for value in needs
            if value in self.producer
        }
        crossing: list[list[int]] = [[] for _ in range(self.num_stages)]
        for value in sorted(last_need):
            for index in range(self.producer[value], last_need[value]):
                crossing[index].append(value)
        return [tuple(values) for values in crossing]

    def stage(self, index: int) -> Stage:
        last = index == self.num_stages - 1
        parts = self._parts(index)
        batch = self._batch(index)
        receives = self.crossing(index - 1) if index else ()
        sends = () if last else self.crossing(index)
        outputs = self.program.outputs if last else sends
        steps = self._with_shared(index)
        shared = len(steps) - len(self.steps[index])
        body = Body(
            (*parts, *(self.program.batch[leaf] for leaf in batch), *receives),
            steps,
            (*(-1 for _ in range(shared)), *self.positions[index]),
            tuple(outputs),
        )
        frozen = self.program.frozen.without_gradient
        return Stage(
            index,
            tuple(parts.values()),
            batch,
            receives,
            tuple(sends),
            body,
            steps,
            self.avals,
            tuple(place for place, part in enumerate(parts.values()) if part.leaf not in frozen),
            tuple(p for p, v in enumerate(receives) if not frozen or v in self.moving),
        )

    @functools.cached_property
    def moving(self) -> set[int]:
        """The values that some trained parameter reaches."""
        frozen = self.program.frozen.without_gradient
        moving = {v for leaf, v in enumerate(self.program.parameters) if leaf not in frozen}
        for step in itertools.chain(self.shared_step.values(), *self.steps):
            if moving.intersection(step.values()):
                moving.update(step.outputs)
        return moving

    def _parts(self, index: int) -> dict[int, ParameterPart]:
        """The parameters that a stage holds, by their values; the first one has the unused, too."""
        found = {value for value in self.needs[index] if value in self.leaf_of}
        if index == 0:
            found |= self.leaf_of.keys() - set(itertools.chain(*self.needs))
        in_order = sorted(found, key=self.leaf_of.__getitem__)
        return {value: ParameterPart(self.leaf_of[value]) for value in in_order}

    def _batch(self, index: int) -> tuple[int, ...]:
        values = set(self.needs[index])
        return tuple(leaf for leaf, value in enumerate(self.program.batch) if value in values)

    def _with_shared(self, index: int) -> tuple[Step, ...]:
        """The stage's steps behind the shared ones that they need, in the program's order."""
        wanted: set[int] = set()
        pending = [operand_value(operand) for operand in self._demands(index)]
        while pending:
            value = pending.pop()
            if value in self.shared_step and value not in wanted:
                wanted.update(self.shared_step[value].outputs)
                pending.extend(self.shared_step[value].values())
        places = sorted({self.shared_place[value] for value in wanted})
        shared = [self.program.steps[place] for place in places]
        return (*shared, *self.steps[index])
