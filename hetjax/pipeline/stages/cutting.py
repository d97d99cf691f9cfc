"""Cutting a program into stages: which steps, parameters and values each of them has."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import jax

from hetjax import _compat
from hetjax.pipeline.program.costs import REPEATABLE, is_heavy
from hetjax.pipeline.program.traced_program import (
    Operand,
    Program,
    SliceOf,
    Step,
    evaluate_steps,
    operand_value,
)
from hetjax.pipeline.stages.scan_pieces import keeping_little, split_scan
from hetjax.sharding.deduction.reshard import RESHARD


@dataclass(frozen=True, order=True)
class ParameterPart:
    """What a stage holds of a parameter leaf.

    Args:
        leaf: the leaf's place in the parameters' pytree.
        start: first row held; 0 where the leaf is whole.
        stop: the row after the last one held; None where the leaf is whole. A leaf stacked over the
            iterations of a ``scan`` is cut along its first dimension where the scan is cut.
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
            itself -1, and of what joins a scan's pieces the position after the scan.
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
        avals: shape and dtype of each value by its number: the program's, and after them those of
            the pieces of scans that are cut, which only the stages of one cut know.
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
    found: set[int] = set()
    position = 0
    for step in program.steps:
        if first <= position and position + step.iterations <= end:
            found.update(step.outputs)
        position += step.iterations
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
    parameters in another form (cast, transposed), which cost less to make again than to send. What
    a scan takes in rows is not among these: its rows belong to the stages of their iterations.
    """
    if program not in _shared:
        _shared[program] = _shared_steps(program)
    return _shared[program]


def _shared_steps(program: Program) -> frozenset[int]:
    rows = {
        value
        for step in program.steps
        if step.iterations > 1 and step.equation is not None
        for operand in step.inputs[_num_unstacked(step.equation) :]
        if (value := operand_value(operand)) is not None
    }
    weights, examples = set(program.parameters), set(program.batch)
    learned: set[int] = set()
    shared: set[int] = set()
    for step in program.steps:
        values, outputs = set(step.values()), set(step.outputs)
        # A reshard stands where the program says so: it is of one stage.
        heavy = step.iterations > 1 or is_heavy(step) or step.name == RESHARD.name
        of_weights, of_examples = bool(values & weights), bool(values & examples)
        costly = step.name not in REPEATABLE or bool(outputs & rows) or of_examples
        if heavy or values & learned or (of_weights and costly):
            learned |= outputs
            continue
        shared |= outputs
        if of_weights:
            weights |= outputs
        elif of_examples:
            examples |= outputs
    return frozenset(shared)


def _num_unstacked(equation: _compat.JaxprEqn) -> int:
    """How many of a scan's inputs come before those that it takes in rows."""
    return equation.params["num_consts"] + equation.params["num_carry"]


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
        position = 0
        for place, step in enumerate(program.steps):
            if shared.issuperset(step.outputs):
                found.update(dict.fromkeys(step.outputs, step))
                places.update(dict.fromkeys(step.outputs, place))
            else:
                others.append((position, step))
            position += step.iterations
        _known_shares[program] = _Shares(found, places, others)
    return _known_shares[program]


class _Cutter:
    def __init__(self, program: Program, boundaries: Sequence[int]):
        self.program = program
        self.avals = list(program.avals)
        self.shares = _shares_of(program)
        self.shared_step, self.shared_place = self.shares.step, self.shares.place
        self.num_stages = len(boundaries) - 1
        self.steps: list[list[Step]] = [[] for _ in range(self.num_stages)]
        self.positions: list[list[int]] = [[] for _ in range(self.num_stages)]
        self.producer: dict[int, int] = {}
        self._assign(boundaries)
        self.needs = [self._needs(index) for index in range(self.num_stages)]
        self.whole_leaves = self._whole_leaves()
        self.leaf_of = {value: leaf for leaf, value in enumerate(program.parameters)}
        self.crossings = self._crossings()

    @functools.cached_property
    def used(self) -> set[int]:
        """The values that a step or the program's result reads."""
        operands = [*(o for step in self.program.steps for o in step.inputs), *self.program.outputs]
        return {value for operand in operands if (value := operand_value(operand)) is not None}

    def _assign(self, boundaries: Sequence[int]) -> None:
        stage = 0
        for position, step in self.shares.others:
            end = position + step.iterations
            inside = boundaries if step.iterations > 1 else ()
            cuts = [b - position for b in inside if position < b < end]
            for piece, start, advance in self._pieces(step, cuts):
                stage += advance
                while position >= boundaries[stage + 1]:
                    stage += 1
                self.steps[stage].append(piece)
                self.positions[stage].append(position + start)
        for stage, steps in enumerate(self.steps):
            for step in steps:
                for output in step.outputs:
                    self.producer[output] = stage

    def _pieces(self, step: Step, cuts: Sequence[int]) -> list[tuple[Step, int, int]]:
        """A step in pieces: each, the iteration where it begins, and 1 where a stage does, too."""
        if not cuts:
            return [(keeping_little(step), 0, 0)]
        pieces, joins = split_scan(step, cuts, self._new_value)
        joins = [join for join in joins if self.used.intersection(join.outputs)]
        begins = zip(pieces, (0, *cuts), strict=True)
        found = [(piece, start, int(start > 0)) for piece, start in begins]
        return found + [(join, step.iterations, 0) for join in joins]

    def _new_value(self, shape: Sequence[int], dtype: Any) -> int:
        self.avals.append(jax.ShapeDtypeStruct(tuple(shape), dtype))
        return len(self.avals) - 1

    def _closure(self, operands: Iterable[Operand]) -> list[Operand]:
        """Operands with those of the shared steps behind them in place of their outputs."""
        found: list[Operand] = []
        pending = list(operands)
        seen: set[int] = set()
        while pending:
            operand = pending.pop()
            value = operand_value(operand)
            if value is None:
                continue
            if value not in self.shared_step:
                found.append(operand)
            elif value not in seen:
                seen.add(value)
                pending.extend(self.shared_step[value].inputs)
        return found

    def _demands(self, index: int) -> list[Operand]:
        operands = [operand for step in self.steps[index] for operand in step.inputs]
        if index == self.num_stages - 1:
            operands += self.program.outputs
        return operands

    def _needs(self, index: int) -> list[Operand]:
        """What a stage reads that it does not make: parameters, batch leaves, earlier values."""
        own = {output for step in self.steps[index] for output in step.outputs}
        operands = self._closure(self._demands(index))
        return [operand for operand in operands if operand_value(operand) not in own]

    def _whole_leaves(self) -> set[int]:
        """Parameter values that some stage reads whole, or whose slices overlap between stages."""
        whole: set[int] = set()
        rows: dict[int, dict[tuple[int, int], int]] = {}
        for index, needs in enumerate(self.needs):
            for operand in needs:
                if isinstance(operand, int):
                    whole.add(operand)
                elif isinstance(operand, SliceOf):
                    owner = rows.setdefault(operand.value, {})
                    if owner.setdefault((operand.start, operand.stop), index) != index:
                        whole.add(operand.value)
        for value, owners in rows.items():
            spans = sorted(owners)
            if any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
                whole.add(value)
        return whole

    def crossing(self, index: int) -> tuple[int, ...]:
        """The values made in stages up to ``index`` and needed after it."""
        return self.crossings[index]

    def _crossings(self) -> list[tuple[int, ...]]:
        """The values that cross the end of each stage."""
        last_need = {
            value: index
            for index, needs in enumerate(self.needs)
            for operand in needs
            if (value := operand_value(operand)) in self.producer
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
        slots = {o: slot for slot, (o, _) in enumerate(parts) if isinstance(o, SliceOf)}
        bound = tuple(_rebind(step, slots) for step in steps) if slots else steps
        held = [o if isinstance(o, int) else -1 - slot for slot, (o, _) in enumerate(parts)]
        shared = len(steps) - len(self.steps[index])
        body = Body(
            (*held, *(self.program.batch[leaf] for leaf in batch), *receives),
            bound,
            (*(-1 for _ in range(shared)), *self.positions[index]),
            tuple(outputs),
        )
        frozen = self.program.frozen.without_gradient
        return Stage(
            index,
            tuple(part for _, part in parts),
            batch,
            receives,
            tuple(sends),
            body,
            steps,
            self.avals,
            tuple(place for place, (_, part) in enumerate(parts) if part.leaf not in frozen),
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

    def _parts(self, index: int) -> list[tuple[Operand, ParameterPart]]:
        leaf_of = self.leaf_of
        parts: dict[Operand, ParameterPart] = {}
        for operand in self.needs[index]:
            value = operand_value(operand)
            if value not in leaf_of:
                continue
            if isinstance(operand, SliceOf) and value not in self.whole_leaves:
                parts[operand] = ParameterPart(leaf_of[value], operand.start, operand.stop)
            else:
                parts[value] = ParameterPart(leaf_of[value])
        if index == 0:
            used = {operand_value(o) for needs in self.needs for o in needs}
            for value, leaf in leaf_of.items():
                if value not in used:
                    parts[value] = ParameterPart(leaf)
        return sorted(parts.items(), key=lambda item: (item[1].leaf, item[1].start))

    def _batch(self, index: int) -> tuple[int, ...]:
        values = {operand_value(operand) for operand in self.needs[index]}
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


def _rebind(step: Step, slots: dict[SliceOf, int]) -> Step:
    """A step whose slices of a parameter read the part that the stage holds."""
    inputs = tuple(
        -1 - slots[operand] if isinstance(operand, SliceOf) and operand in slots else operand
        for operand in step.inputs
    )
    return step if inputs == step.inputs else replace(step, inputs=inputs)
