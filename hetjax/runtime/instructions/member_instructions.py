"""What one member of a stage does: the stage's instructions, with its segments and moves.

The list is written once for the stage. Where a program is divided among members, its run becomes
the runs of the member's segments, and between them it gives to the others and takes from them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from hetjax.runtime.instructions.buffers import Buffer, SegmentValue
from hetjax.runtime.instructions.divided_program import DividedProgram, MoveGroup
from hetjax.runtime.instructions.instruction import (
    Instruction,
    Receive,
    Route,
    RouteKind,
    Run,
    Send,
    Tag,
)
from hetjax.sharding.annotation.subgroup import Subgroup
from hetjax.sharding.deduction.specialize import Segment

DividedPrograms = Mapping[str, DividedProgram]
"""The programs of a stage of several members, by name."""


@dataclass(frozen=True)
class MemberPart:
    """Which part of a stage's programs a member runs.

    Args:
        submesh: the member's devices.
        programs: the stage's programs.
    """

    submesh: Subgroup
    programs: DividedPrograms


def segment_name(program: str, place: int) -> str:
    """What a segment is called, by its place among the steps of a program.

    Example:
        >>> segment_name("forward", 2)
        'forward/2'
    """
    return f"{program}/{place}"


def move_tag(stage: int, program: str, place: int, microbatch: int) -> Tag:
    """The transfer of a group of moves, by its place among the steps of a program."""
    route = Route(RouteKind.MOVE, stage, stage)
    return Tag(route, microbatch, move=segment_name(program, place))


def for_member(body: Iterable[Instruction], stage: int, part: MemberPart) -> Iterator[Instruction]:
    """A stage's instructions as one of its members carries them out.

    Args:
        body: the instructions.
        stage: the stage.
        part: the member's part of its programs.

    Yields:
        The member's instructions.
    """
    for instruction in body:
        if isinstance(instruction, Run):
            yield from _expanded(instruction, stage, part)
        else:
            yield instruction


def _expanded(run: Run, stage: int, part: MemberPart) -> Iterator[Instruction]:
    divided = part.programs[run.program]
    given = itertools.chain.from_iterable(run.inputs)
    names: dict[int, Buffer] = dict(zip(divided.program.outputs, run.outputs, strict=True))
    names |= dict(zip(divided.program.inputs, given, strict=True))

    def name(value: int) -> Buffer:
        return names.get(value) or SegmentValue(run.microbatch, run.program, value)

    # What was sent early is on its way while the member computes: it is taken when it is needed.
    awaited: list[Receive] = []

    def taken_for(needed: Collection[Buffer]) -> Iterator[Receive]:
        while not all(set(needed).isdisjoint(receive.buffers) for receive in awaited):
            yield awaited.pop(0)

    for place, step in enumerate(divided.steps):
        if isinstance(step, MoveGroup):
            sent, taken = step.within(part.submesh)
            tag = move_tag(stage, run.program, place, run.microbatch)
            if sent:
                parts = tuple(name(move.input) for move in sent)
                yield from taken_for(parts)
                yield Send(tag, parts)
            if taken:
                awaited.append(Receive(tag, tuple(name(move.output) for move in taken)))
        elif step.submesh == part.submesh:
            kept, donated = arguments_of(divided, place)
            yield from taken_for([*map(name, step.inputs)])
            yield Run(
                segment_name(run.program, place),
                (tuple(map(name, kept)), tuple(map(name, donated))),
                tuple(map(name, step.outputs)),
                run.microbatch,
            )
    yield from awaited


def arguments_of(divided: DividedProgram, place: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a segment takes: values that stay, and those whose memory its results may take.

    Args:
        divided: the program.
        place: of the segment among its steps.
    """
    segment = divided.steps[place]
    assert not isinstance(segment, MoveGroup)
    # What is sent may be on its way when the segment runs.
    needed = {move.input for group in divided.moves.values() for move in group.moves}
    for step in divided.steps[place + 1 :]:
        if isinstance(step, Segment) and step.submesh == segment.submesh:
            needed.update(step.inputs)
    free = [v for v in segment.inputs if v in divided.donated and v not in needed]
    room = Counter(divided.kept_of(value, segment.submesh) for value in segment.outputs)
    donated = []
    for value in free:
        kept = divided.kept_of(value, segment.submesh)
        if room[kept] > 0:
            room[kept] -= 1
            donated.append(value)
    return tuple(v for v in segment.inputs if v not in donated), tuple(donated)
