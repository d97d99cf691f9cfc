"""Sums among submeshes as moves of the summands, and additions where these arrive.

What adds is then compiled with what needs the sum: an addition costs neither a program of its own
nor a pass over memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import jax

from hetjax.sharding.annotation.annotation import DUPLICATE, PARTIAL, HSharding
from hetjax.sharding.annotation.bounds import even_ends
from hetjax.sharding.annotation.subgroup import entries_of
from hetjax.sharding.deduction.annotated_program import (
    Addition,
    AnnotatedProgram,
    Move,
    Node,
    union_of,
)

LARGE_BYTES = 2**20
"""From what size on a sum for three submeshes and more goes in two phases.

Each submesh then adds up a part, and gets the others' parts afterwards. Of n submeshes each sends
2 (n - 1) / n of the sum instead of n - 1, and there is one message more to wait for; a megabyte
takes a link of 10 Gbit/s 0.8 ms, and a message 0.1.
"""


def with_local_additions(program: AnnotatedProgram) -> AnnotatedProgram:
    """Let every submesh that gets a sum of others' summands get these, and add them up itself.

    Moves that follow each other still do so: additions come after the last one of them, and after
    these the second phases of large sums.

    Args:
        program: the annotated program.

    Returns:
        The program with more moves, and with additions.
    """
    builder = _SumBuilder(program)
    for node in program.nodes:
        if not isinstance(node, Move) or node.is_inside:
            builder.add_up()
            builder.nodes.append(node)
            continue
        if node.input in builder.awaited:
            builder.add_up()
        if _adds(node):
            builder.sum(node)
        else:
            builder.nodes.append(node)
    return builder.program()


class _SumBuilder:
    """A program that grows, with additions that wait for the moves after them."""

    def __init__(self, program: AnnotatedProgram):
        self._program, self.nodes = program, list[Node]()
        self._shapes, self._annotations = list(program.shapes), list(program.annotations)
        self._additions: list[Addition] = []
        self._second_phases: list[Move] = []

    @property
    def awaited(self) -> set[int]:
        """The values that are there when all has been added up."""
        second = {move.output for move in self._second_phases}
        return second.union(*(addition.outputs for addition in self._additions))

    def sum(self, move: Move) -> None:
        """Move the summands of a sum, and add them up later."""
        between = _between(move, self._shapes[move.input])
        target, output = move.destination, move.output
        if between is not None:
            target, output = between, self._value(move.input, between)
            self._second_phases.append(Move(output, move.output, target, move.destination))
        assert move.source is not None
        summands = [
            Move(move.input, self._value(move.input, target), HSharding((group,)), target)
            for group in move.source.subgroups
        ]
        self.nodes += summands
        inputs = tuple(summand.output for summand in summands)
        self._additions.append(Addition(inputs, (output,), union_of(target)))

    def _value(self, like: int, annotation: HSharding) -> int:
        self._shapes.append(self._shapes[like])
        self._annotations.append(annotation)
        return len(self._shapes) - 1

    def add_up(self) -> None:
        """Add up all summands that have been moved."""
        self.nodes += [*self._additions, *self._second_phases]
        self._additions, self._second_phases = [], []

    def program(self) -> AnnotatedProgram:
        self.add_up()
        return replace(
            self._program,
            shapes=tuple(self._shapes),
            annotations=tuple(self._annotations),
            nodes=tuple(self.nodes),
        )


def _adds(move: Move) -> bool:
    """Whether submeshes get the sum of what several of them have."""
    source = move.source
    return source is not None and source.hdim == PARTIAL and move.destination.hdim != PARTIAL


def _between(move: Move, shape: jax.ShapeDtypeStruct) -> HSharding | None:
    """How a large sum lies between its phases: each submesh has a part; None where it has one."""
    destination = move.destination
    size = math.prod(shape.shape) * shape.dtype.itemsize
    if destination.hdim != DUPLICATE or len(destination.subgroups) < 3 or size < LARGE_BYTES:
        return None
    if any(group.num_summands > 1 for group in destination.subgroups):
        return None
    dimension = _whole_dimension(destination, shape.shape)
    if dimension is None:
        return None
    ends = even_ends(shape.shape[dimension], len(destination.subgroups))
    sizes = tuple(b - a for a, b in itertools.pairwise(ends))
    return HSharding(destination.subgroups, dimension, sizes)


def _whole_dimension(annotation: HSharding, shape: Sequence[int]) -> int | None:
    """The longest dimension that no submesh divides, of those that each gets some of."""
    specs = [entries_of(group.spec, len(shape)) for group in annotation.subgroups]
    found = [
        dimension
        for dimension, size in enumerate(shape)
        if size >= len(specs) and all(spec[dimension] is None for spec in specs)
    ]
    return max(found, key=lambda dimension: shape[dimension], default=None)
