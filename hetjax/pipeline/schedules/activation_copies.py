"""When microbatches' activations go to the hosts' memory and come back, by the order of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetjax.pipeline.schedules.schedule import Task

PLACES = 2
"""Of how many microbatches the activations that travel are on the devices at once, mostly."""

MOST_THERE = 3
"""Of how many there may be at most, with those that are read so soon that they do not travel."""

_AWAY = 4
"""How many tasks after its forward pass a microbatch must be read to be away for a whole one."""


@dataclass(frozen=True)
class TaskCopies:
    """What is copied around one task; each field names microbatches.

    Args:
        awaited: those whose way to the hosts must be over before the task begins.
        fetched: those that begin their way back before it.
        stored: those that begin their way to the hosts as it ends: its own, or none.
        awaited_after: those whose way to the hosts must be over for `fetched_after`, as it runs.
        fetched_after: those that begin their way back as it runs, where there is no place before.
    """

    awaited: tuple[int, ...] = ()
    fetched: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    awaited_after: tuple[int, ...] = ()
    fetched_after: tuple[int, ...] = ()


def travelling(tasks: Sequence[Task]) -> dict[int, int]:
    """The microbatches whose activations wait in the hosts' memory, by a stage's order.

    Args:
        tasks: what the stage runs, in order.

    Returns:
        For each of them the place of the task that reads them first: its recomputation, or its
        backward pass. Those that are read within three tasks are left out: between the way there,
        beside the next task, and the way back, beside the one before they are read, no task would
        run without them.

    Example:
        >>> travelling([Task.parse(text) for text in "F0 F1 F2 B0 F3 B1 B2 B3".split()])
        {1: 5, 2: 6}
    """
    made, read = {}, {}
    for place, task in enumerate(tasks):
        if task.kind == "F":
            made[task.microbatch] = place
        elif task.kind in "RB":
            read.setdefault(task.microbatch, place)
    return {m: place for m, place in read.items() if place - made[m] >= _AWAY}


def activation_copies(tasks: Sequence[Task]) -> tuple[TaskCopies, ...]:
    """The copies of a stage whose activations are offloaded, task by task.

    What a forward pass keeps leaves beside the next task, and comes back beside the one before it
    is read. Where that would be a third microbatch on the devices, what is leaving is waited for.

    Args:
        tasks: what the stage runs, in order.

    Returns:
        One for each task.

    Example:
        >>> tasks = [Task.parse(text) for text in "F0 F1 F2 F3 B0 F4 B1 F5 B2".split()]
        >>> copies = activation_copies(tasks + [Task("B", m) for m in (3, 4, 5)])
        >>> copies[2].awaited, copies[2].stored
        ((0,), (2,))
        >>> copies[3].awaited_after, copies[3].fetched_after  # F3: 0 comes back once 2 has left
        ((2,), (0,))
        >>> copies[5].awaited, copies[5].fetched, copies[5].stored  # F4
        ((3,), (1,), (4,))
    """
    read = travelling(tasks)
    there: set[int] = set()
    leaving: list[int] = []

    def awaiting(count: int) -> tuple[int, ...]:
        """The first so many of those that leave are gone."""
        gone = tuple(leaving[:count])
        del leaving[:count]
        there.difference_update(gone)
        return gone

    found = []
    for place, task in enumerate(tasks):
        microbatch, begins = task.microbatch, task.kind == "F"
        # What the task right before has made may still be on its way.
        fresh = place > 0 and tasks[place - 1].kind == "F"
        is_fresh = fresh and leaving[-1:] == [tasks[place - 1].microbatch]
        awaited = awaiting(len(leaving) - is_fresh)
        if begins:
            if len(there) >= PLACES:
                awaited += awaiting(len(leaving))
            there.add(microbatch)
        coming = tasks[place + 1].microbatch if place + 1 < len(tasks) else -1
        comes = read.get(coming) == place + 1
        fetched = (coming,) if comes and len(there) < PLACES else ()
        there.update(fetched)
        stored = (microbatch,) if begins and microbatch in read else ()
        if task.kind == "B":
            there.discard(microbatch)
        late = (coming,) if comes and not fetched else ()
        awaited_after = awaiting(len(leaving)) if late else ()
        there.update(late)
        leaving += stored
        found.append(TaskCopies(awaited, fetched, stored, awaited_after, late))
    assert not leaving, "what leaves comes back"
    return tuple(found)
