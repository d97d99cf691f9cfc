"""The instructions of stages that share devices, as one list: their tasks in the schedule's turns.

The devices wait in the order of that list, so it must be one in which nobody waits for what comes
after the wait. For tasks the schedule's own turns are such an order. After them, when stages
exchange what their updates need, it is the order in which all stages of all pipelines together can
go through their lists.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from hetjax.pipeline.schedules.schedule import Schedule, Task
from hetjax.runtime.instructions.instruction import Instruction, Receive, Send, Tag, Turn

TurnList = tuple[tuple[int, Instruction], ...]
"""Instructions of several stages in order, each with its stage."""


def in_turns(
    lists: Sequence[Sequence[Instruction]], schedules: Mapping[int, Schedule]
) -> dict[tuple[int, ...], TurnList]:
    """One list for each group of stages that share devices.

    Args:
        lists: for each stage its instructions; in a pipeline with turns, with a `Turn` before each
            of its tasks and one after the last.
        schedules: the schedule of each pipeline, by the number of its first stage.

    Returns:
        For each group its list; none where no stages share devices.

    Example:
        >>> from hetjax.pipeline.schedules.schedule import Task
        >>> from hetjax.runtime.instructions.instruction import Run
        >>> tasks = (Task("F", 0), Task("B", 0))
        >>> runs = [[Turn(), Run(f"F{s}", (), ()), Turn(), Run(f"B{s}", (), ()), Turn()]
        ...         for s in range(3)]
        >>> schedule = Schedule("explicit", (tasks,) * 3, turns=((0, 2, 2, 0),))
        >>> [run.program for _, run in in_turns(runs, {0: schedule})[0, 2]]
        ['F0', 'F2', 'B2', 'B0']
    """
    groups = [
        (tuple(first + stage for stage in group), tuple(first + stage for stage in turns))
        for first, schedule in schedules.items()
        for group, turns in schedule.turns_of.items()
    ]
    if not groups:
        return {}
    chunks = [_chunks(instructions) for instructions in lists]
    endings = [each[-1] for each in chunks]
    order = _possible_order(endings)
    found = {}
    for group, turns in groups:
        begun = [(stage, each) for stage in group for each in chunks[stage][0]]
        left = {stage: iter(chunks[stage][1:-1]) for stage in group}
        tasks = [(stage, each) for stage in turns for each in next(left[stage])]
        ended = [(stage, endings[stage][place]) for stage, place in order if stage in group]
        found[group] = (*begun, *tasks, *ended)
    return found


def forward_schedule(schedule: Schedule) -> Schedule:
    """The forward passes of a schedule alone, as an evaluation has them.

    Stages that share devices take turns: of those that have what they need, the latest is next.

    Args:
        schedule: the schedule of a pipeline.

    Returns:
        A schedule of as many stages and microbatches.

    Example:
        >>> tasks = tuple(map(Task.parse, "F0 F1 B0 B1".split()))
        >>> turns = ((0, 0, 2, 2, 2, 2, 0, 0),)
        >>> forward_schedule(Schedule("explicit", (tasks,) * 3, turns=turns)).turns
        ((0, 0, 2, 2),)
    """
    stages, count = range(schedule.num_stages), schedule.num_microbatches
    turns: dict[tuple[int, ...], list[int]] = {group: [] for group in schedule.sharing}
    done = [0 for _ in stages]
    while min(done) < count:
        ready = [done[s] < (done[s - 1] if s else count) for s in stages]
        for group, taken in turns.items():
            following = [stage for stage in group if ready[stage]][-1:]
            for stage in following:
                done[stage] += 1
            taken += following
    forward = tuple(Task("F", microbatch) for microbatch in range(count))
    taken_turns = tuple(tuple(turns[group]) for group in schedule.groups)
    return Schedule("explicit", (forward,) * schedule.num_stages, taken_turns)


def _chunks(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    """The instructions before each turn, and those after the last."""
    chunks: list[list[Instruction]] = [[]]
    for instruction in instructions:
        if isinstance(instruction, Turn):
            chunks.append([])
        else:
            chunks[-1].append(instruction)
    return chunks


def _possible_order(lists: Sequence[Sequence[Instruction]]) -> list[tuple[int, int]]:
    """An order of all instructions of all stages in which each receives what has been sent."""
    sent: set[Tag] = set()
    places = [0] * len(lists)
    order: list[tuple[int, int]] = []
    moved = True
    while moved:
        moved = False
        for stage, instructions in enumerate(lists):
            for instruction in itertools.islice(instructions, places[stage], None):
                if isinstance(instruction, Receive) and instruction.tag not in sent:
                    break
                if isinstance(instruction, Send):
                    sent.add(instruction.tag)
                order.append((stage, places[stage]))
                places[stage] += 1
                moved = True
    assert places == [len(each) for each in lists], "updates wait for one another"
    return order
