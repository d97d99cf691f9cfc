"""From when to when buffers are there: transfers asked for ahead, and frees after last uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from hetjax.runtime.instructions.buffers import Buffer, Buffers, Gradient
from hetjax.runtime.instructions.instruction import (
    Await,
    Expect,
    Fetch,
    Free,
    Instruction,
    Load,
    Receive,
    Route,
    Run,
    Send,
    Store,
    Tag,
)


def _makes(instruction: Instruction) -> Buffers:
    if isinstance(instruction, Run):
        return instruction.outputs
    if isinstance(instruction, Store):
        return instruction.targets
    return instruction.buffers if isinstance(instruction, Load | Receive | Fetch) else ()


def with_expectations(
    body: Sequence[Instruction], windows: dict[Route, int]
) -> Iterator[Instruction]:
    """Ask for each transfer a window ahead; transfers without a window are asked for at once.

    Args:
        body: the instructions.
        windows: by route, how many of its transfers may be asked for ahead of their use.
    """
    waiting: dict[Route, list[Tag]] = {}
    for instruction in body:
        if isinstance(instruction, Receive):
            waiting.setdefault(instruction.tag.route, []).append(instruction.tag)
    for route, tags in waiting.items():
        for tag in tags[: windows.get(route, len(tags))]:
            yield Expect(tag)
        del tags[: windows.get(route, len(tags))]
    for instruction in body:
        yield instruction
        if isinstance(instruction, Receive) and waiting[instruction.tag.route]:
            yield Expect(waiting[instruction.tag.route].pop(0))


def _reads(instruction: Instruction) -> Buffers:
    if isinstance(instruction, Run):
        return tuple(buffer for argument in instruction.inputs for buffer in argument)
    if isinstance(instruction, Fetch):
        return instruction.sources
    if isinstance(instruction, Await):
        # What leaves the devices is there until it has left.
        return (*instruction.buffers, *(each.buffer for each in instruction.buffers))
    return instruction.buffers if isinstance(instruction, Send | Store) else ()


def _is_of_update(instruction: Instruction) -> bool:
    """Whether it makes what the next step has: by a program, or by a move that ends one."""
    names = ("update", "zero_gradients")
    if isinstance(instruction, Run):
        return instruction.program.startswith(names)
    return isinstance(instruction, Receive) and instruction.tag.move.startswith(names)


def with_frees(
    body: Iterable[Instruction], is_kept: Callable[[Buffer], bool]
) -> Iterator[Instruction]:
    """Free every buffer after the instruction that uses it last, or last before it is made anew.

    What is left at the end are the buffers that are kept, and what the update made for the next
    step: gradient sums set back to zero.

    Args:
        body: the instructions.
        is_kept: whether a buffer is there from step to step.
    """
    instructions = list(body)
    last: dict[Buffer, int] = {}
    ends: dict[int, list[Buffer]] = {}
    for place, instruction in enumerate(instructions):
        reads = _reads(instruction)
        for buffer in _makes(instruction):
            if buffer in last and buffer not in reads and not is_kept(buffer):
                ends.setdefault(last[buffer], []).append(buffer)
        last |= dict.fromkeys((*_makes(instruction), *reads), place)
    made = (buffer for each in instructions if _is_of_update(each) for buffer in _makes(each))
    final = frozenset(buffer for buffer in made if isinstance(buffer, Gradient))
    for buffer, place in last.items():
        if not is_kept(buffer) and buffer not in final:
            ends.setdefault(place, []).append(buffer)
    for place, instruction in enumerate(instructions):
        yield instruction
        if place in ends:
            yield Free(tuple(ends[place]))
