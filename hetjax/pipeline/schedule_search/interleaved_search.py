"""The search for the best interleaved schedule: of fixed ones, and of what a list scheduler makes.

Each submesh takes its forward tasks in one order and its backward tasks in another one, group after
group of microbatches through all of its stages. Which of the two it runs next it decides as time
goes by, by a few rules; gradients of weights fill its waits.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hetjax.errors import InputError
from hetjax.pipeline.schedules.interleaved import from_rows, in_groups, interleaved
from hetjax.pipeline.schedules.schedule import INTERLEAVED, Schedule, Task, check
from hetjax.pipeline.timeline.simulate import simulate_schedule
from hetjax.pipeline.timeline.times import StepTimes

AHEAD = (1, 2, 3, 4)
"""How many forward tasks more than the submesh after it a submesh may warm up with."""

_NEVER = math.inf


@dataclass(frozen=True)
class InterleavedRules:
    """How submeshes decide what to run next.

    Args:
        group: how many microbatches go through all stages of a submesh together.
        ahead: how many forward tasks more than the submesh after it a submesh warms up with.
        is_capped: whether it may hold no more than after its warm-up.
        backlog: how many gradients of weights may be left for later; None where no backward pass is
            split.
    """

    group: int
    ahead: int
    is_capped: bool
    backlog: float | None


def search_interleaved(
    times: StepTimes,
    num_submeshes: int,
    num_microbatches: int,
    fits: Callable[[Schedule], bool] = lambda _: True,
) -> Schedule | None:
    """The interleaved schedule of least makespan that is found, of those that fit.

    Args:
        times: what tasks and transfers take, of p v stages.
        num_submeshes: p, which divides their number; stage s is on submesh s modulo p.
        num_microbatches: M.
        fits: whether a schedule may be taken; it is asked of the fastest first.

    Returns:
        The schedule; None where none fits.

    Raises:
        InputError: a count is too small, or the submeshes do not divide the stages.

    Example:
        >>> times = StepTimes([1.0] * 4, [2.0] * 4, [0.0] * 3, [0.0] * 3)
        >>> found = search_interleaved(times, num_submeshes=2, num_microbatches=2)
        >>> simulate_schedule(found, times).makespan
        15.0
    """
    passes, rest = divmod(times.num_stages, num_submeshes)
    if rest:
        raise InputError(
            f"num_submeshes is {num_submeshes}; it must divide the {times.num_stages} stages"
        )
    found: dict[Schedule, float] = {}
    for schedule in _candidates(times, num_submeshes, passes, num_microbatches):
        if schedule not in found:
            found[schedule] = simulate_schedule(schedule, times).makespan
    ordered = sorted(found, key=lambda schedule: found[schedule])
    return next((schedule for schedule in ordered if fits(schedule)), None)


def _candidates(
    times: StepTimes, submeshes: int, passes: int, num_microbatches: int
) -> Iterator[Schedule]:
    for ahead in AHEAD:
        schedule = interleaved(submeshes, passes, num_microbatches, ahead)
        if _is_possible(schedule):
            yield schedule
    groups = {min(each, num_microbatches) for each in (submeshes, 2 * submeshes, num_microbatches)}
    backlogs = (None, 0, 1, _NEVER) if times.can_split else (None,)
    for group, ahead, capped, backlog in itertools.product(
        sorted(groups), AHEAD, (True, False), backlogs
    ):
        rules = InterleavedRules(group, ahead, capped, backlog)
        rows = listed_rows(rules, times, submeshes, num_microbatches)
        if rows is not None:
            schedule = from_rows(INTERLEAVED, rows)
            yield schedule
            yield _with_whole_passes(schedule)


def _is_possible(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except InputError:
        return False
    return True


def _with_whole_passes(schedule: Schedule) -> Schedule:
    """The schedule in which a W right after its B makes one whole backward pass with it."""
    rows = []
    for row in schedule.rows:
        kept: list[tuple[int, Task]] = []
        for stage, task in row:
            if task.kind != "W" or kept[-1] != (stage, Task("B", task.microbatch)):
                kept.append((stage, task))
        rows.append(kept)
    return from_rows(schedule.name, rows)


def listed_rows(
    rules: InterleavedRules, times: StepTimes, num_submeshes: int, num_microbatches: int
) -> list[list[tuple[int, Task]]] | None:
    """What submeshes run that decide by rules.

    Args:
        rules: the rules.
        times: what tasks and transfers take.
        num_submeshes: p.
        num_microbatches: M.

    Returns:
        For each submesh pairs of stage and task, in order; None where they wait for one another.
    """
    play = _Play(rules, times, num_submeshes, num_microbatches)
    waking = [(0.0, row) for row in range(num_submeshes)]
    while waking:
        now, row = heapq.heappop(waking)
        if play.rows[row].free <= now:
            for each in play.advance(row, now):
                heapq.heappush(waking, each)
    return None if play.left else [row.done for row in play.rows]


class _Row:
    """A submesh in mid-step."""

    def __init__(self, rules: InterleavedRules, index: int, submeshes: int, stages: range, m: int):
        self.forward = [*in_groups("F", stages, rules.group, m)]
        self.backward = [*in_groups("B", stages[::-1], rules.group, m)]
        self.weights: list[tuple[int, Task]] = []
        base = (len(stages) - 1) * rules.group + 1
        self.wanted = min(base + rules.ahead * (submeshes - index - 1), len(self.forward))
        self.most = self.wanted if rules.is_capped else len(self.forward)
        self.forwards = self.backwards = 0
        self.free = 0.0
        self.done: list[tuple[int, Task]] = []

    @property
    def in_flight(self) -> int:
        return self.forwards - self.backwards


class _Play:
    """All submeshes in mid-step, and what is on its way to them."""

    def __init__(
        self, rules: InterleavedRules, times: StepTimes, submeshes: int, num_microbatches: int
    ):
        self.rules, self.times, self.submeshes = rules, times, submeshes
        last = times.num_stages - 1
        self.rows = [
            _Row(rules, r, submeshes, range(r, last + 1, submeshes), num_microbatches)
            for r in range(submeshes)
        ]
        self.arrived = {(0, Task("F", m)): 0.0 for m in range(num_microbatches)}
        self.lanes: dict[tuple[int, int], float] = {}
        self.left = sum(2 * len(row.forward) for row in self.rows)

    def advance(self, index: int, now: float) -> Iterator[tuple[float, int]]:
        """Begin what a submesh does next; when it, and who gets something, is to look again."""
        row = self.rows[index]
        chosen = self._choose(row, now)
        if chosen is None:
            return
        stage, task = chosen
        row.done.append(chosen)
        row.free = now + self._seconds(stage, task)
        yield row.free, index
        if task.kind == "W":
            row.weights.remove(chosen)
            return
        self.left -= 1
        if task.kind == "F":
            row.forwards += 1
            target = stage + 1
        else:
            row.backwards += 1
            target = stage - 1
            if self.rules.backlog is not None:
                row.weights.append((stage, Task("W", task.microbatch)))
        if task.kind == "F" and target == self.times.num_stages:
            self.arrived[stage, Task("B", task.microbatch)] = row.free
        elif target >= 0:
            arrival = self._sent(stage, target, row.free)
            self.arrived[target, task] = arrival
            yield arrival, target % self.submeshes

    def _sent(self, source: int, target: int, ready: float) -> float:
        times = self.times
        seconds = times.sends[source] if target > source else times.returns[target]
        lane = source % self.submeshes, target % self.submeshes
        self.lanes[lane] = max(ready, self.lanes.get(lane, 0.0)) + seconds
        return self.lanes[lane]

    def _choose(self, row: _Row, now: float) -> tuple[int, Task] | None:
        forward = row.forward[row.forwards] if row.forwards < len(row.forward) else None
        if forward is not None and (row.in_flight >= row.most or not self._is_there(forward, now)):
            forward = None
        backward = row.backward[row.backwards] if row.backwards < len(row.backward) else None
        if backward is not None and not self._is_there(backward, now):
            backward = None
        backlog = self.rules.backlog
        if row.weights and backlog is not None and len(row.weights) > backlog:
            return row.weights[0]
        if forward is not None and (row.in_flight < row.wanted or backward is None):
            return forward
        return backward or (row.weights[0] if row.weights else None)

    def _is_there(self, task: tuple[int, Task], now: float) -> bool:
        return self.arrived.get(task, _NEVER) <= now

    def _seconds(self, stage: int, task: Task) -> float:
        if task.kind == "F":
            return self.times.forward[stage]
        if task.kind == "W":
            return self.times.weight_gradient[stage]
        is_split = self.rules.backlog is not None
        return self.times.backward_seconds(stage, split=is_split, recomputed=False)
