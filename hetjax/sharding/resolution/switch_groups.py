"""In which order the arrays of a switch move, and how many at a time.

A device that gives arrays and one that gets them both have to have room. Where all moved at once,
each would hold what it has, what it gets, and the pieces of it. They move in small groups instead,
each of which frees what it came from before the next one begins; and in an order in which no device
gets much before it has given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hetjax.sharding.annotation.bounds import volume
from hetjax.sharding.annotation.subgroup import Shard
from hetjax.sharding.resolution.steps import SentPiece
from hetjax.sharding.resolution.switch_transfers import Messages, MovedArray, SwitchPlan

GROUP_SHARE = 0.05
"""Of all that a switch brings, how much moves at a time; an array that is larger moves alone."""


def groups_of(
    arrays: Sequence[MovedArray], share: float = GROUP_SHARE
) -> tuple[tuple[int, ...], ...]:
    """Put arrays in an order and in groups, so that memory stays near what either plan takes.

    The next array is always the one with which the fullest device is least full, counted against
    what it holds before or after the switch, whichever is more.

    Args:
        arrays: the arrays.
        share: how much of all bytes that are made a group may have, unless it is one array.

    Returns:
        Places of arrays, group by group; every array is in one.

    Example:
        >>> here, there = Shard(0, ((0, 4),)), Shard(1, ((0, 4),))
        >>> arrays = [MovedArray(n, (4,), 4, (here,), (there,)) for n in "ab"]
        >>> arrays += [MovedArray(n, (4,), 4, (there,), (here,)) for n in "cd"]
        >>> groups_of(arrays)
        ((0,), (2,), (1,), (3,))
    """
    if not arrays:
        return ()
    made, freed = _bytes_on_devices(arrays)
    limit = share * made.sum()
    groups: list[list[int]] = []
    size = 0.0
    for i in _order(arrays, made, freed):
        own = made[i].sum()
        if not groups or size + own > limit:
            groups.append([])
            size = 0.0
        groups[-1].append(i)
        size += own
    return tuple(map(tuple, groups))


def _bytes_on_devices(arrays: Sequence[MovedArray]) -> tuple[np.ndarray, np.ndarray]:
    """For each array and device the bytes that are made and that are freed.

    What a device has already, of the same bounds, stays where it is.
    """
    devices = sorted({s.device for array in arrays for s in (*array.before, *array.after)})
    places = {device: place for place, device in enumerate(devices)}
    made, freed = np.zeros((2, len(arrays), len(devices)))
    for i, array in enumerate(arrays):
        before, after = set(_parts(array.before)), set(_parts(array.after))
        for table, parts in ((made, after - before), (freed, before - after)):
            for device, bounds in parts:
                table[i, places[device]] += volume(bounds) * array.itemsize
    return made, freed


def _parts(shards: Iterable[Shard]) -> Iterable[tuple[int, tuple[tuple[int, int], ...]]]:
    return ((shard.device, shard.bounds) for shard in shards)


def _order(arrays: Sequence[MovedArray], made: np.ndarray, freed: np.ndarray) -> Iterable[int]:
    """The arrays, so that the fullest device is as empty as it goes when each of them is made."""
    held = freed.sum(axis=0)
    room = np.maximum(np.maximum(held, made.sum(axis=0)), 1)
    left = np.arange(len(arrays))
    while left.size:
        fullest = ((held + made[left]) / room).max(axis=1)
        best = int(fullest.argmin())
        chosen = int(left[best])
        yield chosen
        held += made[chosen] - freed[chosen]
        left = np.delete(left, best)


def messages_of_groups(
    plan: SwitchPlan, groups: Sequence[Sequence[int]]
) -> list[tuple[Messages, ...]]:
    """The messages of a switch, group by group.

    Args:
        plan: all messages.
        groups: the arrays of each group.

    Returns:
        For each group its messages, phase by phase, in the order of the plan.
    """
    group_of = {array: g for g, group in enumerate(groups) for array in group}
    found: list[list[list[SentPiece]]] = [[[] for _ in plan.phases] for _ in groups]
    for place, messages in enumerate(plan.phases):
        for piece in messages:
            found[group_of[piece.array]][place].append(piece)
    return [tuple(tuple(phase) for phase in phases if phase) for phases in found]
