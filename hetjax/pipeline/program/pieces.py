"""Pieces of a program that repeats itself: runs of steps of which many are alike.

The blocks of a model that is not scanned come one after another in its trace, with the same
equations each, and so do their backward passes. Such a program is cut where the next block begins;
pieces that compute the same on values of the same shapes need to be compiled only once.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from hetjax.pipeline.program.computations import computation_of, constant_of
from hetjax.pipeline.program.costs import is_expensive, steps_cost
from hetjax.pipeline.program.step_program import StepProgram
from hetjax.pipeline.program.traced_program import (
    Constant,
    Operand,
    Step,
    num_bytes,
    operand_value,
)

_FEWEST = 2
"""A program is cut where so many runs of steps, one after another, are alike."""

LEAST_FLOPS = 1e8
"""What a piece computes at least: a call of a compiled program takes a processor 0.15 ms."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a program.

    Args:
        program: the part, of one argument, the values that it reads, and of one sequence of
            outputs, beside sums.
        makes: what its outputs are to the whole program: values that later pieces read, and the
            program's outputs.
        summands: which of the program's summands it makes, by place.
        key: equal for pieces that compute the same.
    """

    program: StepProgram
    makes: tuple[Operand, ...]
    summands: tuple[int, ...]
    key: Hashable

    @property
    def reads(self) -> tuple[int, ...]:
        """The values that it reads and does not make, in the order in which it does."""
        return self.program.arguments[0]


def piece_of(
    program: StepProgram,
    makes: Sequence[Operand],
    summands: Sequence[int] = (),
    *,
    differentiated: bool = False,
    key: Hashable = None,
) -> Piece:
    """A part of a program as a piece.

    Args:
        program: the part; what it reads is found.
        makes: what its outputs are to the whole program.
        summands: which of the program's summands it makes, by place.
        differentiated: whether it is to be differentiated yet.
        key: its key, where that is known.
    """
    own = (program, *([program.otherwise] if program.otherwise else []))
    made = {output for each in own for step in each.steps for output in step.outputs}
    read = [value for each in own for step in each.steps for value in step.values()]
    read += _values([*itertools.chain(*program.outputs), *(program.summands or ())])
    if program.otherwise is not None:
        read += [program.otherwise.predicate, *_values(program.otherwise.outputs)]
    reads = tuple(dict.fromkeys(value for value in read if value not in made))
    program = replace(program, arguments=(reads,))
    key = key or key_of(program, differentiated=differentiated)
    return Piece(program, tuple(makes), tuple(summands), key)


def pieces_of(
    program: StepProgram, least_flops: float = LEAST_FLOPS, *, differentiated: bool = False
) -> tuple[Piece, ...]:
    """Cut a program into pieces.

    Args:
        program: the program.
        least_flops: floating-point operations of matrix products that a piece has at least.
        differentiated: whether it is to be differentiated yet; pieces are then alike where also
            their derivatives are.

    Returns:
        Pieces that compute the program, in order, where many of them are alike; else none.
    """
    outputs = [*itertools.chain(*program.outputs), *(program.summands or ())]
    made = set(_values(outputs))
    steps = where_they_belong(program.steps)
    cuts = _cuts(steps, program, made, least_flops, differentiated)
    if not cuts:
        return ()
    bounds = itertools.pairwise([0, *cuts, len(steps)])
    return tuple(_pieces(program, [steps[first:end] for first, end in bounds], differentiated))


def where_they_belong(steps: Sequence[Step]) -> list[Step]:
    """The steps in an order in which each block has its own together.

    A backward pass has what it makes again of the forward pass in front, and sums the gradients of
    vectors at its end. Here cheap steps come right before the first that reads what they make, and
    steps that no other reads right after the last that they read of.
    """
    producer = {output: step for step in steps for output in step.outputs}
    read = {value for step in steps for value in step.values()}
    order: dict[Step, int] = {}
    for step in steps:
        if is_expensive(step) and not read.isdisjoint(step.outputs):
            for each in needed_before(step, producer, order):
                order[each] = len(order)
    behind: list[list[Step]] = [[] for _ in range(len(order) + 1)]
    places = {step: place + 1 for step, place in order.items()}
    for step in steps:
        if read.isdisjoint(step.outputs):
            new = list(needed_before(step, producer, places))
            needed = {producer[v] for each in new for v in each.values() if v in producer}
            place = max((places[each] for each in needed - set(new)), default=0)
            places |= dict.fromkeys(new, place)
            behind[place] += new
    return [*behind[0], *(each for s, p in order.items() for each in (s, *behind[p + 1]))]


def needed_before(
    step: Step, producer: Mapping[int, Step], *known: Container[Step]
) -> Iterator[Step]:
    """A step, and before it those that it needs.

    Args:
        step: the step.
        producer: for each value the step that makes it.
        known: the steps that need not run, nor what they need.

    Yields:
        The steps, in an order in which they can run.
    """
    found = {step}
    stack = [(step, iter(step.values()))]
    while stack:
        current, values = stack[-1]
        before = next((producer[value] for value in values if value in producer), None)
        if before is None:
            stack.pop()
            yield current
        elif before not in found and not any(before in steps for steps in known):
            found.add(before)
            stack.append((before, iter(before.values())))


def _cuts(
    steps: Sequence[Step],
    program: StepProgram,
    made: set[int],
    least_flops: float,
    differentiated: bool,
) -> list[int]:
    """Where a program is cut: between steps that repeat, where the fewest bytes are alive."""
    codes = _codes(steps, program.avals, differentiated)
    heavy = np.array([is_expensive(step) for step in steps])
    alive = _bytes_alive(steps, program.avals, made)
    cuts: list[int] = []
    spans = [(0, len(steps))]
    while spans:
        first, end = spans.pop()
        run = _longest_run(codes[first:end], heavy[first:end])
        if run is None:
            continue
        begin, length, period = first + run[0], run[1], run[2]
        within = alive[begin : begin + length]
        # The bytes at each place of the period, at the places between two of its repetitions.
        rows = within[: length // period * period].reshape(-1, period)[1:]
        offset = int(np.argmin(rows.max(axis=0)))
        every = _together(steps[begin : begin + period], least_flops)
        if length >= _FEWEST * every * period:
            found = range(begin + offset, begin + length + 1, period * every)
            cuts += [cut for cut in found if 0 < cut < len(steps)]
        spans += [(first, begin), (begin + length, end)]
    return sorted(set(cuts))


def _together(period: Sequence[Step], least_flops: float) -> int:
    """How many repetitions make a piece that is worth a call of its own."""
    return max(1, math.ceil(least_flops / max(1.0, steps_cost(period).matmul_flops)))


def _codes(
    steps: Sequence[Step], avals: Sequence[jax.ShapeDtypeStruct], differentiated: bool
) -> np.ndarray:
    """A number for each step, the same for those that look alike."""
    numbers: dict[Hashable, int] = {}
    shapes = [tuple(_shape(avals[value]) for value in step.outputs) for step in steps]
    computed = (computation_of(step, differentiated=differentiated) for step in steps)
    keys = zip(computed, shapes, strict=True)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _shape(aval: jax.ShapeDtypeStruct) -> Hashable:
    return aval.shape, aval.dtype


def _bytes_alive(
    steps: Sequence[Step], avals: Sequence[jax.ShapeDtypeStruct], made: set[int]
) -> np.ndarray:
    """The bytes of what steps before each place have made for steps after it."""
    place = {output: p for p, step in enumerate(steps) for output in step.outputs}
    last = {value: p for p, step in enumerate(steps) for value in step.values() if value in place}
    change = np.zeros(len(steps) + 1)
    for value, end in last.items():
        if value not in made:
            change[place[value] + 1] += num_bytes(avals[value])
            change[end + 1] -= num_bytes(avals[value])
    return np.cumsum(change)


def _longest_run(codes: np.ndarray, heavy: np.ndarray) -> tuple[int, int, int] | None:
    """The longest run of steps that repeats itself: where it begins, its length, its period."""
    best: tuple[int, int, int] | None = None
    for period in _periods(codes, heavy):
        same = codes[period:] == codes[:-period]
        edges = np.flatnonzero(np.diff(np.concatenate(([0], same, [0]))))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            length = int(end - begin) + period
            repeats = length >= _FEWEST * period and heavy[begin : begin + period].any()
            if repeats and (best is None or length > best[1]):
                best = int(begin), length, period
    return best


def _periods(codes: np.ndarray, heavy: np.ndarray) -> list[int]:
    """How far apart expensive steps that look alike are, the smallest distances first."""
    places: dict[int, list[int]] = {}
    for place in np.flatnonzero(heavy):
        places.setdefault(int(codes[place]), []).append(int(place))
    distances: Counter[int] = Counter()
    for found in places.values():
        for stride in range(1, min(_MOST_IN_A_PERIOD, len(found) // _FEWEST) + 1):
            distances.update(b - a for a, b in zip(found, found[stride:], strict=False))
    return sorted(period for period, _ in distances.most_common(_MOST_PERIODS))


_MOST_IN_A_PERIOD = 16
"""How many steps that look alike a period may have, as four projections of a block do."""

_MOST_PERIODS = 24
"""How many distances are tried."""


def _pieces(
    program: StepProgram, runs: Sequence[Sequence[Step]], differentiated: bool
) -> Iterator[Piece]:
    summands = program.summands or ()
    outputs = dict.fromkeys(itertools.chain(*program.outputs))
    places: dict[Operand, list[int]] = {}
    for place, operand in enumerate(summands):
        places.setdefault(operand, []).append(place)
    read_later = [frozenset[int]()]
    for run in reversed(runs[1:]):
        read_later.append(read_later[-1].union(*(step.values() for step in run)))

    def piece(run: Sequence[Step], makes: Sequence[Operand], own: Sequence[int]) -> Piece:
        added = tuple(summands[place] for place in own) if program.summands is not None else None
        part = replace(program, steps=tuple(run), outputs=(tuple(makes),), summands=added)
        return piece_of(part, makes, own, differentiated=differentiated)

    for run, later in zip(runs, reversed(read_later), strict=True):
        made = [output for step in run for output in step.outputs]
        makes = [value for value in made if value in later or value in outputs]
        own = [place for value in made for place in places.pop(value, ())]
        yield piece(run, makes, own)
    every = {output for run in runs for step in run for output in step.outputs}
    loose = [operand for operand in outputs if operand not in every]
    left = list(itertools.chain(*places.values()))
    if loose or left:
        yield piece((), loose, left)


def _values(operands: Iterable[Operand]) -> Iterator[int]:
    """The values that operands read."""
    return (value for value in map(operand_value, operands) if value is not None)


def key_of(program: StepProgram, *, differentiated: bool = False) -> Hashable:
    """What a program computes, equal for programs that compute the same.

    Args:
        program: the program.
        differentiated: whether it is to be differentiated yet.
    """
    codes: dict[int, int] = {}

    def code(operand: Operand) -> Hashable:
        if isinstance(operand, Constant):
            return constant_of(operand.value)
        return codes[operand]

    def number(values: Iterable[int]) -> Hashable:
        for value in values:
            codes[value] = len(codes)
        return tuple(_shape(program.avals[value]) for value in values)

    def lines(steps: Iterable[Step]) -> Iterator[Hashable]:
        for step in steps:
            operands = tuple(map(code, step.inputs))
            yield (
                computation_of(step, differentiated=differentiated),
                operands,
                number(step.outputs),
            )

    given = tuple(map(number, program.arguments))
    own = (given, *lines(program.steps), tuple(tuple(map(code, each)) for each in program.outputs))
    added = tuple(map(code, program.summands or ())), program.accumulate
    if program.otherwise is None:
        return own, added
    other = program.otherwise
    return own, added, code(other.predicate), *lines(other.steps), tuple(map(code, other.outputs))
