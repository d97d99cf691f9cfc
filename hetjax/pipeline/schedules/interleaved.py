"""Interleaved schedules: a pipeline that passes its submeshes more than once.

With p submeshes and v passes there are p v stages, and stage s is on submesh s modulo p. While one
microbatch is on its first pass through the later submeshes, the earlier ones have others to do on
their second: the step's beginning and end, in which submeshes wait for the first and the last
microbatch, take one v-th of the time. Every microbatch crosses the links v times as often.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hetjax.errors import InputError
from hetjax.pipeline.schedules.schedule import INTERLEAVED, Schedule, Task, TaskKind
from hetjax.pipeline.schedules.warm_up import require_countable, require_positive


def interleaved(
    num_submeshes: int, num_passes: int, num_microbatches: int, ahead: int = 2
) -> Schedule:
    """Interleaved 1F1B: microbatches go through every pass in groups, one for each submesh.

    After its warm-up each submesh runs a forward and a backward task in turn, in the order of
    groups, in a group in the order of passes, and in a pass in the order of microbatches; backward
    tasks likewise, from the last pass to the first.

    Args:
        num_submeshes: p, at least 2.
        num_passes: v, at least 2.
        num_microbatches: M, at least 1; where it is no multiple of p, the last group is smaller.
        ahead: how many forward tasks more than the submesh after it each submesh warms up with;
            at least 1, which is possible with any M. Megatron-LM has 2, and asks that p divides M.

    Returns:
        The schedule, of p v stages; submesh r, from 0, warms up with
        ``ahead (p - r - 1) + (v - 1) p + 1`` forward tasks, or with all.

    Raises:
        InputError: a count is too small, or the submeshes would wait for one another for ever.

    Source: Narayanan et al., Efficient large-scale language model training on GPU clusters using
        Megatron-LM, 2021, section 2.2.

    Example:
        >>> schedule = interleaved(num_submeshes=2, num_passes=2, num_microbatches=2)
        >>> for row in schedule.rows:
        ...     print(" ".join(f"{task}@{stage}" for stage, task in row))
        F0@0 F1@0 F0@2 F1@2 B0@2 B1@2 B0@0 B1@0
        F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 B0@1 B1@1
    """
    for name, value in (("num_submeshes", num_submeshes), ("num_passes", num_passes)):
        if value < 2:
            raise InputError(f"{name} is {value}; it must be 2 or more")
    require_positive(num_submeshes, num_microbatches)
    require_countable(num_submeshes * num_passes, num_microbatches)
    if ahead < 1:
        raise InputError(f"ahead is {ahead}; it must be 1 or more")
    rows = []
    for row in range(num_submeshes):
        stages = range(row, num_submeshes * num_passes, num_submeshes)
        forward = [*in_groups("F", stages, num_submeshes, num_microbatches)]
        backward = [*in_groups("B", stages[::-1], num_submeshes, num_microbatches)]
        warm_up = ahead * (num_submeshes - row - 1) + (num_passes - 1) * num_submeshes + 1
        rows.append(_one_in_turn(forward, backward, min(warm_up, len(forward))))
    return from_rows(INTERLEAVED, rows)


def from_rows(name: str, rows: Sequence[Sequence[tuple[int, Task]]]) -> Schedule:
    """The schedule in which sets of devices run given tasks of their stages.

    Args:
        name: the schedule's name.
        rows: for each set of devices pairs of stage and task, in order.

    Returns:
        The schedule, of all stages that are named.

    Example:
        >>> row = [(0, Task("F", 0)), (2, Task("F", 0)), (2, Task("B", 0)), (0, Task("B", 0))]
        >>> schedule = from_rows("explicit", [row, [(1, Task("F", 0)), (1, Task("B", 0))]])
        >>> schedule.num_stages, schedule.turns
        (3, ((0, 2, 2, 0),))
    """
    of_stage: dict[int, list[Task]] = {}
    for stage, task in itertools.chain.from_iterable(rows):
        of_stage.setdefault(stage, []).append(task)
    turns = [tuple(stage for stage, _ in row) for row in rows]
    return Schedule(
        name,
        tuple(tuple(of_stage[stage]) for stage in sorted(of_stage)),
        tuple(each for each in turns if len(set(each)) > 1),
    )


def in_groups(
    kind: TaskKind, stages: Sequence[int], size: int, num_microbatches: int
) -> Iterator[tuple[int, Task]]:
    """The tasks of one kind of a submesh: group after group of microbatches goes through all.

    Args:
        kind: the kind.
        stages: its stages, in the order in which a group goes through them.
        size: how many microbatches a group has.
        num_microbatches: M.

    Yields:
        Pairs of stage and task.
    """
    for first in range(0, num_microbatches, size):
        for stage in stages:
            for microbatch in range(first, min(first + size, num_microbatches)):
                yield stage, Task(kind, microbatch)


def _one_in_turn(
    forward: Sequence[tuple[int, Task]], backward: Sequence[tuple[int, Task]], warm_up: int
) -> list[tuple[int, Task]]:
    """Forward tasks, then a backward and a forward one in turn, then the backward ones left."""
    steady = len(forward) - warm_up
    pairs = zip(backward[:steady], forward[warm_up:], strict=True)
    return [*forward[:warm_up], *itertools.chain.from_iterable(pairs), *backward[steady:]]
