"""Pipeline schedules as data: the order of tasks on every stage.

A schedule says *what runs after what* on each stage and nothing about time; the timeline puts
durations to it. Stages and microbatches are counted from 0; Harp counts both from 1.

The tasks of a microbatch on a stage are its forward pass F, at most one recomputation R of what
the backward pass needs, its backward pass B, and at most one weight-gradient pass W. Where W is in
the order, B is the input-gradient half of the backward pass and W the other half; where it is
not, B is the whole. B sends the gradient on as it ends; R and W send and receive nothing.

Mostly each stage has devices of its own. Where a pipeline passes the same devices more than once,
its stages there take turns.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from hetjax.errors import InputError, shown, unknown_name

TaskKind = Literal["F", "R", "B", "W"]
"""What a task does with its microbatch on its stage: the forward pass (F), the recomputation of
what the backward pass needs (R), the backward pass (B), the weight gradient (W)."""

WARM_UP_SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "h_1f1b")
"""Schedules that follow from one warm-up count a stage, with whole backward passes."""

SPLIT_SCHEDULES = ("h_1f1b_split", "zb_h1", "zb_h2", "search")
"""Schedules that may split backward passes."""

INTERLEAVED = "interleaved"
"""The name of schedules in which a pipeline passes its submeshes more than once."""

SCHEDULES = WARM_UP_SCHEDULES + SPLIT_SCHEDULES
"""The names that `hetjax.pipeline.make_schedule` knows."""

EXPLICIT = "explicit"
"""The name of a schedule whose order was written down task by task."""

PLANNED_SCHEDULES = (*SCHEDULES, INTERLEAVED, EXPLICIT)
"""The names that the schedule of a plan may have."""

_TASK = re.compile(rf"([{''.join(get_args(TaskKind))}])(0|[1-9][0-9]*)")


_NEEDS: Mapping[TaskKind, Sequence[tuple[TaskKind, str]]] = {
    "F": (),
    "R": (("F", "forward"),),
    "B": (("F", "forward"),),
    "W": (("B", "backward"),),
}
"""What must have run on the same stage before an operation, and what a message calls it."""


@dataclass(frozen=True, order=True)
class Task:
    """One operation on one microbatch; the stage is where it stands in `Schedule.order`.

    Args:
        kind: ``"F"``, ``"R"``, ``"B"`` or ``"W"``, see `TaskKind`.
        microbatch: index of the microbatch, from 0.

    Example:
        >>> str(Task("F", 3)), Task.parse("B0")
        ('F3', Task(kind='B', microbatch=0))
    """

    kind: TaskKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """Reads a task as `str` writes it.

        Args:
            text: the operation's letter and the microbatch, e.g. ``"F3"``.

        Returns:
            The task.

        Raises:
            InputError: `text` is not of that form.
        """
        match = _TASK.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            letters = ", ".join(get_args(TaskKind))
            raise InputError(f"task {text!r} is not one of {letters} and a microbatch, e.g. 'F3'")
        return cls(cast(TaskKind, match[1]), int(match[2]))


@dataclass(frozen=True)
class Schedule:
    """The explicit order of tasks on every stage of a pipeline.

    Args:
        name: one of `SCHEDULES`, or ``"explicit"``.
        order: one tuple of tasks a stage, in the order in which the stage runs them.
        turns: for each group of stages that share their devices, whose next task it is: the stage
            once for each of its tasks. Stages of no group have devices of their own.

    Example:
        >>> rows = ("F0 F1 B0 W0 B1 W1", "F0 B0 F1 B1")
        >>> order = tuple(tuple(map(Task.parse, row.split())) for row in rows)
        >>> schedule = Schedule("explicit", order)
        >>> schedule.num_microbatches, schedule.warm_up_counts
        (2, (2, 1))
    """

    name: str
    order: tuple[tuple[Task, ...], ...]
    turns: tuple[tuple[int, ...], ...] = ()

    @property
    def num_stages(self) -> int:
        """The number of stages, S."""
        return len(self.order)

    @functools.cached_property
    def num_microbatches(self) -> int:
        """The number of microbatches, M: one more than the largest index in the order."""
        return 1 + max((task.microbatch for tasks in self.order for task in tasks), default=-1)

    @property
    def warm_up_counts(self) -> tuple[int, ...]:
        """For every stage, the number N_i of forward tasks before its first backward task."""

        def count(tasks: Sequence[Task]) -> int:
            warm_up = itertools.takewhile(lambda task: task.kind != "B", tasks)
            return sum(task.kind == "F" for task in warm_up)

        return tuple(map(count, self.order))

    @functools.cached_property
    def turns_of(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The turns of each group of stages that share devices."""
        return {tuple(sorted(set(turns))): turns for turns in self.turns}

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of stages that share devices; mostly none."""
        return tuple(group for group in self.sharing if len(group) > 1)

    @functools.cached_property
    def sharing(self) -> tuple[tuple[int, ...], ...]:
        """The stages on each set of devices: a group that takes turns, or one alone.

        Example:
            >>> tasks = (Task("F", 0), Task("B", 0))
            >>> Schedule("explicit", (tasks,) * 3, turns=((0, 2, 2, 0),)).sharing
            ((0, 2), (1,))
        """
        taken = {stage for group in self.turns_of for stage in group}
        alone = [(stage,) for stage in range(self.num_stages) if stage not in taken]
        return tuple(sorted((*self.turns_of, *alone)))

    @functools.cached_property
    def rows(self) -> tuple[tuple[tuple[int, Task], ...], ...]:
        """What each set of devices runs, in the order of `sharing`: pairs of stage and task.

        Example:
            >>> tasks = (Task("F", 0), Task("B", 0))
            >>> (row,) = Schedule("explicit", (tasks,) * 2, turns=((0, 1, 1, 0),)).rows
            >>> [f"{task} of {stage}" for stage, task in row]
            ['F0 of 0', 'F0 of 1', 'B0 of 1', 'B0 of 0']
        """
        left = [iter(tasks) for tasks in self.order]
        return tuple(
            tuple(
                (stage, next(left[stage]))
                for stage in self.turns_of.get(group, group * len(self.order[group[0]]))
            )
            for group in self.sharing
        )

    @property
    def splits_backward(self) -> bool:
        """Whether the backward pass of any microbatch is split on any stage."""
        return any(task.kind == "W" for tasks in self.order for task in tasks)

    def live_bound(self, stage: int) -> int:
        """The number of microbatches whose activations a stage holds at most.

        Args:
            stage: index of the stage, from 0.

        Returns:
            The maximum over time, for any durations of the tasks.

        Example:
            >>> from hetjax.pipeline.schedules.warm_up import eager_1f1b
            >>> eager_1f1b(num_stages=3, num_microbatches=8).live_bound(0)
            5
        """
        return max(live_microbatches(self)[stage], default=0)

    def to_json(self) -> dict[str, Any]:
        """This schedule in plain JSON values: ``{"name": ..., "order": [["F0", ...], ...]}``.

        Where stages share devices, ``"turns"`` has numbers of stages in the same way.
        """
        turns = {"turns": [list(each) for each in self.turns]} if self.turns else {}
        order = [[str(task) for task in row] for row in self.order]
        return {"name": self.name, "order": order, **turns}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Schedule:
        """Reads what `to_json` wrote or a person edited, and checks it.

        Args:
            value: a mapping with ``name``, ``order`` and maybe ``turns``.

        Returns:
            A schedule that `check` accepts.

        Raises:
            InputError: a field is missing or malformed, or the order cannot be executed.
        """
        for field in ("name", "order"):
            if field not in value:
                raise InputError(f"schedule has no field {field!r}; it needs name and order")
        name, order = value["name"], value["order"]
        if name not in PLANNED_SCHEDULES:
            raise InputError(unknown_name("schedule", str(name), PLANNED_SCHEDULES))
        if not _is_list(order) or not all(_is_list(tasks) for tasks in order):
            raise InputError("schedule order must be a list of lists of tasks, one list a stage")
        turns = value.get("turns", ())
        if not _is_list(turns) or not all(_is_list(each) for each in turns):
            raise InputError("schedule turns must be a list of lists of stages")
        schedule = cls(
            name,
            tuple(tuple(Task.parse(text) for text in tasks) for tasks in order),
            tuple(map(tuple, turns)),
        )
        check(schedule)
        return schedule


def check(schedule: Schedule) -> None:
    """Proves that a schedule can be executed: its tasks complete and in order, no deadlock.

    On every stage, F and B of every microbatch stand once in the order, R and W at most once, R
    between F and B, W after B.

    Args:
        schedule: the schedule to check.

    Raises:
        InputError: naming the stage and task, when something in the order is no task, when a stage
            lacks or repeats a task, runs a task before one of the same microbatch that it needs, or
            when stages with blocking receives would wait for one another for ever.

    Example:
        >>> from hetjax.pipeline.schedules.warm_up import gpipe
        >>> check(gpipe(num_stages=4, num_microbatches=8))
    """
    check_tasks(schedule)
    if not schedule.num_stages or not schedule.num_microbatches:
        raise InputError(f"schedule {schedule.name!r} has no tasks")
    for stage in range(schedule.num_stages):
        _check_stage(schedule, stage)
    _check_turns(schedule)
    for _ in dependency_order(schedule):
        pass


def check_tasks(schedule: Schedule) -> None:
    """Check that the order of a schedule has tasks alone, whatever stands where.

    Args:
        schedule: the schedule.

    Raises:
        InputError: naming the stage and what is no task.
    """
    order = schedule.order
    if not _is_list(order) or not all(_is_list(tasks) for tasks in order):
        raise InputError(f"schedule order is {shown(order)}; allowed: a tuple of tasks for a stage")
    for stage, tasks in enumerate(order):
        for task in tasks:
            _check_task(task, f"schedule {schedule.name!r}, stage {stage}")


def dependency_order(schedule: Schedule) -> Iterator[tuple[int, Task]]:
    """All tasks of all stages, each after the task it waits for: an execution without a clock.

    Every set of devices goes through its own order and blocks where the input of a task is not
    there yet: the activation from the stage before (F) or the gradient from the stage after (B).
    Sends never block. What has no durations cannot depend on them: if this ends, so does every
    timed execution.

    Args:
        schedule: a schedule in which no stage repeats a task.

    Yields:
        Pairs (stage, task).

    Raises:
        InputError: the stages deadlock; the message names what each one waits for.
    """
    done: set[tuple[int, TaskKind, int]] = set()
    waiting = [list(reversed(row)) for row in schedule.rows]
    moved = True
    while moved:
        moved = False
        for row in waiting:
            while row:
                stage, task = row[-1]
                source = input_source(schedule, stage, task)
                # A neighbour's task of the same kind and microbatch.
                if source is not None and (source[0], task.kind, task.microbatch) not in done:
                    break
                done.add((stage, task.kind, task.microbatch))
                moved = True
                yield row.pop()
    blocked = [row[-1] for row in waiting if row]
    if blocked:
        raise InputError(f"schedule {schedule.name!r} deadlocks: " + _waits(schedule, blocked))


def input_source(schedule: Schedule, stage: int, task: Task) -> tuple[int, Task] | None:
    """The task on a neighbouring stage whose result this task receives.

    Args:
        schedule: the schedule.
        stage: the stage of the task.
        task: the task.

    Returns:
        Pair (stage, task), or None for tasks that receive nothing: R, W, the first stage's F and
        the last stage's B.
    """
    if task.kind not in ("F", "B"):
        return None
    neighbour = stage - 1 if task.kind == "F" else stage + 1
    return (neighbour, task) if 0 <= neighbour < schedule.num_stages else None


def live_microbatches(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """How many microbatches' activations every stage holds during each of its tasks.

    A microbatch is held from the start of its F to the end of its W, or of its B where it has no
    W on that stage.

    Args:
        schedule: the schedule.

    Returns:
        For every stage, one number a task, in the stage's order.

    Example:
        >>> from hetjax.pipeline.schedules.warm_up import one_f_one_b
        >>> live_microbatches(one_f_one_b(num_stages=2, num_microbatches=2))
        ((1, 2, 2, 1), (1, 1, 1, 1))
    """

    def during(tasks: Sequence[Task]) -> Iterator[int]:
        held, split = 0, split_microbatches(tasks)
        for task in tasks:
            held += task.kind == "F"
            yield held
            held -= task.kind == "W" or (task.kind == "B" and task.microbatch not in split)

    return tuple(tuple(during(tasks)) for tasks in schedule.order)


def split_microbatches(tasks: Sequence[Task]) -> frozenset[int]:
    """The microbatches whose backward pass is split in a stage's order.

    Args:
        tasks: the order of one stage.

    Returns:
        The microbatches that have a W.
    """
    return frozenset(task.microbatch for task in tasks if task.kind == "W")


def _check_task(task: object, where: str) -> None:
    if not isinstance(task, Task):
        raise InputError(f"{where}: {shown(task)} is no Task; allowed: such as Task('F', 0)")
    if task.kind not in _NEEDS:
        raise InputError(unknown_name(f"{where}: kind of task", str(task.kind), _NEEDS))
    if type(task.microbatch) is not int or task.microbatch < 0:
        raise InputError(
            f"{where}: a task {task.kind} has microbatch {shown(task.microbatch)}; allowed: whole "
            f"numbers from 0"
        )


def _check_stage(schedule: Schedule, stage: int) -> None:
    """Raises unless a stage runs all it must once, and each after what it needs."""
    where = f"schedule {schedule.name!r}, stage {stage}"
    # Of all tasks of a long schedule, pairs are made and found much faster than tasks.
    seen: set[tuple[TaskKind, int]] = set()
    for task in schedule.order[stage]:
        own = task.kind, task.microbatch
        if own in seen:
            raise InputError(f"{where}: task {task} stands twice in the order")
        for kind, name in _NEEDS[task.kind]:
            if (kind, task.microbatch) not in seen:
                raise InputError(
                    f"{where}: task {task} comes before its {name} {kind}{task.microbatch}"
                )
        if task.kind == "R" and ("B", task.microbatch) in seen:
            raise InputError(f"{where}: task {task} comes after its backward B{task.microbatch}")
        seen.add(own)
    kinds: tuple[TaskKind, ...] = ("F", "B")
    for microbatch, kind in itertools.product(range(schedule.num_microbatches), kinds):
        if (kind, microbatch) not in seen:
            raise InputError(f"{where}: task {kind}{microbatch} is missing from the order")


def _check_turns(schedule: Schedule) -> None:
    """Raises unless each stage that takes turns has one for each of its tasks, in one group."""
    seen: set[int] = set()
    for place, turns in enumerate(schedule.turns):
        where = f"schedule {schedule.name!r}, turns[{place}]"
        group = set(turns)
        for stage in group:
            if type(stage) is not int or not 0 <= stage < schedule.num_stages:
                raise InputError(
                    f"{where} has {shown(stage)}; allowed: stages 0 to {schedule.num_stages - 1}"
                )
        if len(group) < 2:
            raise InputError(f"{where} has {len(group)} stages; stages that take turns are several")
        for stage in group:
            if stage in seen:
                raise InputError(f"{where} has stage {stage}, which has turns in another group too")
            if (count := turns.count(stage)) != len(schedule.order[stage]):
                raise InputError(
                    f"{where} has stage {stage} {count} times; it has {len(schedule.order[stage])} "
                    f"tasks"
                )
        seen |= group


def _waits(schedule: Schedule, blocked: Sequence[tuple[int, Task]]) -> str:
    """One phrase for each stage that is stuck."""
    phrases = []
    for stage, task in blocked:
        source = input_source(schedule, stage, task)
        assert source is not None, "a task without a source never waits"
        phrases.append(f"stage {stage} waits at {task} for stage {source[0]}")
    return "; ".join(phrases)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
