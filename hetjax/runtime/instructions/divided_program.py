"""Divided programs: what several members of a stage compute, as segments with moves between them.

A function and how its arguments and results lie are all that is needed: deduction finds how the
values between them lie, specialization what each member computes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from hetjax.errors import InputError
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.annotation.bounds import extent
from hetjax.sharding.annotation.subgroup import Subgroup
from hetjax.sharding.deduction.annotated_program import (
    AnnotatedProgram,
    Move,
    Node,
    Union,
    union_of,
)
from hetjax.sharding.deduction.deduce import deduce
from hetjax.sharding.deduction.opening import deduce_opened
from hetjax.sharding.deduction.specialize import Segment, inputs_of, specialize
from hetjax.sharding.deduction.top_tier import sized


@dataclass(frozen=True, eq=False)
class MoveGroup:
    """Moves that follow each other with nothing to compute in between: one message for all.

    Args:
        moves: the moves.
    """

    moves: tuple[Move, ...]

    def within(self, submesh: Subgroup) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
        """The moves that a submesh gives to, and those that it takes from."""
        given = [m for m in self.moves if m.source is not None and submesh in union_of(m.source)]
        taken = [move for move in self.moves if submesh in union_of(move.destination)]
        return tuple(given), tuple(taken)


@dataclass(frozen=True, eq=False)
class DividedProgram:
    """A program of a stage, divided among its members.

    Args:
        program: the annotated program, whose inputs are the function's arguments, flat.
        steps: what is done, in an order in which every member can do its part.
        donated: the inputs whose memory results may take.
        output_tree: the structure of the function's results.
    """

    program: AnnotatedProgram
    steps: tuple[Segment | MoveGroup, ...]
    donated: frozenset[int]
    output_tree: Any

    @property
    def output_shardings(self) -> Any:
        """How the results lie, in the function's own structure."""
        annotations = [self.program.annotations[value] for value in self.program.outputs]
        return jax.tree.unflatten(self.output_tree, annotations)

    def kept_of(self, value: int, submesh: Subgroup) -> tuple[Any, ...]:
        """What a submesh has of a value: results may take the memory of what is alike."""
        shape, annotation = self.program.shapes[value], self.program.annotations[value]
        if annotation is None:
            return shape.shape, shape.dtype, None
        place = union_of(annotation).index(submesh)
        region = annotation.regions(shape.shape)[place]
        return extent(region), shape.dtype, annotation.subgroups[place].spec

    @functools.cached_property
    def moves(self) -> dict[int, MoveGroup]:
        """The groups of moves, by their place among the steps."""
        return {i: step for i, step in enumerate(self.steps) if isinstance(step, MoveGroup)}


def divide_program(
    function: Callable[..., Any],
    shapes: Sequence[Sequence[jax.ShapeDtypeStruct]],
    annotations: Sequence[Sequence[HSharding]],
    wanted: Sequence[HSharding | None],
    whole: HSharding,
    donated: Sequence[int] = (),
    *,
    is_told: bool = False,
) -> DividedProgram:
    """Divide a function of sequences of arrays among the members of a stage.

    Args:
        function: takes as many sequences as there are shapes.
        shapes: of the arrays of each argument.
        annotations: how they lie.
        wanted: for each result, flat, how it shall lie; None: as it is made.
        whole: how a result lies that is known everywhere.
        donated: which arguments results may write over.
        is_told: whether the function has all moves written in it.

    Returns:
        The divided program.

    Raises:
        InputError: a value cannot be taken as it lies; it names the equation and its line.
    """
    closed, made = jax.make_jaxpr(function, return_shape=True)(*map(list, shapes))
    flat = [annotation for argument in annotations for annotation in argument]
    # Moves inside bodies, which never leave a submesh, cannot be told: they are found again.
    deduced = (
        deduce(closed, flat, mend_bodies=True, sums_stay=True)
        if is_told
        else deduce_opened(closed, flat)
    )
    program = _moves_together(_reduced_inside(_with_outputs(deduced, wanted, whole)))
    specialized = specialize(program)
    program, steps = specialized.program, specialized.steps
    _check_members(steps, union_of(whole))
    values = iter(program.inputs)
    places = [[next(values) for _ in argument] for argument in shapes]
    return DividedProgram(
        program,
        tuple(_grouped(steps)),
        frozenset(value for place in donated for value in places[place]),
        jax.tree.structure(made),
    )


def _check_members(steps: Sequence[Segment | Move], members: Union) -> None:
    """Check that members alone compute: annotations of users may name other submeshes."""
    strange = next(
        (s.submesh for s in steps if isinstance(s, Segment) and s.submesh not in members), None
    )
    if strange is not None:
        raise InputError(
            f"hetjax.reshard: a value comes to lie on {strange}, which is no member of its stage: "
            f"the members are {', '.join(map(str, members))}"
        )


def _with_outputs(
    program: AnnotatedProgram, wanted: Sequence[HSharding | None], whole: HSharding
) -> AnnotatedProgram:
    """A program whose outputs are values of their own, and lie as they shall."""
    builder = _Builder(program)
    outputs, taken = [], {*program.inputs, *program.constants}
    for value, want in zip(program.outputs, wanted, strict=True):
        source, shape = program.annotations[value], program.shapes[value].shape
        want = sized(want, shape) if want is not None else source or whole
        if source != want or value in taken:
            value = builder.moved(value, source, want)
        taken.add(value)
        outputs.append(value)
    return replace(builder.program(), outputs=tuple(outputs))


def _reduced_inside(program: AnnotatedProgram) -> AnnotatedProgram:
    """A program in which members add up their own summands before others get them."""
    builder = _Builder(replace(program, nodes=()))
    for node in program.nodes:
        if not isinstance(node, Move) or node.is_inside or node.source is None:
            builder.nodes.append(node)
            continue
        before = _without_summands(node, program.shapes[node.input].shape)
        after = _whole_parts(node.destination)
        value = node.input
        chain = [node.source, before, after, node.destination]
        ways = [pair for pair in itertools.pairwise(chain) if pair[0] != pair[1]]
        for source, destination in ways[:-1]:
            value = builder.moved(value, source, destination)
        source, destination = ways[-1]
        builder.nodes.append(replace(node, input=value, source=source, destination=destination))
    return builder.program()


def _whole_parts(annotation: HSharding) -> HSharding:
    """An annotation in which no member has summands inside it."""
    groups = (g.with_spec(PartitionSpec(*g.spec.partitions)) for g in annotation.subgroups)
    return replace(annotation, subgroups=tuple(groups))


def _without_summands(move: Move, shape: Sequence[int]) -> HSharding:
    """How a value lies when members have added up their own summands: if it can be, as at last."""
    source, destination = move.source, move.destination
    assert source is not None
    regions = source.regions(shape)
    groups = []
    for place, group in enumerate(source.subgroups):
        if group.num_summands == 1:
            groups.append(group)
            continue
        spec = PartitionSpec(*group.spec.partitions)
        if union_of(source) == union_of(destination):
            last = _whole_parts(destination).subgroups[place]
            sizes, parts = extent(regions[place]), last.divisions(len(shape))
            if all(size % part == 0 for size, part in zip(sizes, parts, strict=True)):
                spec = last.spec
        groups.append(group.with_spec(spec))
    return replace(source, subgroups=tuple(groups))


def _moves_together(program: AnnotatedProgram) -> AnnotatedProgram:
    """A program whose moves wait until one of them is needed: then all go together."""
    nodes: list[Node] = []
    waiting: list[Move] = []
    for node in program.nodes:
        if isinstance(node, Move) and not node.is_inside:
            ready = all(node.input != each.output for each in waiting)
            if not ready:
                nodes += waiting
                waiting = []
            (nodes if node.is_early else waiting).append(node)
            continue
        if not {each.output for each in waiting}.isdisjoint(inputs_of(node)):
            nodes += waiting
            waiting = []
        nodes.append(node)
    return replace(program, nodes=(*nodes, *waiting))


class _Builder:
    """An annotated program that grows."""

    def __init__(self, program: AnnotatedProgram):
        self._program, self.nodes = program, list(program.nodes)
        self._shapes, self._annotations = list(program.shapes), list(program.annotations)

    def moved(self, value: int, source: HSharding | None, destination: HSharding) -> int:
        """Another value, which is a value as it lies in another way."""
        self._shapes.append(self._shapes[value])
        self._annotations.append(destination)
        new = len(self._shapes) - 1
        self.nodes.append(Move(value, new, source, destination))
        return new

    def program(self) -> AnnotatedProgram:
        return replace(
            self._program,
            shapes=tuple(self._shapes),
            annotations=tuple(self._annotations),
            nodes=tuple(self.nodes),
        )


def _grouped(steps: Sequence[Segment | Move]) -> Iterator[Segment | MoveGroup]:
    waiting: list[Move] = []
    for step in steps:
        if isinstance(step, Move):
            if any(step.input == each.output for each in waiting):
                yield MoveGroup(tuple(waiting))
                waiting = []
            waiting.append(step)
            continue
        if waiting:
            yield MoveGroup(tuple(waiting))
            waiting = []
        yield step
    if waiting:
        yield MoveGroup(tuple(waiting))
