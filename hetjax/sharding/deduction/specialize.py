"""Specialization: one program for each submesh, and the communication steps between them.

What a submesh has no part in is not in its program. Between two moves the equations of a submesh
are one segment, compiled as a whole; what takes a value that was sent early begins another one. A
sum among submeshes is moves of the summands, and an addition in the segment of each submesh that
gets them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetjax.sharding.annotation.subgroup import Subgroup
from hetjax.sharding.deduction.annotated_program import (
    AnnotatedProgram,
    Compute,
    Move,
    Node,
    Union,
    union_of,
)
from hetjax.sharding.deduction.local_additions import with_local_additions
from hetjax.sharding.deduction.repeating import Makers, made_again


@dataclass(frozen=True, eq=False)
class Segment:
    """Equations that one submesh computes without a message in between.

    Args:
        submesh: the submesh.
        nodes: the nodes, each with the submesh's place in its union; for values that are known
            everywhere the place is of no meaning.
        inputs: the values that it takes.
        outputs: the values that others need, or later segments.
    """

    submesh: Subgroup
    nodes: tuple[tuple[Node, int], ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class SpecializedProgram:
    """The programs of all submeshes.

    Args:
        program: the annotated program that they are of, with additions for sums among submeshes.
        steps: segments and the moves between them, in an order in which they can be carried out.
    """

    program: AnnotatedProgram
    steps: tuple[Segment | Move, ...]


def specialize(program: AnnotatedProgram) -> SpecializedProgram:
    """Divide an annotated program among its submeshes.

    Args:
        program: the annotated program.

    Returns:
        A program for each submesh.

    Source: Hetu v2, section 5.3.
    """
    program = with_local_additions(program)
    steps: list[Segment | Move] = []
    opened: dict[Subgroup, list[tuple[Node, int]]] = {}

    def close(submeshes: Union) -> None:
        for submesh in submeshes:
            if nodes := opened.pop(submesh, None):
                steps.append(Segment(submesh, tuple(nodes)))

    # What was sent early comes while a segment runs: what needs it begins another one.
    coming: set[int] = set()
    for node in program.nodes:
        if isinstance(node, Move) and not node.is_inside:
            assert node.source is not None
            close(union_of(node.source))
            close(union_of(node.destination))
            steps.append(node)
            if node.is_early:
                coming.add(node.output)
            continue
        if not coming.isdisjoint(inputs_of(node)):
            close(computed_on(node))
            coming.difference_update(inputs_of(node))
        for place, submesh in enumerate(computed_on(node)):
            opened.setdefault(submesh, []).append((node, place))
    close(tuple(opened))
    return SpecializedProgram(program, tuple(_live(program, steps)))


def computed_on(node: Node) -> Union:
    """The submeshes that compute a node; none where its value is known everywhere."""
    return union_of(node.destination) if isinstance(node, Move) else node.union


def _live(program: AnnotatedProgram, steps: Sequence[Segment | Move]) -> list[Segment | Move]:
    """The steps without what nobody needs, each segment with what goes in and out."""
    # By value the submeshes that need it later on; None: all that have it.
    needed: dict[int, set[Subgroup | None]] = {value: {None} for value in program.outputs}
    makers: dict[Subgroup, dict[int, tuple[Node, int]]] = {}
    for segment in (step for step in steps if isinstance(step, Segment)):
        own = makers.setdefault(segment.submesh, {})
        for node, place in segment.nodes:
            own.update(dict.fromkeys(outputs_of(node), (node, place)))
    found: list[Segment | Move] = []
    for step in reversed(steps):
        if isinstance(step, Move):
            if step.output in needed:
                needed.setdefault(step.input, set()).add(None)
                found.append(step)
            continue
        segment = _trimmed(step, needed, program, makers[step.submesh])
        if segment.outputs:
            found.append(segment)
            for value in segment.inputs:
                needed.setdefault(value, set()).add(step.submesh)
    return found[::-1]


def _trimmed(
    segment: Segment,
    needed: Mapping[int, set[Subgroup | None]],
    program: AnnotatedProgram,
    makers: Makers,
) -> Segment:
    """A segment without what nobody needs, and with the values that it can compute itself."""
    made = {value for node, _ in segment.nodes for value in outputs_of(node)}
    outputs = tuple(
        sorted(value for value in made if needed.get(value, set()) & {None, segment.submesh})
    )
    wanted, nodes = set(outputs), []
    for node, place in reversed(segment.nodes):
        if wanted.isdisjoint(outputs_of(node)):
            continue
        wanted.update(inputs_of(node))
        nodes.append((node, place))
    taken = wanted - {value for node, _ in nodes for value in outputs_of(node)}
    repeated = made_again(taken, makers, program)
    again = _in_order(repeated, program)
    wanted.update(value for node, _ in again for value in inputs_of(node))
    known: list[tuple[Node, int]] = [(node, 0) for node in known_everywhere(wanted, program)]
    inside = {value for node, _ in (*nodes, *again, *known) for value in outputs_of(node)}
    wanted.update(value for node, _ in known for value in inputs_of(node))
    inputs = sorted(wanted - inside - set(program.constants))
    whole = (*known, *again, *reversed(nodes))
    return replace(segment, nodes=whole, inputs=tuple(inputs), outputs=outputs)


def _in_order(made: Makers, program: AnnotatedProgram) -> list[tuple[Node, int]]:
    """Nodes in the program's order, each once."""
    places = dict(made.values())
    return [(node, places[node]) for node in program.nodes if node in places]


def known_everywhere(wanted: set[int], program: AnnotatedProgram) -> Iterator[Compute]:
    """The equations that make values which need no submesh, in order.

    Args:
        wanted: values, of any kind.
        program: the annotated program.

    Yields:
        The equations, those whose results others take first.
    """
    wanted, found = set(wanted), []
    for node in reversed(program.nodes):
        if isinstance(node, Compute) and not node.union and not wanted.isdisjoint(node.outputs):
            wanted.update(node.inputs)
            found.append(node)
    yield from reversed(found)


def outputs_of(node: Node) -> tuple[int, ...]:
    """The values that a node makes."""
    return (node.output,) if isinstance(node, Move) else node.outputs


def inputs_of(node: Node) -> tuple[int, ...]:
    """The values that a node takes."""
    return (node.input,) if isinstance(node, Move) else node.inputs
