"""Pipeline schedules as data: the order of forward and backward tasks on every stage.

A schedule says *what runs after what* on each stage and nothing about time; the timeline puts
durations to it. All schedules here but explicit ones follow from one warm-up count a stage: run
that many forward tasks, then a backward and a forward in turn, then the backward tasks that are
left. Stages and microbatches are counted from 0; Harp counts both from 1.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from hetjax.errors import InputError, unknown_name

Operation = Literal["F", "B"]
"""What a task does with its microbatch: the forward (F) or the backward (B) pass of the stage."""

SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "h_1f1b")
"""The names that `make_schedule` knows."""

EXPLICIT = "explicit"
"""The name of a schedule whose order was written down task by task."""

_TASK = re.compile(rf"([{''.join(get_args(Operation))}])(0|[1-9][0-9]*)")


@dataclass(frozen=True, order=True)
class Task:
    """One operation on one microbatch; the stage is where it stands in `Schedule.order`.

    Args:
        kind: ``"F"`` or ``"B"``.
        microbatch: index of the microbatch, from 0.

    Example:
        >>> str(Task("F", 3)), Task.parse("B0")
        ('F3', Task(kind='B', microbatch=0))
    """

    kind: Operation
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
            letters = " or ".join(get_args(Operation))
            raise InputError(f"task {text!r} is not {letters} and a microbatch, e.g. 'F3'")
        return cls(cast(Operation, match[1]), int(match[2]))


@dataclass(frozen=True)
class Schedule:
    """The explicit order of tasks on every stage of a pipeline.

    Args:
        name: one of `SCHEDULES`, or ``"explicit"``.
        order: one tuple of tasks a stage, in the order in which the stage runs them.

    Example:
        >>> one_f_one_b(num_stages=2, num_microbatches=2).to_json()["order"]
        [['F0', 'F1', 'B0', 'B1'], ['F0', 'B0', 'F1', 'B1']]
    """

    name: str
    order: tuple[tuple[Task, ...], ...]

    @property
    def num_stages(self) -> int:
        """The number of stages, S."""
        return len(self.order)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches, M: one more than the largest index in the order."""
        return 1 + max((task.microbatch for tasks in self.order for task in tasks), default=-1)

    @property
    def warm_up_counts(self) -> tuple[int, ...]:
        """For every stage, the number N_i of forward tasks before its first backward task."""
        return tuple(
            sum(1 for _ in itertools.takewhile(lambda task: task.kind == "F", tasks))
            for tasks in self.order
        )

    def live_bound(self, stage: int) -> int:
        """The number of microbatches whose activations a stage holds at most.

        Args:
            stage: index of the stage, from 0.

        Returns:
            The maximum over time, for any durations of the tasks.

        Example:
            >>> eager_1f1b(num_stages=3, num_microbatches=8).live_bound(0)
            5
        """
        return max(live_microbatches(self)[stage], default=0)

    def to_json(self) -> dict[str, Any]:
        """This schedule in plain JSON values: ``{"name": ..., "order": [["F0", ...], ...]}``."""
        return {"name": self.name, "order": [[str(task) for task in row] for row in self.order]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Schedule:
        """Reads what `to_json` wrote or a person edited, and checks it.

        Args:
            value: a mapping with ``name`` and ``order``.

        Returns:
            A schedule that `check` accepts.

        Raises:
            InputError: a field is missing or malformed, or the order cannot be executed.
        """
        for field in ("name", "order"):
            if field not in value:
                raise InputError(f"schedule has no field {field!r}; it needs name and order")
        name, order = value["name"], value["order"]
        if name not in (*SCHEDULES, EXPLICIT):
            raise InputError(unknown_name("schedule", str(name), (*SCHEDULES, EXPLICIT)))
        if not _is_list(order) or not all(_is_list(tasks) for tasks in order):
            raise InputError("schedule order must be a list of lists of tasks, one list a stage")
        schedule = cls(name, tuple(tuple(Task.parse(text) for text in tasks) for tasks in order))
        check(schedule)
        return schedule


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """GPipe: every stage runs all forward tasks, then all backward tasks; holds M microbatches.

    Args:
        num_stages: S, at least 1.
        num_microbatches: M, at least 1.

    Returns:
        The schedule.

    Raises:
        InputError: a count is below 1.
    """
    _require_positive(num_stages, num_microbatches)
    return from_warm_up_counts([num_microbatches] * num_stages, num_microbatches, "gpipe")


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B: the least warm-up that fills the pipeline, N_i = S - i with i from 0.

    Args:
        num_stages: S, at least 1.
        num_microbatches: M, at least 1.

    Returns:
        The schedule.

    Raises:
        InputError: a count is below 1.
    """
    _require_positive(num_stages, num_microbatches)
    counts = range(num_stages, 0, -1)
    return from_warm_up_counts(counts, num_microbatches, "1f1b")


def eager_1f1b(num_stages: int, num_microbatches: int) -> Schedule:
    """Eager-1F1B: two forward tasks more than the next stage, N_i = 2 (S - 1 - i) + 1, i from 0.

    It hides communication of up to half a stage's computation behind it, on fast links too, where
    there is nothing to hide.

    Args:
        num_stages: S, at least 1.
        num_microbatches: M, at least 1.

    Returns:
        The schedule.

    Raises:
        InputError: a count is below 1.

    Source: Harp section 2.3.1.
    """
    _require_positive(num_stages, num_microbatches)
    counts = range(2 * num_stages - 1, 0, -2)
    return from_warm_up_counts(counts, num_microbatches, "eager_1f1b")


def h_1f1b(
    num_stages: int,
    num_microbatches: int,
    compute: Sequence[float],
    communication: Sequence[float],
    tolerance: float = 0.1,
) -> Schedule:
    """H-1F1B: as many extra warm-up forward tasks as each link's communication needs to hide.

    Args:
        num_stages: S, at least 1.
        num_microbatches: M, at least 1.
        compute: t_i, forward plus backward of one microbatch on every stage, in seconds; S long.
        communication: c_i, one transfer between stage i and i + 1, in seconds; S - 1 long.
        tolerance: Harp's epsilon, see `h_1f1b_counts`.

    Returns:
        The schedule.

    Raises:
        InputError: a count is below 1, a length does not fit, or a time is negative.

    Source: Harp section 4.1, equations 1 and 2.

    Example:
        The slow link takes three forward tasks more, the fast one only 1F1B's one: the counts
        that Harp's figure 3(d) sets by hand.

        >>> h_1f1b(3, 8, compute=[1.0, 1.0, 1.0], communication=[0.7, 0.01]).warm_up_counts
        (5, 2, 1)
    """
    _require_positive(num_stages, num_microbatches)
    for field, times, expected in (
        ("compute", compute, num_stages),
        ("communication", communication, num_stages - 1),
    ):
        if len(times) != expected:
            raise InputError(f"{field} has {len(times)} times; {num_stages} stages need {expected}")
    counts = h_1f1b_counts(compute, communication, tolerance)
    return from_warm_up_counts(counts, num_microbatches, "h_1f1b")


def h_1f1b_counts(
    compute: Sequence[float], communication: Sequence[float], tolerance: float = 0.1
) -> tuple[int, ...]:
    """The warm-up counts of H-1F1B before they are clipped to the number of microbatches.

    With t_max = max_i t_i, stage i launches delta_i forward tasks more than stage i + 1:

    - 1 where c_i <= tolerance * t_max: too little to hide, no memory is spent on it;
    - 2 where c_i <= t_max / 2, and 3 where c_i <= t_max (equation 2);
    - ceil(1 + 2 c_i / t_max) beyond. Harp assumes c_i <= t_max, since a slower link is the
      bottleneck itself and cannot be hidden whole; equation 10 stays the least count that keeps
      that link busy while the stages compute, so we go on with it.

    Args:
        compute: t_i of every stage, in seconds; S long, the largest above 0.
        communication: c_i, in seconds, 0 or more; S - 1 long.
        tolerance: Harp's epsilon, from 0 to 0.5.

    Returns:
        N_i of every stage; the last is 1.

    Raises:
        InputError: a length does not fit, a time is negative or not finite, or the tolerance is
            out of range.

    Source: Harp equations 1, 2 and 10.

    Example:
        >>> h_1f1b_counts([1.0, 1.0], [2.2])
        (7, 1)
    """
    if not 0 <= tolerance <= 0.5:
        raise InputError(f"tolerance is {tolerance}; it must be from 0 to 0.5")
    for field, times in (("compute", compute), ("communication", communication)):
        if not all(math.isfinite(time) and time >= 0 for time in times):
            raise InputError(f"{field} is {list(times)}; times must be finite and not negative")
    if len(communication) != len(compute) - 1:
        raise InputError(
            f"communication has {len(communication)} times for {len(compute)} stages; "
            "it needs one between each two stages"
        )
    longest = max(compute)
    if longest == 0:
        raise InputError("compute is 0 on every stage; at least one time must be above 0")
    extra = (_extra_forwards(cost, longest, tolerance) for cost in reversed(communication))
    return tuple(itertools.accumulate(extra, initial=1))[::-1]


def from_warm_up_counts(
    counts: Sequence[int], num_microbatches: int, name: str = EXPLICIT
) -> Schedule:
    """The schedule that warm-up counts stand for: N_i forward tasks, then B and F in turn.

    Args:
        counts: N_i of every stage, at least 1 and never above the count of the stage before;
            counts above `num_microbatches` are clipped to it.
        num_microbatches: M, at least 1.
        name: the name of the schedule.

    Returns:
        The schedule; stage i holds the activations of min(N_i, M) microbatches at most.

    Raises:
        InputError: a count is below 1, or a stage has a larger count than the one before it: the
            two would wait for one another for ever.

    Example:
        >>> [str(task) for task in from_warm_up_counts([2], 3).order[0]]
        ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    _require_positive(len(counts), num_microbatches)
    for stage, count in enumerate(counts):
        if count < 1:
            raise InputError(f"warm-up count of stage {stage} is {count}; it must be 1 or more")
        if stage and count > counts[stage - 1]:
            raise InputError(
                f"warm-up count of stage {stage} is {count}, above the {counts[stage - 1]} of "
                f"stage {stage - 1}: the two would deadlock; counts may not rise along the pipeline"
            )
    order = tuple(_stage_order(min(count, num_microbatches), num_microbatches) for count in counts)
    return Schedule(name, order)


def make_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    compute: Sequence[float] = (),
    communication: Sequence[float] = (),
    tolerance: float = 0.1,
) -> Schedule:
    """Builds a schedule by its name.

    Args:
        name: one of `SCHEDULES`.
        num_stages: S, at least 1.
        num_microbatches: M, at least 1.
        compute: t_i in seconds; only ``"h_1f1b"`` looks at it.
        communication: c_i in seconds; only ``"h_1f1b"`` looks at it.
        tolerance: Harp's epsilon; only ``"h_1f1b"`` looks at it.

    Returns:
        The schedule.

    Raises:
        InputError: the name is unknown, or the schedule's own function refuses its arguments.

    Example:
        >>> make_schedule("1f1b", num_stages=4, num_microbatches=8).warm_up_counts
        (4, 3, 2, 1)
    """
    match name:
        case "gpipe":
            return gpipe(num_stages, num_microbatches)
        case "1f1b":
            return one_f_one_b(num_stages, num_microbatches)
        case "eager_1f1b":
            return eager_1f1b(num_stages, num_microbatches)
        case "h_1f1b":
            return h_1f1b(num_stages, num_microbatches, compute, communication, tolerance)
    raise InputError(unknown_name("schedule", name, SCHEDULES))


def check(schedule: Schedule) -> None:
    """Proves that a schedule can be executed: every task once, no backward early, no deadlock.

    Args:
        schedule: the schedule to check.

    Raises:
        InputError: naming the stage and task, when a stage lacks or repeats a task, runs a
            backward task before its forward task, or when stages with blocking receives would
            wait for one another for ever.

    Example:
        >>> check(gpipe(num_stages=4, num_microbatches=8))
    """
    if not schedule.num_stages or not schedule.num_microbatches:
        raise InputError(f"schedule {schedule.name!r} has no tasks")
    for stage in range(schedule.num_stages):
        _check_stage(schedule, stage)
    for _ in dependency_order(schedule):
        pass


def dependency_order(schedule: Schedule) -> Iterator[tuple[int, Task]]:
    """All tasks of all stages, each after the task it waits for: an execution without a clock.

    Every stage goes through its own order and blocks where the input of a task is not there yet:
    the activation from the stage before (F) or the gradient from the stage after (B). Sends never
    block. What has no durations cannot depend on them: if this ends, so does every timed
    execution.

    Args:
        schedule: a schedule in which no stage repeats a task.

    Yields:
        Pairs (stage, task).

    Raises:
        InputError: the stages deadlock; the message names what each one waits for.
    """
    done: set[tuple[int, Task]] = set()
    waiting = [list(reversed(tasks)) for tasks in schedule.order]
    moved = True
    while moved:
        moved = False
        for stage, tasks in enumerate(waiting):
            while tasks:
                source = input_source(schedule, stage, tasks[-1])
                if source is not None and source not in done:
                    break
                task = tasks.pop()
                done.add((stage, task))
                moved = True
                yield stage, task
    blocked = [(stage, tasks[-1]) for stage, tasks in enumerate(waiting) if tasks]
    if blocked:
        raise InputError(f"schedule {schedule.name!r} deadlocks: " + _waits(schedule, blocked))


def input_source(schedule: Schedule, stage: int, task: Task) -> tuple[int, Task] | None:
    """The task on a neighbouring stage whose result this task receives.

    Args:
        schedule: the schedule.
        stage: the stage of the task.
        task: the task.

    Returns:
        Pair (stage, task), or None for the first stage's forward tasks and the last stage's
        backward tasks, which receive nothing.
    """
    neighbour = stage - 1 if task.kind == "F" else stage + 1
    return (neighbour, task) if 0 <= neighbour < schedule.num_stages else None


def live_microbatches(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """How many microbatches' activations every stage holds during each of its tasks.

    A microbatch is held from the start of its forward task to the end of its backward task.

    Args:
        schedule: the schedule.

    Returns:
        For every stage, one number a task, in the stage's order.

    Example:
        >>> live_microbatches(one_f_one_b(num_stages=2, num_microbatches=2))
        ((1, 2, 2, 1), (1, 1, 1, 1))
    """

    def during(tasks: Sequence[Task]) -> Iterator[int]:
        held = 0
        for task in tasks:
            if task.kind == "F":
                held += 1
            yield held
            if task.kind == "B":
                held -= 1

    return tuple(tuple(during(tasks)) for tasks in schedule.order)


def _stage_order(count: int, num_microbatches: int) -> tuple[Task, ...]:
    """`count` forwards, then backward and forward in turn, then the backwards that are left."""
    forwards = [Task("F", microbatch) for microbatch in range(num_microbatches)]
    backwards = [Task("B", microbatch) for microbatch in range(num_microbatches)]
    steady = num_microbatches - count
    pairs = zip(backwards[:steady], forwards[count:], strict=True)
    return (*forwards[:count], *itertools.chain.from_iterable(pairs), *backwards[steady:])


def _extra_forwards(cost: float, longest: float, tolerance: float) -> int:
    """delta_i for one link: Harp equation 2, and equation 10 where c_i is above t_max."""
    if cost <= tolerance * longest:
        return 1
    if cost <= longest / 2:
        return 2
    if cost <= longest:
        return 3
    return math.ceil(1 + 2 * cost / longest)


def _check_stage(schedule: Schedule, stage: int) -> None:
    """Raises unless a stage runs F and B of every microbatch once, F first."""
    where = f"schedule {schedule.name!r}, stage {stage}"
    seen: set[Task] = set()
    for task in schedule.order[stage]:
        if task in seen:
            raise InputError(f"{where}: task {task} stands twice in the order")
        if task.kind == "B" and Task("F", task.microbatch) not in seen:
            raise InputError(f"{where}: task {task} comes before its forward F{task.microbatch}")
        seen.add(task)
    for microbatch, kind in itertools.product(
        range(schedule.num_microbatches), get_args(Operation)
    ):
        if Task(kind, microbatch) not in seen:
            raise InputError(f"{where}: task {kind}{microbatch} is missing from the order")


def _waits(schedule: Schedule, blocked: Sequence[tuple[int, Task]]) -> str:
    """One phrase for each stage that is stuck."""
    phrases = []
    for stage, task in blocked:
        source = input_source(schedule, stage, task)
        assert source is not None, "a task without a source never waits"
        phrases.append(f"stage {stage} waits at {task} for stage {source[0]}")
    return "; ".join(phrases)


def _require_positive(num_stages: int, num_microbatches: int) -> None:
    for field, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise InputError(f"{field} is {value}; it must be 1 or more")


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
