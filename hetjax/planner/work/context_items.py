"""What members that share the context do in a task, in turn: what they compute, and what they move.

Moves wait until something needs one of them, and then go together; early ones go at once, and what
needs them begins another program. So does the runtime divide a task.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetjax.pipeline.program.traced_program import Step
from hetjax.planner.work.context_walk import Amounts, ContextMove, ContextTrace, Messages


@dataclass(eq=False)
class ComputedRun:
    """What members compute between two moves of a task, in one program.

    Args:
        amounts: what they compute.
        takes: the moves, by place among the task's items, whose values it reads.
        steps: what it is made of.
    """

    amounts: Amounts
    takes: set[int] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Moved:
    """Values that move together.

    Args:
        messages: who sends what to whom.
        takes: the moves, by place among the task's items, whose values are sent on.
        made: the last item that makes one of the values; -1 where all are there before.
        moves: the values; none of what all members tell each other, which is little.
    """

    messages: Messages
    takes: frozenset[int]
    made: int = -1
    moves: tuple[ContextMove, ...] = ()


Item = ComputedRun | Moved


def items_of(trace: ContextTrace, steps: Sequence[Step], given: float = 0.0) -> tuple[Item, ...]:
    """What members do in a task, in an order that each of them follows.

    Moves wait until something needs one of them, and then go together; early ones go at once.

    Args:
        trace: the stage's trace.
        steps: the task's steps.
        given: what members tell each other at its end, in bytes.

    Returns:
        What they compute and move, in turn.
    """
    return tuple(_Items(trace).of(steps, given))


class _Items:
    def __init__(self, trace: ContextTrace):
        self._trace, self._items = trace, list[Item]()
        # The item by which a value came, and that which made it.
        self._came: dict[int, int] = {}
        self._made: dict[int, int] = {}
        self._waiting: list[ContextMove] = []
        # What was sent early comes while members compute: what needs it begins another program.
        self._coming: set[int] = set()

    def of(self, steps: Sequence[Step], given: float) -> list[Item]:
        for step in steps:
            move = self._trace.moves.get(step)
            if move is not None:
                self._move(step, move)
                continue
            read = step.values()
            if any(each.moved in read for each in self._waiting):
                self._flush()
            if step in self._trace.exchanged:
                self._flush()
                self._exchange(self._trace.exchanged[step])
            self._compute(step, read)
        self._flush()
        if given:
            self._exchange(given)
        return self._items

    def _move(self, step: Step, move: ContextMove) -> None:
        if any(each.moved == move.value for each in self._waiting):
            self._flush()
        if not move.messages:
            # It is there already, or comes with what it is made of: each takes its own part.
            self._compute(step, step.values())
            if move.value in self._came:
                self._came[move.moved] = self._came[move.value]
        elif move.is_early:
            self._together([move])
            self._coming.add(move.moved)
        else:
            self._waiting.append(move)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._together(waiting)

    def _together(self, moves: Sequence[ContextMove]) -> None:
        last = self._items[-1] if self._items else None
        place = len(self._items) - 1
        messages = Counter[tuple[int, int]]()
        takes: set[int] = set()
        made, before = -1, tuple[ContextMove, ...]()
        if isinstance(last, Moved) and all(self._came.get(m.value) != place for m in moves):
            messages.update(last.messages)
            takes.update(last.takes)
            made, before = last.made, last.moves
            self._items.pop()
        for move in moves:
            messages.update(move.messages)
            takes.update(self._taken([move.value]))
            made = max(made, self._made.get(move.value, -1))
        moved = Moved(dict(messages), frozenset(takes), made, (*before, *moves))
        self._items.append(moved)
        self._came.update((move.moved, len(self._items) - 1) for move in moves)

    def _exchange(self, size: float) -> None:
        """All members tell all others."""
        pairs = itertools.permutations(range(self._trace.count), 2)
        computed = [n for n, each in enumerate(self._items) if isinstance(each, ComputedRun)]
        made = computed[-1] if computed else -1
        self._items.append(Moved(dict.fromkeys(pairs, int(size)), frozenset(), made))

    def _compute(self, step: Step, read: Sequence[int]) -> None:
        taken = self._coming.intersection(read)
        if taken or not self._items or isinstance(self._items[-1], Moved):
            self._coming -= taken
            nothing = np.zeros(self._trace.count)
            self._items.append(ComputedRun(Amounts(nothing, nothing, {})))
        last = self._items[-1]
        assert isinstance(last, ComputedRun)
        last.steps.append(step)
        if step not in self._trace.moves:
            last.amounts += self._trace.amounts(step)
        last.takes.update(self._taken(read))
        self._made.update(dict.fromkeys(step.outputs, len(self._items) - 1))

    def _taken(self, values: Sequence[int]) -> Iterator[int]:
        return (self._came[value] for value in values if value in self._came)
