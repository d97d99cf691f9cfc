"""Weight gradients that run before their turn, while a worker would wait for a transfer."""

from __future__ import annotations

from collections.abc import Container, Sequence

from hetjax.runtime.instructions.buffers import Buffer
from hetjax.runtime.instructions.instruction import Instruction, Run
from hetjax.runtime.instructions.instruction_list import WEIGHT_GRADIENT


class EarlyRuns:
    """Which weight gradients of an instruction list have run before their turn.

    Gradients are added up in the order of the list, whatever runs early: so the next run that adds
    to the sums is the only one that may be taken, and only if it is a weight gradient.

    Args:
        instructions: the list.
    """

    def __init__(self, instructions: Sequence[Instruction]):
        names = (WEIGHT_GRADIENT, "backward")
        self._runs = [
            (place, instruction)
            for place, instruction in enumerate(instructions)
            if isinstance(instruction, Run) and instruction.program in names
        ]
        self._next = 0
        self._early: set[int] = set()

    def next_after(self, place: int, held: Container[Buffer]) -> Run | None:
        """The weight gradient that may run before the instruction at a place.

        Args:
            place: where the worker is in the list.
            held: the buffers that it has.

        Returns:
            The run; None where the next sum is another program's, or its inputs are not there.
        """
        while self._next < len(self._runs) and self._runs[self._next][0] < place:
            self._next += 1
        if self._next == len(self._runs):
            return None
        run = self._runs[self._next][1]
        if run.program != WEIGHT_GRADIENT:
            return None
        return run if all(b in held for group in run.inputs for b in group) else None

    def mark(self) -> None:
        """Note that the run last returned by `next_after` has run."""
        self._early.add(self._runs[self._next][0])
        self._next += 1

    def has_run(self, place: int) -> bool:
        """Whether the instruction at a place ran early."""
        return place in self._early
