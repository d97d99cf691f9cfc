"""An update by leaves: parameters that are updated alike share one program.

An optimizer's update falls apart into components, the arrays of one parameter each, which meet only
in scalars: a norm, a count, a factor. Compiled as one program it takes the longer the more leaves
there are. Here the scalars are programs of their own, and so are runs of components, chosen so that
many runs compute the same on arrays of the same shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import (
    Callable,
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from typing import Any

import jax

from hetjax.pipeline.program.costs import is_expensive
from hetjax.pipeline.program.pieces import Piece, needed_before, piece_of
from hetjax.pipeline.program.step_program import Otherwise, StepProgram
from hetjax.pipeline.program.traced_program import (
    Operand,
    Step,
    flatten_jaxpr,
    num_bytes,
    operand_value,
)
from hetjax.pipeline.program.values import Values, renumbered

Ends = Mapping[Operand, tuple[Operand, Operand | None]]
"""Results of an update: for each of them what is computed, and what is kept instead."""

_TOGETHER = 96
"""How many components at most are updated by one call: each call takes a processor 0.1 ms."""

RESULT_BYTES = 2**25
"""How many bytes of results at most: XLA for CPUs copies some of what a call updates."""

_FEWEST = 3
"""An update that would take fewer calls stays one program."""


def is_divided(components: int, result_bytes: int) -> bool:
    """Whether an update of so many components is worth calls of its own for parts of them.

    Args:
        components: how many there are; no more than parameters.
        result_bytes: bytes of what it returns.

    Example:
        >>> is_divided(12, 2**20), is_divided(960, 2**20), is_divided(12, 2**30)
        (False, True, True)
    """
    return min(components, _least_calls(components, result_bytes)) >= _FEWEST


def _least_calls(components: int, result_bytes: int) -> int:
    return max(-(-components // _TOGETHER), -(-result_bytes // RESULT_BYTES))


def program_of(
    function: Callable[..., Any], arguments: Sequence[Sequence[Any]]
) -> tuple[StepProgram, Any]:
    """A function of sequences of arrays as a program.

    Args:
        function: the function.
        arguments: what it takes: arrays, or their shapes.

    Returns:
        The program, whose outputs are one sequence, and the structure of what the function returns.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*map(list, arguments))
    flat = flatten_jaxpr(closed)
    inputs = iter(flat.inputs)
    given = tuple(tuple(itertools.islice(inputs, len(each))) for each in arguments)
    return StepProgram(flat.steps, given, (flat.outputs,), flat.avals), jax.tree.structure(shapes)


def leafwise_pieces(program: StepProgram) -> tuple[StepProgram, tuple[Piece, ...]]:
    """Divide an update by leaves.

    Args:
        program: the update, or a phase of it. What it computes behind a conditional at its end is
            computed component by component behind conditionals of their own.

    Returns:
        The program with the values of its branches among its own, and pieces that compute it, in
        order; none where few components are alike, or where they meet in more than scalars.
    """
    return _Leafwise(program).divided()


class _Leafwise:
    def __init__(self, program: StepProgram):
        values = Values(program.avals)
        opened = _opened(program, values)
        steps, self.kept, self.predicate, self.guarded = opened
        self.program = replace(program, steps=steps, avals=values.avals)
        self.producer = {output: step for step in steps for output in step.outputs}
        self.keeper = {output: step for step in self.kept for output in step.outputs}
        self.component = self._components()
        self.owner: dict[int, int] = {}
        self.level: dict[int, int] = {}
        self.owned: set[Step] = set()
        self.constants: set[int] = set()
        self.shared: list[list[Step]] = []
        for step in steps:
            self._place(step)

    def _components(self) -> Callable[[int], int | None]:
        """The component of each array that depends on arrays given, through arrays."""
        parent: dict[int, int] = {}

        def find(value: int) -> int:
            while parent[value] != value:
                parent[value] = parent[parent[value]]
                value = parent[value]
            return value

        def join(values: Sequence[int]) -> None:
            known = [value for value in values if value in parent]
            for value in known[1:]:
                parent[find(value)] = find(known[0])

        def is_array(value: int) -> bool:
            return bool(self.program.avals[value].shape)

        given = itertools.chain(*self.program.arguments)
        parent.update((value, value) for value in given if is_array(value))
        for step in (*self.program.steps, *self.kept):
            if any(value in parent for value in step.values()):
                parent.update((output, output) for output in step.outputs if is_array(output))
            join((*step.values(), *step.outputs))
        for pair in self.guarded.values():
            join([value for value in map(operand_value, pair) if value is not None])
        return lambda value: find(value) if value in parent else None

    def _place(self, step: Step) -> None:
        """Find whose a step is, and how often scalars go to all before it can run."""
        values = (*step.values(), *step.outputs)
        own = {c for c in map(self.component, values) if c is not None}
        if not own:
            own = {self.owner[value] for value in step.values() if value in self.owner}
            if any(self.level.get(value, 0) for value in step.values() if value not in self.owner):
                # Part of something that all components have a part in: a sum over them.
                own = set()
        is_shared = len(own) != 1
        level = max((self._level(value, is_shared) for value in step.values()), default=0)
        self.level.update(dict.fromkeys(step.outputs, level))
        if not is_shared:
            self.owned.add(step)
            self.owner.update(dict.fromkeys(step.outputs, next(iter(own))))
        elif not self._is_copied(step):
            while len(self.shared) <= level:
                self.shared.append([])
            self.shared[level].append(step)

    def _is_copied(self, step: Step) -> bool:
        """Whether each piece has a step of its own that makes an array of shared scalars.

        Or makes anything of constants: a program that reads nothing lies on no devices.
        """
        if all(value in self.constants for value in step.values()):
            self.constants.update(step.outputs)
            return True
        is_array = any(self.program.avals[output].shape for output in step.outputs)
        return (
            is_array and not is_expensive(step) and not any(v in self.owner for v in step.values())
        )

    def _level(self, value: int, for_all: bool) -> int:
        told = for_all and (value in self.owner or self.component(value) is not None)
        return self.level.get(value, 0) + told

    def divided(self) -> tuple[StepProgram, tuple[Piece, ...]]:
        everything = {step for steps in self.shared for step in steps}
        ends = self._ends()
        owners = {self._owner(pair[0]) for pair in ends.values()} - {None}
        if not is_divided(len(owners), self._bytes(ends)):
            return self.program, ()
        pieces: list[Piece] = []
        for steps in self.shared:
            # In order, so that alike components tell alike.
            told = sorted({v for step in steps for v in step.values() if v in self.owner})
            pieces += self._of_owners({v: (v, None) for v in told}, everything)
            pieces += self._shared_pieces(steps)
        if self.predicate is not None and self._owner(self.predicate) is not None:
            # There is but one component.
            pieces += self._of_owners({self.predicate: (self.predicate, None)}, everything)
        passed_on = ends.keys() & set(itertools.chain(*self.program.arguments))
        guarded = {end for end, pair in ends.items() if pair[1] is not None}
        # What is passed on comes last: others read it before its memory is given away.
        for chosen in (ends.keys() - guarded - passed_on, guarded, passed_on):
            own = {end: pair for end, pair in ends.items() if end in chosen}
            pieces += self._of_owners(own, everything)
        return self.program, tuple(pieces)

    def _ends(self) -> Ends:
        """The outputs that no shared step makes: what is computed, and what is kept instead."""
        (outputs,) = self.program.outputs
        made = {output for steps in self.shared for step in steps for output in step.outputs}
        return {end: self.guarded.get(end, (end, None)) for end in outputs if end not in made}

    def _bytes(self, ends: Iterable[Operand]) -> int:
        values = (operand_value(end) for end in ends)
        return sum(num_bytes(self.program.avals[value]) for value in values if value is not None)

    def _owner(self, operand: Operand) -> int | None:
        value = operand_value(operand)
        if value is None:
            return None
        component = self.component(value)
        return self.owner.get(value) if component is None else component

    def _of_owners(self, ends: Ends, shared: Container[Step]) -> Iterator[Piece]:
        """Pieces that make what single components make, alike components together."""
        groups: dict[Hashable, dict[Operand, tuple[Operand, Operand | None]]] = {}
        for end, pair in ends.items():
            owner = self._owner(pair[0])
            # What no component makes, as zeros, is like one by itself.
            groups.setdefault(("end", end) if owner is None else owner, {})[end] = pair
        alike: dict[Hashable, list[tuple[Ends, Piece]]] = {}
        for group in groups.values():
            piece = self._piece(group, shared)
            alike.setdefault(piece.key, []).append((group, piece))
        size = self._bytes(end for group in groups.values() for end in group)
        for together in _calls(list(alike.values()), _least_calls(len(groups), size)):
            ends = {end: pair for group, _ in together for end, pair in group.items()}
            yield self._piece(ends, shared, _key_of_all([piece for _, piece in together]))

    def _piece(self, ends: Ends, shared: Container[Step], key: Hashable = None) -> Piece:
        computed = tuple(pair[0] for pair in ends.values())
        instead = tuple(pair[1] for pair in ends.values() if pair[1] is not None)
        otherwise = None
        if instead:
            assert isinstance(self.predicate, int), "what is guarded has a predicate"
            kept = _needed(instead, self.keeper, shared)
            otherwise = Otherwise(self.predicate, kept, instead)
        steps = _needed(computed, self.producer, shared)
        part = replace(self.program, steps=steps, outputs=(computed,), otherwise=otherwise)
        return piece_of(part, tuple(ends), key=key)

    def _shared_pieces(self, steps: Sequence[Step]) -> Iterator[Piece]:
        own = set(steps)
        ends = (*self.program.outputs[0], *itertools.chain(*self.guarded.values()))
        told = () if self.predicate is None else (self.predicate,)
        read = {*map(operand_value, (*ends, *told))}
        beside = (step for step in (*self.program.steps, *self.kept) if step not in own)
        read.update(value for step in beside for value in step.values())
        made = tuple(output for step in steps for output in step.outputs if output in read)
        if made:
            others = {each for level in self.shared for each in level} - own
            needed = _needed(made, self.producer, others, self.owned)
            yield piece_of(replace(self.program, steps=needed, outputs=(made,)), made)


def _key_of_all(pieces: Sequence[Piece]) -> Hashable:
    """The key of pieces as one: their own keys, and which of them read the same values."""
    reads = itertools.chain(*(piece.reads for piece in pieces))
    places = {value: place for place, value in enumerate(dict.fromkeys(reads))}
    return tuple((piece.key, tuple(places[v] for v in piece.reads)) for piece in pieces)


def _calls(alike: Sequence[Sequence[Any]], least: int) -> Iterator[list[Any]]:
    """What is done by one call: of everything alike as many, so that calls are alike, too.

    Args:
        alike: components, those that are alike in one sequence.
        least: how many calls there are at least, where there are as many components.

    Yields:
        The components of each call.

    Example:
        >>> [len(call) for call in _calls([range(193), "ab"], least=3)]
        [64, 64, 64, 3]
        >>> [len(call) for call in _calls(["ab", "cd", "ef"], least=4)]
        [2, 2, 1, 1]
    """
    total = sum(map(len, alike))
    least = min(least, total)
    calls = max(
        range(max(least, 1), 2 * least + 1),
        key=lambda count: (sum(len(same) // count * count for same in alike), -count),
        default=1,
    )
    sizes = [len(same) // calls for same in alike]
    for call in range(calls if any(sizes) else 0):
        yield [
            each
            for same, size in zip(alike, sizes, strict=True)
            for each in same[call * size : (call + 1) * size]
        ]
    few = [each for same, size in zip(alike, sizes, strict=True) for each in same[calls * size :]]
    of_few = -(-least * len(few) // max(total, 1))
    for call in range(of_few):
        yield few[slice(*_share(len(few), of_few, call))]


def _share(count: int, calls: int, call: int) -> tuple[int, int]:
    """What a call does of as many alike ones, first and end; the first calls do one more each."""
    size, more = divmod(count, calls)
    first = call * size + min(call, more)
    return first, first + size + (call < more)


def _opened(
    program: StepProgram, values: Values
) -> tuple[
    tuple[Step, ...], tuple[Step, ...], Operand | None, dict[Operand, tuple[Operand, Operand]]
]:
    """The steps of an update with those behind its guard, and those of what it keeps instead.

    Returns:
        The steps; those of what is kept; the guard's predicate; and for each of its results what is
        computed, and what is kept.
    """
    guard, *more = [step for step in program.steps if step.name == "cond"] or [None]
    if guard is None or more or guard.equation is None:
        return program.steps, (), None, {}
    predicate, *operands = guard.inputs
    kept, applied = (
        renumbered(flatten_jaxpr(branch), operands, values)
        for branch in guard.equation.params["branches"]
    )
    steps = (*(step for step in program.steps if step is not guard), *applied.steps)
    pairs = zip(applied.outputs, kept.outputs, strict=True)
    return steps, kept.steps, predicate, dict(zip(guard.outputs, pairs, strict=True))


def _needed(
    outputs: Sequence[Operand], producer: Mapping[int, Step], *others: Container[Step]
) -> tuple[Step, ...]:
    """The steps that outputs need, but for those of others."""
    found: dict[Step, None] = {}
    for operand in outputs:
        value = operand_value(operand)
        step = None if value is None else producer.get(value)
        if step is not None and step not in found and not any(step in each for each in others):
            found |= dict.fromkeys(needed_before(step, producer, found, *others))
    return tuple(found)
