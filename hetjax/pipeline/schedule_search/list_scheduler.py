"""A list scheduler: every stage decides by a few rules what to run next, as time goes by.

Microbatches are alike, so every stage takes them in turn, and its order is told by the operations
alone. The rules of a stage are a handful of numbers, so that searching over them is searching
over schedules.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from hetjax.pipeline.schedules.schedule import Schedule, Task
from hetjax.pipeline.timeline.times import StepTimes

NEVER = 1 << 30
"""A number of microbatches that is never reached."""


@dataclass(frozen=True)
class Rules:
    """What a stage does when several tasks could run; a microbatch is in flight between F and B.

    Without a rule that says otherwise a stage runs B, then F, and where both have to wait R or W.

    Args:
        limit: microbatches that may be live; F waits for that, and W comes before B if it would
            let a wanted F start.
        wanted: F comes before B until as many microbatches are in flight.
        most: microbatches that may be in flight.
        backlog: W that may be left for later while there are F to come; the next one comes first.
        patience: R and W wait for an F or B on its way if that comes within this part of their
            own duration.
        whole_before: the backward passes of microbatches before this one are not split.
        in_turn: keep to the order of F and B that `wanted` sets, though the other could run.
    """

    limit: int
    wanted: int
    most: int = NEVER
    backlog: int = NEVER
    patience: float = 0.0
    whole_before: int = 0
    in_turn: bool = False


class _StageState:
    """A stage in mid-step."""

    def __init__(self, rules: Rules, times: StepTimes, index: int, num_microbatches: int):
        self.rules, self.num_microbatches = rules, num_microbatches
        self.f, self.r = times.forward[index], times.recompute_seconds(index)
        self.b = self.whole = times.backward[index]
        self.w = 0.0
        self.whole_before = num_microbatches
        if times.can_split:
            self.b, self.w = times.input_gradient[index], times.weight_gradient[index]
            self.whole_before = min(rules.whole_before, num_microbatches)
        # How many have been done of each; a whole backward pass is a B and a W at once.
        self.forwards = self.recomputed = self.backwards = self.weights = 0
        self.activations: list[float] = []
        self.gradients: list[float] = []
        self.free = 0.0
        self.order: list[str] = []

    @property
    def done(self) -> bool:
        return self.weights == self.num_microbatches

    def choose(self, now: float) -> str:
        """What to run now: F, R, B, W, "whole" for both halves, or nothing."""
        rules, done_f, done_b = self.rules, self.forwards, self.backwards
        backlog, in_flight = done_b - self.weights, done_f - done_b
        more = done_f < self.num_microbatches
        room = more and done_f - self.weights < rules.limit
        wanted = more and in_flight < rules.wanted
        may_forward = room and in_flight < rules.most and (wanted or not rules.in_turn)
        may_backward = not (rules.in_turn and wanted)
        arrived = more and len(self.activations) > done_f and self.activations[done_f] <= now
        forward = may_forward and arrived
        backward = may_backward and len(self.gradients) > done_b and self.gradients[done_b] <= now
        if backlog and more and (backlog > rules.backlog or (wanted and arrived and not room)):
            return "W"
        if forward and (wanted or not backward):
            return "F"
        if backward:
            return "whole" if done_b < self.whole_before else "B"
        if self.r and self.recomputed <= done_b < done_f:
            operation, seconds = "R", self.r
        elif backlog:
            operation, seconds = "W", self.w
        else:
            return ""
        until = now + rules.patience * seconds
        coming = (may_forward and self._comes(self.activations, done_f, now, until)) or (
            may_backward and self._comes(self.gradients, done_b, now, until)
        )
        return "" if coming else operation

    def next_arrival(self, now: float) -> float | None:
        """When the next activation or gradient comes that is on its way."""
        queues = ((self.activations, self.forwards), (self.gradients, self.backwards))
        times = [queue[taken] for queue, taken in queues if len(queue) > taken]
        return min((time for time in times if time > now), default=None)

    def run(self, operation: str, now: float) -> float:
        """Does it; returns when it ends."""
        self.order.append(operation)
        match operation:
            case "F":
                self.forwards += 1
                seconds = self.f
            case "R":
                self.recomputed = self.backwards + 1
                seconds = self.r
            case "W":
                self.weights += 1
                seconds = self.w
            case _:
                seconds = self.b if operation == "B" else self.whole
                seconds += self.r if self.recomputed <= self.backwards else 0.0
                self.backwards += 1
                self.weights += operation == "whole"
        self.free = now + seconds
        return self.free

    @staticmethod
    def _comes(queue: Sequence[float], index: int, now: float, until: float) -> bool:
        """Whether an input is on its way that arrives before a time."""
        return len(queue) > index and now < queue[index] < until


class _LinkState:
    """One direction of a link."""

    def __init__(self, seconds: float):
        self.seconds, self.free = seconds, 0.0

    def send(self, ready: float) -> float:
        """When what is ready to be sent arrives."""
        self.free = max(self.free, ready) + self.seconds
        return self.free


@dataclass(frozen=True)
class Outcome:
    """What a set of rules leads to.

    Args:
        makespan: seconds.
        orders: for every stage, what it ran: F, R, B, W, or "whole".
    """

    makespan: float
    orders: tuple[Sequence[str], ...]

    def schedule(self, name: str) -> Schedule:
        """The schedule with the same order.

        Args:
            name: its name.

        Returns:
            The schedule.
        """
        return Schedule(name, tuple(map(_tasks, self.orders)))


def list_schedule(rules: Sequence[Rules], times: StepTimes, num_microbatches: int) -> Outcome:
    """Runs a step in which every stage follows its rules.

    Args:
        rules: the rules of every stage; S long.
        times: what the tasks take; backward passes are split where it tells the times of halves.
        num_microbatches: M, at least 1.

    Returns:
        The makespan and the order of every stage.

    Example:
        >>> times = StepTimes([1.0] * 2, [2.0] * 2, [0.5], [0.5], (), [1.0] * 2, [1.0] * 2)
        >>> outcome = list_schedule([Rules(2, 2), Rules(2, 1)], times, 2)
        >>> outcome.makespan, [str(task) for task in outcome.schedule("explicit").order[0]]
        (8.0, ['F0', 'F1', 'B0', 'W0', 'B1', 'W1'])
    """
    stages = [_StageState(r, times, i, num_microbatches) for i, r in enumerate(rules)]
    there, back = [_LinkState(c) for c in times.sends], [_LinkState(c) for c in times.returns]
    stages[0].activations = [0.0] * num_microbatches
    last = len(stages) - 1
    events = [(0.0, 0)]
    while events:
        now, index = heapq.heappop(events)
        stage = stages[index]
        if now < stage.free:
            continue
        operation = stage.choose(now)
        if not operation:
            arrival = stage.next_arrival(now)
            if arrival is not None:
                heapq.heappush(events, (arrival, index))
            continue
        end = stage.run(operation, now)
        heapq.heappush(events, (end, index))
        if operation == "F" and index == last:
            stage.gradients.append(end)
        elif operation == "F":
            arrival = there[index].send(end)
            stages[index + 1].activations.append(arrival)
            heapq.heappush(events, (arrival, index + 1))
        elif operation in ("B", "whole") and index:
            arrival = back[index - 1].send(end)
            stages[index - 1].gradients.append(arrival)
            heapq.heappush(events, (arrival, index - 1))
    assert all(stage.done for stage in stages), "a stage waits for what never comes"
    updates = times.update if len(times.update) else [0.0] * len(stages)
    makespan = max(stage.free + update for stage, update in zip(stages, updates, strict=True))
    return Outcome(makespan, tuple(stage.order for stage in stages))


def _tasks(order: Sequence[str]) -> tuple[Task, ...]:
    """The tasks of a stage that takes microbatches in turn."""
    forwards = backwards = weights = 0
    tasks = []
    for operation in order:
        match operation:
            case "F":
                tasks.append(Task("F", forwards))
                forwards += 1
            case "R":
                tasks.append(Task("R", backwards))
            case "W":
                tasks.append(Task("W", weights))
                weights += 1
            case _:
                tasks.append(Task("B", backwards))
                backwards += 1
                weights += operation == "whole"
    return tuple(tasks)
